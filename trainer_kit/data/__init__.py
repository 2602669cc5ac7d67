"""Data for the steps: order and division of samples among ranks, and their transfer to the device."""

from trainer_kit.data.combined import MODES, CombinedLoader, is_tree, read_together
from trainer_kit.data.feed import Feed
from trainer_kit.data.order import EMPTY, MISSING
from trainer_kit.data.sizes import limit_batches
from trainer_kit.data.transfer import Ahead

__all__ = [
    "EMPTY",
    "MISSING",
    "MODES",
    "Ahead",
    "CombinedLoader",
    "Feed",
    "is_tree",
    "limit_batches",
    "read_together",
]
