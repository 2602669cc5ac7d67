"""A checkpoint is complete or absent, and gives back what it was given."""

from __future__ import annotations

import errno
import json
import os
import pickletools
import shutil
import sys

import numpy as np
import pytest
import safetensors.torch
import torch

from trainer_kit.checkpoint import commit, files
from trainer_kit.checkpoint.commit import (
    remove_checkpoint,
    take_snapshot,
    write_checkpoint,
    write_snapshot,
)
from trainer_kit.checkpoint.read import read_checkpoint, read_info, verify_checkpoint
from trainer_kit.core.errors import CheckpointError

INFO = {"step": 12, "epoch": 1, "world_size": 1, "best": float("inf"), "shape": (1, 2)}


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_written_checkpoint_is_read_back(saved, same, make_state):
    assert same(read_checkpoint(saved), make_state())
    assert list(read_checkpoint(saved)) == [
        "model",
        "optimizers",
        "progress",
        "rng",
        "callbacks",
    ]
    assert read_info(saved) == {"step": 12}
    manifest = verify_checkpoint(saved)
    assert manifest["parts"] == {
        "model": "model.safetensors",
        "optimizers": "optimizers.safetensors",
        "progress": None,
        "rng": "rng.safetensors",
        "callbacks": None,
    }
    assert manifest["versions"]["torch"] == str(torch.__version__)
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        path.name: path.stat().st_size
        for path in saved.iterdir()
        if path.name != "manifest.json"
    }
    assert [path.name for path in saved.parent.iterdir()] == ["step-12"]


def test_the_info_keeps_its_types(tmp_path):
    assert read_info(write_checkpoint(tmp_path / "c", {}, info=INFO)) == INFO


def test_the_model_file_is_an_ordinary_safetensors_file(saved, make_state):
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    assert all(
        torch.equal(tensors[name], value)
        for name, value in make_state()["model"].items()
    )


def test_equal_states_give_equal_bytes(saved, tmp_path, make_state):
    again = write_checkpoint(
        tmp_path / "elsewhere" / "again", make_state(), info={"step": 12}
    )
    assert without_commit(listing(again)) == without_commit(listing(saved))


def without_commit(files):
    """The files, without what a manifest says of its commit: its number, and so its own checksum."""
    manifest = json.loads(files["manifest.json"])
    assert manifest.pop("committed") > 0
    del manifest["sha256"]
    return {**files, "manifest.json": manifest}


