"""Files that others put into a checkpoint: what hooks write into its work directory before it is committed.

The manifest lists them under ``extra``, by path, with size and checksum. Into a checkpoint that has this entry other
programs may write afterwards, too: what it does not list is left alone, and kept when the checkpoint is replaced.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any, Final

from trainer_kit.checkpoint.files import checksum
from trainer_kit.checkpoint.manifest import DOCUMENT, LAYOUT, MANIFEST, may_be_ours, read_manifest
from trainer_kit.core.atomic_files import sync_directory
from trainer_kit.core.errors import CheckpointError

__all__ = ["STAGED", "carry_over", "check_staged", "delete_directory", "holds_only_a_save", "staged_files"]

STAGED: Final = ".staged"
"""In a work directory until the moment before it is renamed: everything in it belongs to an unfinished save."""


def check_staged(work: Path) -> None:
    """Refuse files of hooks that have the names of a checkpoint's own.

    Raises:
        CheckpointError: naming the file.
    """
    for name in (MANIFEST, DOCUMENT, LAYOUT):
        if os.path.lexists(work / name):
            raise CheckpointError(
                work / name,
                None,
                f"a hook wrote {name}, which is a file of the checkpoint itself",
                fix="let the hook write into a directory of its own: os.path.join(output_dir, 'mine')",
            )


def staged_files(work: Path, own: Collection[str]) -> dict[str, Any]:
    """What others wrote into a work directory, made durable: by path, the manifest's entries.

    Args:
        work: the directory.
        own: the files of the checkpoint itself.

    Raises:
        CheckpointError: something is neither a file nor a directory.
    """
    found: dict[str, Any] = {}
    for directory, names, files in os.walk(work):
        for path in (Path(directory, name) for name in (*names, *files)):
            relative, mode = path.relative_to(work).as_posix(), path.lstat().st_mode
            if relative in own or relative == STAGED or stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise CheckpointError(path, None, "a hook wrote something that is neither a file nor a directory")
            _sync(path)
            found[relative] = {"size": path.stat().st_size, "xxh3_64": checksum(path)}
        sync_directory(Path(directory))
    return dict(sorted(found.items()))


def _sync(file: Path) -> None:
    if os.name == "nt":  # it syncs only what is open for writing, and a hook's file may be read-only
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def carry_over(old: Path, new: Path) -> None:
    """Move what other programs put into a checkpoint that is replaced into the one that replaces it."""
    try:
        manifest = read_manifest(old)
    except CheckpointError:
        return
    if "extra" not in manifest:
        return
    listed = {MANIFEST, *manifest["files"], *_first_names(manifest["extra"])}
    for entry in old.iterdir():
        if entry.name not in listed and not os.path.lexists(new / entry.name):
            os.rename(entry, new / entry.name)


def holds_only_a_save(directory: Path) -> bool:
    """Whether nothing is in a hidden directory but what a save, or a deletion, of this library left there."""
    others = {file.name for file in directory.iterdir() if not may_be_ours(file)}
    if not others or STAGED in others:
        return True
    try:
        return others <= _first_names(read_manifest(directory).get("extra", {}))
    except CheckpointError:
        return False


def delete_directory(directory: Path) -> None:
    """Delete a hidden directory; the files of others first, so that `holds_only_a_save` is true of what is left."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif not may_be_ours(entry):
            entry.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=False)


def _first_names(paths: Collection[str]) -> set[str]:
    return {PurePosixPath(path).parts[0] for path in paths}
