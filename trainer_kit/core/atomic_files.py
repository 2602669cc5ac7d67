"""Temporary siblings of files and checkpoints: their names, and the process that writes each.

``.<name>.<pid>-<host><start><random>.tmp`` is being written or deleted; ``.old`` is being replaced. Host and start time
of the writing process are hashed to six hex digits each, so the name alone shows whether that process is alive.
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

__all__ = [
    "Hidden",
    "Process",
    "discard_torn",
    "hidden_path",
    "replace_file",
    "sync_directory",
]

# As `hidden_path` writes it: pid, then six hex digits each of the host, the start time and a random number.
_PATTERN: Final = re.compile(
    r"\.(.+)\.([1-9]\d{0,9})-([0-9a-f]{6})([0-9a-f]{6})[0-9a-f]{6}\.(tmp|old)",
    re.DOTALL,
)


_AnyPath = TypeVar("_AnyPath", Path, RemotePath)


def hidden_path(target: _AnyPath, suffix: str) -> _AnyPath:
    """A new hidden sibling of ``target``; ``suffix`` is tmp or old."""
    pid = os.getpid()
    # The random part tells the files of two threads apart.
    token = f"{_short(socket.gethostname())}{_short(_start(pid) or '')}{secrets.token_hex(3)}"
    return target.with_name(f".{target.name}.{pid}-{token}.{suffix}")


@final
@dataclass(frozen=True)
class Hidden:
    """The parsed name of a hidden sibling.

    Attributes:
        target: the name of the file or directory beside it.
        suffix: tmp or old.
        on_this_host: whether its writer runs, or ran, on this host. Processes of other hosts cannot be checked.
        stale: whether its writer ran on this host and has ended.
    """

    target: str
    suffix: str
    on_this_host: bool
    stale: bool

    @classmethod
    def parse(cls, name: str) -> Hidden | None:
        """Parse a file name; None if this library did not create it."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        target, pid, host, start, suffix = match.groups()
        on_this_host = host == _short(socket.gethostname())
        stale = on_this_host and not _lives(int(pid), start)
        return cls(target, suffix, on_this_host, stale)


@final
@dataclass(frozen=True)
class Process:
    """A process, identified by host, pid and start time, because the system reuses pids.

    Attributes:
        host: the name of its machine.
        pid: its process id.
        start: its start time as the system reports it (Linux: clock ticks since boot); empty if unknown.
    """

    host: str
    pid: int
    start: str

    @classmethod
    def this(cls) -> Process:
        """The current process."""
        return cls(socket.gethostname(), os.getpid(), _start(os.getpid()) or "")

    @property
    def dead(self) -> bool:
        """Whether it ran on this host and has ended; False for other hosts, whose processes cannot be checked."""
        if self.host != socket.gethostname():
            return False
        return not _lives(self.pid, _short(self.start))


def replace_file(path: Path | RemotePath, data: bytes, mode: int = 0o666) -> None:
    """Replace a file durably and atomically: after a crash it has the old content or the new.

    Args:
        path: the file.
        data: its new content.
        mode: permissions of a local file, before the umask.

    Raises:
        OSError: the file cannot be written.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    work = hidden_path(path, "tmp")

    def open_with_mode(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    try:
        with open(work, "xb", opener=open_with_mode) as file:
            file.write(data)
            file.flush()
            # Before the rename: a file system may write names before contents, and a crash between them would leave
            # an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(work, path)
        # Until its directory is on disk, a crash brings the old file back.
        sync_directory(path.parent)
    except BaseException:
        # Also at a KeyboardInterrupt: while this process lives, `discard_torn` leaves the sibling alone.
        with suppress(OSError):
            work.unlink()
        raise


def discard_torn(path: Path) -> None:
    """Remove the temporary files of killed processes beside ``path``."""
    # Another process may discard them at the same time, and a directory may be read-only: they only take space.
    with suppress(OSError):
        for entry in path.parent.glob(f".{escape(path.name)}.*"):
            hidden = Hidden.parse(entry.name)
            if hidden is not None and hidden.target == path.name and hidden.stale:
                entry.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk. Does nothing on Windows, which has no such call and needs none."""
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
    # On Windows, os.kill(pid, 0) would end the process.
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It exists, and belongs to another user.
        pass
    # With another start time, another process has reused the pid. Where the system does not tell start times, both
    # are the hash of an empty text, and the pid alone decides.
    return _short(_start(pid) or "") == start


def _start(pid: int) -> str | None:
    # Linux: state and start time (clock ticks) follow the command name, which may contain spaces and brackets.
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    # A zombie still has its pid and start time, but has ended: this word is no start time of a process.
    if fields[0] == "Z":
        return "zombie"
    return fields[19]
