"""What an Accelerator costs in a step, exactly: Python calls over those of the hand-written loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.calls import python_calls
from trainer_kit import Accelerator

BATCH = [(torch.randn(32, 32), torch.randint(10, (32,)))]


def loop(count, accelerator=None, steps=1, read=None):
    """A run of the tiny step, MLP 32 -> 64 -> 10, with as much of the accelerator as is given."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (
        BATCH * count
        if read is None
        else read(DataLoader(BATCH * count, batch_size=None))
    )
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)

    def plain():
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def accelerated():
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    def accumulating():
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return plain if accelerator is None else accumulating if steps > 1 else accelerated


def per_step(make):
    """The difference between a long and a short run, so that whatever comes once cancels out."""
    make(8)()
    return (python_calls(make(140)) - python_calls(make(40))) / 100


@pytest.fixture(scope="module")
def by_hand():
    return per_step(loop)


def test_a_tiny_step(by_hand):
    found = per_step(lambda count: loop(count, Accelerator(cpu=True)))
    assert found - by_hand <= 8


def test_a_micro_batch(by_hand):
    """Three of four micro-batches step nothing: that saves more than the context costs."""

    def make(count):
        return loop(
            count, Accelerator(cpu=True, gradient_accumulation_steps=4), steps=4
        )

    assert per_step(make) <= by_hand - 35


def test_a_prepared_loader():
    """Over the same DataLoader, unprepared."""

    def make(count):
        accelerator = Accelerator(cpu=True)
        return loop(count, accelerator, read=accelerator.prepare)

    own = per_step(
        lambda count: loop(count, Accelerator(cpu=True), read=lambda loader: loader)
    )
    assert per_step(make) - own <= 12
