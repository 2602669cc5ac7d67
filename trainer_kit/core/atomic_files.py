"""Temporary siblings of files and checkpoints: their names, and the process that writes each.

``.<name>.<pid>-<host><start><random>.tmp`` holds what is being written or deleted; ``.old`` what is being replaced.
Host and start of the process are six hex digits each, so the name alone shows whether its writer is alive.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Final, TypeVar, final

from trainer_kit.core.location import RemotePath

__all__ = ["Hidden", "Process", "discard_torn", "hidden_path", "replace_file", "sync_directory"]

_PATTERN: Final = re.compile(r"\.(.+)\.([1-9]\d{0,9})-([0-9a-f]{6})([0-9a-f]{6})[0-9a-f]{6}\.(tmp|old)", re.DOTALL)


_Place = TypeVar("_Place", Path, RemotePath)


def hidden_path(target: _Place, suffix: str) -> _Place:
    """A new hidden sibling of ``target``; ``suffix`` is tmp or old."""
    pid = os.getpid()
    token = f"{_short(socket.gethostname())}{_short(_start(pid) or '')}{secrets.token_hex(3)}"
    return target.with_name(f".{target.name}.{pid}-{token}.{suffix}")


@final
@dataclass(frozen=True)
class Hidden:
    """The parsed name of a hidden sibling.

    Attributes:
        target: the name of the file or directory beside it.
        suffix: tmp or old.
        here: its writer runs, or ran, on this host. Other hosts' processes cannot be seen.
        stale: its writer ran on this host and is dead.
    """

    target: str
    suffix: str
    here: bool
    stale: bool

    @classmethod
    def parse(cls, name: str) -> Hidden | None:
        """Read a name; None for one that this library did not give."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        target, pid, host, start, suffix = match.groups()
        here = host == _short(socket.gethostname())
        return cls(target, suffix, here, here and not _lives(int(pid), start))


@final
@dataclass(frozen=True)
class Process:
    """A process, identified by more than its number, which the system reuses.

    Attributes:
        host: the name of its machine.
        pid: its number there.
        start: when it began, as the system counts (Linux: clock ticks since boot); empty where that is unknown.
    """

    host: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Process:
        """The process that asks."""
        return cls(socket.gethostname(), os.getpid(), _start(os.getpid()) or "")

    @property
    def dead(self) -> bool:
        """It ran on this host and is gone. Other hosts' processes cannot be seen: theirs is never dead."""
        return self.host == socket.gethostname() and not _lives(self.pid, _short(self.start))


def replace_file(path: Path | RemotePath, data: bytes, mode: int = 0o666) -> None:
    """Replace a file durably and atomically: after a crash it has the old content or the new.

    Args:
        path: the file.
        data: all of its new content.
        mode: permissions on this machine, before the umask.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    work = hidden_path(path, "tmp")
    try:
        with open(work, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
        sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            work.unlink()
        raise


def discard_torn(path: Path) -> None:
    """Remove the temporary files of killed processes beside ``path``."""
    with suppress(OSError):
        for entry in path.parent.glob(f".{escape(path.name)}.*"):
            hidden = Hidden.parse(entry.name)
            if hidden is not None and hidden.target == path.name and hidden.stale:
                entry.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _lives(pid: int, start: str) -> bool:
    if os.name == "nt":  # there, os.kill(pid, 0) would end it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _short(_start(pid) or "") == start  # else the number was given to another process


def _start(pid: int) -> str | None:
    # Linux: state and start in clock ticks since boot, after the command, which may hold spaces and brackets.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "zombie" if fields[0] == "Z" else fields[19]
