"""`verify` reads the data as the ranks do: samplers with random numbers of their own, batches of the loader, limits."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import trainer_kit as tk
from tests.verify import verified
from tests.verify.test_verify import status, verify
from trainer_kit.verify.loaders import Division, feeds_of, loaders_by_rank

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks")]


class Noisy(Dataset):
    """Draws noise for each sample from Python's and torch's generators."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = verified.data()[index]
        return x + 0.01 * torch.rand(8) + 0.01 * random.random(), y


class Lengths:
    """A batch sampler with a generator, batches of different sizes, and a count of its passes."""

    def __init__(self):
        self.generator, self.passes = torch.Generator(), 0

    def __len__(self):
        return 9

    def __iter__(self):
        self.passes += 1
        order, at = torch.randperm(64, generator=self.generator).tolist(), self.passes
        for size in (4, 3, 5, 4, 2, 6, 4, 4, 3):
            yield order[at : at + size]
            at += size


class Stream(IterableDataset):
    """Shuffles with a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return 64

    def __iter__(self):
        data = verified.data()
        return (
            data[index]
            for index in torch.randperm(64, generator=self.generator).tolist()
        )


def seed_worker(_):
    """As on PyTorch's page about reproducibility."""
    random.seed(get_worker_info().seed % 2**32)


def with_sampler(sampler, **options):
    return DataLoader(verified.data(), 4, sampler=sampler, **options)


LOADERS = {
    "generator": lambda g: verified.loader(generator=g),
    "workers": lambda g: DataLoader(
        Noisy(), 4, True, generator=g, num_workers=1, worker_init_fn=seed_worker
    ),
    "sampler": lambda g: with_sampler(RandomSampler(verified.data(), generator=g)),
    "both": lambda g: with_sampler(
        RandomSampler(verified.data(), generator=g), generator=g
    ),
    "replacement": lambda g: with_sampler(
        RandomSampler(verified.data(), True, 32, generator=g)
    ),
    "weighted": lambda g: with_sampler(
        WeightedRandomSampler(torch.arange(1.0, 65), 64, generator=g)
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        "generator",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in LOADERS
            if kind != "generator"
        ),
    ],
)
def test_loaders_with_a_generator(kind):
    """Each rank's share of the plain loop continued the generator of the one before: a false alarm at step 0."""
    found = verify(
        verified.Classifier(), LOADERS[kind](torch.Generator().manual_seed(7)), steps=2
    )
    assert found.ok, str(found)
    assert [name for name, one in status(found).items() if one != "ok"] == [
        "validation"
    ], str(found)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_loader_that_makes_its_batches_itself(devices):
    """It was refused with an error about a batch size that the user had not set."""
    for loader in (
        DataLoader(verified.data(), batch_sampler=Lengths()),
        DataLoader(
            verified.data(),
            batch_sampler=BatchSampler(RandomSampler(range(64)), 4, True),
        ),
    ):
        found = verify(
            verified.Classifier(), loader, devices=devices, strategy="auto", steps=2
        )
        assert found.ok, str(found)
        assert (
            status(found)["samples"]
            == status(found)["data"]
            == status(found)["training"]
            == "ok"
        )
        assert status(found)["other world"] == "not checked"


@pytest.mark.parametrize(
    "limits",
    [
        {"limit_train_batches": 1},
        pytest.param({"limit_train_batches": 0.25}, marks=pytest.mark.long),
        pytest.param({"overfit_batches": 1}, marks=pytest.mark.long),
    ],
)
def test_epochs_that_a_limit_ends(limits):
    """The order of one process had no limit: a false alarm where the second epoch begins."""
    loader = verified.loader(generator=torch.Generator())
    found = verify(verified.Classifier(), loader, steps=3, **limits)
    assert found.ok, str(found)
    assert status(found)["samples"] == status(found)["training"] == "ok"


@pytest.mark.long
def test_a_stream_with_a_generator():
    found = verify(verified.Classifier(), DataLoader(Stream(), 4), steps=2)
    assert found.ok, str(found)
    assert status(found)["training"] == "ok"


def test_shares_of_one_loader_share_its_dataset_and_nothing_that_changes():
    loader = verified.loader(
        generator=torch.Generator(), num_workers=1, multiprocessing_context="fork"
    )
    trainer = tk.Trainer(accelerator="cpu", logger=False)
    division = Division(2, 1, 5, world=2)
    feeds, _ = feeds_of(
        trainer, loaders_by_rank({"a": loader, "b": [loader]}, division, True), division
    )
    first, second = (feed.loader for feed in feeds)
    assert second["a"].dataset is first["a"].dataset
    assert (
        second["a"].sampler.generator
        is second["a"].generator
        is second["b"][0].generator
    )
    assert second["a"].generator is not first["a"].generator


def test_a_loader_that_cannot_be_copied_is_shared():
    def batches():
        yield 1

    loader = batches()
    division = Division(2, 1, 5, world=2)
    trainer = tk.Trainer(accelerator="cpu", logger=False)
    feeds, _ = feeds_of(trainer, loaders_by_rank(loader, division, True), division)
    assert feeds[0].loader is feeds[1].loader is loader
