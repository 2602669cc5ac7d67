import os
from contextlib import nullcontext

import pytest
import torch

from tests.callbacks.fits import BATCH, Scripted, each, fit, trainer
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint
from trainer_kit.callbacks.early_stopping import EarlyStoppingReason
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


def run(stop, *values, **options):
    """One epoch for each value, until the run stops."""
    return fit(
        stop, epochs=len(values), batches=1, val=each("loss", *values), **options
    )


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
def test_it_stops_after_the_expected_epoch(values, options, epochs):
    done = run(EarlyStopping("loss", **options), *values)
    assert bool(done.stops) == (epochs is not None)
    assert done.current_epoch == (epochs or len(values))


def test_the_reason_has_the_numbers():
    stop = EarlyStopping("loss", patience=2)
    done = run(stop, 0.5, 0.75, 0.625)
    assert done.stops == ["loss = 0.625 has not improved on 0.5 for 2 checks"]
    assert stop.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stop.stopping_reason_message == done.stops[0]
    assert (stop.stopped_epoch, stop.wait_count) == (2, 2)
    assert torch.equal(stop.best_score, torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize(("last", "epochs"), [(0.5, 6), (3.0, 4)])
def test_a_run_before_its_minimum_stops_there_unless_the_value_improves(last, epochs):
    """Epochs 2 and 3 are worse than the first; the value of the fourth decides."""

    class Scored(TinyModule):
        def validation_step(self, batch, batch_idx):
            values = [1.0, 2.0, 2.0, last, 0.25, 0.125]
            self.log("score", values[self.current_epoch])

    trainer = Trainer(
        max_epochs=6,
        min_epochs=4,
        callbacks=EarlyStopping("score", patience=1),
        barebones=True,
    )
    trainer.fit(Scored(), [torch.ones(2, 32)], [torch.ones(2, 32)])
    assert trainer.current_epoch == epochs


def test_the_state_survives_a_restart(tmp_path):
    before, after = EarlyStopping("loss", patience=3), EarlyStopping("loss", patience=3)
    run(before, 1.0, 2.0, 2.0).save_checkpoint(tmp_path / "saved")

    class Looks(Callback):
        order = "early"

        def on_train_start(self, trainer, module):
            self.state = after.state_dict()

    done = fit(
        after,
        looks := Looks(),
        epochs=9,
        batches=1,
        val=each("loss", 1.5),
        ckpt_path=tmp_path / "saved",
    )
    assert looks.state == before.state_dict()
    assert (len(done.stops), done.current_epoch) == (1, 4)
    assert (
        after.state_key
        == before.state_key
        != EarlyStopping("loss", mode="max").state_key
    )


def test_a_restart_with_more_patience_continues(tmp_path):
    run(EarlyStopping("loss", patience=3), 1.0, 2.0, 2.0, 2.0).save_checkpoint(
        tmp_path / "saved"
    )
    more = EarlyStopping("loss", patience=10)
    done = fit(
        more,
        epochs=20,
        batches=1,
        val=each("loss", *[2.0] * 9),
        ckpt_path=tmp_path / "saved",
    )
    assert done.current_epoch == 4 + 7


@pytest.mark.parametrize("unsized", [False, True])
def test_training_values_are_monitored_when_validation_runs(unsized):
    stop = EarlyStopping("train_loss", patience=1)
    values = {
        "val": each("val_loss", *[0.0] * 5),
        "epoch": each("train_loss", 3.0, 2.0, 1.0, 4.0, 0.5),
    }
    done = fit(stop, epochs=5, unsized=unsized, **values)
    assert (done.current_epoch, float(stop.best_score)) == (4, 1.0)


@pytest.mark.parametrize(
    ("at_epoch_end", "validates", "checks"),
    [(None, True, 3), (None, False, 1), (True, True, 1), (False, True, 3)],
)
def test_check_on_train_epoch_end_chooses_the_hook(at_epoch_end, validates, checks):
    """Three validations in an epoch, each with a value of its own."""
    stop = EarlyStopping("loss", patience=100, check_on_train_epoch_end=at_epoch_end)
    values = (
        {"val": each("loss", 1.0, 1.0, 1.0)}
        if validates
        else {"epoch": each("loss", 1.0)}
    )
    fit(stop, batches=6, val_check_interval=2, **values) if validates else fit(
        stop, batches=6, **values
    )
    assert stop.wait_count == checks - 1
    assert float(stop.best_score) == 1.0


@pytest.mark.parametrize("strict", [True, False])
def test_checks_after_validation_in_a_fit_without_it(strict):
    """Lightning trains to the end without a check; with strict=False, so does this."""
    stop = EarlyStopping("loss", check_on_train_epoch_end=False, strict=strict)
    refused = pytest.raises(ConfigurationError, match="acts after validation only")
    with refused if strict else nullcontext():
        fit(stop, batches=6, epoch=each("loss", 1.0))
    assert float(stop.best_score) == float("inf")


def test_a_value_is_checked_once():
    """Epochs without validation bring no new value: patience counts the validations."""
    stop = EarlyStopping(
        "loss", patience=2, check_on_train_epoch_end=True, strict=False
    )
    done = fit(
        stop,
        epochs=8,
        batches=1,
        check_val_every_n_epoch=2,
        val=each("loss", 1.0, 2.0, 0.5, 2.0),
    )
    assert (done.stops, stop.wait_count, float(stop.best_score)) == ([], 1, 0.5)


def test_a_validation_inside_the_epoch_is_checked_at_its_end():
    stop = EarlyStopping("loss", patience=1, check_on_train_epoch_end=True)
    done = fit(
        stop, epochs=8, batches=5, val_check_interval=3, val=each("loss", 1.0, 2.0, 0.5)
    )
    assert (done.current_epoch, len(done.stops)) == (2, 1)


def test_not_in_the_sanity_check_nor_in_validate_nor_in_a_fast_run():
    class Loud(Scripted):
        def validation_step(self, batch, batch_idx):
            self.log("loss", 1.0)

    stop = EarlyStopping("loss", patience=0)
    for made, verb in (
        (trainer(stop, num_sanity_val_steps=1, max_epochs=0), "fit"),
        (trainer(stop), "validate"),
        (trainer(stop, fast_dev_run=True), "fit"),
    ):
        getattr(made, verb)(
            Loud(), *([[BATCH]] if verb == "validate" else [[BATCH], [BATCH]])
        )
        assert (stop.wait_count, float(stop.best_score), made.stops) == (
            0,
            float("inf"),
            [],
        )


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_misspelled_value_is_named_before_the_first_step(kind, capsys, tmp_path):
    """The error came at the end of the first epoch, which may take hours."""

    class Module(TinyModule):
        def on_train_start(self):
            print("first step")

    line = (
        f"{kind.__name__} monitors 'val_los', and the sanity check's validation logged"
    )
    trainer = Trainer(
        max_epochs=1,
        callbacks=kind(monitor="val_los"),
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ConfigurationError, match="monitors 'val_los'"):
        trainer.fit(Module(), [BATCH], [BATCH])
    before, _, after = capsys.readouterr().out.partition("first step")
    assert f"{line} val_loss" in before
    assert line not in after
    # A value that validation logs, and one that may come from training, need no line.
    for name in ("val_loss", "train_loss"):
        Trainer(
            max_epochs=1,
            callbacks=kind(monitor=name),
            logger=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
        ).fit(TinyModule(), [BATCH], [BATCH])
    assert "sanity check's" not in capsys.readouterr().out


def test_a_value_that_is_never_logged():
    with pytest.raises(
        ConfigurationError,
        match=r"monitors 'val_los'(.|\n)*logged so far: val_loss(.|\n)*mean 'val_loss'",
    ):
        fit(EarlyStopping("val_los"), val=each("val_loss", 1.0))
    with pytest.raises(ConfigurationError, match="logged so far: nothing"):
        fit(EarlyStopping("loss"))
    with pytest.raises(
        ConfigurationError,
        match=r"train_loss; this fit has no validation\n.*define validation_step and",
    ):
        fit(EarlyStopping("val_loss"), epoch=each("train_loss", 1.0))


def test_not_strict():
    fit(EarlyStopping("x", strict=False))
    with pytest.warns(RuntimeWarning, match="but no value of this name is logged"):
        fit(EarlyStopping("x", strict=False, verbose=True))


@pytest.mark.world_size(2, process_group=False)
def test_rank_0_decides_for_all():
    """The value is each rank's own, and only rank 1's is worse than the limit."""

    class Own(Scripted):
        def training_step(self, batch, batch_idx):
            self.log("loss", float(self.global_rank), sync_dist=False)
            return self(batch).pow(2).mean()

    stop = EarlyStopping("loss", divergence_threshold=0.5, verbose=True)
    made = trainer(stop, devices=2, strategy="ddp", max_epochs=2)
    made.fit(Own(), [BATCH] * 4)
    assert (made.stops, made.current_epoch, float(stop.best_score)) == ([], 2, 0.0)
    assert made.printed == (
        ["loss improved from inf to 0"] if int(os.environ["RANK"]) == 0 else []
    )


def test_verbose():
    done = run(EarlyStopping("loss", verbose=True, patience=1), 2.0, 1.0, 1.5)
    assert done.printed[:3] == [
        "loss improved from inf to 2",
        "loss improved from 2 to 1",
        "loss = 1.5 has not improved on 1 for 1 checks",
    ]


@pytest.mark.parametrize(
    "options", [{"mode": "minimum"}, {"patience": -1}, {"min_delta": -0.1}]
)
def test_bad_arguments(options):
    with pytest.raises(ConfigurationError, match="EarlyStopping"):
        EarlyStopping("loss", **options)


def test_another_fit_starts_from_scratch():
    stop = EarlyStopping("loss", patience=2)
    first = run(stop, 0.1, 0.2, 0.3)
    assert (len(first.stops), stop.wait_count) == (1, 2)
    second = run(stop, 0.5, 0.75)
    assert (second.stops, stop.wait_count, float(stop.best_score)) == ([], 1, 0.5)
    assert stop.stopped_epoch == 0
