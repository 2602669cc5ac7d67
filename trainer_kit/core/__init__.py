"""What every other room stands on: errors, the hook specification, progress, the module. Imports nothing of ours."""

from trainer_kit.core.lazy import other_names

__all__: list[str] = []

__getattr__ = other_names(__name__)
