"""Run as a program: it imports everything once, then forks a script for each command and kills it as it is told.

One command a line on standard input, one answer a line on standard output, both JSON. A forked script is an ordinary
process and its SIGKILL the kernel's. What a killed one leaves behind is given to this process, so every orphan is seen.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import trainer_kit.callbacks.model_checkpoint
import trainer_kit.callbacks.model_summary
import trainer_kit.loggers.journal
import trainer_kit.strategies.ddp
import trainer_kit.strategies.fsdp
import trainer_kit.strategies.mesh
import trainer_kit.trainer  # noqa: F401
from trainer_kit.launch.bootstrap import _leave
from trainer_kit.launch.processes import local_environment

FILE_EVENTS = {
    "open",
    "os.link",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
}
ADOPT_ORPHANS, DIE_WITH_PARENT = 36, 1  # of prctl
PATIENCE = 30.0


def main() -> None:
    prctl(ADOPT_ORPHANS, 1)
    faulthandler.register(
        signal.SIGUSR2
    )  # whoever is forked says where it is, if it is asked
    gc.freeze()  # no collection in a script looks at, and so copies, what is here
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "name orphans":
            print(json.dumps(name_orphans()), flush=True)
            continue
        pids = []
        environments = rank_environments(command["ranks"])
        for rank, environment in enumerate(environments):
            pids.append(os.fork())
            if pids[-1] == 0:
                become(command, rank, environment)
                return
        print(json.dumps(supervise(pids, command)), flush=True)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def rank_environments(count: int) -> list[dict[str, str]]:
    """What torchrun sets; nothing for a single process."""
    if count == 1:
        return [{}]
    shared = {**local_environment(count), "TRAINER_KIT_PATIENCE": str(PATIENCE / 6)}
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
    ]


def become(command: dict[str, Any], rank: int, environment: dict[str, str]) -> None:
    """The script, in a process of its own."""
    prctl(
        DIE_WITH_PARENT, signal.SIGKILL
    )  # not inherited: its own children are its own business
    os.environ.update(environment)
    os.chdir(command["directory"])
    said = os.open(f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if command["point"] is not None and rank == command["victim"]:
        die_at(command["point"], command["within"])
    sys.argv = command["script"]
    runpy.run_path(command["script"][0], run_name="__main__")
    _leave()  # as a rank does: taking the interpreter to pieces costs 0.3 s after a fork


def die_at(point: int, within: str) -> None:
    """Kill this process just before the ``point``-th file operation in the directory ``within``."""
    owner, count, in_tree = os.getpid(), 0, False

    def count_down(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, in_tree
        if (
            event == "shutil.rmtree"
        ):  # its files are then named relative to an open directory
            in_tree = within in str(arguments[0])
        if event not in FILE_EVENTS or os.getpid() != owner:
            return
        relative = event in ("os.remove", "os.rmdir") and arguments[-1] not in (
            None,
            -1,
        )
        if (relative and in_tree) or within in str(arguments[0]):
            count += 1
            if count == point:
                os.kill(owner, signal.SIGKILL)

    sys.addaudithook(count_down)


def supervise(pids: list[int], command: dict[str, Any]) -> dict[str, Any]:
    """How each rank ended, and the seconds until the last one did."""
    began, statuses = time.monotonic(), {}
    ends = None if command["delay"] is None else began + command["delay"]
    first_end = None
    while len(statuses) < len(pids):
        now = time.monotonic()
        if ends is not None and now >= ends:
            if command["victim"] not in statuses:
                os.kill(pids[command["victim"]], signal.SIGKILL)
            ends = None
        for rank, pid in enumerate(pids):
            if rank in statuses:
                continue
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[rank], first_end = (
                    os.waitstatus_to_exitcode(status),
                    first_end or now,
                )
        if first_end is not None and now - first_end > PATIENCE:
            for rank, pid in enumerate(pids):
                if rank not in statuses:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    statuses[rank] = "hung"
        time.sleep(0.001)
    return {
        "ended": [statuses[rank] for rank in range(len(pids))],
        "seconds": time.monotonic() - began,
    }


def name_orphans() -> list[str]:
    """The processes that scripts left behind and that do not end by themselves: what they are, and where."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
        except ChildProcessError:
            return []
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return [describe(int(pid)) for pid in children.read().split()]


def describe(pid: int) -> str:
    """What Linux knows of a process, and the end of what it said after it was asked where it is."""
    process = Path("/proc") / str(pid)
    facts = [
        f"pid {pid}: {(process / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
    ]
    facts += [
        line
        for line in (process / "status").read_text().splitlines()
        if line.startswith(("State", "Sig", "PPid"))
    ]
    facts += [
        f"{name}: {_read(process / name)}" for name in ("wchan", "stack", "syscall")
    ]
    facts += [
        f"thread {task.name}: {_read(task / 'wchan')}"
        for task in (process / "task").iterdir()
    ]
    os.kill(pid, signal.SIGUSR2)
    time.sleep(1)
    return "\n".join([*facts, _read(process / "fd" / "2")[-4000:]])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    main()
