"""One save after the other, file operation by file operation: their order, and what is left when any of them fails."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.checkpoint.read import verify_checkpoint
from trainer_kit.checkpoint.store import newest_verified

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="open files are named by /proc"
)

SAVED, REPORTED, REFUSED = 0, 10, 11
"""Exit codes of a run: see `cycle`."""
CALLS = "openat,write,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,link"
CYCLES = int(os.environ.get("CYCLES", "12"))
"""How many operations of each kind are drawn at most; 0 for every one."""
LIMIT = pytest.mark.timeout(0 if "CYCLES" in os.environ else 120)


class Server:
    """`cycle` as a child process, and directories to run in."""

    def __init__(self, place: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
        }
        self.place, self.directory = place, place / "kept"
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("cycle.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=place,
        )
        assert self.run(2)["ended"] == SAVED
        shutil.copytree(self.directory, place / "before")
        assert sorted(os.listdir(self.directory)) == [
            "index.json",
            "step-00000001",
            "step-00000002",
        ]

    def again(self):
        """As it was after two steps."""
        shutil.rmtree(self.directory)
        shutil.copytree(self.place / "before", self.directory)

    def run(self, steps, by="none", moment="", fault=None, calls=CALLS):
        command = {
            "directory": str(self.directory),
            "steps": steps,
            "by": by,
            "moment": moment,
            "fault": fault,
        }
        command |= {
            "calls": calls,
            "trace": str(self.place / "trace"),
            "said": str(self.place / "said"),
        }
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if answer["ended"] is None:
            pytest.skip(f"strace may not attach here: {answer['said'].strip()}")
        return answer

    def trace(self, by):
        lines = (self.place / "trace").read_text().splitlines()
        return (
            [json.loads(line) for line in lines]
            if by == "audit"
            else list(filter(None, map(operation, lines)))
        )

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("cycle"))
    try:
        yield made
    finally:
        made.close()


BY = [
    "audit",
    pytest.param(
        "strace",
        marks=pytest.mark.skipif(not shutil.which("strace"), reason="needs strace"),
    ),
]


def operation(line):
    """A line of strace as call and paths; None for others."""
    match = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
    if match is None:
        return None
    call, arguments, result = match.groups()
    paths = re.findall(r'"([^"]*)"', arguments) or re.findall(
        r"^\d+<([^>]*)>", arguments
    )
    if call == "openat":
        call = "create" if "O_CREAT" in arguments else "open"
    elif call in ("renameat", "renameat2"):
        call = "rename"
    return [call, *paths] if int(result) >= 0 else None


@pytest.mark.parametrize("by", BY)
def test_the_order_of_one_save(server, by):
    server.again()
    assert server.run(4, by, "save")["ended"] == SAVED
    kept, trace = server.directory, server.trace(by)
    inside = [entry for entry in trace if str(kept) in entry[1]]
    for step in (3, 4):
        target, before = kept / f"step-{step:08d}", kept / f"step-{step - 2:08d}"
        published = next(
            at
            for at, e in enumerate(inside)
            if e[0] == "rename" and e[2:] == [str(target)]
        )
        work = Path(inside[published][1])
        assert work.parent == kept, "beside the target"
        made = [at for at, e in enumerate(inside) if e == ["mkdir", str(work)]]
        assert len(made) == 1
        # Python tells of a file that is opened through an opener twice.
        creates = {
            e[1]: at for at, e in reversed(list(enumerate(inside))) if e[0] == "create"
        }
        files = sorted(
            (at, file) for file, at in creates.items() if file.startswith(f"{work}/")
        )
        assert Path(files[-1][1]).name == "manifest.json", "the manifest is the last"
        assert {Path(file).name for _, file in files} == set(
            os.listdir(kept / "step-00000004")
        )
        synced = {
            file: [at for at, e in enumerate(inside) if e == ["fsync", file]]
            for _, file in files
        }
        ends = []
        for at, file in files:
            [sync] = synced[file]
            assert at < sync < published
            assert not [e for e in inside[sync:] if e == ["write", file]], (
                "nothing is written once it is synced"
            )
            ends.append(sync)
        assert max(ends[:-1]) < files[-1][0], (
            "every other file is on disk before there is a manifest"
        )
        [sync_work] = [at for at, e in enumerate(inside) if e == ["fsync", str(work)]]
        assert max(ends) < sync_work < published
        after = inside[published + 1 :]
        assert after[0] == ["open", str(kept)] or after[0] == ["fsync", str(kept)], (
            "the name is made durable at once"
        )
        parent = after.index(["fsync", str(kept)])
        index = next(
            at
            for at, e in enumerate(after)
            if e[0] == "rename" and e[2:] == [str(kept / "index.json")]
        )
        temporary = after[index][1]
        assert parent < after.index(["fsync", temporary]) < index
        pruned = next(
            at for at, e in enumerate(after) if e[0] == "rename" and e[1] == str(before)
        )
        assert index < after.index(["fsync", str(kept)], index) < pruned, (
            "only then does anything give way"
        )
        gone = [
            at
            for at, e in enumerate(after)
            if e[0] in ("remove", "unlink", "unlinkat", "rmdir", "shutil.rmtree")
        ]
        assert pruned < min(gone)


def check(server, ended, case):
    """Nothing that was there or reported is lost, and the next start sees nothing of what happened."""
    found, damaged = newest_verified(server.directory)
    assert not damaged, case
    assert found is not None, case
    for entry in server.directory.iterdir():
        if entry.name.startswith("step-"):
            verify_checkpoint(entry)
    if ended["ended"] == SAVED:
        assert found.name == "step-00000004", case
    again = server.run(5)
    assert again["ended"] == SAVED, f"{case}: {again['said']}"
    names = sorted(os.listdir(server.directory))
    if case.startswith(
        ("EIO at open", "EIO at listdir")
    ):  # what could not be read may have been set aside
        names = [name for name in names if not name.endswith(".damaged")]
    assert names == ["index.json", "step-00000004", "step-00000005"], case
    verify_checkpoint(server.directory / "step-00000005")


def counts(server, by, moment):
    """How often each call is made, by one thread at most, when nothing fails."""
    server.again()
    assert server.run(4, by, moment)["ended"] == SAVED
    if by == "audit":
        return {"": len(server.trace(by))}
    found: dict[tuple[str, str], int] = {}
    for line in (server.place / "trace").read_text().splitlines():
        match = re.match(r"(\d+) +(\w+)\(", line)
        if match:
            found[match[1], match[2]] = found.get((match[1], match[2]), 0) + 1
    return {
        name: max(n for (_, call), n in found.items() if call == name)
        for _, name in found
    }


def points(server, by, moment):
    every = [
        (call, at)
        for call, count in sorted(counts(server, by, moment).items())
        for at in range(1, count + 1)
    ]
    assert len(every) > 40, "a start or two saves, with what gives way to them"
    return random.Random(f"{by} {moment}").sample(every, CYCLES) if CYCLES else every


@LIMIT
@pytest.mark.parametrize("moment", ["start", "save"])
@pytest.mark.parametrize("by", BY)
def test_killed_at_any_operation(server, by, moment):
    for call, at in points(server, by, moment):
        server.again()
        ended = server.run(
            4,
            by,
            moment,
            {"call": call, "how": "signal=KILL", "error": "KILL", "at": at},
        )
        assert ended["ended"] in (-signal.SIGKILL, SAVED), ended["said"]
        check(server, ended, f"killed at {call} {at}")


@LIMIT
@pytest.mark.parametrize("moment", ["start", "save"])
@pytest.mark.parametrize("by", BY)
def test_any_operation_fails(server, by, moment):
    for number, (call, at) in enumerate(points(server, by, moment)):
        server.again()
        error = ("EIO", "ENOSPC")[number % 2]
        ended = server.run(
            4,
            by,
            moment,
            {"call": call, "how": f"error={error}", "error": error, "at": at},
        )
        expected = (SAVED, REPORTED) if moment == "save" else (SAVED, REPORTED, REFUSED)
        assert ended["ended"] in expected, f"{error} at {call} {at}: {ended['said']}"
        if by == "audit":  # every event is counted: this is the one that failed
            call = server.trace(by)[at - 1][0]
        check(server, ended, f"{error} at {call} {at}")
