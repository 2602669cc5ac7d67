"""Every run with a logger leaves a page behind: of what it logged, how it was configured, and how it ended."""

from __future__ import annotations

import stat
import time
import traceback
import warnings

import pytest
import torch

import trainer_kit as tk
from tests.report.pages import curve, data_of
from trainer_kit.loggers import JSONLLogger, read_journal
from trainer_kit.report import running
from trainer_kit.report.events import read_events
from trainer_kit.testing import TinyModule, run_distributed

BATCHES = [
    torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(6)
]


def trainer(**options):
    options = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        **options,
    }
    return tk.Trainer(
        accelerator="cpu", devices=1, logger=JSONLLogger(".", "", "run"), **options
    )


class StopAfter(tk.Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.steps:
            trainer.stop("enough")


class Net(TinyModule):
    """Breaks in the step ``breaks``, and warns in the one before."""

    def __init__(self, breaks=None, api_key="sk-secret", optim=None):
        super().__init__()
        self.save_hyperparameters()
        self.breaks = breaks

    def training_step(self, batch, batch_idx):
        if self.breaks is not None and self.global_step == self.breaks - 1:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("the <b>loss</b> is high", UserWarning, stacklevel=1)
        if self.global_step == self.breaks:
            raise RuntimeError("broken </script><script>alert(1)</script>")
        return super().training_step(batch, batch_idx)


def test_the_page_of_a_run(tmp_path):
    made = trainer(gradient_clip_val=1.0)
    made.fit(Net(optim={"betas": [0.9, 0.99]}), BATCHES, BATCHES[:2])
    made.test(dataloaders=BATCHES[:2], verbose=False)
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert (run["title"], run["status"], run["step"], run["exceptions"]) == (
        "Net",
        "finished",
        6,
        [],
    )
    logged = [(record["step"], record["train_loss"]) for record in read_journal(tmp_path / "run" / "journal.jsonl")
              if "train_loss" in record]  # fmt: skip
    steps, values = curve(run, "train_loss")
    assert steps == [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert values == pytest.approx([value for _, value in logged])
    assert len(curve(run, "test_loss")[0]) == 1, (
        "what a test logs after the fit is on the page of the run"
    )
    rows = {
        (section, name): (value, origin)
        for section, name, value, origin in run["configuration"]
    }
    assert rows["Trainer", "gradient_clip_val"] == (1.0, "argument")
    assert rows["Trainer", "min_epochs"] == (None, "default")
    assert rows["Net", "optim/betas"] == ([0.9, 0.99], "save_hyperparameters")
    assert rows["Net", "api_key"][0] == "***"
    assert "Net.training_step under 32-true" in run["explain"]
    assert dict(run["environment"])["torch"]
    marks = [
        (mark["kind"], mark["step"]) for mark in run["marks"] if mark["kind"] != "note"
    ]
    assert ("start", 0) in marks
    assert ("checkpoint", 6) in marks
    assert marks[-1] == ("end", 6)
    for name in ("report.html", "events.jsonl"):
        file = tmp_path / "run" / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "sk-secret" not in file.read_text()


def test_the_report_tries_no_step_of_an_optimizer(tmp_path):
    calls = []

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(1)
            return super().step(closure)

    class Counted(TinyModule):
        def configure_optimizers(self):
            return Counts(self.parameters(), lr=0.1)

        def train_dataloader(self):
            calls.append("loaded")
            return BATCHES

    trainer(enable_model_summary=False).fit(Counted())
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert "steps/epoch  6 (6 batches in windows of 1)" in run["explain"]
    assert calls == ["loaded", *[1] * 6]


def test_a_run_that_fails(tmp_path):
    with pytest.raises(RuntimeError, match="broken") as caught:
        trainer().fit(Net(breaks=3), BATCHES)
    assert not [
        frame
        for frame in traceback.extract_tb(caught.value.__traceback__)
        if frame.filename == running.__file__
    ]
    page = (tmp_path / "run" / "report.html").read_text()
    (run,) = data_of(page)["runs"]
    assert run["status"] == "failed"
    (failure,) = run["exceptions"]
    assert (
        failure["headline"] == "RuntimeError: broken </script><script>alert(1)</script>"
    )
    assert "in training_step" in failure["text"]
    assert "float32 (4, 32)" in failure["text"], "the notes of the exception too"
    marks = {mark["kind"]: mark for mark in run["marks"]}
    assert marks["warning"]["text"] == "UserWarning: the <b>loss</b> is high"
    assert (marks["warning"]["step"], marks["exception"]["step"]) == (2, 3)
    assert page.count("<script") == 3
    assert "<b>" not in page.partition('id="data">')[2].partition("</script>")[0]


def test_a_restart_repeats_no_value(tmp_path):
    checkpoints = tk.callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RuntimeError):
        trainer(callbacks=checkpoints, async_save=False).fit(Net(breaks=5), BATCHES)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("*2")
    trainer(max_epochs=2, callbacks=tk.callbacks.ModelCheckpoint()).fit(
        Net(), BATCHES, ckpt_path=saved
    )
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    logged = [
        record["step"]
        for record in read_journal(tmp_path / "run" / "journal.jsonl")
        if "train_loss" in record
    ]
    assert logged == [1, 2, 3, 4, 5, *range(3, 13)]
    assert curve(run, "train_loss")[0] == list(range(1, 13))
    assert run["status"] == "finished"
    assert len(run["exceptions"]) == 1, "the one before the restart is still there"
    (restart,) = (mark for mark in run["marks"] if mark["kind"] == "restart")
    assert (
        restart["step"],
        restart["text"].startswith("restart 1 at step 2, 1 process on "),
    ) == (
        2,
        True,
    )


def test_another_fit_in_the_directory_is_a_separate_run(tmp_path):
    trainer().fit(Net(), BATCHES)
    trainer().fit(Net(), BATCHES[:3])
    first, second = data_of(tmp_path / "run" / "report.html")["runs"]
    assert (first["name"], second["name"]) == ("run, fit 1", "run, fit 2")
    assert (curve(first, "train_loss")[0], curve(second, "train_loss")[0]) == (
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3],
    )


