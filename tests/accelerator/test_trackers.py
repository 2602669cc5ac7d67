"""Trackers of a loop of the user's own, read back from disk."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer_kit import (
    Accelerator,
    GeneralTracker,
    LoggerType,
    ProjectConfiguration,
    on_main_process,
)
from trainer_kit import register_tracker_class as register
from trainer_kit.core.errors import ConfigurationError, RegistryError
from trainer_kit.core.registry import LOGGERS
from trainer_kit.loggers import read_journal
from trainer_kit.report.events import read_events

ROOT = Path(__file__).resolve().parents[2]
HPARAMS = {"lr": 0.1, "layers": 2}


def log_three(accelerator, **options):
    accelerator.init_trackers("project", config=HPARAMS, **options)
    for step in range(3):
        accelerator.log(
            {
                "loss": torch.tensor(1.0 / (step + 1), requires_grad=True),
                "accuracy": step,
            },
            step=step,
        )


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    project = ProjectConfiguration(
        project_dir=tmp_path / "p", logging_dir=tmp_path / "logs"
    )
    accelerator = Accelerator(
        cpu=True, log_with=LoggerType.TENSORBOARD, project_config=project
    )
    log_three(accelerator, init_kwargs={"tensorboard": {"flush_secs": 5}})
    accelerator.log({"nested": {"a": 1, "b": np.float32(2)}, "note": "text"}, step=3)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"picture": np.zeros((1, 3, 4, 6), dtype=np.uint8)}, step=3)
    rows_first = {"rows first": np.zeros((1, 4, 6, 3), dtype=np.uint8)}
    tracker.log_images(rows_first, step=3, dataformats="NHWC")
    tracker.writer.add_scalar("direct", 7.0, 0)
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "logs" / "project"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (i, pytest.approx(1 / (i + 1))) for i in range(3)
    ]
    assert {"nested/a", "nested/b", "direct", "accuracy"} <= set(
        events.Tags()["scalars"]
    )
    for name in ("picture", "rows first"):
        image = events.Images(name)[0]
        assert (image.height, image.width) == (4, 6), (
            "torch's layout: samples, channels, rows, columns"
        )
    assert "note/text_summary" in events.Tags()["tensors"]


def test_csv_and_jsonl(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=["csv", "jsonl"], project_dir=tmp_path)
    log_three(accelerator)
    accelerator.log({"loss": 9.0})
    accelerator.end_training()
    with open(tmp_path / "project" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"], (
        "one more than the last where none is given"
    )
    assert [float(row["loss"]) for row in rows] == [1.0, 0.5, pytest.approx(1 / 3), 9.0]
    journal = tmp_path / "project" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [
        1.0,
        0.5,
        pytest.approx(1 / 3),
        9.0,
    ]


WANDB = """
import json, wandb
from trainer_kit import Accelerator

accelerator = Accelerator(cpu=True, log_with="wandb", project_dir=".")
options = {"wandb": {"mode": "offline", "name": "here"}}
accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs=options)
run = accelerator.get_tracker("wandb", unwrap=True)
assert run is wandb.run
for step in range(3):
    accelerator.log({"loss": 1.0 / (step + 1), "text": "kept"}, step=step)
accelerator.get_tracker("wandb")  # waits for what was logged
found = [dict(run.config), run.name, run.project, run.summary["loss"], run.summary["text"]]
accelerator.end_training()
print(json.dumps(found))
"""


_LEAVES = """
import sys
import trainer_kit as tk
accelerator = tk.Accelerator(cpu=True, log_with="csv", project_dir=sys.argv[1])
accelerator.init_trackers("run")
for step in range(3):
    accelerator.log({"loss": step / 2}, step=step)
