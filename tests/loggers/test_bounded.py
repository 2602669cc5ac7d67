"""A logger that blocks where the training thread needs its answer keeps no run from starting, resuming or ending."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit import (
    Accelerator,
    Fabric,
    ProjectConfiguration,
    register_tracker_class,
)
from trainer_kit.accelerator import GeneralTracker
from trainer_kit.core.hooks import RUNNING_MODULE
from trainer_kit.loggers import CSVLogger, bounded, delivery
from trainer_kit.testing import TinyModule

ROOT = Path(__file__).resolve().parents[2]


class Blocks:
    """A logger of which one method or property waits for an event."""

    def __init__(self, blocked: str, released: threading.Event) -> None:
        self.blocked = blocked
        self.released = released
        self.threads: set[str] = set()
        self.values: list[int] = []

    def _take(self, name: str) -> None:
        if name == self.blocked:
            self.threads.add(threading.current_thread().name)
            self.released.wait()

    @property
    def name(self) -> str:
        self._take("name")
        return "blocks"

    @property
    def log_dir(self) -> None:
        self._take("log_dir")

    def state_dict(self) -> dict[str, Any]:
        self._take("state_dict")
        return {"id": "a"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._take("load_state_dict")

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.values.append(step)


class Logs(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(bounded, "_PATIENCE", 0.5)
    event = threading.Event()
    yield event
    event.set()


def fit(root: Path, logger: Blocks, steps: int, ckpt_path: str | None) -> tk.Trainer:
    trainer = tk.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=root,
        enable_progress_bar=False,
    )
    trainer.fit(Logs(), [torch.randn(4, 32)] * 4, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    "blocked", ["name", "log_dir", "state_dict", "load_state_dict"]
)
def test_a_logger_that_blocks_keeps_no_run_from_starting_or_resuming(
    tmp_path: Path, capsys: Any, released: threading.Event, blocked: str
) -> None:
    fit(tmp_path, Blocks("", released), 2, None)
    (checkpoint,) = tmp_path.glob("**/checkpoints/step*")
    capsys.readouterr()
    logger = Blocks(blocked, released)
    trainer = fit(tmp_path, logger, 4, str(checkpoint))
    assert trainer.global_step == 4
    assert logger.values == [3, 4]
    assert threading.current_thread().name not in logger.threads
    assert logger.threads == {f"Blocks.{blocked}"}
    # One line, although the logger is asked at every checkpoint.
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "Blocks: " in line
    ]
    assert len(lines) == 1, lines
    assert f"Blocks: {blocked} has not returned for" in lines[0]
    assert "the run goes on without it" in lines[0]


def test_a_tracker_that_blocks_at_load_state_keeps_no_loop_from_going_on(
    tmp_path: Path,
    capsys: Any,
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start() -> Accelerator:
        project = ProjectConfiguration(str(tmp_path), logging_dir=str(tmp_path / "log"))
        accelerator = Accelerator(cpu=True, log_with="csv", project_config=project)
        accelerator.init_trackers("p", config={"lr": 0.1})
        return accelerator

    close = CSVLogger.finalize

    def finalize(logger: CSVLogger, status: str) -> None:
        # The logger leaves the directory of a new run for that of the loaded state.
        if status == "interrupted":
            released.wait()
        close(logger, status)

    monkeypatch.setattr(CSVLogger, "finalize", finalize)
    first = start()
    first.log({"loss": 1.0}, step=0)
    first.save_state(str(tmp_path / "state"))
    first.end_training()
    second = start()
    capsys.readouterr()
    second.load_state(str(tmp_path / "state"))
    second.log({"loss": 2.0}, step=1)
    printed = capsys.readouterr().out
    assert "CSVLogger: load_state_dict has not returned" in printed
    released.set()
    second.end_training()


class RunsModule(Blocks):
    """Runs the module in evaluation mode for its graph, and then blocks or does not."""

    running: Any = None

    def log_graph(self, module: tk.Module) -> None:
        module.eval()
        self.running = RUNNING_MODULE.get()
        module(torch.randn(2, 32))
        self._take("log_graph")


def test_a_logger_that_blocks_in_log_graph_keeps_no_fit_from_starting(
    tmp_path: Path, capsys: Any, released: threading.Event
) -> None:
    logger = RunsModule("log_graph", released)
    modes = []

    class Looks(tk.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *rest: Any) -> None:
            modes.append(module.training)

    trainer = tk.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        callbacks=[Looks()],
    )
    trainer.fit(Logs(), [torch.randn(4, 32)] * 4)
    assert logger.values == [1, 2]
    assert logger.threads == {"RunsModule.log_graph"}
    assert logger.running is trainer.lightning_module
    # The logger left the module in evaluation mode.
    assert modes == [True, True]
    assert "RunsModule: log_graph has not returned for" in capsys.readouterr().out


def test_a_graph_that_takes_long_to_compute_is_waited_for(
    tmp_path: Path, capsys: Any, released: threading.Event
) -> None:
    """Another thread that runs the module would change its modes and the random numbers during training."""
    took = []

    class Computes(Blocks):
        def log_graph(self, module: tk.Module) -> None:
            begun = time.thread_time()
            while time.thread_time() < begun + 2:
                module(torch.randn(64, 32))
            took.append("graph")

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            took.append("values")

    fit(tmp_path, Computes("", released), 1, None)
    assert took == ["graph", "values"]
    assert "has not returned" not in capsys.readouterr().out


def test_a_logger_whose_root_directory_blocks_keeps_no_run_from_being_found(
    tmp_path: Path, capsys: Any, released: threading.Event
) -> None:
    class InDirectory(Blocks):
        """Has a directory for each run, and one for all of them."""

        @property
        def log_dir(self) -> str:  # type: ignore[override]
            return str(tmp_path / "runs" / "one")

        @property
        def root_dir(self) -> str:
            self._take("root_dir")
            return str(tmp_path / "runs")

    logger = InDirectory("root_dir", released)
    trainer = tk.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        resume="auto",
    )
    trainer.fit(Logs(), [torch.randn(4, 32)])
    assert logger.values == [1]
    assert logger.threads == {"InDirectory.root_dir"}
    printed = capsys.readouterr().out
    assert "InDirectory: root_dir has not returned for" in printed


def test_a_tracker_whose_constructor_blocks_gets_its_values_when_it_returns(
    tmp_path: Path,
    capsys: Any,
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[tuple[int | None, dict[str, Any]]] = []

    @register_tracker_class
    class Connects(GeneralTracker):
        name = "connects"
        tracker = received

        def __init__(self, project: str) -> None:
            released.wait()

        def log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
            received.append((step, values))

    accelerator = Accelerator(
        cpu=True, log_with=["connects", "csv"], project_dir=str(tmp_path)
    )
    with monkeypatch.context() as patched:
        # The wait for the first calls of all trackers, which follows.
        patched.setattr(delivery, "_PATIENCE", 0.5)
        accelerator.init_trackers("project")
    printed = capsys.readouterr().out
    assert "tracker 'connects': its constructor has not returned for" in printed
    assert [tracker.name for tracker in accelerator.trackers] == ["connects", "csv"]
    accelerator.log({"loss": 1.0}, step=0)
    # A user's call of the tracker itself does nothing yet.
    accelerator.trackers[0].log_images({})
    assert received == []
    released.set()
    accelerator.log({"loss": 2.0}, step=1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(received) < 2:
        time.sleep(0.01)
    assert isinstance(accelerator.get_tracker("connects"), Connects)
    assert isinstance(accelerator.trackers[0], Connects)
    accelerator.end_training()
    assert received == [(0, {"loss": 1.0}), (1, {"loss": 2.0})]


def test_the_error_of_a_tracker_constructor_is_raised() -> None:
    @register_tracker_class
    class Fails(GeneralTracker):
        name = "fails"

        def __init__(self, project: str) -> None:
            raise ValueError("no such project")

    with pytest.raises(ValueError, match="no such project"):
        Accelerator(cpu=True, log_with="fails").init_trackers("project")


def test_a_logger_that_blocks_keeps_no_loop_of_fabric_from_going_on(
    capsys: Any, released: threading.Event
) -> None:
    class Blocked(Blocks):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self._take("log_metrics")
            super().log_metrics(metrics, step)

    blocked, other = Blocked("log_metrics", released), Blocks("", released)
    fabric = Fabric(accelerator="cpu", loggers=[blocked, other])
    for step in range(3):
        fabric.log("loss", 0.5, step=step)
    assert (blocked.values, other.values) == ([], [0, 1, 2])
    printed = capsys.readouterr().out
    assert printed.count("Blocked: log_metrics has not returned for") == 1


class InDatabase:
    """A connection of SQLite belongs to the thread that opened it."""

    def __init__(self) -> None:
        self.connection: sqlite3.Connection | None = None
        self.threads: set[threading.Thread] = set()
        self.rows: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.threads.add(threading.current_thread())
        if self.connection is None:
            self.connection = sqlite3.connect(":memory:")
            self.connection.execute("create table logs (step int, loss real)")
        row = (step, metrics["loss"])
        self.connection.execute("insert into logs values (?, ?)", row)
        self.rows = self.connection.execute("select * from logs").fetchall()
        if step == 2:
            self.connection.close()


def test_fabric_calls_a_logger_on_one_thread_which_ends_with_it() -> None:
    first, second = InDatabase(), InDatabase()
    fabric = Fabric(accelerator="cpu", loggers=[first, second])
    for step in range(3):
        fabric.log("loss", 0.5, step=step)
    assert first.rows == second.rows == [(0, 0.5), (1, 0.5), (2, 0.5)]
    (first_thread,) = first.threads
    (second_thread,) = second.threads
    assert first_thread is not second_thread
    fabric.loggers.remove(first)
    del first
    gc.collect()
    first_thread.join(60)
    assert not first_thread.is_alive()
    assert second_thread.is_alive()
    del fabric
    gc.collect()
    second_thread.join(60)
    assert not second_thread.is_alive()


def test_a_logger_may_log_inside_its_own_call() -> None:
    class LogsTwice(Blocks):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            super().log_metrics(metrics, step)
            if step == 0:
                fabric.log("again", 0.5, step=1)

    logger = LogsTwice("", threading.Event())
    fabric = Fabric(accelerator="cpu", loggers=logger)
    fabric.log("loss", 0.5, step=0)
    assert logger.values == [0, 1]


def test_a_call_whose_thread_is_gone_does_not_block_its_logger(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has the objects of its parent, and none of its threads."""
    calls = bounded.BoundedCalls(print, one_thread=True)
    logger = Blocks("name", released)
    assert calls.name(logger) == ""
    assert calls.states([logger]) == [{}]
    (entry,) = calls._blocked.values()
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    calls._blocked[id(logger)] = (ended, entry[1])
    calls._threads.clear()
    monkeypatch.setattr(bounded, "_PATIENCE", 60.0)
    assert calls.states([logger]) == [{"id": "a"}]