def test_a_page_while_the_run_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_FIRST", 0.01)
    seen = []

    class Waits(TinyModule):
        def training_step(self, batch, batch_idx):
            page, deadline = tmp_path / "run" / "report.html", time.monotonic() + 60
            while batch_idx == 3 and not seen and time.monotonic() < deadline:
                if page.exists():
                    seen.extend(data_of(page)["runs"])
                time.sleep(0.01)
            return super().training_step(batch, batch_idx)

    trainer().fit(Waits(), BATCHES)
    assert seen[0]["status"] == "running"
    assert data_of(tmp_path / "run" / "report.html")["runs"][0]["status"] == "finished"


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    (tmp_path / "run" / "events.jsonl").mkdir()
    made = trainer()
    made.fit(TinyModule(), BATCHES)
    assert made.global_step == 6
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "could not be written" in line
    ]
    assert len(lines) == 1
    assert "report.html could not be written: IsADirectoryError" in lines[0]


def test_runs_without_a_report_write_none(tmp_path):
    tk.Trainer(
        accelerator="cpu", devices=1, fast_dev_run=True, enable_progress_bar=False
    ).fit(TinyModule(), BATCHES)
    tk.Trainer(accelerator="cpu", devices=1, max_steps=1, barebones=True).fit(
        TinyModule(), BATCHES
    )
    with pytest.raises(tk.TrainerKitError, match="fit needs training data"):
        trainer().fit(TinyModule())
    assert not list(tmp_path.rglob("report.html"))
    assert not list(tmp_path.rglob("events.jsonl"))


def two_ranks(root):
    made = tk.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=1, log_every_n_steps=1, default_root_dir=root,
        enable_progress_bar=False, logger="jsonl",
    )  # fmt: skip
    made.fit(
        TinyModule(), torch.utils.data.DataLoader(torch.cat(BATCHES), batch_size=2)
    )


@pytest.mark.slow
def test_one_page_of_two_ranks(tmp_path):
    run_distributed(two_ranks, 2, str(tmp_path))
    (file,) = tmp_path.rglob("report.html")
    (run,) = data_of(file)["runs"]
    (start,) = (
        event for event in read_events(file.parent) if event["event"] == "start"
    )
    assert start["place"].startswith("2 processes on ")
    assert curve(run, "train_loss")[0] == [1, 2, 3, 4, 5, 6]
    assert "all-reduce over 2 ranks" in run["explain"]


def test_curves_over_samples_and_tokens(tmp_path):
    """Of batches of different sizes, also after a restart."""

    class Counts(TinyModule):
        def loss_weight(self, batch):
            return 10 * len(batch)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.0)

    batches = [torch.ones(size, 32) for size in (1, 4, 2, 3, 1, 5)]
    options = {"max_duration": "1000tok", "max_epochs": None, "num_sanity_val_steps": 0}
    checkpoints = tk.callbacks.ModelCheckpoint(every_n_train_steps=4)
    trainer(
        **options, limit_train_batches=5, callbacks=[checkpoints, StopAfter(5)]
    ).fit(Counts(), batches, batches[:1])
    saved = checkpoints.best_model_path
    trainer(**options, callbacks=StopAfter(6)).fit(
        Counts(), batches, batches[:1], ckpt_path=saved
    )
    records = read_journal(tmp_path / "run" / "journal.jsonl")
    assert [r["counts"] for r in records if "train_loss" in r][-1] == {
        "samples": 16,
        "tokens": 160,
    }
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert curve(run, "train_loss", "samples")[0] == [1, 5, 7, 10, 11, 16]
    assert curve(run, "train_loss", "tokens")[0] == [10, 50, 70, 100, 110, 160]
    assert curve(run, "val_loss", "tokens")[0] == [160]
    (restart,) = (mark for mark in run["marks"] if mark["kind"] == "restart")
    assert (restart["step"], restart["samples"], restart["tokens"]) == (4, 10, 100)
