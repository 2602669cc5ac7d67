"""A step that is repeated or dropped leaves no trace: metric objects, logged values, counts, buffers, attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import AutoMicroBatch, NaNGuard, ReplayCheck

draw = torch.Generator().manual_seed(1)
GOOD = [torch.randn(8, 4, generator=draw) for _ in range(6)]
BAD = [*GOOD[:3], torch.full((8, 4), torch.nan), *GOOD[3:]]


ATTRIBUTES = {"number", "sizes", "total", "calls"}
"""What only `NaNGuard` undoes."""


class Scale(nn.Module):
    """A layer that counts in an attribute, and assigns its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += len(x)
        self.seen = self.seen + len(x)
        return x * (1 + self.seen / 100)


class Learner(TrainModule):
    """Counts its samples in every way that a step can."""

    limit = 99

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 1))
        self.updated, self.logged = SumMetric(), SumMetric()
        self.both = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})
        self.plain = {"in a dict": SumMetric()}
        self.number, self.sizes, self.total = 0, [], torch.zeros(())

    def training_step(self, batch, batch_idx):
        size = float(len(batch))
        ones = torch.ones(len(batch))
        self.updated.update(size)
        self.logged(size)
        self.both.update(ones)
        self.plain["in a dict"].update(size)
        self.number += len(batch)
        self.sizes.append(len(batch))
        self.total += len(batch)
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        self.log("sum", size, on_step=False, on_epoch=True, reduce_fx="sum")
        loss = self.net(batch).pow(2).mean()
        if len(batch) > self.limit:
            raise torch.OutOfMemoryError("planted")
        return loss

    def on_train_epoch_end(self):
        counts = {
            "updated": self.updated.compute(),
            "both": self.both["sum"].compute(),
            "plain": self.plain["in a dict"].compute(),
            "number": float(self.number),
            "sizes": float(sum(self.sizes)),
            "total": self.total.clone(),
            "calls": float(self.net[1].calls),
            "seen": self.net[1].seen.clone(),
            "samples": float(self.trainer.progress.samples),
        }
        self.log_dict(counts)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counts(Callback):
    """Has a metric object that a hook of the step updates."""

    def __init__(self) -> None:
        self.mean = SumMetric()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.mean.update(float(len(batch)))

    def on_train_epoch_end(self, trainer, module):
        module.log("callback", self.mean.compute())


def run(
    callbacks: list[Any], batches: list[Any], limit: int = 99, **options: Any
) -> tuple[dict[str, float], Any]:
    torch.manual_seed(0)
    module = Learner()
    module.limit = limit
    common = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(
        max_epochs=1, callbacks=[*callbacks, Counts()], **common, **options
    )
    trainer.fit(module, batches)
    return {
        name: float(value) for name, value in trainer.callback_metrics.items()
    }, module.state_dict()


def assert_weights_equal(state: Any, other: Any, exact: bool = True) -> None:
    for name, value in state.items():
        torch.testing.assert_close(
            value, other[name], **({"rtol": 0, "atol": 0} if exact else {})
        )


@pytest.mark.parametrize("windows", [1, 2])
def test_a_replayed_step_leaves_no_trace(windows):
    plain, weights = run([], GOOD, accumulate_grad_batches=windows)
    assert set(plain.values()) == {48.0}
    counts, replayed = run(
        [ReplayCheck(every=2)], GOOD, accumulate_grad_batches=windows
    )
    assert {name for name in plain if counts[name] != plain[name]} == {
        "number",
        "sizes",
        "total",
        "calls",
    }  # attributes
    assert_weights_equal(replayed, weights)


@pytest.mark.parametrize("windows", [1, 2])
def test_a_step_that_ran_out_of_memory_leaves_no_trace(windows):
    plain, _ = run([], GOOD, accumulate_grad_batches=windows)
    counts, _ = run([AutoMicroBatch()], GOOD, limit=4, accumulate_grad_batches=windows)
    assert {name for name in plain if counts[name] != plain[name]} == ATTRIBUTES


def test_a_step_that_is_left_out_leaves_no_trace():
    plain, weights = run([], GOOD)
    counts, skipped = run([NaNGuard("skip")], BAD)
    assert counts == plain
    assert_weights_equal(skipped, weights)


def test_an_optimizer_that_evaluates_the_loss_again_counts_a_step_once():
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            closure()
            return super().step(closure)

    class Closure(Learner):
        def configure_optimizers(self):
            return Twice(self.parameters(), lr=0.01)

    module = Closure()
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(max_epochs=1, **options)
    trainer.fit(module, GOOD)
    shown = trainer.callback_metrics
    assert [
        float(shown[name]) for name in ("updated", "both", "logged", "sum", "samples")
    ] == [48.0] * 5
