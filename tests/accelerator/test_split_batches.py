"""``split_batches`` with a batch sampler: each process computes its part of every batch, as in Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from trainer_kit import Accelerator, DataLoaderConfiguration
from trainer_kit.core.errors import ConfigurationError


class Buckets:
    """A batch sampler that is none of torch's classes."""

    def __init__(self, sizes: list[int], batch_size: Any = 4) -> None:
        self.sizes = sizes
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


def read(loader: Any, **options: Any) -> list[list[int]]:
    """The batches of this process."""
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=True, **options),
    )
    prepared = accelerator.prepare(loader)
    batches = [batch.tolist() for batch in prepared]
    assert len(batches) == len(prepared)
    return batches


def by_batch_sampler(samples: int, drop_last: bool = False) -> DataLoader[Any]:
    data = list(range(samples))
    return DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last)
    )  # type: ignore[arg-type]


def test_one_process_reads_whole_batches() -> None:
    assert read(by_batch_sampler(8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read(DataLoader(list(range(6)), batch_sampler=Buckets([4, 2]))) == [
        [0, 1, 2, 3],
        [4, 5],
    ]  # type: ignore[arg-type]


@pytest.mark.world_size(2)
def test_two_processes_read_parts() -> None:
    rank = torch.distributed.get_rank()
    parts = [[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 7]]
    assert read(by_batch_sampler(8)) == parts
    assert read(by_batch_sampler(9, drop_last=True)) == parts
    assert read(DataLoader(list(range(8)), batch_sampler=Buckets([4, 4]))) == parts  # type: ignore[arg-type]
    assert read(by_batch_sampler(8), dispatch_batches=True) == parts
    for samples in range(9, 12):
        accelerator = Accelerator(cpu=True, split_batches=True)
        loader = accelerator.prepare(by_batch_sampler(samples))
        assert len(loader) == 3
        assert loader.total_batch_size == 4
        seen: list[int] = []
        for batch in loader:
            assert len(batch) == 2
            seen += accelerator.gather_for_metrics(batch).tolist()
        assert seen == list(range(samples))
    shuffled = list(range(16))
    loader = accelerator.prepare(
        DataLoader(
            shuffled, batch_sampler=BatchSampler(RandomSampler(shuffled), 4, False)
        )
    )  # type: ignore[arg-type]
    orders = [
        [i for batch in loader for i in accelerator.gather(batch).tolist()]
        for _ in range(2)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == shuffled
    assert orders[0] != orders[1]
    with pytest.raises(
        ConfigurationError, match="a Buckets without a number as batch_size"
    ):
        accelerator.prepare(DataLoader(shuffled, batch_sampler=Buckets([4, 4], None)))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="batch_size=3 over 2 processes"):
        accelerator.prepare(DataLoader(shuffled, batch_sampler=Buckets([3, 3], 3)))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs batches of one size"):
        list(accelerator.prepare(DataLoader(shuffled, batch_sampler=Buckets([2, 4]))))  # type: ignore[arg-type]
