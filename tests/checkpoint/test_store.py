"""A directory of checkpoints lists the complete ones, and its index can always be done without."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from trainer_kit.checkpoint import store
from trainer_kit.checkpoint.commit import remove_checkpoint, write_checkpoint
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.checkpoint.store import checkpoints, lookup, mark
from trainer_kit.core.atomic_files import hidden_path
from trainer_kit.core.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    for step in (100, 9, 20):
        write_checkpoint(
            tmp_path / f"step-{step}", {"progress": {"step": step}}, info={"step": step}
        )
    return tmp_path


def names(folder):
    return [record.path.name for record in checkpoints(folder)]


def test_sorted_by_commit_whatever_steps_and_times_of_files_say(folder):
    assert names(folder) == ["step-100", "step-9", "step-20"]
    again = write_checkpoint(
        folder / "step-9", {"progress": {"step": 9}}, info={"step": 9}, overwrite=True
    )
    stepless = write_checkpoint(folder / "a", {}, info={"step": "no number"})
    for number, name in enumerate(
        ["a", "step-9", "step-20", "step-100"]
    ):  # as after a copy without times
        os.utime(folder / name / "manifest.json", (number, number))
    assert names(folder) == ["step-100", "step-20", "step-9", "a"]
    record = checkpoints(folder)[2]
    assert (record.path, record.step, record.info) == (again, 9, {"step": 9})
    assert record.created.tzinfo is not None
    assert record.created > datetime(2020, 1, 1, tzinfo=timezone.utc)
    assert read_checkpoint(record) == {"progress": {"step": 9}}
    assert checkpoints(folder)[-1].path == stepless
    assert checkpoints(folder)[-1].step is None


def test_a_clock_that_is_set_back_changes_no_order(folder, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    write_checkpoint(folder / "later", {}, info={"step": 1})
    write_checkpoint(folder / "after-that", {}, info={"step": 1})
    assert names(folder)[-2:] == ["later", "after-that"]


def test_checkpoints_of_earlier_versions_are_older_and_sorted_by_step(folder):
    golden = Path(__file__).parent / "golden"
    shutil.copytree(golden / "format-1", folder / "z")
    assert names(folder) == ["z", "step-100", "step-9", "step-20"]


def test_only_complete_ones_are_counted(folder):
    shutil.copytree(folder / "step-100", hidden_path(folder / "step-200", "tmp"))
    shutil.copytree(folder / "step-100", folder / ".hidden")
    (folder / "link").symlink_to(folder / "step-100")
    (folder / "foreign").mkdir()
    (folder / "file").write_text("x")
    (folder / "step-20" / "state.json").unlink()
    torn = folder / "step-100" / "manifest.json"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert names(folder) == ["step-9"]
    assert checkpoints(folder / "absent") == []


def test_marks(folder):
    mark(folder, last=folder / "step-100", best=folder / "step-9")
    mark(folder, last=str(folder / "step-20"))
    assert lookup(folder, "last") == folder / "step-20"
    assert lookup(folder, "best") == folder / "step-9"
    mark(folder, best=None, never=None)
    assert lookup(folder, "best") is None
    assert sorted(os.listdir(folder)) == ["index.json", "step-100", "step-20", "step-9"]


def test_a_nested_template(folder):
    path = write_checkpoint(folder / "epoch=1" / "best", {})
    mark(folder, best=path)
    assert lookup(folder, "best") == path


def test_marks_are_checkpoints_of_this_directory(folder, tmp_path_factory):
    other = write_checkpoint(tmp_path_factory.mktemp("other") / "c", {})
    (folder / "step-9" / "state.json").unlink()
    for path in (
        other,
        folder,
        folder / "absent",
        folder / "step-9",
        folder / "step-20" / ".." / ".." / "x",
    ):
        with pytest.raises(CheckpointError, match="cannot be 'best'"):
            mark(folder, best=path)
    assert not (folder / "index.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        '{"format": "theirs", "names": {"last": "step-9"}}',
        '{"format": "trainer_kit.index", "names": []}',
        '{"format": "trainer_kit.index", "names": {"last": 3}}',
        '{"format": "trainer_kit.index", "names": {"last": "../elsewhere"}}',
        '{"format": "trainer_kit.index", "names": {"last": "/step-9"}}',
        '{"format": "trainer_kit.index", "names": {"last": ""}}',
        '{"format": "trainer_kit.index", "names": {"last": "gone"}}',
        '{"format": "trainer_kit.index", "names": {"last": "torn"}}',
    ],
)
def test_last_needs_no_index(folder, text):
    shutil.copytree(folder / "step-9", folder.parent / "elsewhere", dirs_exist_ok=True)
    shutil.copytree(folder / "step-9", folder / "torn")
    (folder / "torn" / "state.json").write_bytes(b"")
    if text is not None:
        (folder / "index.json").write_text(text)
    assert lookup(folder, "last") == folder / "step-20"
    assert lookup(folder, "best") is None
    mark(folder, best=folder / "step-20")
    assert lookup(folder, "best") == folder / "step-20"
    assert (
        json.loads((folder / "index.json").read_text())["format"] == "trainer_kit.index"
    )
    shutil.rmtree(folder.parent / "elsewhere")


def test_lookup_follows_removals(folder):
    mark(folder, last=folder / "step-100")
    remove_checkpoint(folder / "step-100")
    assert lookup(folder, "last") == folder / "step-20"
    assert lookup(folder / "absent", "last") is None


def test_a_failed_mark_keeps_the_old_index(folder, monkeypatch):
    mark(folder, best=folder / "step-9")

    def fail(one, other):
        raise OSError("no")

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(CheckpointError, match="could not be written"):
        mark(folder, best=folder / "step-20")
    assert lookup(folder, "best") == folder / "step-9"
    assert sorted(os.listdir(folder)) == ["index.json", "step-100", "step-20", "step-9"]


def test_a_new_last_that_cannot_be_read_removes_the_old_index(folder, monkeypatch):
    mark(folder, last=folder / "step-9")
    monkeypatch.setattr(store, "is_complete", lambda path: False)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        mark(folder, last=folder / "step-100")
    assert not (folder / "index.json").exists()


@pytest.mark.parametrize("path", ["step-absent", "../elsewhere"])
def test_a_wrong_path_keeps_the_index(folder, path):
    mark(folder, best=folder / "step-20", last=folder / "step-9")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        mark(folder, last=folder / path)
    assert lookup(folder, "best") == folder / "step-20"
    assert lookup(folder, "last") == folder / "step-9"


def test_an_index_without_a_last_checkpoint_is_ignored(folder, monkeypatch):
    mark(folder, last=folder / "step-9")

    def fail(one, other):
        raise OSError("no")

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(CheckpointError, match="could not be written"):
        mark(folder, last=folder / "step-100")
    assert lookup(folder, "last") == folder / "step-20"
    assert sorted(os.listdir(folder)) == ["step-100", "step-20", "step-9"]
