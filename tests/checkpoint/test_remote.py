"""Checkpoints at URLs: the manifest makes them, everything that takes a path takes them."""

from __future__ import annotations

import os
import socket

import fsspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.bucket import Bucket, Upload
from trainer_kit.checkpoint import (
    checkpoints,
    diff,
    export,
    read_checkpoint,
    read_weights,
    repair,
    verify_checkpoint,
    write_checkpoint,
)
from trainer_kit.checkpoint.commit import clean_incomplete, remove_checkpoint
from trainer_kit.checkpoint.lock import LOCK, DirectoryLock, owner_of
from trainer_kit.checkpoint.store import (
    candidates,
    lookup,
    mark,
    newest_verified,
    read_index,
    set_aside,
)
from trainer_kit.commands.main import main
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import RemotePath, locate


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "objects").mkdir()
    Bucket.open_at(tmp_path / "objects")
    return Bucket


@pytest.fixture
def memory():
    storage = fsspec.filesystem("memory")
    yield storage
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "bucket"])
def root(request):
    request.getfixturevalue(request.param)
    return f"{request.param}://team/run"


def keys(bucket):
    return sorted(
        str(file.relative_to(bucket.directory))
        for file in bucket.directory.rglob("*")
        if file.is_file()
    )


def test_the_same_state_comes_back_and_the_files_are_those_of_a_local_one(
    root, tmp_path, make_state, same
):
    state = make_state()
    path = write_checkpoint(f"{root}/step-12", state, info={"step": 12})
    local = write_checkpoint(tmp_path / "step-12", state, info={"step": 12})
    assert isinstance(path, RemotePath)
    assert str(path) == f"{root}/step-12"
    assert same(read_checkpoint(path), state)
    assert same(
        read_checkpoint(str(path), parts=["progress"]), {"progress": state["progress"]}
    )
    assert {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name != "manifest.json"
    } == {
        file.name: file.read_bytes()
        for file in local.iterdir()
        if file.name != "manifest.json"
    }
    there, here = verify_checkpoint(path), verify_checkpoint(local)
    assert there.pop("committed") <= here.pop("committed")
    assert there == here
    assert diff(path, local) == []


def test_files_go_in_small_pieces_and_arrive_in_full(bucket, monkeypatch):
    sizes = []

    def write(self, data):
        sizes.append(len(data))
        return len(data)  # of a storage that says it took everything

    state = {"model": {"w": torch.ones(6_000_000)}}
    write_checkpoint("bucket://run/step-1", state)
    monkeypatch.setattr(Upload, "write", write)
    with pytest.raises(
        CheckpointError, match=r"0 of 240001\d\d bytes arrived \(need 24 MB\)"
    ) as caught:
        write_checkpoint("bucket://run/step-2", state)
    assert isinstance(caught.value.__cause__, OSError)
    assert max(sizes) == 4 << 20
    assert {key.split("/")[1] for key in keys(bucket)} == {"step-1"}


def test_the_manifest_goes_last_and_nothing_but_the_checkpoint_stays(bucket):
    write_checkpoint(
        "bucket://run/step-3", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}}
    )
    sign = bucket.done[0][1]
    assert sign.startswith("run/.step-3.")
    assert bucket.done == [
        ("put", sign),
        ("put", "run/step-3/model.safetensors"),
        ("put", "run/step-3/state.json"),
        ("put", "run/step-3/manifest.json"),
        ("delete", sign),
    ]
    bucket.done.clear()
    remove_checkpoint("bucket://run/step-3")
    assert (
        next(key.rpartition("/")[2] for _, key in bucket.done[1:-1]) == "manifest.json"
    )
    assert keys(bucket) == []


def test_until_the_new_manifest_is_there_the_old_checkpoint_is_whole(bucket):
    old = {"model": {"w": torch.ones(2)}}
    seen = []
    path = write_checkpoint("bucket://run/only", old)

    def look(operation, key):
        if key.startswith("run/only") and operation == "put":
            seen.append(
                (
                    read_checkpoint(path)["model"]["w"].tolist(),
                    len(checkpoints("bucket://run")),
                )
            )

    for value in (2.0, 3.0):
        bucket.before = staticmethod(look)
        write_checkpoint(
            path, {"model": {"w": torch.full((2,), value)}}, overwrite=True
        )
        bucket.before = staticmethod(lambda operation, key: None)
        assert read_checkpoint(path)["model"]["w"].tolist() == [value, value]
    assert seen == [([1.0, 1.0], 1)] * 4 + [([2.0, 2.0], 1)] * 4
    assert len(keys(bucket)) == 4, "of the older ones nothing is left"
    verify_checkpoint(path)
    remove_checkpoint(path)
    assert keys(bucket) == []


