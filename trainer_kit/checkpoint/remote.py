"""Checkpoints at a URL. The storage has no rename and no fsync; a directory with a manifest is a checkpoint.

The manifest is uploaded last and deleted first. While a checkpoint is uploaded or deleted, a small file with a hidden
name (see `trainer_kit.core.atomic_files`) stands beside it, which tells the work of a dead process from that of a live
one.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.lock import LOCK, owner_of
from trainer_kit.checkpoint.manifest import (
    AGAIN,
    MANIFEST,
    check_files,
    dump_manifest,
    may_be_ours,
    read_manifest,
)
from trainer_kit.core.atomic_files import Hidden, Process, hidden_path
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath

__all__ = [
    "clean_uploads",
    "delete",
    "fetched",
    "is_vacant",
    "move",
    "upload_directory",
]


@contextmanager
def upload_directory(target: RemotePath) -> Iterator[RemotePath]:
    """Yield the directory to which to upload the files of ``target``, the manifest last; undo the upload on an error.

    An existing checkpoint stays whole until one request replaces its manifest. The new files are uploaded to a separate
    directory within it, and stay there.

    Raises:
        OSError: the storage failed, also in the code inside.
    """
    again = (target / MANIFEST).exists()
    work = target / f"again-{secrets.token_hex(4)}" if again else target
    target.parent.mkdir()
    sign = _declare(target)
    try:
        if not again:
            _discard(target)  # leftovers of an unfinished upload
        work.mkdir()
        yield work
    except BaseException:
        with suppress(
            OSError
        ):  # `clean_uploads` deletes what stays, because the sign stays too
            (work / MANIFEST).unlink(missing_ok=True)
            _remove_tree(work)
            sign.unlink()
        raise
    if again:
        # A failed request may have arrived: keep the files of both manifests; `clean_uploads` deletes the rest.
        _point(target, work)
    with suppress(OSError):
        if again:
            _discard(target)
        sign.unlink()


def delete(target: RemotePath) -> None:
    """Delete a checkpoint, the manifest first."""
    sign = _declare(target)
    (target / MANIFEST).unlink(missing_ok=True)
    _remove_tree(target)
    sign.unlink(missing_ok=True)


def move(old: RemotePath, new: RemotePath) -> None:
    """Copy all files, then delete the old ones; after a kill in between both exist."""
    for file in _files(old):
        copy = new / file.url.removeprefix(f"{old}/")
        copy.parent.mkdir()
        file.copy_to(copy)
    _remove_tree(old)


def clean_uploads(root: RemotePath) -> list[str]:
    """Delete the files of unfinished uploads and deletions of dead processes that no manifest lists.

    If this process holds the directory's lock, processes of other hosts count as dead.

    Returns:
        The target names of these uploads and deletions.
    """
    owner, found = owner_of(root), list[str]()
    held = owner is not None and owner.process == Process.this()
    for entry in list(root.iterdir()) if root.is_dir() else ():
        hidden = Hidden.parse(entry.name)
        if (
            hidden is None
            or not (hidden.stale or (held and not hidden.here))
            or not entry.is_file()
        ):
            continue
        if hidden.target != LOCK:
            _discard(root / hidden.target)
        entry.unlink(missing_ok=True)
        found.append(hidden.target)
    return found


def is_vacant(target: RemotePath) -> bool:
    """Whether the target is absent, or holds only leftovers of an unfinished upload."""
    if target.is_file() or (target / MANIFEST).exists():
        return False
    return all(map(_may_go, target.iterdir())) if target.is_dir() else True


@contextmanager
def fetched(root: Location, names: Iterable[str]) -> Iterator[Path]:
    """Yield a local directory with these files of ``root``: itself, or a temporary one. Errors name ``root``.

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
                fix = (
                    "make room there, or set TMPDIR to a place that has some"
                    if error.errno
                    else None
                )
                raise CheckpointError(root / name, None, reason, fix=fix) from error
        try:
            yield here
        except CheckpointError as error:
            name = Path(error.file).name
            raise CheckpointError(
                root / name, error.key, error.reason, fix=error.fix
            ) from error.__cause__


def _declare(target: RemotePath) -> RemotePath:
    sign = hidden_path(target, "tmp")
    sign.write_bytes(b"1\n")  # some storages treat an empty file as a directory
    return sign


def _point(target: RemotePath, work: RemotePath) -> None:
    """Write a manifest that makes ``target`` the checkpoint whose files are in ``work``, within it."""
    try:
        manifest = read_manifest(work)
    except CheckpointError as error:
        raise OSError(
            f"the uploaded files were read back with another content: {error.reason}"
        ) from error
    (target / MANIFEST).write_bytes(dump_manifest({**manifest, "within": work.name}))


def _discard(target: RemotePath) -> None:
    """Delete the files that the manifest does not list; without a manifest, all files."""
    kept: set[Any] = set()
    if (target / MANIFEST).exists():
        try:
            manifest = read_manifest(target)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            # If the storage does not write a file in one step, the new manifest may be torn while its files are whole.
            whole = sorted(
                (_time(entry), entry) for entry in target.iterdir() if _is_whole(entry)
            )
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
        return AGAIN.fullmatch(entry.name) is not None and all(
            map(may_be_ours, entry.iterdir())
        )
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
    return [
        file
        for entry in entries
        for file in (_files(entry) if entry.is_dir() else [entry])
    ]
