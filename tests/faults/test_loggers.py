"""Loggers that raise, block, are slow or have a full disk cost no step, and the journal has every value."""

from __future__ import annotations

import csv
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.mounts import mounted
from trainer_kit import Accelerator, Trainer
from trainer_kit.accelerator.trackers import GeneralTracker
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.read import verify_checkpoint
from trainer_kit.core.errors import LogError
from trainer_kit.loggers import CSVLogger, TensorBoardLogger, delivery, read_journal
from trainer_kit.loggers.run_logger import RunLogger
from trainer_kit.testing import TinyModule

pytestmark = pytest.mark.slow
METHODS = [
    "log_hyperparams",
    "log_metrics",
    "save",
    "after_save_checkpoint",
    "finalize",
]


class Logs(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Faulty:
    """Keeps what it gets; ``fault`` is called first, with the name of the method and the number of its call."""

    def __init__(self, fault):
        self.fault, self.calls, self.values = fault, dict.fromkeys(METHODS, 0), []

    def _take(self, name):
        self.calls[name] += 1
        self.fault(name, self.calls[name])

    def log_metrics(self, metrics, step):
        self._take("log_metrics")
        self.values.append((step, metrics["loss"]))

    def log_hyperparams(self, params):
        self._take("log_hyperparams")

    def save(self):
        self._take("save")

    def after_save_checkpoint(self, path):
        self._take("after_save_checkpoint")

    def finalize(self, status):
        self._take("finalize")


def fit(tmp_path, logger, steps=20, checkpoints=True, limit=None):
    torch.manual_seed(0)
    model = Logs()
    model.save_hyperparameters({"width": 4})
    trainer = Trainer(
        max_steps=steps,
        logger=[
            CSVLogger(tmp_path, name="run", version=0),
            *([] if logger is None else [logger]),
        ],
        default_root_dir=tmp_path,
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(tmp_path / "kept", every_n_train_steps=5, save_top_k=-1)
        ]
        if checkpoints
        else [],
        enable_checkpointing=checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    data = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, [*data])
    return trainer, torch.cat(
        [parameter.detach().flatten() for parameter in model.parameters()]
    )


def journal(tmp_path):
    records = read_journal(tmp_path / "run" / "version_0" / "journal.jsonl")
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def lines_about(capsys, name):
    return [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(name)
    ]


