"""What dead processes left behind goes, or comes back; nothing else is touched."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys

import pytest

from trainer_kit.checkpoint import commit
from trainer_kit.checkpoint.commit import (
    clean_incomplete,
)
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.core.atomic_files import Hidden, hidden_path

KILLED = """
import os, signal, sys
from trainer_kit.checkpoint import commit
exchange, moment, path = sys.argv[1:]
if exchange == "no":
    commit._exchange = lambda one, other: False
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
name, skip = moment.split(":")
real, calls = getattr(commit, name), [0]
def after(*args, **kwargs):
    calls[0] += 1
    return die() if calls[0] > int(skip) else real(*args, **kwargs)
if name == "rename":
    real, commit.os.rename = commit.os.rename, None
    commit.os.rename = after
else:
    setattr(commit, name, after)
import torch
commit.write_checkpoint(path, {"model": {"w": torch.ones(3)}}, overwrite=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize(
    ("exchange", "moment", "winner"),
    [
        ("no", "write_file:1", "old"),
        ("no", "dump_manifest:0", "old"),
        ("no", "sync_directory:0", "old"),
        ("no", "_replace:0", "old"),
        ("no", "sync_directory:1", "new"),
        ("yes", "sync_directory:1", "new"),
    ],
)
def test_after_a_kill_cleaning_leaves_one_whole_checkpoint(
    saved, tmp_path, programs, exchange, moment, winner
):
    if exchange == "yes" and sys.platform != "linux":
        pytest.skip("renameat2 is Linux")
    result = programs.run_code(KILLED, exchange, moment, str(saved))
    assert result.returncode == -9, result.stderr
    assert len(os.listdir(tmp_path)) > 1
    assert clean_incomplete(tmp_path) == ["step-12"]
    assert os.listdir(tmp_path) == ["step-12"]
    assert ("optimizers" in read_checkpoint(saved)) == (winner == "old")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
def test_a_kill_between_two_renames_puts_the_old_one_back(
    saved, tmp_path, same, make_state, programs
):
    script = KILLED.replace('if name == "rename":', "if True:").replace(
        "real, calls = getattr(commit, name), [0]", "calls = [0]"
    )
    result = programs.run_code(script, "no", "rename:1", str(saved))
    assert result.returncode == -9, result.stderr
    assert all(name.startswith(".step-12.") for name in os.listdir(tmp_path))
    assert clean_incomplete(tmp_path) == ["step-12", "step-12"]
    assert os.listdir(tmp_path) == ["step-12"]
    assert same(read_checkpoint(saved), make_state())


def dead_name(target, suffix="tmp"):
    """A name as this host's process would give it, of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mine = hidden_path(target, suffix)
    return mine.with_name(mine.name.replace(f".{os.getpid()}-", f".{process.pid}-"))


def test_the_new_checkpoint_is_durable_before_the_old_one_is_deleted(
    saved, tmp_path, monkeypatch
):
    """A process may be killed after it swapped two checkpoints and before it synchronized their directory."""
    old = dead_name(saved, "old")
    shutil.copytree(saved, old)
    present_at_sync = []

    def sync(directory):
        present_at_sync.append((directory, old.exists()))

    monkeypatch.setattr(commit, "sync_directory", sync)
    assert clean_incomplete(tmp_path) == ["step-12"]
    assert not old.exists()
    assert present_at_sync[0] == (tmp_path, True)


def test_without_durable_names_only_what_may_be_a_replaced_checkpoint_stays(
    saved, tmp_path, monkeypatch
):
    """Some network file systems refuse to synchronize a directory."""
    replaced = dead_name(saved, "tmp")
    shutil.copytree(saved, replaced)
    unfinished = dead_name(tmp_path / "step-13")
    shutil.copytree(saved, unfinished)
    real_sync = commit.sync_directory
    failures = iter([OSError(errno.EINVAL, "Invalid argument")])

    def sync(directory):
        for failure in failures:
            raise failure
        real_sync(directory)

    monkeypatch.setattr(commit, "sync_directory", sync)
    assert clean_incomplete(tmp_path) == ["step-13"]
    assert replaced.exists()
    assert not unfinished.exists()


def test_only_our_own_dead_work_is_cleaned(saved, tmp_path):
    dead = dead_name(tmp_path / "c")
    host = dead.name.rpartition("-")[2][:6]
    other_host = dead.name.replace(
        f"-{host}", f"-{hashlib.sha256(b'other').hexdigest()[:6]}"
    )
    keep = [
        hidden_path(tmp_path / "c", "tmp").name,  # this very process
        other_host,
        ".c.tmp",
        ".c.123.tmp",
        ".c.1-abc.tmp",
        "c.999999-aaaaaaaaaaaaaaaaaa.tmp",
        dead.name + ".bak",
    ]
    for name in keep:
        (tmp_path / name).mkdir()
    foreign = dead_name(tmp_path / "d")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    file = dead_name(tmp_path / "e")
    file.write_text("not a directory")
    link = dead_name(tmp_path / "f")
    link.symlink_to(saved)
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    index = dead_name(tmp_path / "index.json")
    index.write_text("{")
    assert sorted(clean_incomplete(tmp_path)) == ["c", "index.json"]
    assert set(os.listdir(tmp_path)) == {
        *keep,
        foreign.name,
        file.name,
        link.name,
        "step-12",
    }
    verify_checkpoint(saved)
    assert clean_incomplete(tmp_path / "absent") == []


def test_a_process_number_that_was_given_away_is_dead(tmp_path):
    name = hidden_path(tmp_path / "c", "tmp").name
    parsed = Hidden.parse(name)
    assert parsed == Hidden("c", "tmp", on_this_host=True, stale=False)
    head, _, token = name.rpartition("-")
    assert Hidden.parse(f"{head}-{token[:6]}ffffff{token[12:]}") == Hidden(
        "c", "tmp", on_this_host=True, stale=True
    )
    assert Hidden.parse(".c.d.9999999999-" + token) == Hidden(
        "c.d", "tmp", on_this_host=True, stale=True
    )
    assert Hidden.parse("step-12") is None
