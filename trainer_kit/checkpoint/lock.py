"""Allow one writer per directory: a lock file names the process that writes there.

The lock protects what only one run may do in a directory of checkpoints: choose names, write the index, prune, and
discard incomplete saves. Readers take no lock, since a checkpoint is complete or absent at every instant. The file
is no lock of the system (those are inherited by forked workers, and missing on some network file systems): it counts
as long as the process that it names lives.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Final, final

from trainer_kit.checkpoint.files import (
    make_directories,
    missing_directories,
    read_file,
    write_file,
)
from trainer_kit.core.atomic_files import Process, hidden_path
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = ["LOCK", "DirectoryLock", "Owner", "is_free", "owner_of"]

LOCK: Final = ".lock"
_MAX_BYTES: Final = 1 << 16
"""Bytes of a lock file: one that anybody may have put there cannot exhaust the memory."""
_ATTEMPTS: Final = 20
"""How often taking the lock is tried while other processes take over, or release, the same file."""
_SETTLE_SECONDS: Final = 0.05
"""Seconds after which a takeover is verified."""
_DENIED_FIX: Final = (
    "choose a directory that this process may write to (dirpath=, default_root_dir=)"
)


_RIVALS: Final = "others that take the lock at the same time"


@final
@dataclass(frozen=True)
class Owner:
    """The owner of a lock.

    Attributes:
        process: the process that holds the lock.
        since: when it took the lock (UTC), for messages.
    """

    process: Process
    since: str

    def __str__(self) -> str:
        return f"pid {self.process.pid} on host {self.process.host} since {self.since}"


@final
class DirectoryLock:
    """The right to write into one directory. The constructor creates the directory and tests that it is writable.

    The lock is held until `release`. The lock of a dead owner is taken over. A forked process does not hold the lock.

    Args:
        directory: of checkpoints. `release` removes it if this lock made it and it is empty.

    Raises:
        CheckpointError: another process holds the lock, or the directory cannot be made or written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     lock = DirectoryLock(directory)
        ...     owner_of(directory).process.pid == os.getpid()
        ...     lock.release()
        ...     owner_of(directory) is None
        True
        True
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = absolute(directory)
        since = datetime.now(timezone.utc).isoformat(" ", "seconds")
        self.owner = Owner(Process.this(), since)
        self._file = self.directory / LOCK
        self._new_directories: list[Path] = []
        # Directories that were made for a lock that is refused do not stay.
        try:
            self._make_directory()
            if isinstance(self._file, RemotePath):
                self._acquire_remote(self._file)
            else:
                self._acquire(self._file)
        except BaseException as error:
            self._remove_directory()
            if isinstance(error, OSError):
                reason = f"no checkpoint can be written here: {error.strerror or error}"
                raise CheckpointError(
                    self.directory, None, reason, fix=_DENIED_FIX
                ) from error
            raise

    def release(self) -> None:
        """Release the lock; no effect if it is released already, or in a forked process, or after a takeover."""
        # A forked worker inherits this object: its exit must not release the lock of the run.
        if self.owner.process.pid != os.getpid():
            return
        with suppress(OSError):
            # Another process may have taken the lock over, for example after this one was suspended.
            if _read(self._file) == self.owner:
                self._file.unlink()
        self._remove_directory()

    def _make_directory(self) -> None:
        if isinstance(self.directory, RemotePath):
            self.directory.mkdir()
            return
        self._new_directories = missing_directories(self.directory)
        make_directories(self._new_directories)

    def _remove_directory(self) -> None:
        for directory in self._new_directories:
            # It fails where the directory is in use now, or was never made.
            with suppress(OSError):
                directory.rmdir()
        self._new_directories = []

    def _content(self) -> bytes:
        content = {**asdict(self.owner.process), "since": self.owner.since}
        return (json.dumps(content) + "\n").encode()

    def _acquire(self, file: Path) -> None:
        work = hidden_path(file, "tmp")
        try:
            # Whole before it gets its name: no process reads half a lock.
            write_file(work, [self._content()])
            for _ in range(_ATTEMPTS):
                if _put(work, file) or self._take_over(work, file):
                    return
        finally:
            work.unlink(missing_ok=True)
        raise self._refusal(_RIVALS)

    def _take_over(self, work: Path, file: Path) -> bool:
        """Replace the lock of a dead owner by ``work``; False if another process took it over first."""
        owner = _read(file)
        if owner is not None and not owner.process.dead:
            raise self._refusal(str(owner))
        try:
            with _open(file) as stale:
                # One process at a time gets past this line with the file of this dead owner.
                _wait_for(stale)
                opened = os.fstat(stale.fileno())
                is_same = os.path.samestat(opened, os.stat(file))
                # The process that was here before has put its own lock in place: look at that one.
                if not is_same or _read(file) != owner:
                    return False
                status = os.stat(work)
                os.replace(work, file)
        except FileNotFoundError:
            # Another process has taken it over and released it again.
            return False
        # Without file locks, another process may have done the same at the same time.
        time.sleep(_SETTLE_SECONDS)
        if not os.path.samestat(status, os.stat(file)):
            raise self._refusal(str(_read(file)))
        return True

    def _acquire_remote(self, file: RemotePath) -> None:
        """If the storage can create a file exclusively, the first process wins; else the last one to write wins."""
        # Storage without permission to write or delete is an error now, and not at the first save.
        probe = hidden_path(file, "tmp")
        probe.write_bytes(self._content())
        probe.unlink()
        if file.exists():
            owner = _read(file)
            # Another process may be writing it.
            if owner is None:
                time.sleep(_SETTLE_SECONDS)
                owner = _read(file)
            if owner is not None and not owner.process.dead:
                raise self._refusal(str(owner))
            file.unlink(missing_ok=True)
        with suppress(FileExistsError):
            file.write_bytes(self._content(), new=True)
        # Where two writers could both succeed, the file shows after a while who was the last one.
        time.sleep(_SETTLE_SECONDS)
        if _read(file) != self.owner:
            owner = _read(file)
            raise self._refusal(str(owner or _RIVALS))

    def _refusal(self, by: str) -> CheckpointError:
        return CheckpointError(
            self.directory,
            None,
            f"locked by {by}: two runs cannot write checkpoints to one directory",
            fix=f"give this run its own directory, or wait; if that run is dead, delete {self._file}",
        )