@pytest.fixture
def released():
    """An event on which loggers block; it is set at the end, so that their threads end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def hurried(monkeypatch):
    """Seconds become tenths, so that blocking loggers do not hold the tests up."""
    monkeypatch.setattr(delivery, "_PATIENCE", 1.0)
    monkeypatch.setattr(delivery, "_SHORT", 0.1)


def reference(tmp_path):
    return fit(tmp_path / "reference", None)[1]


@pytest.mark.parametrize("method", METHODS)
def test_a_logger_that_raises_costs_no_step(tmp_path, capsys, method):
    def fault(name, count):
        if name == method:
            raise ConnectionError("the tracker is down")

    expected = reference(tmp_path)
    begun = time.monotonic()
    trainer, weights = fit(tmp_path, Faulty(fault))
    assert time.monotonic() - begun < 10
    assert trainer.global_step == 20
    assert torch.equal(weights, expected)
    assert [step for step, _ in journal(tmp_path)] == list(range(1, 21))
    warning, *others = lines_about(capsys, "Faulty")
    assert "ConnectionError: the tracker is down; training continues" in warning
    assert (
        f"all values are in {tmp_path / 'run' / 'version_0' / 'journal.jsonl'}"
        in warning
    )
    assert len(others) <= 1  # what is left at the end
    assert len(list((tmp_path / "kept").glob("step*"))) == 4


@pytest.mark.parametrize("method", METHODS)
def test_a_logger_that_blocks_for_ever_costs_no_step(
    tmp_path, capsys, method, released, hurried
):
    def fault(name, count):
        if name == method:
            released.wait()

    expected = reference(tmp_path)
    trainer, weights = fit(tmp_path, logger := Faulty(fault))
    assert trainer.global_step == 20
    assert torch.equal(weights, expected)
    expected_values = journal(tmp_path)
    assert [step for step, _ in expected_values] == list(range(1, 21))
    lines = lines_about(capsys, "Faulty")
    assert len(lines) <= 2  # during the run, and at its end
    assert all(f"{method} has not returned for" in line for line in lines)
    released.set()  # it answers: the rest is logged, in order
    deadline = time.monotonic() + 10
    while logger.calls["finalize"] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert logger.values == expected_values


def test_a_logger_of_100_ms_a_call_does_not_slow_the_steps(tmp_path):
    ends = []

    class Times(Logs):
        def on_train_end(self):
            ends.append(time.monotonic() - begun)

    logger = Faulty(lambda name, count: time.sleep(0.1))
    trainer = Trainer(
        max_steps=60, logger=logger, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    begun = time.monotonic()
    trainer.fit(Times(), [torch.randn(2, 32) for _ in range(60)])
    assert ends[0] < 3  # 60 calls take 6 s
    assert [step for step, _ in logger.values] == list(
        range(1, 61)
    )  # the close waits for them


def compute(seconds, released):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not released.is_set():
        pass


@pytest.mark.parametrize("seconds", [2.5, 8.0])
def test_a_close_waits_for_a_first_call_that_computes_but_not_for_ever(
    tmp_path, capsys, released, monkeypatch, seconds
):
    monkeypatch.setattr(delivery, "_PATIENCE", 0.5)
    monkeypatch.setattr(delivery, "_GRACE", 6.0)

    def fault(name, count):
        if name == "log_hyperparams":
            compute(seconds, released)

    fit(tmp_path, logger := Faulty(fault), checkpoints=False)
    if seconds < 6:  # such as a database that is created
        assert logger.values == journal(tmp_path)
        assert [step for step, _ in logger.values] == list(range(1, 21))
        assert logger.calls["finalize"] == 1
        return
    assert logger.values == []
    *_, left = lines_about(capsys, "Faulty")
    assert "20 values are not logged there; all values are in" in left


def close_times(monkeypatch):
    """The seconds of each close: what the fit around it takes depends on what else the machine does."""
    took, close = [], delivery.Deliveries.close

    def timed(*arguments, **options):
        begun = time.monotonic()
        close(*arguments, **options)
        took.append(time.monotonic() - begun)

    monkeypatch.setattr(delivery.Deliveries, "close", timed)
    return took


@pytest.mark.parametrize("method", ["log_hyperparams", "finalize"])
@pytest.mark.parametrize("polls", [False, True])
def test_a_close_does_not_wait_longer_for_a_call_that_hangs(
    tmp_path, capsys, released, monkeypatch, method, polls
):
    """The limit of a first call was 60 seconds for these too."""
    monkeypatch.setattr(delivery, "_PATIENCE", 2.0)
    took = close_times(monkeypatch)

    def fault(name, count):
        while name == method and not released.wait(0.05 if polls else None):
            pass

    fit(tmp_path, logger := Faulty(fault), steps=2, checkpoints=False)
    assert 1.5 < sum(took) < 10
    assert logger.values == (journal(tmp_path) if method == "finalize" else [])
    *_, left = lines_about(capsys, "Faulty")
    assert f"{method} has not returned for" in left


@pytest.mark.long
def test_a_close_ends_within_ten_seconds(tmp_path, released, monkeypatch):
    took = close_times(monkeypatch)
    fit(
        tmp_path,
        Faulty(lambda name, count: released.wait()),
        steps=2,
        checkpoints=False,
    )
    assert 9 < sum(took) < 15


def test_a_run_that_a_signal_ends_does_not_wait_longer_for_a_first_call(
    tmp_path, released, monkeypatch
):
    monkeypatch.setattr(delivery, "_PATIENCE", 0.5)
    took = close_times(monkeypatch)

    class Ended(Logs):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        logger=Faulty(lambda name, count: compute(30, released)), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    with pytest.raises(SystemExit):
        trainer.fit(Ended(), [torch.randn(2, 32) for _ in range(3)])
    assert sum(took) < 10


def test_values_are_replayed_in_order_when_the_logger_answers(tmp_path, capsys):
    def fault(name, count):
        if name == "log_metrics" and count <= 3:
            raise OSError("connection reset")

    logger = Faulty(fault)
    fit(tmp_path, logger)
    assert logger.values == journal(tmp_path)
    assert len(logger.values) == 20
    first, last = lines_about(capsys, "Faulty")
    assert "connection reset" in first
    assert last == "Faulty answers again"


def test_values_beyond_the_queue_are_read_back_from_the_journal(
    tmp_path, released, monkeypatch
):
    # The journal keeps ten times as many: all of this run.
    monkeypatch.setattr(delivery, "_MAX_CALLS", 40)

    def fault(name, count):
        if name == "log_metrics" and count == 3:
            released.wait()

    class Releases(Logs):
        def on_train_end(self):
            released.set()

    logger = Faulty(fault)
    trainer = Trainer(
        max_steps=400, logger=logger, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Releases(), [torch.randn(2, 32) for _ in range(400)])
    records = read_journal(Path(str(trainer.log_dir)) / "journal.jsonl")
    assert logger.values == [
        (record["step"], record["loss"]) for record in records if "loss" in record
    ]
    assert [step for step, _ in logger.values] == list(range(1, 401))


def test_values_that_cannot_be_read_back_are_counted(
    tmp_path, capsys, released, monkeypatch
):
    """Only the first hundred of them were in a line."""
    monkeypatch.setattr(delivery, "_MAX_CALLS", 40)

    def fault(name, count):
        if name == "log_metrics" and count == 3:
            released.wait()

    class Removes(Logs):
        def on_train_end(self):
            deadline = time.monotonic() + 60
            while (
                len(journal(tmp_path)) < 400 and time.monotonic() < deadline
            ):  # a later line would make a new file
                time.sleep(0.01)
            (tmp_path / "run" / "version_0" / "journal.jsonl").unlink()
            released.set()

    logger = Faulty(fault)
    trainer = Trainer(
        max_steps=400, logger=[CSVLogger(tmp_path, name="run", version=0), logger], log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Removes(), [torch.randn(2, 32) for _ in range(400)])
    first, *_, last = lines_about(capsys, "Faulty")
    assert "values cannot be read back: FileNotFoundError" in first
    assert f"{400 - len(logger.values)} calls were dropped" in last
    assert 30 < len(logger.values) < 60


@pytest.mark.parametrize("waits", [False, True])
def test_values_reach_an_idle_logger_without_waking_it(waits):
    """Each wake-up would interrupt the training thread, with which the logger's thread shares the interpreter."""
    came, kept = threading.Event(), []

    class Keeps:
        def log_metrics(self, metrics, step):
            kept.append((step, threading.current_thread()))
            if len(kept) == 6:
                came.set()

    deliveries = delivery.Deliveries(print)
    deliveries.open([Keeps()], None)
    deliveries.log({"loss": 0.5}, 0, {})
    deliveries.wait()  # its thread is idle now
    (one,) = deliveries.each()
    woken, notify = [], one._changed.notify_all
    one._changed.notify_all = lambda: (
        woken.append(threading.current_thread()),
        notify(),
    )
    for step in range(1, 6):
        deliveries.log({"loss": 0.5}, step, {})
    assert threading.current_thread() not in woken
    if waits:
        one.catch_up(time.monotonic() + 60)
        assert threading.current_thread() in woken  # a caller that waits does wake it
    assert came.wait(60)
    assert [step for step, _ in kept] == list(range(6))
    deliveries.close("success")