def test_a_graph_leaves_its_thread_the_default_device() -> None:
    class Creates(Blocks):
        def log_graph(self, module: torch.nn.Module) -> None:
            devices.append(torch.get_default_device().type)

    devices: list[str] = []
    logger = Creates("", threading.Event())
    calls = bounded.BoundedCalls(print, one_thread=True)
    with torch.device("meta"):
        calls.log_graph(logger, TinyModule(), torch.device("cpu"))

    def look() -> None:
        devices.append(torch.get_default_device().type)

    calls.call(logger, "look", look, None)
    assert devices == ["meta", "cpu"]


def test_the_time_of_earlier_calls_is_no_reason_to_wait_for_a_graph(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    class Counts(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    logger = Blocks("log_dir", released)
    calls = bounded.BoundedCalls(lambda line: None, one_thread=True)
    monkeypatch.setattr(bounded, "cpu_seconds", lambda thread: 100.0)
    monkeypatch.setattr(threading, "Event", Counts)
    calls.call(logger, "log_dir", lambda: logger.log_dir, None, may_compute=True)
    # A thread that starts waits too, without a limit.
    assert [limit for limit in waits if limit is not None] == [0.5]


def test_a_handler_at_the_end_of_the_process_logs_on_the_thread_of_its_logger() -> None:
    script = """
import atexit, sys, threading
sys.path.insert(0, sys.argv[1])

class Logger:
    threads = set()
    def log_metrics(self, metrics, step):
        self.threads.add(threading.current_thread())

def log_last():
    fabric.log("loss", 0.5, step=1)
    print("threads:", len(Logger.threads))

atexit.register(log_last)
from trainer_kit import Fabric
fabric = Fabric(accelerator="cpu", loggers=Logger())
fabric.log("loss", 0.5, step=0)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "threads: 1" in result.stdout, result.stdout + result.stderr


def test_the_error_of_a_logger_is_raised_by_fabric_and_the_next_call_is_made() -> None:
    class FailsOnce(Blocks):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            super().log_metrics(metrics, step)
            if step == 0:
                raise ValueError("no such run")

    logger = FailsOnce("", threading.Event())
    fabric = Fabric(accelerator="cpu", loggers=logger)
    with pytest.raises(ValueError, match="no such run"):
        fabric.log("loss", 0.5, step=0)
    fabric.log("loss", 0.5, step=1)
    assert logger.values == [0, 1]


def test_a_tracker_that_blocks_at_the_end_of_the_process_does_not_keep_it(
    tmp_path: Path,
) -> None:
    """SwanLab, Comet and ClearML end their runs when the process exits."""
    script = tmp_path / "run.py"
    script.write_text(
        """
import sys, time
sys.path.insert(0, sys.argv[1])
import swanlab
import torch
import trainer_kit as tk
from trainer_kit.loggers import SwanLabLogger, bounded
from trainer_kit.testing import TinyModule

bounded._PATIENCE = 1.0
logger = SwanLabLogger(project="project", mode="offline", save_dir=sys.argv[2])
logger._end = lambda run, status: time.sleep(600)
trainer = tk.Trainer(
    max_steps=1, logger=logger, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
    default_root_dir=sys.argv[2], enable_autolog_hparams=False,
)
trainer.fit(TinyModule(), [torch.randn(2, 32)])
logger.log_metrics({"loss": 1.0}, 1)
print("script ended", flush=True)
"""
    )
    stand_ins = str(Path(__file__).parent / "tracker_stand_ins")
    ended = subprocess.run(
        [sys.executable, str(script), stand_ins, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert "script ended" in ended.stdout
    assert "SwanLabLogger: the end of its run has not returned" in ended.stdout