def test_a_manifest_that_arrived_though_its_request_failed_means_files_that_are_there(
    bucket, monkeypatch
):
    path = write_checkpoint("bucket://run/only", {"model": {"w": torch.tensor(1.0)}})

    def put(self, key, value, real=Bucket._put):
        real(self, key, value)
        if key.endswith("run/only/manifest.json"):
            raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "_put", put)
        with pytest.raises(CheckpointError, match="no answer"):
            write_checkpoint(path, {"model": {"w": torch.tensor(2.0)}}, overwrite=True)
    verify_checkpoint(path)
    assert read_checkpoint(path)["model"]["w"] == 2.0
    write_checkpoint(path, {"model": {"w": torch.tensor(3.0)}}, overwrite=True)
    assert read_checkpoint(path)["model"]["w"] == 3.0
    assert len([key for key in keys(bucket) if key.startswith("run/only")]) == 4, (
        "of the older ones nothing is left"
    )


def test_a_copy_of_one_that_was_replaced_reads_on_a_disk(bucket, tmp_path):
    for value in (1.0, 2.0):
        write_checkpoint(
            "bucket://run/only", {"model": {"w": torch.tensor(value)}}, overwrite=True
        )
    assert read_checkpoint(bucket.directory / "run" / "only")["model"]["w"] == 2.0
    verify_checkpoint(bucket.directory / "run" / "only")


def test_overwriting_needs_a_request_and_never_replaces_other_files(root):
    path = write_checkpoint(f"{root}/step-3", {})
    with pytest.raises(CheckpointError, match="it exists already"):
        write_checkpoint(path, {})
    locate(f"{root}/theirs/notes.txt").write_bytes(b"mine")
    with pytest.raises(
        CheckpointError,
        match="not a checkpoint of this library, so it is not overwritten",
    ):
        write_checkpoint(f"{root}/theirs", {}, overwrite=True)
    with pytest.raises(
        CheckpointError, match="not a checkpoint of this library, so it is not deleted"
    ):
        remove_checkpoint(f"{root}/theirs")
    with pytest.raises(CheckpointError, match="starts with a dot"):
        write_checkpoint(f"{root}/.step", {})
    assert locate(f"{root}/theirs/notes.txt").read_bytes() == b"mine"


def test_names_in_the_directory(root):
    assert checkpoints(root) == []
    assert lookup(root, "last") is None
    three, twenty = (
        write_checkpoint(f"{root}/step-{step}", {}, info={"step": step})
        for step in (3, 20)
    )
    assert [(record.path, record.step) for record in checkpoints(root)] == [
        (three, 3),
        (twenty, 20),
    ]
    assert checkpoints(root)[0].created.year > 2000
    assert lookup(root, "last") == twenty
    mark(root, last=three, best=twenty)
    assert (lookup(root, "last"), lookup(root, "best")) == (three, twenty)
    assert read_index(root) == {"last": "step-3", "best": "step-20"}
    assert candidates(root)[0] == three
    with pytest.raises(CheckpointError, match="not a complete checkpoint in"):
        mark(root, best=f"{root}-other/step-3")
    (three / "manifest.json").unlink()
    assert lookup(root, "last") == twenty


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_flipped_byte_is_found_and_the_one_before_it_taken(root, name):
    for step in (3, 20):
        write_checkpoint(
            f"{root}/step-{step}", {"model": {"w": torch.ones(9)}}, info={"step": step}
        )
    file = locate(f"{root}/step-20") / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(bytes(data))
    for read in (verify_checkpoint, read_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            read(f"{root}/step-20")
        assert caught.value.file == f"{root}/step-20/{name}"
    sound, damaged = newest_verified(root)
    assert sound == locate(f"{root}/step-3")
    assert [path.name for path, _ in damaged] == ["step-20"]
    assert str(set_aside(damaged[0][0])) == f"{root}/step-20.damaged"
    assert sorted(entry.name for entry in locate(root).iterdir()) == [
        "step-20.damaged",
        "step-3",
    ]
    assert (locate(f"{root}/step-20.damaged") / name).read_bytes() == bytes(data)


def test_missing_and_foreign_files(root):
    path = write_checkpoint(f"{root}/step-3", {"model": {"w": torch.ones(9)}})
    (path / "notes.txt").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"notes\.txt: an unexpected file"):
        verify_checkpoint(path)
    (path / "notes.txt").unlink()
    (path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: the file is missing"
    ):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_checkpoint(f"{root}/step-4")


