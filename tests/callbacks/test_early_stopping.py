import math

import pytest
import torch

from trainer_kit import Trainer
from trainer_kit.callbacks import EarlyStopping
from trainer_kit.callbacks.early_stopping import EarlyStoppingReason
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


def run(trainer, values, name="loss"):
    """One epoch for each value, until a stop is asked for; returns how many epochs ran."""
    for epoch, value in enumerate(values):
        trainer.epoch(val={name: value})
        if trainer.stops:
            return epoch + 1
    return None


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([5.0, 4.0, 4.0, 4.0, 3.0], {"patience": 2}, 4),
        ([5.0, 4.0, 4.5, 3.0, 3.5, 3.5, 3.5], {"patience": 3}, 7),
        ([5.0, 4.99, 4.98, 4.97], {"patience": 2, "min_delta": 0.1}, 3),
        ([0.1, 0.2, 0.2, 0.2], {"patience": 2, "mode": "max"}, 4),
        ([0.1, 0.15, 0.19], {"patience": 2, "mode": "max", "min_delta": 0.1}, 3),
        ([5.0, 4.0, 3.0], {"patience": 1}, None),
        ([5.0, 5.0], {"patience": 0}, 2),
        ([5.0, 4.0, 0.5], {"stopping_threshold": 1.0}, 3),
        ([5.0, 4.0, 50.0], {"divergence_threshold": 10.0}, 3),
        ([0.5, 0.1], {"divergence_threshold": 0.2, "mode": "max"}, 2),
        ([5.0, float("nan")], {}, 2),
        ([5.0, float("inf"), 5.0], {"check_finite": False, "patience": 2}, 3),
        ([5.0, float("nan"), float("nan")], {"check_finite": False, "patience": 2}, 3),
    ],
)
def test_when_it_stops(make_trainer, values, options, epochs):
    trainer = make_trainer(EarlyStopping("loss", **options), val_batches=[2]).begin()
    assert run(trainer, values) == epochs


def test_the_reason_has_the_numbers(make_trainer):
    stop = EarlyStopping("loss", patience=2)
    trainer = make_trainer(stop, val_batches=[1]).begin()
    run(trainer, [0.5, 0.75, 0.625])
    assert trainer.stops == ["loss = 0.625 has not improved on 0.5 for 2 checks"]
    assert stop.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stop.stopping_reason_message == trainer.stops[0]
    assert (stop.stopped_epoch, stop.wait_count) == (2, 2)
    assert torch.equal(stop.best_score, torch.tensor(0.5, dtype=torch.float64))


def test_an_improvement_takes_the_stop_back(make_trainer):
    """A request before min_epochs is re-evaluated at each check."""
    stop = EarlyStopping("loss", patience=1)
    trainer = make_trainer(stop, val_batches=[1]).begin()
    for value in (1.0, 2.0, 2.0, 0.5):
        trainer.epoch(val={"loss": value})
    assert len(trainer.stops) == 2
    assert stop.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert stop.wait_count == 0
    assert trainer.withdrawn == trainer.stops


@pytest.mark.parametrize(("last", "epochs"), [(0.5, 6), (3.0, 4)])
def test_a_run_before_its_minimum_stops_there_unless_the_value_improves(last, epochs):
    """Epochs 2 and 3 are worse than the first; the value of the fourth decides."""

    class Scored(TinyModule):
        def validation_step(self, batch, batch_idx):
            values = [1.0, 2.0, 2.0, last, 0.25, 0.125]
            self.log("score", values[self.current_epoch])

    trainer = Trainer(max_epochs=6, min_epochs=4, callbacks=EarlyStopping("score", patience=1), barebones=True)
    trainer.fit(Scored(), [torch.ones(2, 32)], [torch.ones(2, 32)])
    assert trainer.current_epoch == epochs


def test_the_state_survives_a_restart(make_trainer):
    before = EarlyStopping("loss", patience=3)
    first = make_trainer(before, val_batches=[1]).begin()
    for value in (1.0, 2.0, 2.0):
        first.epoch(val={"loss": value})
    after = EarlyStopping("loss", patience=3)
    second = make_trainer(after, val_batches=[1]).begin([before.state_dict()])
    assert after.state_dict() == before.state_dict()
    second.epoch(val={"loss": 1.5})
    assert second.stops
    assert after.state_key == before.state_key != EarlyStopping("loss", mode="max").state_key


def test_a_restart_with_more_patience_goes_on(make_trainer):
    state = {**EarlyStopping("loss").state_dict(), "wait_count": 3, "best_score": 1.0}
    trainer = make_trainer(EarlyStopping("loss", patience=10), val_batches=[1]).begin([state])
    assert run(trainer, [2.0] * 7) == 7


