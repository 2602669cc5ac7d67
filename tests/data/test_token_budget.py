"""Batches by a number of tokens: every sample once, within the budget, of about equal cost, and exact to resume."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit.core.errors import DataError
from trainer_kit.data import token_budget
from trainer_kit.testing import check_loader


def lengths(count: int = 2000) -> np.ndarray:
    draw = np.random.default_rng(1)
    return draw.lognormal(4, 0.8, count).astype(int).clip(1, 1000)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_within_the_budget(shuffle: bool, padded: bool) -> None:
    sampler = token_budget(range(2000), 2000, lengths(), padded=padded, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(chain.from_iterable(batches)) == list(range(2000))
    assert len(sampler) == len(batches)
    assert max(sampler.costs()) <= 2000


@pytest.mark.parametrize("padded", [True, False])
def test_batches_cost_about_the_same(padded: bool) -> None:
    costs = np.array(token_budget(range(2000), 4000, lengths(), padded=padded).costs())
    # One batch has what remains.
    costs = np.sort(costs)[1:]
    assert costs.min() > 0.75 * 4000
    assert costs.mean() > 0.95 * 4000


def test_the_longest_samples_come_at_any_place() -> None:
    """They were the last batch of every epoch."""
    sampler = token_budget(range(2000), 2000, lengths())
    places = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        longest = [lengths()[batch].max() for batch in sampler]
        places.append(int(np.argmax(longest)) / len(longest))
    assert min(places) < 0.5
    assert places != sorted(places)


def test_little_is_padded() -> None:
    sampler = token_budget(range(2000), 4000, lengths())
    assert lengths().sum() / sum(sampler.costs()) > 0.9


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        sampler = token_budget(range(300), 1000, lengths(300), seed=seed)
        sampler.set_epoch(epoch)
        orders.append(str(list(sampler)))
    assert len(set(orders)) == 3


def make_loader(workers: int) -> Any:
    texts = [torch.arange(length) for length in lengths(60).clip(1, 90).tolist()]
    return DataLoader(
        texts,
        batch_sampler=token_budget(texts, 200),
        collate_fn=pad,
        num_workers=workers,
    )


def pad(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-1)


def names(batch: torch.Tensor) -> list[int]:
    """Rows differ in their length, or not at all."""
    return (batch >= 0).sum(1).tolist()


def test_a_resume_is_exact() -> None:
    report = check_loader(make_loader, workers=[0], identify=names, positions=None)
    report.raise_if_failed()
    assert {check.status for check in report.checks} == {"ok"}


@pytest.mark.slow
def test_a_resume_is_exact_in_workers() -> None:
    check_loader(make_loader, identify=names, positions=1).raise_if_failed()


class Ones(tk.TrainModule):
    """The mean over samples of the step has the same gradient however they are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.weight * (batch >= 0).double().sum(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_step_is_the_mean_over_its_samples() -> None:
    module = Ones()
    count = len(make_loader(0))
    trainer = tk.Trainer(
        max_epochs=1,
        accelerator="cpu",
        barebones=True,
        accumulate_grad_batches=count,
    )
    trainer.fit(module, make_loader(0))
    expected = lengths(60).clip(1, 90).mean()
    assert -module.weight.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: token_budget(iter([]), 3), "without __len__"),
        (lambda: token_budget(["abcd"], 3), "sample 0 with 4 tokens, tokens=3"),
        (lambda: token_budget(["a", "b"], 3, [1]), "2 samples, lengths of shape"),
    ],
)
def test_mistakes_are_errors(make: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def test_no_samples() -> None:
    assert list(token_budget([], 3)) == []


@pytest.mark.parametrize(
    ("dataset", "options", "found"),
    [
        ([{"input_ids": [1] * 9, "labels": [1] * 9}], {}, "a dict of 2"),
        ([([1] * 9, 0)], {}, "a tuple of 2"),
        ([[1], [2]], {"length": [1.9, 0.5]}, "float64"),
        ([[1], [2]], {"length": lambda sample: 0.5}, "float64"),
        ([[1], [2]], {"length": [1, -1]}, "from -1"),
    ],
)
def test_lengths_that_are_no_numbers_of_tokens(dataset, options, found) -> None:
    """A dict has as many entries as keys: batches had many times the budget."""
    with pytest.raises(DataError, match=found):
        tk.data.token_budget(dataset, tokens=4, **options)