def test_parts_are_read_alone(saved, same, make_state):
    assert list(read_checkpoint(saved, parts=["rng", "progress"])) == [
        "rng",
        "progress",
    ]
    data = bytearray((saved / "optimizers.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "optimizers.safetensors").write_bytes(data)
    assert same(read_checkpoint(saved, parts=["model"])["model"], make_state()["model"])
    with pytest.raises(CheckpointError, match=r"optimizers\.safetensors: damaged"):
        read_checkpoint(saved)
    read_checkpoint(saved, verify=False)
    with pytest.raises(CheckpointError, match="did you mean 'model'"):
        read_checkpoint(saved, parts=["modle"])


def test_awkward_part_names(tmp_path, same):
    names = [
        "model",
        "Model",
        "MODEL",
        "../up",
        "a/b",
        "..",
        "",
        "x" * 300,
        "part0",
        "naïve",
        "state",
        "$",
        "manifest",
    ]
    state = {name: {"t": torch.full((2,), float(i))} for i, name in enumerate(names)}
    path = write_checkpoint(tmp_path / "c", state)
    assert same(read_checkpoint(path), state)
    files = [name.casefold() for name in verify_checkpoint(path)["parts"].values()]
    assert len(set(files)) == len(names)
    assert os.listdir(tmp_path) == ["c"]


def test_a_part_gets_a_number_that_no_other_part_has_for_a_name():
    names = commit.name_parts({"part0": [0], "a/b": [0], "empty": []}, ".bin")
    assert names == {"part0": "part0.bin", "a/b": "part1.bin", "empty": None}


def test_empty_and_wrong_states(tmp_path):
    assert read_checkpoint(write_checkpoint(tmp_path / "empty", {})) == {}
    for state, key in [
        ({1: 2}, "1"),
        ({"callbacks": {"EMA": {"fn": print}}}, "callbacks.EMA.fn"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path / "new" / "wrong", state)
        assert caught.value.key == key
    with pytest.raises(CheckpointError, match=r"info\.loss"):
        write_checkpoint(tmp_path / "wrong", {}, info={"loss": torch.ones(1)})
    with pytest.raises(CheckpointError, match="starts with a dot"):
        write_checkpoint(tmp_path / ".wrong", {})
    assert os.listdir(tmp_path) == ["empty"]


def test_nothing_follows_the_live_tensors(tmp_path):
    state = {"model": {"w": torch.zeros(3)}, "rng": np.zeros(2)}
    path = write_checkpoint(tmp_path / "a", state)
    snapshot = take_snapshot(state)
    state["model"]["w"].fill_(7)
    state["rng"].fill(7)
    late = write_snapshot(tmp_path / "b", snapshot)
    for back in (read_checkpoint(path), read_checkpoint(late)):
        assert back["model"]["w"].tolist() == [0, 0, 0]
        assert back["rng"].tolist() == [0, 0]
    back = read_checkpoint(path)
    back["model"]["w"].fill_(9)
    assert read_checkpoint(path)["model"]["w"].tolist() == [0, 0, 0]
    shutil.rmtree(path)
    assert back["model"]["w"].tolist() == [9, 9, 9]


def test_large_tensors_are_hashed_and_written_in_few_calls(tmp_path, monkeypatch):
    """Each call lets go of the interpreter lock, and waits for it again beside a training thread that runs Python."""
    sizes = []

    class Digest:
        def update(self, data):
            sizes.append(len(data))

        def hexdigest(self):
            return "0" * 16

    monkeypatch.setattr(files.xxhash, "xxh3_64", Digest)
    write_checkpoint(tmp_path / "step-1", {"model": {"w": torch.ones(6_000_000)}})
    assert 24_000_000 in sizes


def test_no_file_is_a_pickle(saved):
    for path in saved.iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"PK", b"\x80"))
        with pytest.raises(
            ValueError,
            match=r"opcode|pickle|exhausted|expected|invalid|not enough|newline",
        ):
            list(pickletools.genops(data))


def test_modes_follow_the_umask(tmp_path, make_state):
    old = os.umask(0o027)
    try:
        path = write_checkpoint(tmp_path / "c", make_state())
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_an_existing_target_is_refused_and_unharmed(saved, tmp_path):
    before = listing(saved)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        write_checkpoint(saved, {"model": {}})
    assert listing(saved) == before
    assert os.listdir(tmp_path) == ["step-12"]


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(saved, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    write_checkpoint(saved, {"progress": {"step": 13}}, overwrite=True)
    assert read_checkpoint(saved) == {"progress": {"step": 13}}
    write_checkpoint(tmp_path / "new", {}, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["new", "step-12"]


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux")
def test_linux_exchanges_in_one_step(saved, monkeypatch):
    def never(*args):
        raise AssertionError("two renames")

    monkeypatch.setattr(commit.os, "rename", never)
    write_checkpoint(saved, {}, overwrite=True)
    assert read_checkpoint(saved) == {}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("call", ["write_file", "sync_directory", "rmtree"])
def test_a_failed_overwrite_leaves_a_whole_checkpoint(
    saved, tmp_path, monkeypatch, exchange, call, same, make_state
):
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    old, new = make_state(), {"progress": {"step": 13}}

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    if call == "rmtree":
        monkeypatch.setattr(
            commit.shutil, "rmtree", lambda path, ignore_errors=False: None
        )
        write_checkpoint(saved, new, overwrite=True)
        assert read_checkpoint(saved) == new
        return
    monkeypatch.setattr(commit, call, fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_checkpoint(saved, new, overwrite=True)
    assert same(read_checkpoint(saved), old)
    assert os.listdir(tmp_path) == ["step-12"]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_overwrite_that_cannot_be_made_durable_is_undone(
    saved, tmp_path, monkeypatch, exchange, same, make_state
):
    if not exchange:
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    real = commit.sync_directory

    def fail(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        real(path)

    monkeypatch.setattr(commit, "sync_directory", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_checkpoint(saved, {"progress": {"step": 13}}, overwrite=True)
    assert same(read_checkpoint(saved), make_state())
    assert os.listdir(tmp_path) == ["step-12"]


@pytest.mark.parametrize(
    ("failure", "raised", "match"),
    [
        (
            OSError(errno.EIO, "Input/output error"),
            CheckpointError,
            "the previous checkpoint is now",
        ),
        # Control-C during the sync is not turned into a failed save.
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["error", "interrupt"],
)
def test_a_swap_that_cannot_be_undone_leaves_both_checkpoints(
    saved, tmp_path, monkeypatch, same, make_state, failure, raised, match
):
    """Whether the new name is durable is unknown, so the old files must not go."""
    swaps, real_sync = [], commit.sync_directory

    def swap_once(one, other):
        swaps.append(one)
        if len(swaps) > 1:
            return False
        spare = tmp_path / "spare"
        os.rename(other, spare)
        os.rename(one, other)
        os.rename(spare, one)
        return True

    def fail(path):
        if path == tmp_path:
            raise failure
        real_sync(path)

    monkeypatch.setattr(commit, "_exchange", swap_once)
    monkeypatch.setattr(commit, "sync_directory", fail)
    with pytest.raises(raised, match=match):
        write_checkpoint(saved, {"progress": {"step": 13}}, overwrite=True)
    assert len(swaps) == 2
    assert read_checkpoint(saved) == {"progress": {"step": 13}}
    (old,) = tmp_path.glob(".step-12.*.old")
    assert same(read_checkpoint(old), make_state())


def test_a_swap_that_can_neither_be_undone_nor_renamed_leaves_both_checkpoints(
    saved, tmp_path, monkeypatch, same, make_state
):
    """The failed save deletes its directory, but not the previous checkpoint in its place."""
    real_rename, real_sync = os.rename, commit.sync_directory
    swaps = iter([True, False])

    def swap_once(one, other):
        if not next(swaps):
            return False
        spare = tmp_path / "spare"
        real_rename(other, spare)
        real_rename(one, other)
        real_rename(spare, one)
        return True

    def sync(path):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        real_sync(path)

    def rename(one, other):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(commit, "_exchange", swap_once)
    monkeypatch.setattr(commit, "sync_directory", sync)
    monkeypatch.setattr(commit.os, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error") as error:
        write_checkpoint(saved, {"progress": {"step": 13}}, overwrite=True)
    assert read_checkpoint(saved) == {"progress": {"step": 13}}
    (previous,) = tmp_path.glob(".step-12.*.tmp")
    assert same(read_checkpoint(previous), make_state())
    assert previous.name in str(error.value)


def test_the_second_rename_failing_puts_the_old_one_back(
    saved, tmp_path, monkeypatch, same, make_state
):
    monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    real = os.rename

    def rename(one, other):
        if str(one).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(one, other)

    monkeypatch.setattr(commit.os, "rename", rename)
    with pytest.raises(CheckpointError):
        write_checkpoint(saved, {}, overwrite=True)
    assert same(read_checkpoint(saved), make_state())
    assert os.listdir(tmp_path) == ["step-12"]


def test_foreign_directories_are_never_overwritten_or_removed(saved, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"format": "theirs"}')
    link = tmp_path / "link"
    link.symlink_to(saved)
    for target in (foreign, link, tmp_path / "absent", saved / "state.json"):
        with pytest.raises(CheckpointError, match="not a checkpoint of this library"):
            remove_checkpoint(target)
    for target in (foreign, link, saved / "state.json"):
        with pytest.raises(CheckpointError, match="not overwritten"):
            write_checkpoint(target, {}, overwrite=True)
    verify_checkpoint(saved)
    assert (foreign / "manifest.json").exists()


def test_remove(saved, tmp_path):
    (saved / "state.json").write_bytes(b"damaged")
    remove_checkpoint(saved)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_reported_before_a_byte_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        commit.shutil, "disk_usage", lambda path: usage._replace(free=1000)
    )
    with pytest.raises(
        CheckpointError, match=r"No space left.*\(need 4\.\d+ kB, free 1 kB\)\n  fix:"
    ) as caught:
        write_checkpoint(
            tmp_path / "a" / "b" / "c", {"model": {"w": torch.zeros(1000)}}
        )
    assert caught.value.file == str(tmp_path / "a" / "b" / "c")
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(
        commit.shutil, "disk_usage", lambda path: usage._replace(total=0, free=0)
    )
    verify_checkpoint(write_checkpoint(tmp_path / "c", {}))


@pytest.mark.skipif(sys.platform == "win32", reason="resource is POSIX")
def test_a_file_that_the_system_cuts_short_leaves_nothing(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"too large \(need [\d.]+ kB, free [\d.]+ .B\)"
        ):
            write_checkpoint(
                tmp_path / "a" / "c", {"model": {"w": torch.zeros(10_000)}}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", range(7))
def test_any_failing_fsync_leaves_nothing(tmp_path, monkeypatch, after, make_state):
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"No space left.*need"):
        write_checkpoint(tmp_path / "c", make_state())
    assert os.listdir(tmp_path) == []


def test_every_file_and_directory_is_synced_before_and_after_the_rename(
    tmp_path, monkeypatch
):
    events = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def rename(one, other):
        events.append("rename")
        real_rename(one, other)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(commit.os, "rename", rename)
    write_checkpoint(tmp_path / "c", {"model": {"w": torch.ones(1)}})
    work = next(name for name in events if name.startswith(".c."))
    assert events == [
        "model.safetensors",
        "state.json",
        "manifest.json",
        work,
        "rename",
        tmp_path.name,
    ]


def test_a_parent_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "c", tmp_path / ("x" * 300)):
        with pytest.raises(CheckpointError, match=r"Not a directory|too long"):
            write_checkpoint(path, {})
    assert os.listdir(tmp_path) == ["file"]


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, make_state):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(commit, "sync_directory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", make_state())
    assert os.listdir(tmp_path) == []
