"""Samplers and data sets that give each process its share, under Hugging Face Accelerate's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any, TypeVar, final

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError

__all__ = ["BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler"]

_Row = TypeVar("_Row")


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of a seed and the epoch.

    Args:
        args: of torch's ``RandomSampler``.
        data_seed: the seed; by default torch's initial seed.
        kwargs: of torch's ``RandomSampler``.

    Example:
        >>> sampler = SeedableRandomSampler(range(8), data_seed=3)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first != second
        True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        # After a complete iteration only: an iteration that was left early has the same order when it begins again.
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one process, from a batch sampler for all processes.

    Args:
        batch_sampler: the batch sampler for all processes.
        num_processes: the number of processes.
        process_index: the rank of this process.
        split_batches: each process gets a part of every batch; otherwise every ``num_processes``-th batch.
        even_batches: every process gets equally many samples: the last batches are filled up from the start.

    Raises:
        ConfigurationError: ``split_batches`` with a batch size that is not divisible by the number of processes.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> [list(BatchSamplerShard(BatchSampler(range(7), 2, False), 2, rank)) for rank in (0, 1)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if not split_batches:
            return
        if self.batch_size is None or self.batch_size % num_processes:
            raise ConfigurationError(
                "split_batches needs a batch size that can be divided by the number of processes",
                found=f"batch_size={self.batch_size} over {plural(num_processes, 'process')}",
            )

    @property
    def total_length(self) -> int:
        """The number of batches over all processes."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the batch sampler for all processes."""
        return self.batch_sampler.sampler

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        length, extra_batches = divmod(self.total_length, self.num_processes)
        if not extra_batches or self.drop_last:
            return length
        gets_one_more = self.even_batches or self.process_index < extra_batches
        return length + gets_one_more

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        if self.batch_size is None:
            # Batches of unknown size are not divided or filled up: each is one row.
            turns = _chunks(batches, self.num_processes)
            shares = self._select_shares(turns, 1)
            return (share[0] for share in shares)
        if self.split_batches:
            rows = map(list, batches)
            return self._select_shares(rows, self.batch_size // self.num_processes)
        rows = map(_concatenate, _chunks(batches, self.num_processes))
        return self._select_shares(rows, self.batch_size)

    def _select_shares(
        self, turns: Iterator[list[_Row]], share_size: int
    ) -> Iterator[Any]:
        return _shares(
            turns,
            share_size,
            self.num_processes,
            self.process_index,
            self.drop_last,
            self.even_batches,
        )


@final
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, from a stream for all processes.

    Args:
        dataset: the stream.
        batch_size: the batch size of the loader that reads this data set.
        drop_last: drop the samples of an incomplete last batch.
        num_processes: the number of processes.
        process_index: the rank of this process.
        split_batches: ``batch_size`` is the total over all processes.

    Example:
        >>> [list(IterableDatasetShard(range(5), 2, num_processes=2, process_index=rank)) for rank in (0, 1)]
        [[0, 1, 4, 0], [2, 3, 1, 2]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ConfigurationError(
                "split_batches needs a batch size that can be divided by the number of processes",
                found=f"batch_size={batch_size} over {plural(num_processes, 'process')}",
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    @property
    def _total_batch_size(self) -> int:
        """The number of samples in a batch over all processes."""
        if self.split_batches:
            return self.batch_size
        return self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the stream, if it has this method."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        total = self._total_batch_size
        turns, remaining = divmod(len(self.dataset), total)
        # A short last turn is filled up from the start of the data.
        if remaining and not self.drop_last:
            turns += 1
        return turns * total // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        total = self._total_batch_size
        shares = _shares(
            _chunks(iter(self.dataset), total),
            total // self.num_processes,
            self.num_processes,
            self.process_index,
            self.drop_last,
            even=True,
        )
        for share in shares:
            yield from share


def _chunks(items: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield lists of ``size`` items; the last one may be shorter."""
    chunk = list(islice(items, size))
    while chunk:
        yield chunk
        chunk = list(islice(items, size))


def _concatenate(batches: Iterable[Iterable[_Row]]) -> list[_Row]:
    rows: list[_Row] = []
    for batch in batches:
        rows.extend(batch)
    return rows


def _shares(
    turns: Iterator[list[_Row]],
    share_size: int,
    processes: int,
    rank: int,
    drop_last: bool,
    even: bool,
) -> Iterator[list[_Row]]:
    """Yield a process's share of each turn; a short turn is filled up from the start of the data."""
    total = share_size * processes
    first_turn: list[_Row] = []
    for turn in turns:
        first_turn = first_turn or turn
        missing = total - len(turn)
        if missing > 0:
            if drop_last:
                return
            if even:
                turn = turn + list(islice(cycle(first_turn), missing))
        share = turn[rank * share_size : (rank + 1) * share_size]
        if share:
            yield share
