"""Batches that processes share: the parts of each batch under ``split_batches``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from typing import Any, final

from torch.utils.data import BatchSampler

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import Loaders

__all__ = ["split_loader"]


def split_loader(loader: Loaders, processes: int) -> tuple[int | None, Loaders]:
    """Return the batch size of a process under ``split_batches``, and the loader to read.

    A batch sampler has its own batch size: the loader gets another one, which yields the parts of each batch.

    Raises:
        ConfigurationError: the batch size is unknown, or not divisible by the number of processes.
    """
    batches = getattr(loader, "batch_sampler", None)
    by_sampler = getattr(loader, "batch_size", None) is None and batches is not None
    owner = batches if by_sampler else loader
    batch_size = getattr(owner, "batch_size", None)
    if not isinstance(batch_size, int):
        raise ConfigurationError(
            "split_batches needs to know the batch size, to divide it by the number of processes",
            found=f"a {type(owner).__name__} without a number as batch_size",
            fix="give it the attribute batch_size, or leave split_batches out",
        )
    if batch_size % processes:
        raise ConfigurationError(
            "split_batches needs a batch size that is divisible by the number of processes",
            found=f"batch_size={batch_size} over {plural(processes, 'process')}",
            fix=f"use a multiple of {processes}, or leave split_batches out",
        )
    if not by_sampler:
        return batch_size // processes, loader
    split = copy.copy(loader)
    # DataLoader.__setattr__ refuses to set these.
    split.__dict__.update(
        _iterator=None, batch_sampler=_BatchParts(batches, batch_size, processes)
    )
    return None, split


@final
class _BatchParts(BatchSampler):
    """The parts of each batch of a batch sampler, one after the other, as many as there are processes."""

    def __init__(self, batches: Any, batch_size: int, processes: int) -> None:
        self.batches = batches
        self.batch_size = batch_size // processes
        self._total_batch_size = batch_size

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        parts_per_batch = self._total_batch_size // self.batch_size
        if self._samples is None:
            return len(self.batches) * parts_per_batch
        full_batches, remaining = divmod(self._samples, self._total_batch_size)
        # Rounded up: the last part may be short.
        return full_batches * parts_per_batch + -(-remaining // self.batch_size)

    @property
    def _samples(self) -> int | None:
        """The number of samples in all batches, if torch's own batch sampler makes them."""
        if type(self.batches) is not BatchSampler or self.batches.drop_last:
            return None
        sampler = self.batches.sampler
        return len(sampler) if isinstance(sampler, Sized) else None

    def __iter__(self) -> Iterator[list[int]]:
        was_short = False
        for batch in self.batches:
            if was_short or len(batch) > self._total_batch_size:
                raise ConfigurationError(
                    "split_batches needs batches of one size, except the last",
                    found=f"a batch of another size than batch_size={self._total_batch_size} of "
                    f"{type(self.batches).__name__}",
                    fix="leave split_batches out",
                )
            was_short = len(batch) < self._total_batch_size
            for start in range(0, len(batch), self.batch_size):
                yield batch[start : start + self.batch_size]
