"""The random numbers that a step draws are those of the same loop with a plain DataLoader."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer_kit import Accelerator, Fabric
from trainer_kit.core.seed import preserved_rng

EPOCHS = 3
DATA = TensorDataset(torch.linspace(-1, 1, 22).reshape(11, 2))
WEIGHTS = [1.0] * len(DATA)


@pytest.fixture(autouse=True)
def _preserved():
    with preserved_rng():
        yield


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def in_order() -> DataLoader:
    return DataLoader(DATA, batch_size=4)


def shuffled(generator: torch.Generator | None = None) -> DataLoader:
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)


def sampled(sampler: Sampler, **options) -> DataLoader:
    return DataLoader(DATA, batch_size=4, sampler=sampler, **options)


# An order that the loader draws from a generator of its own is the order of a plain loop too.
SAME_ORDER = {
    "in order": in_order,
    "shuffled": lambda: shuffled(generator()),
    "sampler": lambda: sampled(RandomSampler(DATA, generator=generator())),
    "subset": lambda: sampled(SubsetRandomSampler(range(9), generator())),
    "weighted": lambda: sampled(
        WeightedRandomSampler(WEIGHTS, 10, generator=generator())
    ),
}
OTHER_ORDER = {
    "shuffled": shuffled,
    "replaced": lambda: sampled(RandomSampler(DATA, replacement=True, num_samples=40)),
    "subset": lambda: sampled(SubsetRandomSampler(range(9))),
    "weighted": lambda: sampled(WeightedRandomSampler(WEIGHTS, 10)),
}


def noisy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def noisy_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(inputs)
    return model(inputs + 0.1 * noise).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def trained_in_a_plain_loop(loader: DataLoader) -> list[torch.Tensor]:
    model = noisy_model()
    optimizer = optimizer_of(model)
    for _ in range(EPOCHS):
        for (inputs,) in loader:
            noisy_loss(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def trained_by(loop: Accelerator | Fabric, loader: DataLoader) -> list[torch.Tensor]:
    model = noisy_model()
    if isinstance(loop, Fabric):
        model, optimizer = loop.setup(model, optimizer_of(model))
        prepared = loop.setup_dataloaders(loader)
    else:
        model, optimizer, prepared = loop.prepare(model, optimizer_of(model), loader)
    for _ in range(EPOCHS):
        for (inputs,) in prepared:
            loop.backward(noisy_loss(model, inputs))
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("kind", list(SAME_ORDER))
@pytest.mark.parametrize("make_loop", [Accelerator, Fabric])
def test_weights_are_those_of_a_plain_loop(kind, make_loop):
    make_loader = SAME_ORDER[kind]
    expected = trained_in_a_plain_loop(make_loader())
    loop = (
        make_loop(cpu=True) if make_loop is Accelerator else Fabric(accelerator="cpu")
    )
    trained = trained_by(loop, make_loader())
    assert all(map(torch.equal, trained, expected))


def numbers_of_steps(loader, steps: int | None = None) -> list[float]:
    torch.manual_seed(1)
    numbers = []
    for _ in range(EPOCHS):
        numbers += [float(torch.rand(1)) for _ in islice(loader, steps)]
    return numbers


@pytest.mark.parametrize("kind", list(OTHER_ORDER))
@pytest.mark.parametrize("steps", [None, 2])
def test_a_step_draws_the_same_numbers_in_another_order_of_the_data(kind, steps):
    make_loader = OTHER_ORDER[kind]
    prepared = Accelerator(cpu=True).prepare(make_loader())
    assert numbers_of_steps(prepared, steps) == numbers_of_steps(make_loader(), steps)


class InOrder(BatchSampler):
    """Does not iterate the sampler that it has."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def test_a_batch_sampler_with_an_order_of_its_own_draws_nothing_of_its_sampler():
    def make_loader() -> DataLoader:
        batches = InOrder(RandomSampler(DATA), 2, False)
        return DataLoader(DATA, batch_sampler=batches)

    prepared = Accelerator(cpu=True).prepare(make_loader())
    assert numbers_of_steps(prepared) == numbers_of_steps(make_loader())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_step_draws_the_same_numbers_beside_workers(persistent):
    def make_loader() -> DataLoader:
        return DataLoader(
            DATA,
            batch_size=4,
            shuffle=True,
            num_workers=1,
            persistent_workers=persistent,
        )

    prepared = Accelerator(cpu=True).prepare(make_loader())
    assert numbers_of_steps(prepared) == numbers_of_steps(make_loader())


@pytest.mark.parametrize("make_loader", [in_order, shuffled])
@pytest.mark.parametrize("saved_at", [(1, 2), (2, 0)])
def test_a_resumed_run_draws_the_same_numbers(make_loader, saved_at, tmp_path):
    def run(accelerator: Accelerator, resumes: bool) -> tuple[list[float], list]:
        torch.manual_seed(3)
        loader = accelerator.prepare(make_loader())
        numbers, samples = [], []
        first = 0
        if resumes:
            accelerator.load_state(tmp_path / "state")
            numbers, samples, first = [], [], saved_at[0]
        for epoch in range(first, EPOCHS):
            if (epoch, 0) == saved_at and not resumes:
                accelerator.save_state(tmp_path / "state")
            for batch, (inputs,) in enumerate(loader):
                numbers.append(float(torch.rand(1)))
                samples.append(inputs.tolist())
                if (epoch, batch + 1) == saved_at and not resumes:
                    accelerator.save_state(tmp_path / "state")
        return numbers, samples

    numbers, samples = run(Accelerator(cpu=True), False)
    numbers_later, samples_later = run(Accelerator(cpu=True), True)
    assert len(numbers_later) == len(numbers) - saved_at[0] * 3 - saved_at[1]
    assert numbers_later == numbers[-len(numbers_later) :]
    assert samples_later == samples[-len(samples_later) :]
