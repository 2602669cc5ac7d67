"""Checkpoints at a URL: a storage without rename and fsync, where the manifest alone makes a checkpoint.

It is uploaded last and deleted first. Beside a checkpoint that is being uploaded or deleted stands a small file under a
hidden name (see `trainer_kit.core.atomic_files`), so that what a dead process left can be told from work that goes on.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.lock import LOCK, owner_of
from trainer_kit.checkpoint.manifest import AGAIN, MANIFEST, check_files, dump_manifest, may_be_ours, read_manifest
from trainer_kit.core.atomic_files import Hidden, Process, hidden_path
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath

__all__ = ["clean_uploads", "delete", "fetched", "is_vacant", "move", "upload_directory"]


@contextmanager
def upload_directory(target: RemotePath) -> Iterator[RemotePath]:
    """Where to upload the files of ``target`` to, the manifest last; after an error nothing new is there.

    What is there stays whole until the new manifest replaces the old one, in one request: until then the new files
    stand in a directory of their own within it, and stay there.

    Raises:
        OSError: the storage failed, also in the code inside.
    """
    again = (target / MANIFEST).exists()
    work = target / f"again-{secrets.token_hex(4)}" if again else target
    target.parent.mkdir()
    sign = _declare(target)
    try:
        if not again:
            _discard(target)  # of an upload that nobody finished
        work.mkdir()
        yield work
    except BaseException:
        with suppress(OSError):  # what stays, and the sign with it, is for `clean_uploads`
            (work / MANIFEST).unlink(missing_ok=True)
            _remove_tree(work)
            sign.unlink()
        raise
    if again:
        # A request that failed may have arrived: what either manifest means stays, the rest is for `clean_uploads`.
        _point(target, work)
    with suppress(OSError):
        if again:
            _discard(target)
        sign.unlink()


def delete(target: RemotePath) -> None:
    """Delete a checkpoint: from its first file on it is none."""
    sign = _declare(target)
    (target / MANIFEST).unlink(missing_ok=True)
    _remove_tree(target)
    sign.unlink(missing_ok=True)


def move(old: RemotePath, new: RemotePath) -> None:
    """Copy all files, then delete the old ones: killed in between, both are there."""
    for file in _files(old):
        copy = new / file.url.removeprefix(f"{old}/")
        copy.parent.mkdir()
        file.copy_to(copy)
    _remove_tree(old)


def clean_uploads(root: RemotePath) -> list[str]:
    """Remove what no manifest lists of uploads and deletions that dead processes began.

    Whoever holds the directory's lock also takes those of other hosts for dead.

    Returns:
        The names that they were meant to have.
    """
    owner, found = owner_of(root), list[str]()
    held = owner is not None and owner.process == Process.this()
    for entry in list(root.iterdir()) if root.is_dir() else ():
        hidden = Hidden.parse(entry.name)
        if hidden is None or not (hidden.stale or (held and not hidden.here)) or not entry.is_file():
            continue
        if hidden.target != LOCK:
            _discard(root / hidden.target)
        entry.unlink(missing_ok=True)
        found.append(hidden.target)
    return found


def is_vacant(target: RemotePath) -> bool:
    """Whether nothing is there but what an upload left that nobody finished."""
    if target.is_file() or (target / MANIFEST).exists():
        return False
    return all(map(_may_go, target.iterdir())) if target.is_dir() else True


@contextmanager
def fetched(root: Location, names: Iterable[str]) -> Iterator[Path]:
    """A directory of this machine with these files of ``root``: itself, or a temporary one. Errors name ``root``.

    Raises:
        CheckpointError: a file cannot be fetched.
    """
    if not isinstance(root, RemotePath):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="trainer_kit-") as directory:
        here = Path(directory)
        for name in names:
            try:
                (root / name).fetch_to(here / name)
            except OSError as error:
                reason = f"it cannot be fetched to {here}: {error.strerror or error}"
                fix = "make room there, or set TMPDIR to a place that has some" if error.errno else None
                raise CheckpointError(root / name, None, reason, fix=fix) from error
        try:
            yield here
        except CheckpointError as error:
            name = Path(error.file).name
            raise CheckpointError(root / name, error.key, error.reason, fix=error.fix) from error.__cause__


def _declare(target: RemotePath) -> RemotePath:
    sign = hidden_path(target, "tmp")
    sign.write_bytes(b"1\n")  # some storages take an empty file for a directory
    return sign


def _point(target: RemotePath, work: RemotePath) -> None:
    """Let ``target`` be the checkpoint that stands in ``work``, within it."""
    try:
        manifest = read_manifest(work)
    except CheckpointError as error:
        raise OSError(f"what was written came back otherwise: {error.reason}") from error
    (target / MANIFEST).write_bytes(dump_manifest({**manifest, "within": work.name}))


def _discard(target: RemotePath) -> None:
    """Delete what its manifest does not list; all of it where there is none."""
    kept: set[Any] = set()
    if (target / MANIFEST).exists():
        try:
            manifest = read_manifest(target)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            # Where the storage does not write a file at once, the new manifest may be torn: its files are there.
            whole = sorted((_time(entry), entry) for entry in target.iterdir() if _is_whole(entry))
            if whole:
                _point(target, whole[-1][1])
            manifest = read_manifest(target) if whole else {"files": ()}
        kept = {manifest["within"]} if "within" in manifest else {*manifest["files"]}
        kept |= {MANIFEST} if kept else set()
    for entry in list(target.iterdir()) if target.is_dir() else ():
        if entry.name not in kept and _may_go(entry):
            _remove_tree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
    target.rmdir()


def _is_whole(entry: RemotePath) -> bool:
    if not AGAIN.fullmatch(entry.name):
        return False
    try:
        check_files(entry, read_manifest(entry))
    except CheckpointError:
        return False
    return True


def _time(directory: RemotePath) -> int:
    return (directory / MANIFEST).lstat().st_mtime_ns


def _may_go(entry: RemotePath) -> bool:
    if entry.is_dir():
        return AGAIN.fullmatch(entry.name) is not None and all(map(may_be_ours, entry.iterdir()))
    return may_be_ours(entry)


def _remove_tree(directory: RemotePath) -> None:
    for file in _files(directory):
        file.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        for entry in list(directory.iterdir()):
            entry.rmdir()
    directory.rmdir()


def _files(directory: RemotePath) -> list[RemotePath]:
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    return [file for entry in entries for file in (_files(entry) if entry.is_dir() else [entry])]
