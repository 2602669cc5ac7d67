"""What reaches a step: which samples, in which order, on which rank, and how they get to the device."""

from trainer_kit.data.combined import CombinedLoader
from trainer_kit.data.feed import Feed
from trainer_kit.data.order import EMPTY
from trainer_kit.data.sizes import batch_size_of, limit_batches, size_reader
from trainer_kit.data.transfer import Ahead

__all__ = [
    "EMPTY",
    "Ahead",
    "CombinedLoader",
    "Feed",
    "batch_size_of",
    "limit_batches",
    "size_reader",
]
