"""What goes wrong while several ranks save, and what is wrong with what they saved."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainer_kit.checkpoint import (
    checkpoints,
    read_checkpoint,
    read_sharded,
    verify_checkpoint,
    write_sharded,
)
from trainer_kit.checkpoint import sharded as writing
from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.files import checksum
from trainer_kit.checkpoint.manifest import dump_manifest
from trainer_kit.checkpoint.store import repair
from trainer_kit.core.errors import CheckpointError, RankError
from trainer_kit.testing import run_distributed


def make(factor=1.0, rows=300):
    """Four rows of zeros to three on each rank, times the factor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(rows * 4.0).reshape(rows, 4) * factor + dist.get_rank()
    return {
        "model": {"w": DTensor.from_local(local, mesh, [Shard(0)]), "b": torch.ones(3)},
        "progress": {"step": 3},
    }


def save(path):
    write_sharded(path, make(rows=2), info={"step": 3})


@pytest.fixture(scope="module")
def by_three(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "step-70"
    run_distributed(save, 3, str(path))
    return path


@pytest.fixture
def saved(by_three, tmp_path):
    shutil.copytree(by_three, tmp_path / "step-70")
    return tmp_path / "step-70"


def save_twice(path, how):
    """The first save works, the second fails on rank 1, the third works; what the second said."""
    rank = dist.get_rank()
    write_sharded(f"{path}/step-1", make())
    write, fsync, rename, limits = (
        writing.write_file,
        os.fsync,
        os.rename,
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    if rank == 1 and how == "too large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    elif rank == 1 and how == "eio":

        def fail(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = fail
    elif rank == 1 and how == "bug":
        writing.write_file = None
    elif rank == 0 and how == "manifest":

        def fail_at_manifest(file, buffers):
            if file.name == "manifest.json":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, buffers)

        writing.write_file = fail_at_manifest
    elif rank == 0 and how == "rename":

        def fail_to_rename(old, new):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.rename = fail_to_rename
    error = None
    try:
        write_sharded(f"{path}/step-2", make(2.0))
    except Exception as raised:
        error = raised
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.fsync, os.rename, writing.write_file = fsync, rename, write
    dist.barrier()
    there = sorted(os.listdir(path))
    write_sharded(f"{path}/step-3", make(3.0))
    cause = getattr(error.__cause__, "errno", None)
    return (
        type(error).__name__,
        getattr(error, "file", ""),
        getattr(error, "reason", str(error)),
        cause,
        there,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "file", "said", "cause"),
    [
        (
            "too large",
            "CheckpointError",
            "step-2/model-00002-of-00002.safetensors",
            "rank 1: File too large",
            27,
        ),
        (
            "eio",
            "CheckpointError",
            "step-2/model-00002-of-00002.safetensors",
            "rank 1: Input/output error",
            5,
        ),
        (
            "bug",
            "RankError",
            "",
            "rank 1: TypeError: 'NoneType' object is not callable",
            None,
        ),
        ("manifest", "CheckpointError", "step-2", "No space left on device", 28),
        ("rename", "CheckpointError", "step-2", "Input/output error", 5),
    ],
)
def test_a_failure_on_one_rank_is_known_to_all_and_nothing_is_there(
    tmp_path, how, kind, file, said, cause
):
    for rank, found in enumerate(run_distributed(save_twice, 2, str(tmp_path), how)):
        if how == "bug" and rank == 1:
            assert found[0] == "TypeError"
            continue
        assert found[0] == kind
        assert found[1] == (str(tmp_path / file) if file else "")
        assert found[2].startswith(said)
        assert found[3] == cause
        assert [name for name in found[4] if not name.startswith(".")] == ["step-1"]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    for name, factor in (("step-1", 1.0), ("step-3", 3.0)):
        verify_checkpoint(tmp_path / name)
        half = torch.arange(1200.0).reshape(300, 4) * factor
        assert torch.equal(
            read_checkpoint(tmp_path / name)["model"]["w"], torch.cat([half, half + 1])
        )


def die(path, victim, where):
    """One rank is killed in the middle of its save."""
    write = writing.write_file
    if dist.get_rank() == victim:

        def kill(file, buffers):
            if where in file.name:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, buffers)

        writing.write_file = kill
    write_sharded(path, make(2.0), overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "where"), [(1, "model-"), (0, "model-"), (0, "layout"), (0, "manifest")]
)
def test_a_rank_that_is_killed_in_a_save_leaves_the_earlier_checkpoint(
    tmp_path, victim, where
):
    path = tmp_path / "step-3"
    run_distributed(save, 2, str(path))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(RankError, match=f"rank {victim}.*SIGKILL"):
        run_distributed(die, 2, str(path), victim, where)
    verify_checkpoint(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    clean_incomplete(tmp_path)
    assert os.listdir(tmp_path) == ["step-3"]
    run_distributed(die, 2, str(path), victim, "nothing of this name")
    assert read_checkpoint(path)["model"]["w"][1].tolist() == [8.0, 10.0, 12.0, 14.0]


def test_a_target_that_exists_is_refused_on_every_rank(by_three):
    with pytest.raises(CheckpointError, match="it exists already"):
        run_distributed(save, 2, str(by_three))
    verify_checkpoint(by_three)


def test_every_flipped_bit_is_found(saved):
    for file in sorted(saved.iterdir()):
        sound = file.read_bytes()
        for at in range(0, 8 * len(sound), max(1, len(sound) // 4)):
            damaged = bytearray(sound)
            damaged[at // 8] ^= 1 << at % 8
            file.write_bytes(damaged)
            for read in (
                verify_checkpoint,
                read_checkpoint,
                lambda path: read_sharded(path, {"model": None}),
            ):
                with pytest.raises(CheckpointError) as caught:
                    read(saved)
                assert caught.value.file == str(file)
        file.write_bytes(sound)
    verify_checkpoint(saved)


def load_damaged(path):
    state = make(0.0, rows=2)
    with pytest.raises(CheckpointError) as caught:
        read_sharded(path, state)
    return caught.value.file, caught.value.reason


@pytest.mark.slow
def test_a_damaged_shard_is_known_to_every_rank(saved):
    file = saved / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    first, second, third = run_distributed(load_damaged, 3, str(saved))
    assert first == second == third
    assert first[0] == str(file)
    assert first[1].startswith("rank 1: damaged: checksum")


def test_a_missing_shard_is_named(saved):
    file = saved / "model-00003-of-00003.safetensors"
    file.unlink()
    for read in (
        verify_checkpoint,
        read_checkpoint,
        lambda path: read_sharded(path, {"model": None}),
    ):
        with pytest.raises(CheckpointError) as caught:
            read(saved)
        assert (caught.value.file, caught.value.reason) == (
            str(file),
            "step-70 lacks shard 3 of 3",
        )
    assert checkpoints(saved.parent) == []
    assert [path.name for path, _ in repair(saved.parent).damaged] == [
        "step-70.damaged"
    ]


def seal(path, manifest=None, layout=None):
    """As somebody would who wants it to be believed: every size and checksum is right."""
    content = json.loads((path / "manifest.json").read_bytes())
    content.pop("sha256")
    if layout is not None:
        whole = json.loads((path / "layout.json").read_bytes())
        layout(whole)
        (path / "layout.json").write_text(json.dumps(whole))
    for file in path.iterdir():
        if file.name in content["files"]:
            content["files"][file.name].update(
                size=file.stat().st_size, xxh3_64=checksum(file)
            )
    if manifest is not None:
        manifest(content)
    (path / "manifest.json").write_bytes(dump_manifest(content))


def chunk(whole, index=0):
    return whole["model"]["w"]["chunks"][index]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: chunk(w).update(offsets=[1, 0]), "overlap"),
        (lambda w: chunk(w, 2).update(offsets=[5, 0]), "not inside"),
        (lambda w: chunk(w).update(offsets=[-1, 0]), "damaged layout"),
        (lambda w: chunk(w).update(offsets=[0]), "not inside"),
        (lambda w: chunk(w).update(offsets=[0, 0.0]), "damaged layout"),
        (lambda w: chunk(w).update(offsets=[False, 0]), "damaged layout"),
        (
            lambda w: chunk(w).update(sizes=[1, 4]),
            "chunks of 20 elements for a tensor of 24",
        ),
        (lambda w: chunk(w).update(sizes=[2**62, 4]), "not inside"),
        (lambda w: chunk(w).update(sizes=[2**70, 4]), "beyond 64 bits"),
        (
            lambda w: chunk(w).update(
                file="../step-70/model-00001-of-00003.safetensors"
            ),
            "not listed",
        ),
        (lambda w: chunk(w).update(file="/etc/passwd"), "not listed"),
        (lambda w: chunk(w).update(file="layout.json"), "not listed"),
        (lambda w: chunk(w).update(key="b"), "not what the layout says|cannot be read"),
        (lambda w: chunk(w).update(key="__metadata__"), "cannot be read"),
        (lambda w: chunk(w).pop("file"), "damaged layout"),
        (
            lambda w: w["model"]["w"].update(dtype="float64"),
            "smaller|not what the layout says",
        ),
        (lambda w: w["model"]["w"].update(dtype="int32"), "not what the layout says"),
        (lambda w: w["model"]["w"].update(dtype="save"), "damaged layout"),
        (lambda w: w["model"]["w"].update(shape=[2**40, 4]), "for a tensor of"),
        (lambda w: w["model"]["w"].update(shape=6), "damaged layout"),
        (lambda w: w["model"]["w"].update(chunks=None), "damaged layout"),
        (
            lambda w: w["model"]["w"].update(chunks=w["model"]["w"]["chunks"] * 2),
            "for a tensor of",
        ),
        (
            lambda w: w["model"]["w"].update(
                shape=[2**30, 4],
                chunks=[{**chunk(w), "sizes": [2**30, 4], "offsets": [0, 0]}],
            ),
            "which is smaller",
        ),
        (lambda w: w["model"].pop("w"), "not in the file"),
        (lambda w: w.update(model=[]), "not a dict"),
        (lambda w: w.update(more={}), "does not describe the parts"),
        (lambda w: w.pop("model"), "does not describe the parts"),
    ],
)
def test_a_hostile_layout_is_refused_before_anything_is_allocated(saved, change, said):
    seal(saved, layout=change)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(saved)
    with pytest.raises(CheckpointError, match=f"{said}|the checkpoint has none"):
        read_sharded(saved, {"model": {"w": torch.zeros(6, 4)}, "progress": None})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.pop("shards"), "without number of shards"),
        (lambda m: m.update(shards=0), "without number of shards"),
        (lambda m: m.update(shards=2), "not one of 2 shards"),
        (lambda m: m["files"].pop("layout.json"), "without number of shards or layout"),
        (
            lambda m: m["files"]["model-00001-of-00003.safetensors"].pop("shard"),
            "not one of 3 shards",
        ),
        (lambda m: m["parts"].update(model=None), "not listed"),
        (lambda m: m["parts"].update(model="state.json"), "not one of 3 shards"),
        (lambda m: m["parts"].update(model=["nothing"]), "not listed"),
        (lambda m: m["parts"].update(model=[["a"]]), "not listed"),
        (lambda m: m["parts"]["model"].pop(), "not listed"),
        (lambda m: m.update(version=1), "not listed"),
    ],
)
def test_a_hostile_manifest_of_shards_is_refused(saved, change, said):
    seal(saved, manifest=change)
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(saved)


def test_a_shard_that_holds_something_else_is_refused(saved):
    file = saved / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "w": tensors["w"].T.contiguous()}, file)
    seal(saved)
    with pytest.raises(CheckpointError, match="not what the layout says"):
        read_checkpoint(saved)