def test_values_that_a_logger_refuses_are_left_out(tmp_path, capsys):
    class Refuses(Faulty):
        def log_metrics(self, metrics, step):
            if step in (3, 20):
                raise KeyError("accuracy")
            super().log_metrics(metrics, step)

    Refuses.__name__ = "Faulty"
    logger = Refuses(lambda name, count: None)
    fit(tmp_path, logger)
    assert logger.values == [
        (step, loss) for step, loss in journal(tmp_path) if step not in (3, 20)
    ]
    assert "KeyError: 'accuracy'" in lines_about(capsys, "Faulty")[0]


@pytest.mark.parametrize(
    "method", ["log_metrics", "save", "after_save_checkpoint", "finalize"]
)
def test_a_refusal_during_a_run_does_not_end_the_next_entry_point(
    tmp_path, capsys, method
):
    def fault(name, count):
        if name == method and count == 1:
            raise LogError("this tracker does not take that")

    trainer, _ = fit(tmp_path, logger := Faulty(fault))
    [line] = lines_about(capsys, "Faulty")
    assert f"it refused {method}" in line
    assert "LogError: this tracker does not take that; training continues" in line
    trainer.fit(Logs(), [torch.ones(2, 32)])
    assert len(logger.values) == 40 - (method == "log_metrics")


