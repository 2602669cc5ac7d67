"""Whatever happens to the bytes of a checkpoint is noticed, named, and got round."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import trainer_kit as tk
from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.store import (
    lookup,
    mark,
    newest_verified,
    read_index,
    repair,
)
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

FLIPS = int(os.environ.get("FLIPS", "2000"))
LIMIT = pytest.mark.timeout(0 if "FLIPS" in os.environ else 120)
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
NEWEST, BEFORE = "step-00000006", "step-00000004"
POSIX = sys.platform != "win32"


class Small(TinyModule):
    """With a state in its optimizer."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(directory, ckpt_path=None, steps=6):
    keeper = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        max_steps=steps, callbacks=keeper, default_root_dir=directory.parent, **QUIET
    )
    trainer.fit(Small(), [torch.ones(2, 32)] * 8, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run left, and where it was."""
    place = tmp_path_factory.mktemp("run")
    fit(place / "kept")
    assert sorted(os.listdir(place / "kept")) == [
        "index.json",
        "step-00000002",
        BEFORE,
        NEWEST,
    ]
    return Path(shutil.copytree(place / "kept", place / "whole"))


@pytest.fixture
def kept(whole):
    directory = whole.with_name("kept")
    shutil.rmtree(directory)
    return Path(shutil.copytree(whole, directory))


def flip(draw, file):
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(draw, file):
    os.truncate(file, draw.randrange(file.stat().st_size))


def delete(draw, file):
    file.unlink()


def empty(draw, file):
    file.write_bytes(b"")


def extend(draw, file):
    with open(file, "ab") as stream:
        stream.write(draw.randbytes(draw.choice([1, 8, 4096])))


def zero(draw, file):
    """A block that never reached the disk."""
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data) - 1)
    end = min(len(data), start + draw.choice([8, 512, 4096]))
    data[start:end] = (
        bytes(end - start) if any(data[start:end]) else b"\1" * (end - start)
    )
    file.write_bytes(data)


def exchange(draw, file):
    """With the file of the same name in another checkpoint."""
    other = file.parent.with_name(draw.choice(["step-00000002", BEFORE])) / file.name
    mine, theirs = file.read_bytes(), other.read_bytes()
    if mine == theirs:
        flip(draw, file)
        return
    file.write_bytes(theirs)


def foreign(draw, file):
    (
        file.parent
        / draw.choice(
            ["notes.txt", "optimizer-9.safetensors", ".hidden", "\udcff", "a\nb"]
        )
    ).write_text("x")


def directory(draw, file):
    file.unlink()
    file.mkdir()


def link(draw, file):
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def dangling(draw, file):
    file.unlink()
    file.symlink_to("nowhere")


def pipe(draw, file):
    file.unlink()
    os.mkfifo(file)


def device(draw, file):
    file.unlink()
    try:
        os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except OSError:
        file.symlink_to("/dev/zero")


BYTES = [flip, flip, flip, flip, truncate, delete, empty, extend, zero, exchange]
KINDS = [truncate, delete, empty, extend, zero, exchange, foreign, directory]
KINDS += [link, dangling, pipe, device] if POSIX else []


def files_of(checkpoint):
    return sorted(path for path in checkpoint.iterdir() if path.is_file())


def refusal(act, *arguments):
    try:
        act(*arguments)
    except CheckpointError as error:
        return error
    return None


@LIMIT
@pytest.mark.parametrize(
    "flips", [FLIPS // 5, pytest.param(FLIPS, marks=pytest.mark.long)]
)
def test_every_one_is_noticed_and_the_checkpoint_before_is_taken(kept, flips):
    newest = kept / NEWEST
    good = {file: file.read_bytes() for file in files_of(newest)}
    draw = random.Random("damage")
    for number in range(flips):
        file, damage = draw.choice(list(good)), draw.choice(BYTES)
        damage(draw, file)
        case = f"{number}: {damage.__name__} {file.name}"
        for check in (verify_checkpoint, read_checkpoint):
            error = refusal(check, newest)
            assert error is not None, f"not noticed: {case}"
            assert error.reason, case
            if (
                damage is not exchange or file.name != "manifest.json"
            ):  # which is right about itself, not about others
                manifest_gone = damage is delete and file.name == "manifest.json"
                assert error.file == str(newest if manifest_gone else file), case
        found, damaged = newest_verified(kept)
        # A manifest of step 2 that fits the sizes of these files says that nothing else was taken before this.
        assert found == kept / BEFORE or (
            damage is exchange and file.name == "manifest.json"
        ), case
        assert [path for path, _ in damaged] == [newest], case
        file.write_bytes(good[file])
    verify_checkpoint(newest)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("damage", KINDS)
def test_a_run_continues_from_the_checkpoint_before_the_damaged_one(
    kept, capsys, damage, name
):
    file = kept / NEWEST / name
    damage(random.Random(name), file)
    with pytest.raises(CheckpointError):
        read_checkpoint(kept / NEWEST)
    trainer = fit(kept, "last")
    assert trainer.global_step == 6
    rejected, resumed = capsys.readouterr().out.splitlines()
    assert rejected.startswith(f"checkpoint {NEWEST} rejected: ")
    assert rejected.endswith(f"; falling back to {BEFORE}; it is now {NEWEST}.damaged")
    if damage not in (foreign, exchange):
        assert name in rejected or damage is delete
    assert resumed == f"resuming from step 4 ({kept / BEFORE})"
    assert [record.step for record in tk.checkpoints(kept)] == [2, 4, 6]
    verify_checkpoint(kept / NEWEST)
    assert os.path.lexists(kept / f"{NEWEST}.damaged")


@pytest.mark.parametrize(
    "damage", [damage for damage in KINDS if damage not in (foreign, exchange)]
)
def test_the_index_is_not_needed(kept, damage):
    mark(kept, best=kept / BEFORE)
    damage(random.Random(1), kept / "index.json")
    assert lookup(kept, "last") == kept / NEWEST
    assert newest_verified(kept) == (kept / NEWEST, [])
    assert fit(kept, "last").global_step == 6
    if damage is directory:  # somebody else's, perhaps
        assert "index.json: could not be written" in str(refusal(repair, kept))
    else:
        assert [path.name for path in repair(kept).sound] == [
            NEWEST,
            BEFORE,
            "step-00000002",
        ]
        assert read_index(kept)["last"] == NEWEST


def test_every_flipped_bit_of_the_index_is_noticed(kept):
    mark(kept, best=kept / BEFORE, last=kept / NEWEST)
    good = (kept / "index.json").read_bytes()
    names = read_index(kept)
    for at in range(0, len(good) * 8, 1 if "FLIPS" in os.environ else 5):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        (kept / "index.json").write_bytes(bad)
        assert read_index(kept) in (None, names), bytes(bad)
        assert lookup(kept, "last") == kept / NEWEST, bytes(bad)


def test_a_damaged_lock_is_taken_over_or_reported(kept):
    lock = DirectoryLock(kept)
    good = json.loads((kept / ".lock").read_bytes())
    lock.release()
    dead = json.dumps({**good, "start": "1"}).encode()
    draw = random.Random(3)
    for number in range(30):
        bad = bytearray(dead)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        (kept / ".lock").write_bytes(
            bad[: draw.randrange(len(bad))] if number % 3 == 0 else bad
        )
        error = refusal(lambda: DirectoryLock(kept).release())
        if error is not None:  # of another host, as far as can be seen
            assert "locked by pid" in error.reason
            assert str(kept / ".lock") in str(error)
            (kept / ".lock").unlink()
        assert not (kept / ".lock").exists()


@pytest.mark.skipif(not POSIX, reason="permissions are POSIX")
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "."]
)
def test_an_unreadable_checkpoint_is_neither_damaged_nor_skipped(whole, name):
    """Permissions can be given back; what a run overwrites that quietly went back to step 4 cannot."""
    with tempfile.TemporaryDirectory() as place:
        kept = Path(shutil.copytree(whole, Path(place, "kept")))
        os.chmod(place, 0o755)
        os.chmod(kept / NEWEST / name, 0)
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                if os.geteuid() == 0:  # who may read everything
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                error = refusal(newest_verified, kept)
                code = (
                    0
                    if error
                    and "Permission denied" in str(error)
                    and NEWEST in error.file
                    else 8
                )
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.chmod(kept / NEWEST, 0o755)
    assert code == 0
