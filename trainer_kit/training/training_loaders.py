"""The training loaders of a fit, and the size of its epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from trainer_kit.core.types import Loaders
from trainer_kit.data import EpochLength, Feed

__all__ = ["TrainingLoaders"]


@final
class TrainingLoaders:
    """The training loaders of a fit, which are got from the user once.

    Attributes:
        loaders: of the running or last fit; None before they are loaded.
        batches: micro-batches of an epoch on this rank, infinite if the number is unknown; None before it is counted.
        batch_samples: samples of the first batch on this rank; None if that is unknown.
    """

    def __init__(self) -> None:
        self.loaders: Loaders | None = None
        self.batches: int | float | None = None
        self.batch_samples: int | None = None

    def load(self, find: Callable[[], Loaders | None]) -> Loaders | None:
        """The loaders, or None; the first call gets them with ``find``."""
        # Once: a second `train_dataloader()` would make other loaders, with workers and generators of their own.
        if self.loaders is None:
            self.loaders = find()
        return self.loaders

    def use(self, loaders: Loaders) -> None:
        """Train on these loaders."""
        self.loaders = loaders

    def forget(self) -> None:
        """Discard the loaders; the next `load` gets them from the user again."""
        self.loaders = None
        self.batches = None

    def count(self, length: EpochLength) -> int | float:
        """Set the number of micro-batches of an epoch, and return it."""
        self.batches = length.expected
        if self.batches is None:
            self.batches = math.inf
        return self.batches

    def measure(self, feed: Feed, length: EpochLength) -> None:
        """Set the numbers of a training epoch from what is read in it."""
        self.count(length)
        self.batch_samples = feed.samples(0)
