"""Logged values over ranks: one value, the same everywhere, or an error that names the names."""

from __future__ import annotations

import math

import pytest
import torch

from trainer_kit import Trainer, TrainModule
from trainer_kit.core.errors import LogError
from trainer_kit.metrics.entry import Entry, agreed, reduced


def entry(
    name,
    values=(),
    weights=None,
    kind="mean",
    hook="training_step",
    loader=None,
    **slots,
):
    made = Entry(hook, name, loader, (False, None, True, True, kind, True, True, False))
    made.values, made.weights = list(values), list(weights or [1.0] * len(values))
    if values:
        made.last, made.last_weight = made.values[-1], made.weights[-1]
    for slot, value in slots.items():
        setattr(made, slot, value)
    return made


def test_a_mean_over_time_is_weighted():
    assert reduced([entry("a", [1.0, 4.0], [3.0, 1.0])], step=False, group=None) == [
        1.75
    ]


def test_tensors_and_numbers_mix():
    values = [
        1.0,
        torch.tensor(2),
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor(6.0),
    ]
    assert reduced([entry("a", values)], step=False, group=None) == [3.0]


def test_a_step_is_the_last_value_alone():
    for kind in ("mean", "sum", "min", "max"):
        assert reduced(
            [entry("a", [9.0, 4.0], [1.0, 3.0], kind)], step=True, group=None
        ) == [4.0]


def test_values_of_all_kinds_keep_the_order_of_the_entries():
    entries = [
        entry("a", [1.0]),
        entry("b", [2.0], kind=torch.median),
        entry("c", [3.0], kind="max"),
    ]
    assert reduced(entries, step=False, group=None) == [1.0, 2.0, 3.0]


def test_nothing_recorded_is_not_a_number():
    assert math.isnan(reduced([entry("a")], step=False, group=None)[0])


def test_folding_early_changes_nothing():
    for kind in ("mean", "sum", "min", "max"):
        whole, parts = (
            entry("a", [3.0, 1.0, 7.0], [1.0, 2.0, 3.0], kind),
            entry("a", [3.0], [1.0], kind),
        )
        parts.fold()
        parts.values, parts.weights = [1.0, 7.0], [2.0, 3.0]
        assert reduced([whole], False, None) == reduced([parts], False, None)


def test_equal_names_are_not_exchanged():
    class Two:
        rank, size, calls = 0, 2, 0

        def agree(self, values):
            self.calls += 1
            return [values, values]

        def all_gather_object(self, value):
            raise AssertionError("names were exchanged although all are the same")

    group, entries = Two(), [entry("a", [1.0])]
    assert agreed(entries, group, ran=True) is entries
    assert group.calls == 1


class Net(TrainModule):
    def __init__(self, log=None, val=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_log, self.val_log = log, val

    def training_step(self, batch, batch_idx):
        if self.train_log is not None:
            self.train_log(self, batch)
        return self.weight.sum() ** 2

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.val_log is not None:
            self.val_log(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, val=None, count=7, **options):
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        barebones=True,
        **{"max_epochs": 1, **options},
    )
    loader = torch.utils.data.DataLoader(torch.arange(float(count)), batch_size=2)
    trainer.fit(module, loader, val)
    return trainer


def values(trainer, *names):
    return [float(trainer.callback_metrics[name]) for name in names]


def rank():
    return torch.distributed.get_rank()


@pytest.mark.world_size(2)
def test_epoch_values_are_means_over_all_samples_of_all_ranks():
    """Ranks get 0 1, 4 5 and 2 3, 6: uneven last batches, and an epoch shorter than any interval."""
    trainer = fit(Net(lambda m, b: m.log("a", b.mean(), on_step=True, on_epoch=True)))
    assert values(trainer, "a", "a_epoch") == [3.0, 3.0]
    assert values(trainer, "a_step") == [pytest.approx((4.5 * 2 + 6.0) / 3)]


@pytest.mark.world_size(2)
def test_other_reductions_over_ranks():
    kinds = {"sum": "sum", "min": "min", "max": "max", "median": torch.median}

    def log(m, b):
        for name, kind in kinds.items():
            m.log(name, b.mean(), on_step=False, on_epoch=True, reduce_fx=kind)

    assert values(fit(Net(log)), *kinds) == [0.5 + 2.5 + 4.5 + 6, 0.5, 6.0, 2.5]


@pytest.mark.world_size(2)
def test_each_rank_keeps_its_own_value_without_sync_dist():
    trainer = fit(
        Net(
            lambda m, b: m.log(
                "a", float(rank()), on_step=False, on_epoch=True, sync_dist=False
            )
        )
    )
    assert values(trainer, "a") == [rank()]


@pytest.mark.world_size(2)
def test_ranks_that_log_different_names_get_an_error_with_the_names():
    with pytest.raises(LogError, match=r"(?s)different names.*rank 0: a0; rank 1: a1"):
        fit(Net(lambda m, b: m.log(f"a{rank()}", 1.0, on_step=False, on_epoch=True)))


@pytest.mark.world_size(2)
def test_rank_zero_may_log_alone():
    def log(m, b):
        if rank() == 0:
            m.log("a", 1.0, on_step=False, on_epoch=True, rank_zero_only=True)
        m.log("b", float(rank()), on_step=False, on_epoch=True)

    trainer = fit(Net(log), count=8)
    assert values(trainer, "b") == [0.5]
    assert ("a" in trainer.callback_metrics) == (rank() == 0)


@pytest.mark.world_size(2)
def test_a_rank_without_a_batch_takes_the_values_of_the_others():
    """One validation sample, two ranks, two loaders: rank 1 never runs a validation step."""
    loader = torch.utils.data.DataLoader(torch.tensor([5.0]), batch_size=2)
    trainer = fit(Net(val=lambda m, b: m.log("a", b.mean())), [loader, loader])
    assert values(trainer, "a/dataloader_idx_0", "a/dataloader_idx_1") == [5.0, 5.0]


@pytest.mark.world_size(2)
def test_a_rank_without_the_last_batch_adds_no_value_of_an_earlier_step():
    """The second step has one sample: rank 1 has none, and its last value is of the first step."""
    trainer = fit(Net(lambda m, b: m.log("a", b.mean(), on_epoch=True)), count=5)
    assert trainer.global_step == 2
    assert values(trainer, "a_step", "a_epoch") == [4.0, 2.0]


@pytest.mark.world_size(2)
def test_validation_is_weighted_over_ranks():
    loader = torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2)
    trainer = fit(Net(val=lambda m, b: m.log("a", b.mean())), loader)
    assert values(trainer, "a") == [2.0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("count", "validated"), [(8, 4), (7, 3)], ids=["even", "uneven last batches"]
)
def test_values_logged_at_the_end_of_an_epoch_are_reduced_over_ranks(count, validated):
    class Ends(Net):
        def on_train_epoch_end(self):
            self.log("end", float(rank()))

        def on_validation_epoch_end(self):
            self.log("val_end", float(rank()), reduce_fx="sum")
            self.log("val_mean", float(rank()))

    loader = torch.utils.data.DataLoader(torch.arange(float(validated)), batch_size=2)
    assert values(fit(Ends(), loader, count=count), "end", "val_end", "val_mean") == [
        0.5,
        1.0,
        0.5,
    ]


@pytest.mark.world_size(2)
def test_a_metric_object_reduces_itself_over_ranks():
    from torchmetrics import MeanMetric

    class WithMetric(Net):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean.update(batch)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    assert values(fit(WithMetric()), "mean") == [3.0]