def test_hyperparameters_that_a_logger_refuses_end_the_entry_point_at_its_start(
    tmp_path, capsys
):
    def fault(name, count):
        if name == "log_hyperparams":
            raise LogError("this tracker does not take that")

    with pytest.raises(LogError, match="does not take that"):
        fit(tmp_path, logger := Faulty(fault))
    assert not logger.values
    assert not lines_about(capsys, "Faulty")  # training does not continue


def test_hyperparameters_refused_too_late_are_reported_in_a_line(
    tmp_path, capsys, hurried, released
):
    def fault(name, count):
        if name == "log_hyperparams" and count == 1:
            released.wait()
            raise LogError("this tracker does not take that")

    trainer, _ = fit(tmp_path, logger := Faulty(fault), steps=2)
    released.set()
    trainer.fit(Logs(), [torch.ones(2, 32)])
    assert len(logger.values) == 4


class FilesOfARun(RunLogger):
    """A run that is a directory; `gate` is waited for before the first values."""

    requires, module, extra = "torch", "torch", "none"

    def __init__(self, save_dir, gate, log_model="all"):
        super().__init__(name="project", save_dir=save_dir, log_model=log_model)
        self.gate, self.values, self.ended = gate, [], []

    def _begin(self, id):
        return self, "run"

    def _end(self, run, status):
        self.ended.append(status)

    def _write_metrics(self, run, values, step):
        self.gate.wait()
        self.values.append(step)

    def _write_params(self, run, params):
        pass


