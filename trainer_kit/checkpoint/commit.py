"""Writing, replacing and removing checkpoints: at every instant a checkpoint is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.codec import encode
from trainer_kit.checkpoint.files import checksum, safetensors_bytes, write_file
from trainer_kit.checkpoint.lock import LOCK
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    DOCUMENT_MOST,
    FILE_NAME,
    LAYOUT,
    MANIFEST,
    SHARD,
    dump_manifest,
    is_ours,
    may_be_ours,
    new_manifest,
    read_manifest,
)
from trainer_kit.checkpoint.remote import clean_uploads, delete, is_vacant, upload_directory
from trainer_kit.core.atomic_files import Hidden, hidden_path, sync_directory
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "STAGED",
    "Snapshot",
    "carry_over",
    "check_staged",
    "check_target",
    "clean_incomplete",
    "delete_directory",
    "dump_document",
    "encode_info",
    "holds_only_a_save",
    "io_failure",
    "name_parts",
    "remove_checkpoint",
    "stage",
    "staged_files",
    "take_snapshot",
    "versions",
    "work_directory",
    "write_checkpoint",
    "write_snapshot",
]

_SINGLE_FILES: Final = ("index.json", LOCK)


@final
@dataclass(frozen=True)
class Snapshot:
    """A state encoded for writing: from here on it is only I/O.

    Attributes:
        document: the bytes of ``state.json``.
        tensors: by part, the tensors by name; a part without any has an empty dict.
        info: encoded, for the manifest.
    """

    document: bytes
    tensors: Mapping[str, Mapping[str, Tensor]]
    info: Any


def take_snapshot(
    state: Mapping[str, Any], *, info: Mapping[str, Any] | None = None, copy: bool | HostBuffers = True
) -> Snapshot:
    """Encode ``state``.

    Args:
        state: parts by name, such as ``{"model": ..., "optimizers": ...}``.
        info: what to know without reading the state: step, epoch, world size, … No tensors.
        copy: give every tensor memory of its own, so that training may go on before the snapshot is written; with
            buffers, the memory of the snapshot before, which must be written by then.

    Raises:
        CheckpointError: for a value that cannot be saved, naming its key path.

    Example:
        >>> take_snapshot({"progress": {"step": 3}}).document
        b'{"progress": {"step": 3}}'
    """
    trees: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    how = copy.copy if isinstance(copy, HostBuffers) else copy
    for part, value in state.items():
        if not isinstance(part, str):
            raise CheckpointError("the state to save", repr(part), "the parts of a checkpoint are named by strings")
        trees[part] = encode(value, tensors.setdefault(part, {}), at=part, copy=how)
    if isinstance(copy, HostBuffers):
        copy.end()
    return Snapshot(dump_document(trees), tensors, encode_info(info))


def dump_document(trees: Mapping[str, Any]) -> bytes:
    """The bytes of ``state.json``.

    Raises:
        CheckpointError: they are more than can be read.
    """
    document = json.dumps(trees, allow_nan=False).encode()
    if len(document) > DOCUMENT_MOST:
        found = f"{in_units(len(document))} that are neither tensors nor arrays, where at most"
        raise CheckpointError("the state to save", None, f"{found} {in_units(DOCUMENT_MOST)} can be saved")
    return document


def encode_info(info: Mapping[str, Any] | None) -> Any:
    """The info of a manifest.

    Raises:
        CheckpointError: there are tensors in it, or what cannot be saved at all.
    """
    loose: dict[str, Tensor] = {}
    header = encode(dict(info or {}), loose, at="info", copy=False)
    if loose:
        raise CheckpointError(
            "the state to save", f"info.{next(iter(loose))}", "the info of a checkpoint holds no tensors or arrays"
        )
    return header


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """Write a checkpoint directory; when this returns it is durable, when it raises there is nothing new.

    Args:
        path: the directory to make, or its URL; its parents are made too.
        state: parts by name. Tensors of the part ``model`` go to ``model.safetensors``, and so on; all else to
            ``state.json``. See `trainer_kit.checkpoint.codec.encode` for what can be saved.
        info: small plain data kept in the manifest, such as ``{"step": 1200, "epoch": 3}``.
        overwrite: replace a checkpoint that is there. Until the new one is durable the old one stays whole.
        staged: from `stage`: what was written there becomes part of the checkpoint.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: for a value that cannot be saved, a target that exists, too little space, or failed I/O.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.read import read_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/step-00000003", {"progress": {"step": 3}}, info={"step": 3})
        ...     sorted(file.name for file in path.iterdir()), read_checkpoint(path)
        (['manifest.json', 'state.json'], {'progress': {'step': 3}})
    """
    target = check_target(path, overwrite)
    return write_snapshot(target, take_snapshot(state, info=info, copy=False), overwrite=overwrite, staged=staged)


def write_snapshot(
    path: str | os.PathLike[str], snapshot: Snapshot, *, overwrite: bool = False, staged: Path | None = None
) -> Location:
    """The second half of `write_checkpoint`: no training state is touched, so any thread may run it."""
    target = check_target(path, overwrite)
    parts = name_parts(snapshot.tensors, taken=() if staged is None else os.listdir(staged))
    shards = {name: safetensors_bytes(snapshot.tensors[part]) for part, name in parts.items() if name is not None}
    needed = len(snapshot.document) + sum(size for size, _ in shards.values())
    with work_directory(target, needed, overwrite=overwrite, staged=staged) as work:
        files = {name: write_file(work / name, buffers) for name, (_, buffers) in shards.items()}
        files[DOCUMENT] = write_file(work / DOCUMENT, [snapshot.document])
        extra = None if staged is None else staged_files(staged, files)
        write_file(work / MANIFEST, [dump_manifest(new_manifest(files, parts, snapshot.info, versions(), extra=extra))])
    return target


def stage(target: Path) -> Path:
    """A work directory in which others may write before the checkpoint ``target`` is written over it, and committed.

    It is beside ``target``, hidden, and replaces what is there at the commit. `shutil.rmtree` gives it up.

    Raises:
        CheckpointError: ``target`` stays as it is, or the directory cannot be made.
    """
    work = hidden_path(target, "tmp")
    check_target(target, overwrite=True)
    try:
        _make_parents(_missing_parents(target))
        work.mkdir()
        write_file(work / STAGED, [])
    except OSError as error:
        raise io_failure(target, error, 0) from error
    return work


@contextmanager
def work_directory(
    target: Location, needed: int, *, overwrite: bool = False, staged: Path | None = None
) -> Iterator[Location]:
    """A hidden directory beside ``target``, which becomes ``target`` durably at the end, or is gone after an error.

    At a URL it is one that `trainer_kit.checkpoint.remote.upload_directory` makes.

    Whoever writes into it syncs its files, and writes the manifest last.

    Args:
        target: from `check_target`; its parents are made too.
        needed: bytes that will be written.
        overwrite: replace a checkpoint that is there.
        staged: from `stage`, to be this directory.

    Raises:
        CheckpointError: for too little space, or any failed I/O, also of the code inside.
    """
    if isinstance(target, RemotePath):
        try:
            with upload_directory(target) as there:
                yield there
        except OSError as error:
            raise io_failure(target, error, needed) from error
        return
    work, made = staged or hidden_path(target, "tmp"), _missing_parents(target)
    try:
        _make_parents(made)
        _check_space(target, needed)
        if staged is None:
            work.mkdir()
        else:
            check_staged(staged)
        yield work
        (work / STAGED).unlink(missing_ok=True)
        sync_directory(work)
        if overwrite and target.exists():
            _replace(work, target)
        else:
            os.rename(work, target)
            try:
                sync_directory(target.parent)
            except BaseException:
                os.rename(target, work)  # whether its name is on disk, nobody can say: it does not exist
                raise
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # somebody else uses it by now
                parent.rmdir()
        if isinstance(error, OSError):
            raise io_failure(target, error, needed) from error
        raise


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, also a damaged one; it is gone at once, never half there.

    Raises:
        CheckpointError: when it is not a checkpoint of this library, or cannot be deleted.
    """
    target = absolute(path)
    if not is_ours(target):
        raise CheckpointError(target, None, "not a checkpoint of this library, so it is not deleted")
    try:
        if isinstance(target, RemotePath):
            delete(target)
            return
        hidden = hidden_path(target, "tmp")
        os.rename(target, hidden)
        sync_directory(target.parent)
        delete_directory(hidden)
    except OSError as error:
        raise CheckpointError(target, None, f"could not be deleted: {error}") from error


