"""Data for the steps: order and division of samples among ranks, and their transfer to the device."""

from trainer_kit.data.combined import MODES, CombinedLoader, is_tree, read_together
from trainer_kit.data.feed import Ahead, Feed
from trainer_kit.data.order import EMPTY, MISSING
from trainer_kit.data.sizes import EpochLength, epoch_length, limit_batches

__all__ = [
    "EMPTY",
    "MISSING",
    "MODES",
    "Ahead",
    "CombinedLoader",
    "EpochLength",
    "Feed",
    "epoch_length",
    "is_tree",
    "limit_batches",
    "read_together",
]