def test_a_checkpoint_that_is_deleted_before_its_upload_is_left_out(
    tmp_path, capsys, released
):
    class Releases(Logs):
        def on_train_end(self):
            released.set()

    logger = FilesOfARun(tmp_path / "tracker", released)
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=1)
    trainer = Trainer(
        max_steps=6, logger=logger, log_every_n_steps=1, callbacks=kept, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, accelerator="cpu",
    )  # fmt: skip
    begun = time.monotonic()
    trainer.fit(Releases(), [torch.randn(2, 32) for _ in range(6)])
    assert time.monotonic() - begun < 8
    assert logger.values == [1, 2, 3, 4, 5, 6]
    assert logger.ended == ["success"]
    uploaded = tmp_path / "tracker" / "project" / "run" / "checkpoints"
    for path in uploaded.iterdir():
        verify_checkpoint(path)
    assert (uploaded / Path(kept.best_model_path).name).exists()
    assert not (uploaded / "step-00000001").exists()
    [line] = lines_about(capsys, "FilesOfARun")
    assert "step-00000001 was deleted before it was uploaded" in line
    assert "Traceback" not in line


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small tmpfs")
def test_a_full_disk_under_the_logs_is_a_warning(tmp_path, capsys, kind):
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401 (imported before the disk is full)

    disk = tmp_path / "disk"
    make = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind]
    expected = reference(tmp_path)
    with mounted(disk, "-t", "tmpfs", "-o", "size=256k", "none"):
        options = {"csv": {"flush_logs_every_n_steps": 2}}.get(kind, {})
        logger = make(disk, name="run", version=0, **options)
        filler = disk / "filler"

        class Fills(Logs):
            def training_step(self, batch, batch_idx):
                self.log_dict(
                    {f"value-{number}": float(batch_idx) for number in range(60)}
                )
                return super().training_step(batch, batch_idx)

            def on_train_batch_end(self, outputs, batch, batch_idx):
                if self.trainer.global_step == 6:
                    time.sleep(0.3)
                    fill(filler)

        torch.manual_seed(0)
        model = Fills()
        trainer = Trainer(
            max_steps=20, logger=logger, log_every_n_steps=1, default_root_dir=tmp_path / "root",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        data = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1))
        trainer.fit(model, [*data])
        weights = torch.cat(
            [parameter.detach().flatten() for parameter in model.parameters()]
        )
        assert torch.equal(weights, expected)
        assert trainer.global_step == 20
        out, err = capsys.readouterr()
        warnings = [line for line in out.splitlines() if "No space left" in line]
        assert any(line.startswith(type(logger).__name__) for line in warnings)
        assert sum(line.startswith(type(logger).__name__) for line in warnings) == 1
        assert "Traceback" not in err
        filler.unlink()
        trainer.log_metrics({"after": 1.0})  # it answers now: everything is there
        logger.save()
        if kind == "csv":
            with open(logger.path, encoding="utf-8") as file:
                steps = [
                    int(row["step"]) for row in csv.DictReader(file) if row["loss"]
                ]
            assert steps == list(range(1, 21))
        else:
            assert tensorboard_steps(logger.log_dir) == list(range(1, 21))
        logger.finalize("success")
        trainer.files.journal.finalize("success")


def fill(file):
    with open(file, "wb", buffering=0) as out:
        for size in (4096, 1):
            try:
                while out.write(b"x" * size):
                    pass
            except OSError:
                continue


