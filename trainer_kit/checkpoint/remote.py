"""Checkpoints at a URL. The storage has no rename and no fsync; a directory with a manifest is a checkpoint.

The manifest is the commit: it is uploaded last and deleted first. While a checkpoint is uploaded or deleted, a small
file with a hidden name (see `trainer_kit.core.atomic_files`), the sign, stands beside it, which tells the work of a
dead process from that of a live one.

The order of a new upload: sign, files, manifest (from here on readers see the checkpoint), removal of the sign. Of a
replacement: sign, files and their manifest in a directory within the old checkpoint, then one new manifest at the top
that points to it (from here on readers see the new one), removal of the old files and of the sign.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer_kit.checkpoint.lock import LOCK, owner_of
from trainer_kit.checkpoint.manifest import (
    MANIFEST,
    REPLACEMENT,
    check_files,
    dump_manifest,
    is_library_file,
    read_manifest,
)
from trainer_kit.core.atomic_files import Hidden, Process, hidden_path
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath

__all__ = [
    "clean_uploads",
    "delete",
    "fetch_files",
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
    replaces = (target / MANIFEST).exists()
    work = target
    if replaces:
        work = target / f"again-{secrets.token_hex(4)}"
    target.parent.mkdir()
    # Before the first file, and removed after the last change: without it `clean_uploads` leaves the files alone.
    sign = _write_sign(target)
    try:
        # Leftovers of an unfinished upload could have the names of files that this one does not write.
        if not replaces:
            _discard_unlisted(target)
        work.mkdir()
        yield work
    except BaseException:
        # `clean_uploads` deletes what stays, because the sign stays too.
        with suppress(OSError):
            # First, as in every deletion: without it nothing below is a checkpoint.
            (work / MANIFEST).unlink(missing_ok=True)
            _remove_tree(work)
            sign.unlink()
        raise
    if replaces:
        # A failed request may have arrived: keep the files of both manifests; `clean_uploads` deletes the others.
        _point_to(target, work)
    # The checkpoint is there, so an error of the cleaning must not fail the save.
    with suppress(OSError):
        if replaces:
            _discard_unlisted(target)
        sign.unlink()


def delete(target: RemotePath) -> None:
    """Delete a checkpoint, the manifest first."""
    sign = _write_sign(target)
    # Without a manifest it is no checkpoint for any reader, whatever is deleted later.
    (target / MANIFEST).unlink(missing_ok=True)
    _remove_tree(target)
    sign.unlink(missing_ok=True)


def move(source: RemotePath, target: RemotePath) -> None:
    """Copy all files, then delete the old ones; after a kill in between both exist."""
    for file in _files(source):
        copy = target / file.url.removeprefix(f"{source}/")
        copy.parent.mkdir()
        file.copy_to(copy)
    _remove_tree(source)


def clean_uploads(root: RemotePath) -> list[str]:
    """Delete the files of unfinished uploads and deletions of dead processes that no manifest lists.

    If this process holds the directory's lock, processes of other hosts count as dead.

    Returns:
        The target names of these uploads and deletions.
    """
    if not root.is_dir():
        return []
    owner = owner_of(root)
    has_lock = owner is not None and owner.process == Process.this()
    cleaned: list[str] = []
    for entry in list(root.iterdir()):
        # Only signs lead to a deletion: files without a manifest alone may be a user's copy in progress.
        hidden = Hidden.parse(entry.name)
        if hidden is None:
            continue
        is_dead = hidden.stale or (has_lock and not hidden.on_this_host)
        if not is_dead or not entry.is_file():
            continue
        if hidden.target != LOCK:
            _discard_unlisted(root / hidden.target)
        # Last: after a kill in between, the next start finds the sign and goes on.
        entry.unlink(missing_ok=True)
        cleaned.append(hidden.target)
    return cleaned


def is_vacant(target: RemotePath) -> bool:
    """Whether the target is absent, or holds only leftovers of an unfinished upload."""
    if target.is_file() or (target / MANIFEST).exists():
        return False
    if not target.is_dir():
        return True
    return all(map(_is_removable, target.iterdir()))


@contextmanager
def fetch_files(root: Location, names: Iterable[str]) -> Iterator[Path]:
    """Yield a local directory with these files of ``root``: itself, or a temporary one. Errors name ``root``.

    Raises:
        CheckpointError: a file cannot be fetched.
    """
    if not isinstance(root, RemotePath):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="trainer_kit-") as temporary:
        directory = Path(temporary)
        for name in names:
            _fetch_file(root / name, directory / name)
        # A name of the temporary directory would tell the user nothing.
        try:
            yield directory
        except CheckpointError as error:
            name = Path(error.file).name
            raise CheckpointError(
                root / name, error.key, error.reason, fix=error.fix
            ) from error.__cause__


def _fetch_file(source: RemotePath, target: Path) -> None:
    try:
        source.fetch_to(target)
    except OSError as error:
        reason = f"it cannot be fetched to {target.parent}: {error.strerror or error}"
        fix = None
        if error.errno:
            fix = "make room there, or set TMPDIR to a place that has some"
        raise CheckpointError(source, None, reason, fix=fix) from error


def _write_sign(target: RemotePath) -> RemotePath:
    """Write the small file that shows that this process uploads or deletes ``target``."""
    sign = hidden_path(target, "tmp")
    # Not empty: some storages treat an empty file as a directory.
    sign.write_bytes(b"1\n")
    return sign


def _point_to(target: RemotePath, work: RemotePath) -> None:
    """Write a manifest that makes ``target`` the checkpoint whose files are in ``work``, within it."""
    # Read back before the old checkpoint is given up for it.
    try:
        manifest = read_manifest(work)
    except CheckpointError as error:
        raise OSError(
            f"the uploaded files were read back with different content: {error.reason}"
        ) from error
    (target / MANIFEST).write_bytes(dump_manifest({**manifest, "within": work.name}))


def _discard_unlisted(target: RemotePath) -> None:
    """Delete the files that the manifest does not list; without a manifest, all files."""
    listed_names = _listed_names(target)
    if target.is_dir():
        for entry in list(target.iterdir()):
            if entry.name in listed_names or not _is_removable(entry):
                continue
            if entry.is_dir():
                _remove_tree(entry)
            else:
                entry.unlink(missing_ok=True)
    target.rmdir()


def _listed_names(target: RemotePath) -> set[str]:
    """The names in ``target`` of the manifest and of what it lists; a torn manifest is written again if possible."""
    if not (target / MANIFEST).exists():
        return set()
    try:
        manifest = read_manifest(target)
    except CheckpointError as error:
        # The storage failed: what the manifest lists is unknown, so nothing may be deleted.
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from error
        # If the storage does not write a file in one step, the new manifest may be torn while its files are whole.
        intact = [entry for entry in target.iterdir() if _is_intact_replacement(entry)]
        if not intact:
            return set()
        # The torn manifest was to point to the files that were uploaded last.
        newest = max(intact, key=lambda entry: (_modified_ns(entry), entry))
        _point_to(target, newest)
        manifest = read_manifest(target)
    if "within" in manifest:
        return {manifest["within"], MANIFEST}
    return {*manifest["files"], MANIFEST}


def _is_intact_replacement(entry: RemotePath) -> bool:
    if not REPLACEMENT.fullmatch(entry.name):
        return False
    try:
        check_files(entry, read_manifest(entry))
    except CheckpointError:
        return False
    return True


def _modified_ns(directory: RemotePath) -> int:
    return (directory / MANIFEST).lstat().st_mtime_ns


def _is_removable(entry: RemotePath) -> bool:
    """Whether this library wrote an entry of a checkpoint's directory."""
    if not entry.is_dir():
        return is_library_file(entry)
    if not REPLACEMENT.fullmatch(entry.name):
        return False
    return all(map(is_library_file, entry.iterdir()))


def _remove_tree(directory: RemotePath) -> None:
    for file in _files(directory):
        file.unlink(missing_ok=True)
    # Object stores have no directories: with its last file a directory is gone.
    with suppress(FileNotFoundError):
        for entry in list(directory.iterdir()):
            entry.rmdir()
    directory.rmdir()


def _files(directory: RemotePath) -> list[RemotePath]:
    """All files below a directory."""
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return []
    files: list[RemotePath] = []
    for entry in entries:
        if entry.is_dir():
            files += _files(entry)
        else:
            files.append(entry)
    return files
