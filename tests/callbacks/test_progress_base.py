"""`ProgressBar`: what a subclass overrides is called; the summary at the end of a fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.callbacks.fits import BATCH, Scripted, Timed, each, trainer
from trainer_kit.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.loggers import CSVLogger
from trainer_kit.testing import TinyModule


class Percent(ProgressBar):
    """Lightning's documented subclass."""

    def __init__(self):
        super().__init__()
        self.lines, self.enable = [], True

    def disable(self):
        self.enable = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        percent = (batch_idx + 1) / self.total_train_batches * 100
        self.lines.append(f"{self.train_description}: {percent:.1f}")


def test_a_custom_bar_replaces_the_default_bar():
    bar = Percent()
    made = trainer(bar, max_epochs=2, enable_progress_bar=True)
    assert [type(callback) for callback in made.callbacks] == [Percent]
    made.fit(TinyModule(), [BATCH] * 4)
    assert bar.lines == [
        f"Epoch {e}/1: {p}" for e in (0, 1) for p in ("25.0", "50.0", "75.0", "100.0")
    ]
    assert made.progress_bar_callback is bar


def test_totals_of_every_kind_of_loader():
    found = {}

    class Bar(ProgressBar):
        def on_sanity_check_start(self, trainer, module):
            super().on_sanity_check_start(trainer, module)
            found["sanity"] = self.total_val_batches

        def on_validation_end(self, trainer, module):
            super().on_validation_end(trainer, module)
            found["val"] = self.total_val_batches

        def on_test_end(self, trainer, module):
            super().on_test_end(trainer, module)
            found["test"] = self.total_test_batches

        def on_predict_end(self, trainer, module):
            super().on_predict_end(trainer, module)
            found["predict"] = self.total_predict_batches

    made, module = (
        trainer(Bar(), max_epochs=1, num_sanity_val_steps=1),
        Timed(lambda seconds: None),
    )
    made.fit(
        module, [BATCH], [DataLoader(torch.ones(samples, 32)) for samples in (2, 3)]
    )
    made.test(module, [BATCH] * 4, verbose=False)
    made.predict(module, [BATCH] * 5)
    assert found == {"sanity": 2, "val": 5, "test": 4, "predict": 5}


def test_overrides_of_a_bar_that_draws(capsys):
    class Bar(TQDMProgressBar):
        train_description = "working"
        total_train_batches = 7
        total_val_batches = 9
        validation_description = "judging"

    made = trainer(Bar(), max_epochs=1, enable_progress_bar=True)
    made.fit(Scripted(), [BATCH] * 4, [BATCH])
    assert "working: 4/7 batches" in capsys.readouterr().err
    made.validate(Scripted(), [BATCH], verbose=False)
    assert "judging: 1/1 batches" not in capsys.readouterr().err


def test_the_trainer_is_missing_before_the_first_entry_point():
    with pytest.raises(ConfigurationError, match="no Trainer yet"):
        _ = ProgressBar().total_train_batches
    assert ProgressBar().is_disabled is False


def test_the_summary_names_best_checkpoint_time_and_logs(tmp_path):
    best = ModelCheckpoint(monitor="m", mode="max")
    made = trainer(
        best,
        max_epochs=3,
        enable_progress_bar=True,
        logger=CSVLogger(tmp_path / "logs"),
    )
    made.fit(Scripted(val=each("m", 1.0, 3.5, 2.0)), [BATCH] * 4, [BATCH])
    lines = made.printed[-4:]
    assert re.fullmatch(r"fit: 12 steps to step 12 in \d+\.\d s( = .*)?", lines[0])
    assert lines[1] == f"checkpoint: best m=3.5: {best.best_model_path}"
    assert lines[2:] == [f"logs: {made.log_dir}", f"report: {made.log_dir}/report.html"]
    assert Path(made.log_dir, "report.html").is_file()
    assert len(made.printed) <= 12


def test_the_summary_splits_the_time(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr("trainer_kit.callbacks.progress_bar.monotonic", lambda: now[0])

    class Slow(TinyModule):
        def on_fit_start(self):
            now[0] += 1

        def training_step(self, batch, batch_idx):
            now[0] += 2
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            now[0] += 3

    made = trainer(max_epochs=1, enable_progress_bar=True)
    made.fit(Slow(), [BATCH] * 2, [BATCH])
    assert made.printed == [
        "fit: 2 steps to step 2 in 8.0 s = setup 1.0 s + training 4.0 s + validation 3.0 s"
    ]


@pytest.mark.parametrize(
    "options", [{"enable_progress_bar": False}, {"fast_dev_run": True}]
)
def test_no_bar_no_summary(options, capsys):
    quiet = {
        "logger": False,
        "enable_model_summary": None,
        "enable_checkpointing": None,
    }
    tk.Trainer(accelerator="cpu", max_epochs=1, **quiet, **options).fit(
        TinyModule(), [BATCH]
    )
    assert "fit:" not in capsys.readouterr().out
