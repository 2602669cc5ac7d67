"""The table is read back after every kind of write."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from trainer_kit import Trainer
from trainer_kit.core.atomic_files import hidden_path
from trainer_kit.core.errors import ConfigurationError, LogError
from trainer_kit.loggers import CSVLogger
from trainer_kit.testing import TinyModule


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(logger.path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def text(logger: CSVLogger) -> str:
    return logger.path.read_text(encoding="utf-8")


def test_rows_of_one_step_are_merged_and_new_columns_appear(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"loss": torch.tensor(0.5)}, 0)
    logger.log_metrics({"loss": 0.25}, 1)
    logger.log_metrics({"lr": 0.1}, 1)
    logger.save()
    assert text(logger) == "step,loss,lr\n0,0.5,\n1,0.25,0.1\n"
    logger.log_metrics({"val": 7}, 1)
    logger.log_metrics({"loss": 0.125}, 2)
    logger.finalize("success")
    assert text(logger) == "step,loss,lr,val\n0,0.5,,\n1,0.25,0.1,7\n2,0.125,,\n"
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_values_of_the_last_step_join_its_row_after_it_was_written(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0, "b": 1e-17}, 0)
    logger.log_metrics({"a": 123456.789}, 5)
    logger.save()
    logger.log_metrics({"b": 2.0}, 5)
    logger.save()
    logger.log_metrics({"a": 3.0}, 5)  # shorter than what stood there
    logger.log_metrics({"a": 4.0}, 6)
    logger.save()
    logger.save()
    assert text(logger) == "step,a,b\n0,1.0,1e-17\n5,3.0,2.0\n6,4.0,\n"


def test_earlier_steps_find_their_row(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    for step in (10, 20, 30):
        logger.log_metrics({"a": float(step)}, step)
        logger.save()
    logger.log_metrics({"a": 0.5}, 20)
    logger.log_metrics({"a": 0.25}, 15)
    logger.save()
    assert text(logger) == "step,a\n10,10.0\n15,0.25\n20,0.5\n30,30.0\n"


def test_an_explicit_version_continues_the_file_of_another_process(tmp_path):
    first = CSVLogger(tmp_path, version="mine")
    for step in range(4):
        first.log_metrics({"loss": 1 / (step + 1)}, step)
    first.finalize("failed")
    second = CSVLogger(tmp_path, version="mine")
    second.log_metrics({"loss": 9.0, "acc": 0.5}, 3)
    second.log_metrics({"loss": 8.0}, 4)
    second.finalize("success")
    assert [(row["step"], row["loss"], row["acc"]) for row in rows(second)] == [
        ("0", "1.0", ""),
        ("1", "0.5", ""),
        ("2", repr(1 / 3), ""),
        ("3", "9.0", "0.5"),
        ("4", "8.0", ""),
    ]
    second.log_metrics({"acc": 0.75}, 4)  # a validation after the fit
    second.finalize("success")
    assert rows(second)[-1] == {"step": "4", "loss": "8.0", "acc": "0.75"}
    assert len(rows(second)) == 5


@pytest.mark.parametrize(
    ("every", "written"), [(1, [0, 1, 2, 3, 4]), (3, [0, 1, 2]), (100, [])]
)
def test_how_many_steps_wait(tmp_path, every, written):
    logger = CSVLogger(tmp_path, version=0, flush_logs_every_n_steps=every)
    for step in range(5):
        logger.log_metrics({"a": 1.0}, step)
    assert (
        [int(row["step"]) for row in rows(logger)] if written else logger.path.exists()
    ) == (written or False)
    logger.save()
    assert [int(row["step"]) for row in rows(logger)] == list(range(5))


def test_a_torn_row_is_cut_off_on_reopening(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0, "b": 2.0}, 0)
    logger.finalize("success")
    with open(logger.path, "a", encoding="utf-8") as file:
        file.write("1,3.")
    again = CSVLogger(tmp_path, version=0)
    again.log_metrics({"a": 4.0, "b": 5.0}, 2)
    again.save()
    assert text(again) == "step,a,b\n0,1.0,2.0\n2,4.0,5.0\n"


def test_an_empty_file_gets_a_header(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    Path(logger.log_dir).mkdir(parents=True)
    logger.path.write_bytes(b"")
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert text(logger) == "step,a\n0,1.0\n"


def test_values_of_a_failed_write_are_written_later(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    content = logger.path.read_bytes()
    logger.path.unlink()
    logger.path.mkdir()  # opening it fails, as root too
    logger.log_metrics({"b": 2.0}, 0)
    for _ in range(2):
        with pytest.raises(OSError, match=r"metrics\.csv"):
            logger.save()
    logger.path.rmdir()
    logger.path.write_bytes(content)
    logger.save()
    assert text(logger) == "step,a,b\n0,1.0,2.0\n"


@pytest.mark.slow
def test_the_next_process_removes_files_of_a_killed_one(tmp_path, programs):
    def files():
        return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())

    directory = tmp_path / "x" / "1"
    directory.mkdir(parents=True)
    half = "; ".join(
        f"hidden_path(Path({name!r}), 'tmp').touch()"
        for name in ("metrics.csv", "hparams.json")
    )
    died = programs.run_code(
        f"import os; from pathlib import Path; os.chdir({str(directory)!r});"
        f"from trainer_kit.core.atomic_files import hidden_path; {half}"
    )
    assert died.returncode == 0
    assert len(files()) == 2
    living = hidden_path(directory / "metrics.csv", "tmp")
    for path in (living, directory / ".metrics.csv.mine.tmp"):
        path.touch()
    logger = CSVLogger(tmp_path, "x", "1")
    logger.log_hyperparams({"lr": 1})
    logger.finalize("success")  # nothing was logged: a run that had finished
    assert files() == sorted(["hparams.json", living.name, ".metrics.csv.mine.tmp"])


def test_names_and_values_of_every_kind_survive(tmp_path):
    logger = CSVLogger(tmp_path, version=0, prefix="p")
    values = {
        'a,"b"': float("nan"),
        "ü": float("-inf"),
        "big": 1e300,
        "count": 10**20,
        "third": 1 / 3,
    }
    logger.log_metrics(values, 0)
    logger.save()
    back = {
        name.removeprefix("p-"): float(value)
        for name, value in rows(logger)[0].items()
        if name != "step"
    }
    assert math.isnan(back.pop('a,"b"'))
    assert back == {"ü": float("-inf"), "big": 1e300, "count": 1e20, "third": 1 / 3}


def test_a_call_without_a_step_is_a_new_row(tmp_path):
    """As in Lightning, whose number of the row is the count of calls since the last save."""
    logger = CSVLogger(tmp_path, version=0)
    for loss in (3.0, 2.0, 1.0):
        logger.log_metrics({"loss": loss})
    logger.log_metrics({"loss": 0.5}, 7)
    logger.log_metrics({})
    logger.log_metrics({"loss": 0.25})
    logger.save()
    assert text(logger) == "step,loss\n0,3.0\n1,2.0\n2,1.0\n7,0.5\n8,0.25\n"
    again = CSVLogger(tmp_path, version=0)
    again.log_metrics({"loss": 0.125})
    again.save()
    assert text(again).endswith("\n8,0.25\n9,0.125\n")


def test_metrics_of_hyperparameters_are_those_of_step_0(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 0.1}, {"score": 0.5})
    logger.save()
    assert text(logger) == "step,score\n0,0.5\n"


def test_wrong_calls(tmp_path):
    with pytest.raises(ConfigurationError, match="at least 1"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


@pytest.mark.parametrize(
    "content", ["a,b\n1,2\n", "step,a\nx,1\n", "step,a\n\n1,2\nzwei,3\n", "a,step\n1\n"]
)
def test_a_file_that_is_not_a_table_of_metrics_is_left_alone(tmp_path, content):
    logger = CSVLogger(tmp_path, version=0)
    Path(logger.log_dir).mkdir(parents=True)
    logger.path.write_text(content, encoding="utf-8")
    logger.log_metrics({"a": 1.0}, 0)
    with pytest.raises(LogError, match="not a table of metrics"):
        logger.save()
    assert text(logger) == content


def test_many_writes_agree_with_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    often, once = (
        CSVLogger(tmp_path, version=0),
        CSVLogger(tmp_path, version=1, flush_logs_every_n_steps=10**9),
    )
    for _ in range(200):
        step, column, flush = torch.randint(0, 40, (3,), generator=generator).tolist()
        value = torch.rand((), generator=generator).item()
        for logger in (often, once):
            logger.log_metrics({f"c{column % 5}": value}, step)
        if flush < 15:
            often.save()
        if flush == 39:
            often.finalize("success")
    often.save()
    once.save()
    key = sorted(rows(once)[0])
    assert [[row[name] for name in key] for row in rows(often)] == [
        [row[name] for name in key] for row in rows(once)
    ]
    assert len(rows(often)) == 40


@pytest.mark.parametrize(
    "logged", [True, False], ids=["new columns", "the same columns"]
)
def test_evaluations_after_a_fit_leave_its_last_row(tmp_path, logged):
    class Scored(TinyModule):
        value = 0.0

        def validation_step(self, batch, batch_idx):
            self.log("score", self.value)

        def test_step(self, batch, batch_idx):
            self.log("test_score" if logged else "score", self.value)

    logger, module = CSVLogger(tmp_path), Scored()
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        max_epochs=1, logger=logger, log_every_n_steps=1, accelerator="cpu", **quiet
    )
    batches = [torch.ones(2, 32)]
    trainer.fit(module, batches * 2, batches)
    before = logger.path.read_text().splitlines()
    for module.value in (1.0, 2.0):
        trainer.validate(module, batches, verbose=False)
    module.value = 3.0
    trainer.test(module, batches, verbose=False)
    with open(logger.path, newline="") as file:
        rows = list(csv.DictReader(file))
    # A value that overwrites nothing (of another column) is added to the last row.
    assert [(row["step"], row["score"], row["epoch"]) for row in rows] == [
        ("1", "", "0"),
        ("2", "0.0", "0"),
        ("2", "1.0", "1"),
        ("2", "2.0", "1"),
        *([] if logged else [("2", "3.0", "1")]),
    ]
    assert not logged or [row["test_score"] for row in rows] == ["", "", "", "3.0"]
    assert [
        line[: len(old)]
        for line, old in zip(
            logger.path.read_text().splitlines()[1:3], before[1:], strict=True
        )
    ] == (before[1:])


def test_a_resumed_run_still_merges_the_row_that_it_writes_again(tmp_path):
    for value in (1.0, 2.0):
        logger = CSVLogger(tmp_path, version=0)
        logger.log_metrics({"loss": value}, 1)
        logger.finalize("failed" if value == 1.0 else "success")
    assert logger.path.read_text().splitlines() == ["step,loss", "1,2.0"]


def test_lightnings_writer(tmp_path):
    logger = CSVLogger(tmp_path, name="a", version=1)
    experiment = logger.experiment
    experiment.log_hparams({"lr": 0.1})
    experiment.log_metrics({"loss": torch.tensor(0.5)}, step=4)
    logger.log_metrics({"acc": 1.0}, step=2)
    assert experiment.metrics == [{"acc": 1.0, "step": 2}, {"loss": 0.5, "step": 4}]
    assert experiment.hparams == {"lr": 0.1}
    assert experiment.log_dir == logger.log_dir == str(tmp_path / "a" / "version_1")
    assert experiment.metrics_file_path == str(
        Path(logger.log_dir, experiment.NAME_METRICS_FILE)
    )
    experiment.save()
    assert experiment.metrics == []
    written = Path(experiment.metrics_file_path).read_text()
    assert written == "step,loss,acc\n2,,1.0\n4,0.5,\n"
