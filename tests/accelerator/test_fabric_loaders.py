"""The samples that `Fabric.setup_dataloaders` gives each process: those of torch's ``DistributedSampler``."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from trainer_kit import Accelerator, Fabric
from trainer_kit.data import Feed

SIZES = [1, 2, 3, 8, 10, 11, 15, 16, 17]


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class LongBatches(BatchSampler):
    """A batch sampler with an order of its own: it is not divided by samples."""

    def __iter__(self):
        yield from ([0, 1, 2], [3, 4, 5], [6])

    def __len__(self):
        return 3


def expected_batches(count, batch_size, drop_last, rank):
    """The batches of rank ``rank`` of 2, as a script with torch's own sampler reads them."""
    sampler = DistributedSampler(range(count), 2, rank, shuffle=False)
    loader = DataLoader(range(count), batch_size, sampler=sampler, drop_last=drop_last)
    return [batch.tolist() for batch in loader]


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.world_size(2)
def test_each_process_reads_the_samples_of_a_distributed_sampler():
    fabric = Fabric(accelerator="cpu", devices=2)
    for count in SIZES:
        data = list(range(count))
        for batch_size, drop_last in ((1, False), (3, True), (4, False), (4, True)):
            expected = expected_batches(
                count, batch_size, drop_last, fabric.global_rank
            )
            batches = BatchSampler(SequentialSampler(data), batch_size, drop_last)
            for loader in (
                DataLoader(data, batch_size, drop_last=drop_last),
                DataLoader(data, batch_sampler=batches),
            ):
                prepared = fabric.setup_dataloaders(loader)
                assert read(prepared) == expected
                assert len(prepared) == len(expected)
                assert list(prepared.batch_sampler) == expected
            shuffled = fabric.setup_dataloaders(
                DataLoader(data, batch_size, shuffle=True, drop_last=drop_last)
            )
            assert [len(batch) for batch in shuffled] == [len(b) for b in expected]


@pytest.mark.world_size(2)
def test_counts_summed_over_the_processes():
    fabric = Fabric(accelerator="cpu", devices=2)
    for count, total in ((10, 10), (11, 12), (1, 2)):
        loaders = [
            fabric.setup_dataloaders(loader)
            for loader in (
                DataLoader(range(count), 4),
                DataLoader(range(count), 4, shuffle=True),
                DataLoader(range(count), batch_size=None),
                DataLoader(Numbers(count), 4),
            )
        ]
        for loader in loaders:
            samples = sum(batch.numel() for batch in map(torch.as_tensor, loader))
            summed = fabric.all_reduce(torch.tensor(samples), reduce_op="sum")
            assert int(summed) == total
        # What the Accelerator gathers leaves out the repeated sample too.
        gather = fabric.accelerator.gather_for_metrics
        gathered = torch.cat([gather(batch) for batch in loaders[0]])
        assert sorted(gathered.tolist()) == list(range(count))


@pytest.mark.world_size(2)
def test_batches_of_a_custom_batch_sampler_are_not_filled():
    fabric = Fabric(accelerator="cpu", devices=2)
    rank = fabric.global_rank
    batches = LongBatches(SequentialSampler(range(7)), 3, False)
    loader = fabric.setup_dataloaders(DataLoader(range(7), batch_sampler=batches))
    expected = [[[0, 1, 2], [6]], [[3, 4, 5], [0, 1, 2]]][rank]
    assert read(loader) == expected
    assert list(loader.batch_sampler) == expected


@pytest.mark.world_size(2)
def test_the_accelerator_fills_up_the_last_batch():
    """`even_batches`, as in Accelerate: every process has equally many samples in each batch."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(10), 4))
    expected = [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]
    assert read(loader) == expected[accelerator.process_index]


def test_a_resume_reads_the_rest_of_the_epoch():
    loader = DataLoader(range(11), batch_size=2)
    for rank in (0, 1):
        feed = Feed(loader, rank=rank, size=2, pad=True, interleave=True)
        batches = [batch.tolist() for batch in feed.epoch(0)]
        assert batches == expected_batches(11, 2, False, rank)
        for start in range(4):
            rest = [batch.tolist() for batch in feed.epoch(0, start)]
            assert rest == batches[start:]


class Noisy(torch.utils.data.Dataset):
    """Samples with a random number, as augmentation draws one."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, torch.rand(())


def test_random_numbers_of_a_sample_do_not_depend_on_the_division():
    loader = DataLoader(Noisy(), batch_size=2)

    def numbers(rank, size):
        feed = Feed(loader, rank=rank, size=size, interleave=True, reproducible=True)
        return {
            int(index): float(number)
            for batch in feed.epoch(0)
            for index, number in zip(*batch, strict=True)
        }

    assert numbers(0, 2) | numbers(1, 2) == numbers(0, 1)