def owner_of(directory: str | os.PathLike[str]) -> Owner | None:
    """Return the live owner of a directory's lock; None without a lock, or if its owner is dead."""
    with suppress(OSError):
        owner = _read(locate(directory) / LOCK)
        if owner is not None and not owner.process.dead:
            return owner
    return None


def is_free(directory: str | os.PathLike[str]) -> bool:
    """Whether no other live process holds the lock of a directory."""
    owner = owner_of(directory)
    return owner is None or owner.process == Process.this()


_INCOMPLETE: Final = (
    FileNotFoundError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    RecursionError,
)
"""What the reading of a lock raises that is missing, or not written to its end."""


def _read(file: Location) -> Owner | None:
    """Return the owner in a lock file; None if the file is missing or incomplete: such a file locks nothing."""
    try:
        content: Any = json.loads(read_file(file, _MAX_BYTES).decode())
        host, pid = str(content["host"]), int(content["pid"])
        process = Process(host, pid, str(content["start"]))
        return Owner(process, str(content["since"]))
    except _INCOMPLETE:
        return None


def _put(work: Path, file: Path) -> bool:
    """Give ``work`` the name ``file`` in one step; False if that name exists."""
    # A link fails where the name exists, and gives it to a whole file; a rename would replace a lock that holds.
    try:
        os.link(work, file)
    except FileExistsError:
        return False
    except OSError:
        # The file system has no hard links: then another process may read half a lock, which counts as none.
        try:
            with open(file, "xb") as stream:
                stream.write(work.read_bytes())
        except FileExistsError:
            return False
    return True


def _open(file: Path) -> IO[bytes]:
    # Network file systems lock only files that are open for writing.
    try:
        return open(file, "r+b")
    except PermissionError:
        return open(file, "rb")


def _wait_for(file: IO[bytes]) -> None:
    """Wait until no other process takes over this file, if the file system has locks."""
    if os.name == "nt":
        return
    import fcntl

    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
