"""What happens around the loop. Subclass `Callback`, override the hooks you need, hand it to the Trainer."""

from trainer_kit.core.hooks import Callback

__all__ = ["Callback"]