def clean_incomplete(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what dead processes of this host left half written or half deleted; put back what they half replaced.

    Names that this library did not give, and work of living processes and of other hosts, are left alone.

    Returns:
        The names that the entries were meant to have, of all that were removed or put back.
    """
    root, found = locate(directory), list[str]()
    if isinstance(root, RemotePath):
        return clean_uploads(root)
    if not root.is_dir():
        return found
    for entry in sorted(root.iterdir(), key=lambda entry: entry.name.endswith(".tmp")):  # old ones are put back first
        hidden = Hidden.parse(entry.name)
        if hidden is None or not hidden.stale or entry.is_symlink():
            continue
        with suppress(FileNotFoundError):  # another rank cleans too
            if entry.is_file() and hidden.target in _SINGLE_FILES:
                entry.unlink()
                found.append(hidden.target)
            elif entry.is_dir() and hidden.suffix == "old" and not os.path.lexists(root / hidden.target):
                if not (is_ours(entry) or holds_only_a_save(entry)):
                    continue
                os.rename(entry, root / hidden.target)
                found.append(hidden.target)
            elif entry.is_dir() and holds_only_a_save(entry):
                shutil.rmtree(entry, ignore_errors=True)
                found.append(hidden.target)
    if found:
        sync_directory(root)
    return found


def check_target(path: str | os.PathLike[str], overwrite: bool) -> Location:
    """``path``, absolute, when a checkpoint may be written there.

    Raises:
        CheckpointError: it may not: the name is hidden, or something is there that stays.
    """
    target = absolute(path)
    if not target.name or target.name.startswith("."):
        raise CheckpointError(target, None, "a hidden name is not counted as a checkpoint", fix="use another name")
    try:
        taken = not is_vacant(target) if isinstance(target, RemotePath) else os.path.lexists(target)
    except OSError as error:
        raise io_failure(target, error, 0) from error
    if taken:
        if not overwrite:
            raise CheckpointError(target, None, "it exists already", fix="pass overwrite=True, or use another name")
        if not is_ours(target):
            raise CheckpointError(target, None, "not a checkpoint of this library, so it is not overwritten")
    return target


def name_parts(
    tensors: Mapping[str, Collection[Any]], suffix: str = SHARD, taken: Iterable[str] = ()
) -> dict[str, str | None]:
    """A file name for each part, the part's own where that is possible; None for a part without tensors.

    Args:
        tensors: of each part.
        suffix: of the names.
        taken: names of other files.
    """
    names: dict[str, str | None] = {}
    taken = {name.casefold() for name in taken}
    for part, members in tensors.items():
        name = part + suffix
        # Case is folded because some file systems do.
        if not FILE_NAME.fullmatch(name) or name.casefold() in taken:
            several = (f"part{i}{suffix}" for i in range(len(taken) + 1))
            name = next(name for name in several if name.casefold() not in taken)
        names[part] = name if members else None
        if members:
            taken.add(name.casefold())
    return names


def _make_parents(missing: list[Path]) -> None:
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        sync_directory(parent.parent)


def _missing_parents(target: Path) -> list[Path]:
    missing = []
    for parent in target.parents:
        if parent.exists():
            break
        missing.append(parent)
    return missing


def _check_space(target: Path, needed: int) -> None:
    usage = shutil.disk_usage(target.parent)
    if usage.total and needed > usage.free:  # some network file systems report nothing at all
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_failure(target: Location, error: OSError, needed: int) -> CheckpointError:
    """What ``error`` means for who wanted to write ``needed`` bytes there."""
    if isinstance(target, RemotePath):
        reason = error.strerror or str(error) or type(error).__name__
        return CheckpointError(target, None, f"{reason} (need {in_units(needed)})")
    try:
        near = next(parent for parent in target.parents if parent.exists())
        free = in_units(shutil.disk_usage(near).free)
    except OSError:
        free = "unknown"
    full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
    return CheckpointError(
        target,
        None,
        f"{error.strerror or error} (need {in_units(needed)}, free {free})",
        fix="free some space, or keep fewer checkpoints (save_top_k)" if full else None,
    )


def _replace(work: Path, target: Path) -> None:
    if _exchange(work, target):
        aside = work
        try:
            sync_directory(target.parent)
        except BaseException:
            _exchange(work, target)
            raise
    else:
        aside = hidden_path(target, "old")
        os.rename(target, aside)  # from here `clean_incomplete` would put it back
        try:
            os.rename(work, target)
            try:
                sync_directory(target.parent)
            except BaseException:
                os.rename(target, work)
                raise
        except BaseException:
            os.rename(aside, target)
            raise
    with suppress(OSError):  # the new one is durable: leftovers are for `clean_incomplete`
        carry_over(aside, target)
        delete_directory(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step, where kernel and file system can (renameat2, RENAME_EXCHANGE)."""
    if sys.platform != "linux":
        return False
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


@cache
def versions() -> dict[str, str]:
    """Of the libraries that write here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("trainer-kit")
    except PackageNotFoundError:
        own = "unknown"
    return {"trainer_kit": own, "torch": str(torch.__version__)}


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
