"""A storage that fails while a checkpoint is saved costs that checkpoint, not the run and not the ones before."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.mounts import mounted
from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup
from trainer_kit.core.errors import CheckpointError

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
}
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
BATCHES = [torch.ones(2, 64)] * 8

SCRIPT = """
import resource, sys
import torch
from torch import nn
from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint

class Wide(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Fills(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        save = trainer.run.saver.save
        if save is not None:
            save.writing.wait()
        soft = 20_000 if batch_idx + 1 in (3, 4) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

trainer = Trainer(
    max_epochs=1, callbacks=[ModelCheckpoint(sys.argv[1], every_n_train_steps=2), Fills()],
    logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
)
trainer.fit(Wide(), [torch.ones(2, 64)] * 7)
print("trained", trainer.global_step)
"""


class Wide(TrainModule):
    """Its weights fill more than a page: 65.8 kB."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 256)
        self.scores = iter([0.5, 0.4, 0.45, 0.3])

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            self.log("score", next(self.scores), on_step=True, on_epoch=False)
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def wait(trainer):
    """Until what is written behind the training thread is on disk, or not."""
    save = trainer.run.saver.save
    if save is not None and save.writing is not None:
        save.writing.wait()


class Breaks(Callback):
    """The disk fails while these steps are saved."""

    def __init__(self, steps, monkeypatch, error=errno.EIO):
        self.steps, self.failing, real = steps, False, os.fsync

        def fsync(descriptor):
            if self.failing:
                raise OSError(error, os.strerror(error))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        wait(trainer)
        self.failing = batch_idx + 1 in self.steps

    def on_fit_end(self, trainer, module):
        self.failing = False


class Disk(Callback):
    """What is on disk after each step."""

    def __init__(self, directory):
        self.directory, self.seen = directory, {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen[trainer.global_step] = [
            record.step for record in checkpoints(self.directory)
        ]

    def on_train_end(self, trainer, module):
        self.seen["end"] = [record.step for record in checkpoints(self.directory)]


def fit(directory, breaks, *callbacks, **options):
    keeper = ModelCheckpoint(directory, **{"every_n_train_steps": 2, **options})
    disk = Disk(directory)
    trainer = Trainer(
        max_epochs=1,
        callbacks=[keeper, breaks, disk, *callbacks],
        log_every_n_steps=1,
        **QUIET,
    )
    trainer.fit(Wide(), BATCHES)
    return trainer, keeper, disk.seen


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_training_continues_and_the_next_interval_tries_again(
    tmp_path, capsys, monkeypatch, error
):
    trainer, keeper, seen = fit(tmp_path, Breaks({3, 4, 5, 6}, monkeypatch, error))
    assert trainer.global_step == 8
    assert seen == {
        0: [],
        1: [],
        2: [2],
        3: [2],
        4: [2],
        5: [2],
        6: [2],
        7: [2],
        "end": [2, 8],
    }
    assert sorted(os.listdir(tmp_path)) == [
        "index.json",
        "run.json",
        "step-00000002",
        "step-00000008",
    ]
    verify_checkpoint(keeper.best_model_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line, step in zip(lines, (4, 6), strict=True):
        assert re.fullmatch(
            rf"save of step {step} failed: {tmp_path}/step-{step:08d}: {os.strerror(error)} "
            rf"\(need [\d.]+ kB, free [\d.]+ .B\); kept step 2; training continues, next try at step {step + 2}",
            line,
        )


def test_the_first_save_and_the_last(tmp_path, capsys, monkeypatch):
    trainer, keeper, seen = fit(tmp_path, Breaks({1, 2, 7, 8}, monkeypatch))
    assert trainer.global_step == 8
    assert seen[2] == []
    assert seen["end"] == [4, 6]
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "; no checkpoint is there yet; training continues, next try at step 4"
    )
    assert last.endswith("; kept step 6; this run ends without it")
    assert keeper.best_model_path == str(tmp_path / "step-00000006")
    assert keeper.last_model_path == str(tmp_path / "step-00000006")
    assert lookup(tmp_path, "last") == tmp_path / "step-00000006"


def test_the_best_is_not_lost_to_one_that_was_never_written(tmp_path, monkeypatch):
    _, keeper, seen = fit(tmp_path, Breaks({3, 4}, monkeypatch), monitor="score")
    assert seen[4] == [2]
    assert seen[6] == [2, 6], "0.45 beats 0.5; 0.4 was never there"
    assert keeper.best_model_score == pytest.approx(0.3)
    assert [record.step for record in checkpoints(tmp_path)] == [6, 8]


class Scored(Wide):
    """Logs another score in each step."""

    def __init__(self, *scores):
        super().__init__()
        self.script = scores

    def training_step(self, batch, batch_idx):
        self.log("score", self.script[batch_idx])
        return self.layer(batch).pow(2).mean()


@pytest.mark.parametrize("keep", [1, 2])
def test_several_failed_saves_in_a_row_leave_no_trace_among_the_best(
    tmp_path, monkeypatch, keep
):
    """Each is asked for before the outcome of the one before it is known."""
    keeper = ModelCheckpoint(
        tmp_path, monitor="score", every_n_train_steps=1, save_top_k=keep
    )
    breaks = Breaks({2, 3, 4}, monkeypatch)
    trainer = Trainer(
        max_epochs=1, callbacks=[keeper, breaks], log_every_n_steps=1, **QUIET
    )
    trainer.fit(Scored(0.6, 0.4, 0.3, 0.2, 0.55, 0.5, 0.45, 0.58), BATCHES)
    assert all(Path(path).is_dir() for path in keeper.best_k_models)
    assert [float(score) for score in keeper.best_k_models.values()] == pytest.approx(
        [0.5, 0.45][-keep:]
    )
    assert keeper.best_model_path == str(tmp_path / "step-00000007")
    assert [record.step for record in checkpoints(tmp_path)] == [6, 7]
    assert lookup(tmp_path, "best") == tmp_path / "step-00000007"


def test_a_failed_overwrite_leaves_the_old_one(tmp_path, monkeypatch):
    options = {"filename": "only", "enable_version_counter": False}
    _, keeper, seen = fit(tmp_path, Breaks({7, 8}, monkeypatch), **options)
    assert seen["end"] == [6]
    assert read_checkpoint(tmp_path / "only")["progress"]["step"] == 6
    assert keeper.best_model_path == str(tmp_path / "only")


def test_state_that_no_disk_can_store_is_an_error(tmp_path):
    class Odd(Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["odd"] = object()

    with pytest.raises(CheckpointError, match="a value of type object cannot be saved"):
        fit(tmp_path, Odd())


def test_a_failed_save_by_the_user_raises(tmp_path, monkeypatch):
    class Saves(Callback):
        def on_train_step_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "mine")

    with pytest.raises(CheckpointError, match="Input/output error"):
        fit(tmp_path, Breaks({3}, monkeypatch), Saves())


def test_a_signal_says_that_its_step_could_not_be_saved(tmp_path, capsys, monkeypatch):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        fit(tmp_path, Breaks({5}, monkeypatch), Ends())
    assert caught.value.code == 143
    failed, ended = capsys.readouterr().out.splitlines()
    assert failed.startswith("save of step 5 failed: ")
    assert failed.endswith("; kept step 4; this run ends without it")
    assert ended == "SIGTERM: step 5 could not be saved, exiting 143"


def test_the_checkpoint_of_a_signal_is_the_last(tmp_path):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, Ends())
    assert lookup(tmp_path, "last") == tmp_path / "step-00000005"


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE is POSIX")
def test_a_process_beyond_its_file_size_limit(tmp_path, programs):
    result = programs.run_code(SCRIPT, str(tmp_path))
    assert result.returncode == 0, result.stderr
    failed, trained = result.stdout.splitlines()
    assert re.search(
        r"step-00000004: File too large \(need 8\d\.\d kB", failed
    )  # 65.8 kB of them are weights
    assert trained == "trained 7"
    assert sorted(os.listdir(tmp_path)) == [
        "index.json",
        "run.json",
        "step-00000002",
        "step-00000006",
    ]
    verify_checkpoint(tmp_path / "step-00000006")


@pytest.mark.parametrize(
    ("size", "reason"),
    [("size=300k", "No space"), ("size=1m,nr_inodes=26", "No space")],
)
def test_a_full_disk(tmp_path, capsys, size, reason):
    disk = tmp_path / "disk"

    class Fills(Callback):
        """Files of somebody else take what is left, and go again."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            wait(trainer)
            if batch_idx == 2:
                try:
                    for number in range(100):
                        (disk / f"other-{number}").write_bytes(bytes(10_000))
                except OSError:
                    pass
            if batch_idx == 4:
                for path in disk.glob("other-*"):
                    path.unlink()

    with mounted(disk, "-t", "tmpfs", "-o", size, "none"):
        trainer, _, seen = fit(disk, Fills())
        assert trainer.global_step == 8
        assert seen[5] == [2]
        assert sorted(os.listdir(disk)) == [
            "index.json",
            "step-00000006",
            "step-00000008",
        ]
        verify_checkpoint(disk / "step-00000008")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"save of step 4 failed: {disk}/step-00000004: {reason}" in said


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_all_ranks_report_a_failed_save(tmp_path, strategy):
    told = []

    class Asks(Callback):
        def on_train_step_end(self, trainer, module):
            trainer.request_checkpoint(
                "each step", Request(trainer.global_step, tmp_path, told)
            )

    class OneDiskFails(Callback):
        def on_train_step_end(self, trainer, module):
            wait(trainer)
            if trainer.is_global_zero and trainer.global_step == 2:
                (tmp_path / "at").rename(tmp_path / "away")
                (tmp_path / "at").write_text("")
            if trainer.is_global_zero and trainer.global_step == 3:
                (tmp_path / "at").unlink()
                (tmp_path / "away").rename(tmp_path / "at")

    trainer = Trainer(
        max_epochs=1,
        callbacks=[Asks(), OneDiskFails()],
        strategy=strategy,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Wide(), [torch.ones(2, 64)] * 8)
    assert told == [("saved", 1), ("failed", 2), ("saved", 3), ("saved", 4)]
    trainer.strategy.world.barrier()
    assert sorted(os.listdir(tmp_path / "at")) == ["1", "3", "4"]


class Request:
    reason, weights_only = "test", False

    def __init__(self, step, directory, told):
        self.step, self.path, self.told = step, directory / "at" / str(step), told

    def saved(self, path):
        self.told.append(("saved", self.step))

    def failed(self, path):
        self.told.append(("failed", self.step))