"""


@pytest.mark.slow
def test_a_script_that_ends_without_end_training_keeps_its_rows(tmp_path):
    subprocess.run([sys.executable, "-c", _LEAVES, str(tmp_path)], check=True)
    assert (tmp_path / "run" / "metrics.csv").read_text().split() == [
        "step,loss",
        "0,0.0",
        "1,0.5",
        "2,1.0",
    ]


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    ran = subprocess.run(
        [sys.executable, "-c", WANDB],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found == [{"lr": 0.1}, "here", "project", pytest.approx(1 / 3), "kept"]
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"loss" in written
    assert b"project" in written


def test_every_tracker_and_an_object(tmp_path):

    class Kept:
        """A logger as a Trainer takes it."""

        def __init__(self):
            self.values = []

        def log_metrics(self, metrics, step):
            self.values.append((step, dict(metrics)))

    kept = Kept()
    accelerator = Accelerator(cpu=True, log_with=[kept, "all"], project_dir=tmp_path)
    for word in {
        "wandb",
        "clearml",
        "comet_ml",
        "mlflow",
        "aim",
        "dvclive",
        "swanlab",
        "trackio",
    }:
        if (
            word in accelerator.log_with
        ):  # is installed; it would need a server, or outlive the test
            accelerator.log_with.remove(word)
    log_three(accelerator)
    accelerator.end_training()
    assert [step for step, _ in kept.values] == [0, 1, 2]
    assert [tracker.name for tracker in accelerator.trackers] == [
        "Kept",
        "tensorboard",
        "csv",
        "jsonl",
    ]


class Written(GeneralTracker):
    """As Accelerate's guide writes one: `tracker` set in the constructor, its own keywords."""

    name = "written"
    requires_logging_directory = True

    @on_main_process
    def __init__(self, run_name: str, logging_dir=None, **kwargs):
        super().__init__()
        self.lines, self.run_name, self.directory, self.kwargs = (
            [],
            run_name,
            logging_dir,
            kwargs,
        )
        self.tracker = self.lines

    @on_main_process
    def store_init_configuration(self, values: dict):
        self.lines.append(("config", values))

    @on_main_process
    def log(self, values: dict, step=None, **kwargs):
        self.lines.append((step, values, kwargs))

    @on_main_process
    def finish(self):
        self.lines.append("finished")


def test_a_tracker_of_the_users_own(tmp_path):
    tracker = Written("mine", tmp_path)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project", config=HPARAMS)
    accelerator.log(
        {"loss": 1.0, "text": "kept"}, log_kwargs={"written": {"commit": True}}
    )
    assert accelerator.get_tracker("written") is tracker
    assert accelerator.get_tracker("written", unwrap=True) is tracker.lines
    accelerator.end_training()
    assert tracker.lines == [
        ("config", HPARAMS),
        (None, {"loss": 1.0, "text": "kept"}, {"commit": True}),
        "finished",
    ]


def test_a_registered_class_is_made_by_its_name(tmp_path):
    register(Written)
    try:
        accelerator = Accelerator(cpu=True, log_with="written", project_dir=tmp_path)
        accelerator.init_trackers("project", init_kwargs={"written": {"option": 3}})
        tracker = accelerator.get_tracker("written")
        assert (tracker.run_name, tracker.directory, tracker.kwargs) == (
            "project",
            str(tmp_path),
            {"option": 3},
        )
    finally:
        LOGGERS._targets.pop("written", None)


def test_wrong_trackers_are_refused():
    with pytest.raises(ConfigurationError, match="tensorboard needs a directory"):
        Accelerator(cpu=True, log_with="tensorboard").init_trackers("project")
    with pytest.raises(RegistryError, match="tensorbord"):
        Accelerator(cpu=True, log_with="tensorbord").init_trackers("project")
    with pytest.raises(ConfigurationError, match="unknown tracker 'wandb'"):
        Accelerator(cpu=True).get_tracker("wandb")

    class Nameless(GeneralTracker):
        pass

    with pytest.raises(
        ConfigurationError, match="needs the attributes name and tracker"
    ):
        Accelerator(cpu=True, log_with=Nameless()).init_trackers("project")