def test_repair(root):
    for step in (3, 6):
        path = write_checkpoint(f"{root}/step-{step}", {}, info={"step": step})
    (path / "state.json").write_bytes(b"[]")
    done = repair(root)
    assert [path.name for path in done.sound] == ["step-3"]
    assert [path.name for path, _ in done.damaged] == ["step-6.damaged"]
    assert read_index(root) == {"last": "step-3"}
    assert owner_of(root) is None


def test_weights_of_files(root, tmp_path):
    weights = {"w": torch.arange(3.0)}
    path = write_checkpoint(f"{root}/step-3", {"model": weights})
    for name in ("model.safetensors", "model.pt"):
        locate(f"{root}/{name}").write_bytes(export(path, tmp_path / name).read_bytes())
        assert read_weights(f"{root}/{name}")["w"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigurationError, match="exported to local paths only"):
        export(path, f"{root}/out.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_weights(f"{root}/absent.safetensors")
    assert caught.value.file == f"{root}/absent.safetensors"


def test_the_command_line(root, tmp_path):
    run = CliRunner().invoke
    one, two = (
        write_checkpoint(
            f"{root}/step-{n}", {"model": {"w": torch.full((2,), n)}}, info={"step": n}
        )
        for n in (3, 20)
    )
    mark(root, best=one)
    listed = run(main, ["checkpoint", "ls", root]).output.splitlines()
    assert [line.split()[0] for line in listed] == ["CHECKPOINT", "step-3", "step-20"]
    assert listed[1].endswith("best")
    assert run(main, ["checkpoint", "verify", root]).output.splitlines() == [
        f"{two}: ok",
        f"{one}: ok",
    ]
    assert (
        run(main, ["checkpoint", "diff", str(one), str(two)])
        .output.splitlines()[-1]
        .startswith("model: w: values")
    )
    exported = run(
        main, ["checkpoint", "export", str(one), str(tmp_path / "w.safetensors")]
    )
    assert load_file(exported.output.strip())["w"].tolist() == [3, 3]
    (two / "state.json").write_bytes(b"[]")
    verified = run(main, ["checkpoint", "verify", root])
    assert verified.exit_code == 1
    assert f"{two}: damaged: state.json: 2 bytes" in verified.output
    assert (
        "set aside as step-20.damaged"
        in run(main, ["checkpoint", "repair", root]).output
    )
    unknown = run(main, ["checkpoint", "ls", "s4://run"])
    assert unknown.exit_code == 2
    assert "s4:// is an unknown storage protocol" in unknown.output
    assert (
        run(main, ["checkpoint", "ls", f"{root}/none"]).output
        == f"no checkpoints in {root}/none\n"
    )


def test_two_runs_in_one_directory(root):
    lock = DirectoryLock(root)
    assert owner_of(root).process.pid == os.getpid()
    with pytest.raises(
        CheckpointError,
        match=rf"locked by pid {os.getpid()} on host .* since .*\n.*delete {root}/.lock",
    ):
        DirectoryLock(root)
    lock.release()
    lock.release()
    assert owner_of(root) is None
    assert not (locate(root) / LOCK).exists()
    DirectoryLock(root).release()


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_the_lock_of_a_dead_run_is_taken_over_and_that_of_another_host_is_kept(
    root, host
):
    name = socket.gethostname() if host == "here" else "node-17"
    content = f'{{"host": "{name}", "pid": 4194399, "start": "12", "since": "2026-01-02 03:04:05+00:00"}}'
    locate(f"{root}/{LOCK}").write_bytes(content.encode())
    if host == "here":
        DirectoryLock(root).release()
    else:
        with pytest.raises(
            CheckpointError,
            match="locked by pid 4194399 on host node-17 since 2026-01-02",
        ):
            DirectoryLock(root)
        assert locate(f"{root}/{LOCK}").read_bytes() == content.encode()


def test_an_incomplete_lock_is_ignored(root):
    locate(f"{root}/{LOCK}").write_bytes(b'{"host": "no')
    DirectoryLock(root).release()
    assert not locate(f"{root}/{LOCK}").exists()


def test_an_unwritable_storage_is_refused(bucket):
    def refuse(operation, key):
        raise PermissionError("403 Forbidden")

    bucket.before = staticmethod(refuse)
    with pytest.raises(
        CheckpointError, match="no checkpoint can be written here: 403 Forbidden"
    ):
        DirectoryLock("bucket://run")


@pytest.mark.parametrize("operation", ["put", "delete"])
def test_the_probe_writes_and_deletes(bucket, operation):
    def refuse(name, key):
        if name == operation:
            raise RuntimeError(
                "AccessDenied"
            )  # not every storage's library raises an OSError

    bucket.before = staticmethod(refuse)
    with pytest.raises(
        CheckpointError,
        match="no checkpoint can be written here: RuntimeError: AccessDenied",
    ):
        DirectoryLock("bucket://run")


def test_the_root_of_a_storage_is_a_directory_too(memory):
    path = write_checkpoint(
        "memory://step-3", {"model": {"w": torch.ones(2)}}, info={"step": 3}
    )
    mark("memory://", last=path)
    assert [str(record.path) for record in checkpoints("memory://")] == [
        "memory://step-3"
    ]
    assert lookup("memory://", "last") == path
    DirectoryLock("memory://").release()
    remove_checkpoint(path)
    assert memory.find("/") == ["/index.json"]


def test_a_failed_cleanup_deletes_nothing(bucket):
    here = socket.gethostname()
    locate("bucket://run/dead/model.safetensors").write_bytes(b"half")
    locate(f"bucket://run/{hidden('dead', here)}").write_bytes(b"1")
    before = keys(bucket)

    def refuse(operation, key):
        raise PermissionError("403 Forbidden")

    bucket.before = staticmethod(refuse)
    with pytest.raises(PermissionError):
        clean_incomplete("bucket://run")
    assert keys(bucket) == before
    bucket.before = staticmethod(lambda operation, key: None)
    assert clean_incomplete("bucket://run") == ["dead"]
    assert keys(bucket) == []


def hidden(target, host, pid=4194399):
    import hashlib

    return (
        f".{target}.{pid}-{hashlib.sha256(host.encode()).hexdigest()[:6]}{'0' * 12}.tmp"
    )


def test_dead_uploads_are_cleaned_and_living_ones_are_not(root):
    here = socket.gethostname()
    for name in ("dead", "away", "undeclared"):
        locate(f"{root}/{name}/model.safetensors").write_bytes(b"half")
    locate(f"{root}/dead/notes.txt").write_bytes(b"theirs")
    locate(f"{root}/{hidden('dead', here)}").write_bytes(b"1")
    locate(f"{root}/{hidden('away', 'node-17')}").write_bytes(b"1")
    locate(f"{root}/{hidden('.lock', here)}").write_bytes(b"1")
    done = write_checkpoint(f"{root}/done", {})
    locate(f"{root}/{hidden('done', here)}").write_bytes(b"1")
    assert checkpoints(root)[0].path == done
    assert len(clean_incomplete(root)) == 3
    assert sorted(str(e.name) for e in locate(root).iterdir()) == sorted(
        [hidden("away", "node-17"), "away", "dead", "done", "undeclared"]
    )
    assert [file.name for file in (locate(root) / "dead").iterdir()] == ["notes.txt"]
    verify_checkpoint(done)
    lock = DirectoryLock(root)  # now nobody else writes here, on any host
    assert len(clean_incomplete(root)) == 1
    lock.release()
    assert not (locate(root) / "away").exists()
    assert (locate(root) / "undeclared").exists()
    write_checkpoint(f"{root}/undeclared", {}, overwrite=True)
    verify_checkpoint(f"{root}/undeclared")


def test_a_storage_that_fails_while_it_is_asked_is_not_a_directory_without_checkpoints(
    bucket,
):
    write_checkpoint("bucket://run/step-3", {})
    bucket.unreachable = True
    for ask in (
        lambda: newest_verified("bucket://run"),
        lambda: checkpoints("bucket://run"),
    ):
        with pytest.raises(CheckpointError, match="cannot be read: no route to host"):
            ask()
    with pytest.raises(CheckpointError, match="no route to host"):
        write_checkpoint("bucket://run/step-4", {})