def test_values_of_the_training_epoch_are_watched_where_validation_runs(make_trainer):
    stop = EarlyStopping("train_loss", patience=1)
    trainer = make_trainer(stop, val_batches=[1]).begin()
    trainer.epoch(val={"val_loss": 0.0}, train_loss=1.0)
    trainer.epoch(val={"val_loss": 0.0}, train_loss=0.5)
    assert float(stop.best_score) == 0.5
    trainer.epoch(val={"val_loss": 0.0}, train_loss=2.0)
    assert trainer.stops


def test_values_of_the_training_epoch_in_epochs_of_unknown_length(make_trainer):
    stop = EarlyStopping("train_loss", patience=1)
    trainer = make_trainer(stop, batches=float("inf"), val_batches=[1]).begin()
    for value in (3.0, 2.0, 1.0):
        trainer.epoch(val={"val_loss": 0.0}, train_loss=value)
        assert float(stop.best_score) == value
    assert not trainer.stops


@pytest.mark.parametrize(
    ("at_epoch_end", "val_batches", "checks"),
    [(None, [1], 3), (None, [], 1), (True, [1], 1), (False, [1], 3), (False, [], 0)],
)
def test_when_it_looks(make_trainer, at_epoch_end, val_batches, checks):
    stop = EarlyStopping("loss", patience=100, check_on_train_epoch_end=at_epoch_end)
    trainer = make_trainer(
        stop, batches=6, val_batches=val_batches, callback_metrics={"loss": torch.tensor(1.0)}
    ).begin()
    stop._best = 0.0  # nothing improves: each look counts
    for _ in range(3):
        trainer.step(batches=2)
        if val_batches:
            trainer.validate(loss=1.0)
    trainer.end_epoch()
    assert stop.wait_count == checks


def test_not_in_the_sanity_check_nor_in_validate_nor_in_a_fast_run(make_trainer):
    stop = EarlyStopping("loss", patience=0)
    trainer = make_trainer(stop, val_batches=[1]).begin()
    trainer.sanity_checking = True
    trainer.validate(loss=1.0)
    trainer.sanity_checking = False
    trainer.begin(stage="validate")
    trainer.validate(loss=1.0)
    trainer.fast_dev_run = True
    trainer.begin()
    trainer.epoch(val={"loss": 1.0})
    assert (stop.wait_count, float(stop.best_score), trainer.stops) == (0, float("inf"), [])


def test_a_value_that_nobody_logged(make_trainer):
    trainer = make_trainer(EarlyStopping("val_los"), val_batches=[1]).begin()
    with pytest.raises(
        ConfigurationError, match=r"watches 'val_los'(.|\n)*logged so far: val_loss(.|\n)*mean 'val_loss'"
    ):
        trainer.epoch(val={"val_loss": 1.0})
    with pytest.raises(ConfigurationError, match="logged so far: nothing"):
        make_trainer(EarlyStopping("loss")).begin().epoch()
    with pytest.raises(ConfigurationError, match=r"train_loss; there is no validation\n.*define validation_step and"):
        make_trainer(EarlyStopping("val_loss")).begin().epoch(train_loss=1.0)


def test_not_strict(make_trainer):
    trainer = make_trainer(EarlyStopping("x", strict=False)).begin()
    trainer.epoch()
    loud = make_trainer(EarlyStopping("x", strict=False, verbose=True)).begin()
    with pytest.warns(RuntimeWarning, match="which nobody logged"):
        loud.epoch()


def test_rank_0_decides_for_all(make_trainer):
    trainer = make_trainer(EarlyStopping("loss"), world_size=2).begin()
    trainer.epoch(loss=1.0)
    assert trainer.strategy.world.heard == [1.0]


def test_verbose(make_trainer):
    trainer = make_trainer(EarlyStopping("loss", verbose=True, patience=1), val_batches=[1]).begin()
    run(trainer, [2.0, 1.0, 1.5])
    assert trainer.printed == [
        "loss improved from inf to 2",
        "loss improved from 2 to 1",
        "loss = 1.5 has not improved on 1 for 1 checks",
    ]
    other = make_trainer(EarlyStopping("loss", verbose=True), rank=1, world_size=2).begin()
    other.epoch(loss=1.0)
    assert not other.printed


@pytest.mark.parametrize("options", [{"mode": "minimum"}, {"patience": -1}, {"min_delta": -0.1}])
def test_bad_arguments(options):
    with pytest.raises(ConfigurationError, match="EarlyStopping"):
        EarlyStopping("loss", **options)


def test_another_fit_begins_anew(make_trainer):
    stop = EarlyStopping("loss", patience=2)
    first = make_trainer(stop, val_batches=[1]).begin()
    for loss in (0.1, 0.2, 0.3):
        first.epoch(val={"loss": loss})
    assert (len(first.stops), stop.wait_count) == (1, 2)
    second = make_trainer(stop, val_batches=[1]).begin()
    assert (stop.wait_count, stop.stopped_epoch, float(stop.best_score)) == (0, 0, math.inf)
    second.epoch(val={"loss": 0.5})
    second.epoch(val={"loss": 0.75})
    assert (second.stops, stop.wait_count, float(stop.best_score)) == ([], 1, 0.5)
