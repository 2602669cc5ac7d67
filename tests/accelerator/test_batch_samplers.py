"""Batch samplers with a constructor of their own are divided by batches, on two processes, and never made anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from trainer_kit import Accelerator, Fabric

COUNT = 23
LENGTHS = [7 * index % 5 + 1 for index in range(COUNT)]
BY_LENGTH = sorted(range(COUNT), key=LENGTHS.__getitem__)
EPOCHS = 2


class Buckets(BatchSampler):
    """Batches of similar length in a random order; it has neither a sampler nor a batch size."""

    def __init__(self, lengths: list[int], per_bucket: int, *, seed: int) -> None:
        self.lengths = lengths
        self.per_bucket = per_bucket
        self.seed = seed
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epochs[-1] if self.epochs else 0
        generator = torch.Generator().manual_seed(self.seed + epoch)
        starts = range(0, COUNT, self.per_bucket)
        for bucket in torch.randperm(len(starts), generator=generator).tolist():
            first = starts[bucket]
            yield BY_LENGTH[first : first + self.per_bucket]

    def __len__(self) -> int:
        return -(-COUNT // self.per_bucket)


class Balanced(Sampler[list[int]]):
    """Equally many samples of each class."""

    def __init__(self, classes: list[list[int]], per_class: int) -> None:
        self.classes = classes
        self.per_class = per_class

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, 5 * self.per_class, self.per_class):
            last = first + self.per_class
            yield [index for members in self.classes for index in members[first:last]]

    def __len__(self) -> int:
        return 5


class Budget(Sampler[list[int]]):
    """Batches of a number of tokens; how many is known at the end."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(COUNT):
            batch.append(index)
            if sum(LENGTHS[member] for member in batch) >= self.tokens:
                yield batch
                batch = []
        if batch:
            yield batch


def samplers() -> list[Sampler[list[int]]]:
    evens, odds = list(range(0, COUNT, 2)), list(range(1, COUNT, 2))
    return [Buckets(LENGTHS, 4, seed=3), Balanced([evens, odds], 2), Budget(8)]


def batches_of_each_rank(sampler: Sampler[list[int]]) -> list[list[list[int]]]:
    """Each second batch; a rank that has one less repeats the first of the epoch."""
    batches = list(sampler)
    if len(batches) % 2:
        batches.append(batches[0])
    return [batches[0::2], batches[1::2]]


@pytest.mark.world_size(2)
def test_batches_of_a_users_sampler_are_divided_as_they_are() -> None:
    data = TensorDataset(torch.arange(COUNT))
    accelerator = Accelerator(cpu=True)
    fabric = Fabric(accelerator="cpu", devices=2)
    rank = accelerator.process_index
    for prepare in (accelerator.prepare, fabric.setup_dataloaders):
        for sampler, expected in zip(samplers(), samplers(), strict=True):
            prepared = prepare(DataLoader(data, batch_sampler=sampler))
            for epoch in range(EPOCHS):
                if isinstance(expected, Buckets):
                    expected.set_epoch(epoch)
                batches = [batch.tolist() for (batch,) in prepared]
                assert batches == batches_of_each_rank(expected)[rank]
            if isinstance(sampler, Buckets):
                assert sampler.epochs == list(range(EPOCHS))
