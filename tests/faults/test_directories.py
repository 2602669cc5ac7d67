"""A directory that two runs want, that nobody can write to, or in which a run died."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.lock import LOCK, owner_of
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
}
BATCHES = [torch.ones(2, 32)] * 6
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
TRAINS = """
import sys, time
import torch
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.testing import TinyModule

class Waits(Callback):
    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 3:
            print("trained", flush=True)
            time.sleep(100)

trainer = Trainer(
    max_epochs=1, callbacks=[ModelCheckpoint(sys.argv[1], every_n_train_steps=2), Waits()],
    logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
)
trainer.fit(TinyModule(), [torch.ones(2, 32)] * 6)
"""
IS_REFUSED = """
import os, sys
import torch
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

class Says(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        print("a step")

def fit(directory, *callbacks):
    trainer = Trainer(
        max_steps=1, callbacks=[ModelCheckpoint(directory), *callbacks],
        logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )
    trainer.fit(TinyModule(), [torch.ones(2, 32)])

closed, directory = sys.argv[1:]
fit("allowed")  # everything is imported now: the other user may not read it
if os.geteuid() == 0:  # who may write everywhere
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
os.chdir(closed)
assert os.listdir() == [] and not os.access(closed, os.W_OK)
try:
    fit(directory, Says())
except CheckpointError as error:
    print(error)
"""


class Looks(Callback):
    """Keeps what it sees at the first step."""

    def __init__(self, directory):
        self.directory, self.owner, self.steps = directory, None, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.owner, self.steps = owner_of(self.directory), self.steps + 1


def fit(directory, *callbacks, **options):
    trainer = Trainer(
        max_epochs=1,
        callbacks=[ModelCheckpoint(directory, every_n_train_steps=3), *callbacks],
        **{**QUIET, **options},
    )
    trainer.fit(TinyModule(), BATCHES)
    return trainer


def test_a_fit_locks_its_directory_and_unlocks_it_at_the_end(tmp_path):
    looks = Looks(tmp_path / "kept")
    fit(tmp_path / "kept", looks)
    assert looks.owner is not None
    assert looks.owner.process.pid == os.getpid()
    assert sorted(os.listdir(tmp_path / "kept")) == [
        "index.json",
        "step-00000003",
        "step-00000006",
    ]


def test_a_failed_fit_unlocks_its_directory(tmp_path):
    class Fails(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            raise RuntimeError("at the first step")

    with pytest.raises(RuntimeError, match="at the first step"):
        fit(tmp_path / "a" / "b", Fails())
    assert os.listdir(tmp_path) == ["run.json"], (
        "what it made for nothing is gone again"
    )


def test_several_directories_are_held(tmp_path):
    looks = Looks(tmp_path / "b")
    fit(tmp_path / "a", ModelCheckpoint(tmp_path / "b", every_n_train_steps=6), looks)
    assert looks.owner is not None
    assert not (tmp_path / "a" / LOCK).exists()
    assert not (tmp_path / "b" / LOCK).exists()


def test_a_run_that_writes_no_checkpoints_neither_locks_nor_makes_anything(tmp_path):
    Trainer(
        max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False, **QUIET
    ).fit(TinyModule(), BATCHES)
    Trainer(
        fast_dev_run=True,
        default_root_dir=tmp_path,
        callbacks=ModelCheckpoint(tmp_path / "a"),
        **QUIET,
    ).fit(TinyModule(), BATCHES)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(
    sys.platform == "win32",
    reason="a dead process is told from a living one by POSIX calls",
)
def test_two_runs_one_directory(tmp_path):
    command = [sys.executable, "-c", TRAINS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "trained\n"
        while (before := sorted(os.listdir(tmp_path))) != [
            LOCK,
            "index.json",
            "run.json",
            "step-00000002",
        ]:
            time.sleep(0.01)  # its save of step 2 goes on behind its third step
        looks = Looks(tmp_path)
        began = time.monotonic()
        with pytest.raises(
            CheckpointError, match=f"locked by pid {first.pid} on host .* since 20"
        ) as caught:
            fit(tmp_path, looks)
        # Not a measurement: a refusal that waited for the first run would take 100 s.
        assert time.monotonic() - began < 50
        assert "fix:" in str(caught.value)
        assert looks.steps == 0
        assert sorted(os.listdir(tmp_path)) == before
        first.kill()
    fit(tmp_path)  # the dead hold nothing
    assert not (tmp_path / LOCK).exists()


def test_leftovers_of_a_dead_run_are_discarded_and_reported_once(
    tmp_path, capsys, programs
):
    code = (
        "import os, sys; from trainer_kit.checkpoint import commit;"
        "commit.dump_manifest = lambda content: os._exit(0); commit.write_checkpoint(sys.argv[1], {})"
    )
    programs.run_code(code, str(tmp_path / "step-9")).check_returncode()
    (tmp_path / ".mine.tmp").mkdir()
    assert len(os.listdir(tmp_path)) == 2
    fit(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        ".mine.tmp",
        "index.json",
        "run.json",
        "step-00000003",
        "step-00000006",
    ]
    assert (
        capsys.readouterr().out
        == f"discarded 1 incomplete save (step 9) in {tmp_path}\n"
    )


def unwritable(kind, tmp_path):
    """A directory in which nothing can be made, its undoing, and the system's reason."""
    if kind == "below a file":
        (tmp_path / "file").write_text("")
        return tmp_path / "file" / "checkpoints", [], "Not a directory"
    if kind == "no such place":
        if not Path("/proc/self").exists():
            pytest.skip("needs /proc")
        return Path("/proc/checkpoints"), [], "No such file"
    directory = tmp_path / "closed"
    directory.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting and attributes need root on Linux")
    if kind == "immutable":
        do, undo = ["chattr", "+i", str(directory)], ["chattr", "-i", str(directory)]
    else:
        do = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(directory)]
        undo = ["umount", str(directory)]
    if (
        shutil.which(do[0]) is None
        or subprocess.run(do, capture_output=True).returncode
    ):
        pytest.skip(f"{do[0]} does not work here")
    return (
        directory,
        undo,
        "not permitted"
        if kind == "immutable"
        else "no checkpoint can be written here: Read-only file system",
    )