@pytest.mark.world_size(2)
def test_one_process_writes_unless_each_has_its_own(tmp_path):
    class Each(GeneralTracker):
        name = "each"
        main_process_only = False
        tracker = None

        def __init__(self):
            self.values = []

        def log(self, values, step=None, **options):
            self.values.append(values)

    each = Each()
    accelerator = Accelerator(
        cpu=True,
        log_with=[each, Written("mine", tmp_path), "csv"],
        project_dir=tmp_path,
    )
    log_three(accelerator)
    mine = accelerator.get_tracker("written")
    accelerator.get_tracker("csv").anything(
        at_all=True
    ) if not accelerator.is_main_process else None
    accelerator.end_training()
    assert len(each.values) == 3
    assert isinstance(mine, Written) == accelerator.is_main_process
    assert not isinstance(mine, Written) or len(mine.lines) == 5
    assert (tmp_path / "project" / "metrics.csv").read_text().count("\n") == 4


def logged_run(
    directory: Path, word: str, value: float, state: str = ""
) -> Accelerator:
    """A run that logs ``value`` at three steps, and continues ``state`` if there is one."""
    accelerator = Accelerator(cpu=True, log_with=word, project_dir=directory)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.init_trackers("exp", config={"lr": value})
    if state:
        accelerator.load_state(directory / state)
    for step in range(3):
        accelerator.log({"loss": value}, step=step + 10 * bool(state))
    accelerator.save_state(directory / f"state-{value}")
    accelerator.end_training()
    return accelerator


def losses(directory: Path) -> list[float]:
    return [
        record["loss"]
        for record in read_journal(directory / "journal.jsonl")
        if "loss" in record
    ]


@pytest.mark.parametrize("word", ["csv", "jsonl", "tensorboard"])
def test_two_runs_of_a_project_share_no_journal_no_report_and_no_table(tmp_path, word):
    for value in (1.0, 2.0, 3.0):
        logged_run(tmp_path, word, value)
    places = [tmp_path / "exp" / name for name in ("", "version_1", "version_2")]
    for value, place in zip((1.0, 2.0, 3.0), places, strict=True):
        assert losses(place) == [value] * 3
        assert (place / "report.html").exists()
        assert (
            len([event for event in read_events(place) if event["event"] == "start"])
            == 1
        )
        if word == "csv":
            assert (place / "metrics.csv").read_text().splitlines()[1:] == [
                f"{step},{value}" for step in range(3)
            ]


@pytest.mark.parametrize("word", ["csv", "jsonl"])
def test_a_run_that_loads_a_state_continues_in_the_directory_of_that_run(
    tmp_path, word
):
    for value in (1.0, 2.0, 3.0):
        logged_run(tmp_path, word, value)
    again = logged_run(tmp_path, word, 4.0, "state-2.0")
    assert losses(tmp_path / "exp" / "version_1") == [2.0] * 3 + [4.0] * 3
    assert (losses(tmp_path / "exp"), losses(tmp_path / "exp" / "version_2")) == (
        [1.0] * 3,
        [3.0] * 3,
    )
    assert not (tmp_path / "exp" / "version_3").exists()
    starts = [
        event
        for event in read_events(tmp_path / "exp" / "version_1")
        if event["event"] == "start"
    ]
    assert len({event["run"] for event in starts}) == 1
    assert again.tracking.version == "version_1"


@pytest.mark.world_size(2)
def test_two_processes_write_one_directory_for_each_run(tmp_path):
    for value in (1.0, 2.0):
        logged_run(tmp_path, "jsonl", value).wait_for_everyone()
    logged_run(tmp_path, "jsonl", 3.0, "state-2.0").wait_for_everyone()
    assert losses(tmp_path / "exp") == [1.0] * 3
    assert losses(tmp_path / "exp" / "version_1") == [2.0] * 3 + [3.0] * 3
