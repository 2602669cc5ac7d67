"""Read stacks of processes, even with a locked interpreter: on a signal, C code writes the stacks to a file."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

__all__ = [
    "answering_file",
    "boot_id",
    "end_process",
    "is_stopped",
    "read_stacks",
    "start_time",
    "write_stacks",
]

_SUPPORTED: Final = hasattr(signal, "SIGRTMAX") and sys.platform == "linux"
# A real-time signal near the end of their range: its default action is to end the process, so none is sent by habit.
_SIGNAL: Final[int | None] = signal.SIGRTMAX - 3 if _SUPPORTED else None
_FILES: Final[dict[int, BinaryIO]] = {}
"""The file of this process by its pid: a fork needs another one."""
_WAIT: Final = 0.5
"""Seconds in which a process writes its stacks."""


def answering_file() -> str:
    """Make this module's signal write the stacks of this process; return the file to read them from.

    Return "" if the system does not support unnamed files.
    """
    if _SIGNAL is None or not hasattr(os, "memfd_create"):
        return ""
    pid = os.getpid()
    if pid not in _FILES:
        # Without a name, so that nothing is left behind by a process that is killed.
        file = os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0)
        _FILES.clear()
        _FILES[pid] = file
        # faulthandler's C code handles it at once, also while other C code holds the interpreter's lock.
        faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=False)
    return f"/proc/{pid}/fd/{_FILES[pid].fileno()}"


def write_stacks(path: Path) -> None:
    """Write the stacks of this process."""
    with suppress(OSError), path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def read_stacks(pid: int, stacks: str) -> str:
    """Return the stacks of another process of this machine and user; "" if it is stopped or has ended."""
    if not stacks or _SIGNAL is None or is_stopped(pid) or not _catches(pid):
        return ""
    try:
        # Other ranks may have asked before: their stacks come first in the file.
        size_before = os.stat(stacks).st_size
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _WAIT
        previous_size = size_before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = os.stat(stacks).st_size
            # Nothing tells that the process has finished, so two equal sizes do.
            if size == previous_size > size_before:
                break
            previous_size = size
        with open(stacks, "rb") as file:
            file.seek(size_before)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _catches(pid: int) -> bool:
    """Whether the process handles the signal; without a handler the signal would end it."""
    mask = int(_status(pid).get("SigCgt", "0"), 16)
    return _SIGNAL is not None and bool(mask >> (_SIGNAL - 1) & 1)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, by SIGSTOP or a debugger."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    return fields


def start_time(pid: int) -> int:
    """Return the time at which the kernel started a process, in ticks; 0 if unknown."""
    try:
        # The name of the process comes first, in parentheses: it may have spaces, and parentheses of its own.
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def boot_id() -> str:
    """Return the id of the running kernel, "" if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def end_process(pid: int, started: int) -> None:
    """Kill a process of this machine if its start time is ``started``, so that its pid was not reused."""
    if started and start_time(pid) == started:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