def tensorboard_steps(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = set()
    for file in Path(directory).glob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        if "loss" in events.Tags()["scalars"]:
            steps.update(event.step for event in events.Scalars("loss"))
    return sorted(steps)


RESUMED = """
import os, signal, sys
import torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule

class Tracker:
    def log_metrics(self, metrics, step):
        if not os.path.exists("answers"):
            raise ConnectionError("the tracker is down")
        with open("tracker", "a") as file:
            file.write(f"{step} {metrics['loss'].hex()}\\n")

class Logs(TinyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss
    def on_checkpoint_committed(self, path):
        if path.name == "step-00000010":
            os.kill(os.getpid(), signal.SIGKILL)
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 17:
            open("answers", "w").close()

tk.seed_everything(7)
trainer = tk.Trainer(
    max_steps=20, accelerator="cpu", log_every_n_steps=1, logger=Tracker(), enable_progress_bar=False,
    callbacks=tk.callbacks.ModelCheckpoint("kept", every_n_train_steps=5, save_top_k=-1), enable_model_summary=False,
)
trainer.fit(Logs(), [torch.randn(2, 32) for _ in range(20)], ckpt_path="last")
"""


def test_the_tracker_gets_its_values_in_order_after_a_kill_and_a_resume(
    tmp_path, server
):
    """The tracker is down from the start; the process is killed once the checkpoint of step 10 is durable, at step 15
    at the latest, and the resumed run is answered at 17."""
    directory = tmp_path / "run"
    assert server.run(directory, RESUMED)["ended"] == [-signal.SIGKILL]
    first, second = (
        directory / f"trainer_kit_logs/version_{number}/journal.jsonl"
        for number in (0, 1)
    )
    records = [record for record in read_journal(first) if "loss" in record]
    assert [record["step"] for record in records][:10] == list(
        range(1, 11)
    )  # the checkpoint of step 10 is durable
    assert not (directory / "tracker").exists()
    assert server.run(directory, RESUMED)["ended"] == [0], (
        directory / "said-0"
    ).read_text()
    records = [record for record in read_journal(second) if "loss" in record]
    assert [record["step"] for record in records] == list(range(11, 21))
    expected = [f"{record['step']} {record['loss'].hex()}" for record in records]
    assert (directory / "tracker").read_text().splitlines() == expected


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("raises", "log_metrics"),
        ("blocks", "log_hyperparams"),
        ("blocks", "save"),
        ("blocks", "finalize"),
    ],
)
def test_a_faulty_logger_on_rank_zero_blocks_no_rank(tmp_path, kind, method):
    released, first = threading.Event(), torch.distributed.get_rank() == 0

    def fault(name, count):
        assert first, "other ranks call no logger"
        if name == method and kind == "blocks":
            released.wait()
        elif name == method:
            raise ConnectionError("the tracker is down")

    expected = reference(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "_PATIENCE", 0.5)
        patch.setattr(delivery, "_SHORT", 0.1)
        begun = time.monotonic()
        trainer, weights = fit(tmp_path, logger := Faulty(fault))
        assert time.monotonic() - begun < 8
    assert trainer.global_step == 20
    assert torch.equal(weights, expected)
    if first:
        assert [step for step, _ in journal(tmp_path)] == list(range(1, 21))
        assert len(list((tmp_path / "kept").glob("step*"))) == 4
    released.set()  # what a logger that blocks did not take arrives in order
    deadline = time.monotonic() + 10
    while (
        first
        and kind == "blocks"
        and logger.calls["finalize"] == 0
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    if first and kind == "blocks":
        assert logger.values == journal(tmp_path)


def test_the_journal_is_durable_with_each_checkpoint(tmp_path, monkeypatch):
    """What was synced before each checkpoint was renamed to its place holds every value up to its step."""
    synced, order = {}, []
    sync, rename = os.fsync, os.rename

    def syncs(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        sync(descriptor)
        if name.endswith("journal.jsonl"):
            synced["lines"] = len(Path(name).read_bytes().splitlines())

    def renames(source, target, **options):
        rename(source, target, **options)
        if Path(target).name.startswith("step"):
            order.append((int(Path(target).name[-8:]), synced.get("lines", 0)))

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "rename", renames)
    fit(tmp_path, None)
    assert [step for step, _ in order] == [5, 10, 15, 20]
    assert all(lines >= step for step, lines in order), order


class Tracker(GeneralTracker):
    name, tracker = "faulty", None

    def __init__(self, fault):
        self.fault, self.calls, self.values = fault, {}, []

    def _take(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
        self.fault(name, self.calls[name])

    def start(self):
        self._take("start")

    def log(self, values, step=None, **options):
        self._take("log")
        self.values.append((step, float(values["loss"])))

    def finish(self):
        self._take("finish")


def raw_loop(tracker):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with=tracker)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("project", config={"lr": 0.1})
    total = torch.zeros(())
    for step in range(20):
        loss = model(torch.full((2, 4), step / 20)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": total}, step=step)
        total += 1  # in place: the tracker gets the value as it was
    accelerator.end_training()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("method", ["start", "log", "finish"])
@pytest.mark.parametrize("kind", ["raises", "blocks"])
def test_a_faulty_tracker_of_an_accelerator_costs_no_step(
    capsys, method, kind, released, hurried
):
    def fault(name, count):
        if name == method and kind == "blocks":
            released.wait()
        elif name == method and count <= 2:
            raise ConnectionError("no answer")

    expected = raw_loop(Tracker(lambda name, count: None))
    capsys.readouterr()
    begun = time.monotonic()
    tracker = Tracker(fault)
    assert torch.equal(raw_loop(tracker), expected)
    assert time.monotonic() - begun < 8
    lines = lines_about(capsys, "tracker 'faulty'")
    expected_text = (
        "ConnectionError: no answer" if kind == "raises" else "has not returned for"
    )
    assert any(expected_text in line for line in lines), lines
    released.set()
    deadline = time.monotonic() + 10
    while "finish" not in tracker.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tracker.values == [(step, float(step)) for step in range(20)]