@pytest.mark.parametrize("below", ["", "a/b"])
@pytest.mark.parametrize(
    "kind", ["below a file", "no such place", "immutable", "read-only"]
)
def test_an_unwritable_directory_is_an_error_before_the_first_step(
    tmp_path, kind, below
):
    directory, undo, reason = unwritable(kind, tmp_path)
    looks = Looks(directory)
    try:
        with pytest.raises(CheckpointError, match=reason) as caught:
            fit(directory / below, looks)
        assert caught.value.file == str(directory / below)
        assert looks.steps == 0
        if directory.exists():
            assert os.listdir(directory) == []
    finally:
        if undo:
            subprocess.run(undo, check=True)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX's")
@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_directory_without_write_permission_is_an_error_before_the_first_step(
    programs, below
):
    place = Path(
        tempfile.mkdtemp(dir="/tmp")
    )  # every user gets there, unlike to a directory of pytest's
    try:
        place.chmod(0o755)
        (closed := place / "closed").mkdir(0o555)
        ran = programs.run_code(IS_REFUSED, str(closed), str(closed / below))
        assert ran.stdout.startswith(
            f"{closed / below}: no checkpoint can be written here: Permission denied"
        ), ran
        assert "a step" not in ran.stdout
        assert os.listdir(closed) == []
    finally:
        shutil.rmtree(place)


@pytest.mark.world_size(2)
def test_all_ranks_are_refused_together(tmp_path):
    (tmp_path / "file").write_text("")
    looks = Looks(tmp_path)
    with pytest.raises(CheckpointError, match="Not a directory"):
        fit(tmp_path / "file" / "a", looks, strategy="ddp")
    assert looks.steps == 0


@pytest.mark.world_size(2)
def test_one_rank_holds_the_directory_for_all(tmp_path):
    looks = Looks(tmp_path / "kept")
    trainer = fit(tmp_path / "kept", looks, strategy="ddp")
    pids = trainer.strategy.world.all_gather_object(os.getpid())
    assert looks.owner is not None
    assert looks.owner.process.pid == pids[0]
    trainer.strategy.world.barrier()
    assert not (tmp_path / "kept" / LOCK).exists()
