"""One writer a directory; the dead hold nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer_kit.checkpoint import lock as module
from trainer_kit.checkpoint.commit import clean_incomplete, write_checkpoint
from trainer_kit.checkpoint.lock import LOCK, DirectoryLock, owner_of
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.atomic_files import Process
from trainer_kit.core.errors import CheckpointError

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
}
HOLDS = """
import sys, time
from trainer_kit.checkpoint.lock import DirectoryLock
DirectoryLock(sys.argv[1])
print("held", flush=True)
time.sleep(100)
"""


def write_lock(directory: Path, **changes: object) -> None:
    """The lock of a living process, this one, with other values."""
    directory.mkdir(exist_ok=True)
    me = Process.this()
    owner = {
        "host": me.host,
        "pid": me.pid,
        "start": me.start,
        "since": "2024-01-01 00:00:00+00:00",
    } | changes
    (directory / LOCK).write_text(json.dumps(owner))


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path):
    first = DirectoryLock(tmp_path / "a" / "b")
    with pytest.raises(CheckpointError, match="locked by") as caught:
        DirectoryLock(tmp_path / "a" / "b")
    for word in (
        str(os.getpid()),
        first.owner.process.host,
        first.owner.since,
        str(tmp_path / "a" / "b" / LOCK),
    ):
        assert word in str(caught.value)
    assert os.listdir(tmp_path / "a" / "b") == [LOCK]
    first.release()
    assert os.listdir(tmp_path) == []


def test_releasing_a_lock_keeps_existing_directories(tmp_path):
    lock = DirectoryLock(tmp_path / "new")
    write_checkpoint(tmp_path / "new" / "step-1", {})
    assert [record.path.name for record in checkpoints(tmp_path / "new")] == ["step-1"]
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / "new") == ["step-1"]
    DirectoryLock(tmp_path / "new").release()
    (tmp_path / "empty").mkdir()
    DirectoryLock(tmp_path / "empty").release()
    assert sorted(os.listdir(tmp_path)) == ["empty", "new"]


@pytest.mark.slow
def test_a_killed_process_holds_nothing(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(
            CheckpointError, match=f"locked by pid {process.pid} on host"
        ):
            DirectoryLock(tmp_path)
        assert owner_of(tmp_path).process.pid == process.pid
        process.kill()
    assert owner_of(tmp_path) is None
    lock = DirectoryLock(tmp_path)
    assert owner_of(tmp_path) == lock.owner
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="the start of a process is read from /proc",
)
def test_a_process_number_that_was_given_away_holds_nothing(tmp_path):
    write_lock(tmp_path, start="1")
    DirectoryLock(tmp_path).release()


def test_other_hosts_are_believed(tmp_path):
    write_lock(tmp_path, host="elsewhere", pid=1, start="")
    with pytest.raises(
        CheckpointError, match="pid 1 on host elsewhere since 2024-01-01"
    ):
        DirectoryLock(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"host": "a"}', '{"pid": "x", "host": "", "start": ""}']
)
def test_an_incomplete_lock_is_ignored(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    DirectoryLock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_was_taken_over_is_not_released_by_its_old_owner(tmp_path):
    old = DirectoryLock(tmp_path)
    write_lock(tmp_path, host="elsewhere")
    old.release()
    assert (tmp_path / LOCK).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_holds_nor_releases(tmp_path):
    lock = DirectoryLock(tmp_path)
    pid = os.fork()
    if pid == 0:
        lock.release()
        try:
            DirectoryLock(tmp_path)
        except CheckpointError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert owner_of(tmp_path) == lock.owner
    lock.release()


def without(what):
    def fails(*args, **kwargs):
        raise OSError(f"no {what} here")

    return fails


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform == "win32",
    reason="a dead process is told from a living one by POSIX calls",
)
@pytest.mark.parametrize("lacks", ["nothing", "flock", "links"])
def test_of_many_that_take_over_at_once_one_wins(tmp_path, monkeypatch, lacks):
    if lacks == "flock":
        monkeypatch.setattr("fcntl.flock", without("flock"))
    if lacks == "links":
        monkeypatch.setattr(module.os, "link", without("links"))

    def take(directory):
        try:
            return DirectoryLock(directory)
        except CheckpointError:
            return None

    for trial in range(20):
        directory = tmp_path / str(trial)
        write_lock(directory, pid=2**22 + 1, host=Process.this().host)
        with ThreadPoolExecutor(4) as pool:
            held = [
                lock for lock in pool.map(take, [directory] * 4) if lock is not None
            ]
        assert len(held) == 1
        assert os.listdir(directory) == [LOCK]
        held[0].release()


def test_a_directory_that_cannot_be_made_or_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (
        tmp_path / "file",
        tmp_path / "file" / "a" / "b",
        tmp_path / "a" / ("x" * 300),
    ):
        with pytest.raises(
            CheckpointError, match="no checkpoint can be written here"
        ) as caught:
            DirectoryLock(path)
        assert caught.value.file == str(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_that_was_being_written_is_cleaned(tmp_path, programs):
    code = (
        "import os, sys; from trainer_kit.checkpoint import lock; lock._put = lambda a, b: os._exit(0);"
        "lock.DirectoryLock(sys.argv[1])"
    )
    programs.run_code(code, str(tmp_path)).check_returncode()
    assert len(os.listdir(tmp_path)) == 1
    assert clean_incomplete(tmp_path) == [".lock"]
    assert os.listdir(tmp_path) == []


def test_the_names_of_the_directories_it_makes_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("trainer_kit.checkpoint.files.sync_directory", synced.append)
    DirectoryLock(tmp_path / "run" / "kept").release()
    assert synced == [tmp_path, tmp_path / "run"]
