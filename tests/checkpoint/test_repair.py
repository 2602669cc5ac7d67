"""Damage is found and set aside; nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from trainer_kit.checkpoint import (
    checkpoints,
    repair,
    verify_checkpoint,
    write_checkpoint,
)
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.manifest import dump_manifest
from trainer_kit.checkpoint.store import (
    candidates,
    lookup,
    mark,
    newest_verified,
    set_aside,
)
from trainer_kit.core.errors import CheckpointError


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGES = {
    "a bit of the tensors": lambda path: flip(path / "model.safetensors"),
    "a bit of the state": lambda path: flip(path / "state.json"),
    "a bit of the manifest": lambda path: flip(path / "manifest.json"),
    "an empty manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "no tensors": lambda path: (path / "model.safetensors").unlink(),
    "cut short": lambda path: os.truncate(path / "model.safetensors", 100),
    "an unexpected file": lambda path: (path / "notes.txt").write_text("mine"),
}


@pytest.fixture
def several(tmp_path, make_state):
    for step in (3, 6, 9):
        write_checkpoint(tmp_path / f"step-{step}", make_state(), info={"step": step})
    mark(tmp_path, last=tmp_path / "step-9", best=tmp_path / "step-6")
    return tmp_path


def as_newer(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(dump_manifest({**manifest, "version": 7}))


def test_a_manifest_without_run_metadata_is_a_candidate(several):
    manifest = json.loads((several / "step-9" / "manifest.json").read_text())
    del manifest["sha256"], manifest["info"]
    (several / "step-9" / "manifest.json").write_bytes(dump_manifest(manifest))
    assert len(candidates(several, resumable_first=True)) == 3


def test_the_best_to_go_on_from_is_first(several):
    assert [path.name for path in candidates(several)] == ["step-9", "step-6", "step-3"]
    mark(
        several, last=several / "step-6"
    )  # a run that went back, or died ahead of its index
    assert [path.name for path in candidates(several)] == ["step-6", "step-9", "step-3"]
    (several / "index.json").unlink()
    (several / "step-6" / "manifest.json").unlink()
    shutil.copytree(several / "step-3", several / ".hidden")
    shutil.copytree(several / "step-3", several / "step-30.damaged")
    (several / "mine").mkdir()
    (several / "mine" / "state.json").write_text("{}")
    (several / "mine" / "notes.txt").write_text("mine")
    (several / "link").symlink_to(several / "step-3")
    # Nothing says when step-6 was committed: it comes first, so that the damage of a newest checkpoint is noticed.
    assert [path.name for path in candidates(several)] == ["step-6", "step-9", "step-3"]
    assert candidates(several / "absent") == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_checkpoint_is_skipped_and_named(several, damage):
    DAMAGES[damage](several / "step-9")
    found, rejected = newest_verified(several)
    assert found == several / "step-6"
    assert [path.name for path, _ in rejected] == ["step-9"]
    assert rejected[0][1].file.startswith(str(several / "step-9"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_repair(several, damage, make_state):
    DAMAGES[damage](several / "step-9")
    flip(several / "step-3" / "state.json")
    (several / "mine").mkdir()
    (several / "mine.txt").write_text("mine")
    damaged = {file.name: file.read_bytes() for file in (several / "step-9").iterdir()}
    done = repair(several)
    assert [path.name for path in done.sound] == ["step-6"]
    assert {path.name for path, _ in done.damaged} == {
        "step-3.damaged",
        "step-9.damaged",
    }
    assert (done.left, done.discarded) == ([], 0)
    assert {
        file.name: file.read_bytes() for file in (several / "step-9.damaged").iterdir()
    } == damaged
    assert sorted(os.listdir(several)) == sorted(
        ["index.json", "mine", "mine.txt", "step-3.damaged", "step-6", "step-9.damaged"]
    )
    assert lookup(several, "last") == lookup(several, "best") == several / "step-6"
    assert [record.path.name for record in checkpoints(several)] == ["step-6"]
    again = repair(several)
    assert (again.sound, again.damaged) == (done.sound, [])


@pytest.mark.parametrize("index", [None, b"", b"{}", b"\x00\xff"])
def test_the_index_is_built_again(several, index):
    (several / "index.json").unlink() if index is None else (
        several / "index.json"
    ).write_bytes(index)
    repair(several)
    names = json.loads((several / "index.json").read_text())["names"]
    assert names == {"last": "step-9"}


def test_links_to_deleted_checkpoints_are_removed(several):
    shutil.rmtree(several / "step-6")
    repair(several)
    assert lookup(several, "best") is None
    assert lookup(several, "last") == several / "step-9"


def test_a_newer_format_is_not_damage(several):
    as_newer(several / "step-9")
    with pytest.raises(CheckpointError, match="format 7, this library reads 1 and 2"):
        newest_verified(several)
    done = repair(several)
    assert [path.name for path in done.sound] == ["step-6", "step-3"]
    assert [path.name for path, _ in done.left] == ["step-9"]
    assert (several / "step-9").is_dir()


def test_no_repair_while_a_run_writes_there(several):
    lock = DirectoryLock(several)
    flip(several / "step-9" / "state.json")
    with pytest.raises(CheckpointError, match="locked by pid"):
        repair(several)
    lock.release()
    assert (several / "step-9").is_dir()
    assert len(repair(several).damaged) == 1


def test_no_repair_of_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="directory does not exist"):
        repair(tmp_path / "absent")
    assert repair(tmp_path).sound == []
    assert os.listdir(tmp_path) == []


def test_set_aside_twice(several):
    assert set_aside(several / "step-9") == several / "step-9.damaged"
    write_checkpoint(several / "step-9", {})
    assert set_aside(several / "step-9") == several / "step-9.damaged-2"
    assert [record.path.name for record in checkpoints(several)] == ["step-3", "step-6"]
    verify_checkpoint(several / "step-9.damaged-2")
    with pytest.raises(CheckpointError, match="could not be set aside"):
        set_aside(several / "step-9")


def test_a_name_further_below_stays(several, make_state):
    nested = write_checkpoint(several / "epoch=1" / "step-12", make_state())
    mark(several, last=nested)
    repair(several)
    assert lookup(several, "last") == nested
    (nested / "manifest.json").unlink()
    repair(several)
    assert lookup(several, "last") == several / "step-9"
