"""Write, replace and remove checkpoints: at every instant a checkpoint is complete or absent.

The order of effects on a local disk, which `work_directory` and its callers keep:

1. A hidden directory is created beside the target. No reader looks into it; its name shows the process that writes it.
2. Each file is written and fsynced, the manifest last: it lists the sizes and checksums of all others.
3. The hidden directory is fsynced, so that the names of the files are durable.
4. It is renamed to the target: from here on readers see the checkpoint.
5. The parent directory is fsynced: from here on the checkpoint is durable, and older ones may be deleted.

A kill before step 4 leaves a hidden directory, which `clean_incomplete` deletes at the next start. URLs have neither
rename nor fsync: `trainer_kit.checkpoint.remote` says what takes their place.

Hooks may write files into the work directory of a checkpoint before its commit. The manifest lists them under
``extra``, by path, with size and checksum. A checkpoint with this entry may also get files from other programs later:
files that the manifest does not list are ignored, and kept when the checkpoint is replaced.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.encoding import encode
from trainer_kit.checkpoint.files import (
    checksum,
    make_directories,
    missing_directories,
    named_failure,
    safetensors_bytes,
    write_file,
)
from trainer_kit.checkpoint.lock import LOCK
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    FILE_NAME,
    LAYOUT,
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    SHARD,
    FileEntries,
    dump_manifest,
    has_library_manifest,
    is_library_file,
    new_manifest,
    next_commit,
    read_manifest,
)
from trainer_kit.checkpoint.remote import (
    clean_uploads,
    delete,
    is_vacant,
    upload_directory,
)
from trainer_kit.core.atomic_files import Hidden, hidden_path, sync_directory
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "Snapshot",
    "check_target",
    "clean_incomplete",
    "dump_document",
    "encode_info",
    "io_failure",
    "io_failures",
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
_STAGED: Final = ".staged"
"""A file in a work directory until just before the commit: it marks the directory as an unfinished save."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@final
@dataclass(frozen=True)
class Snapshot:
    """An encoded state. Writing it is only I/O.

    Attributes:
        document: the bytes of ``state.json``.
        tensors: the tensors by part and name; the dict of a part without tensors is empty.
        info: encoded, for the manifest.
    """

    document: bytes
    tensors: Mapping[str, Mapping[str, Tensor]]
    info: object


def take_snapshot(
    state: Mapping[str, object],
    *,
    info: Mapping[str, object] | None = None,
    copy: bool | HostBuffers = True,
) -> Snapshot:
    """Encode ``state``.

    Args:
        state: parts by name, such as ``{"model": ..., "optimizers": ...}``.
        info: values that are readable without the state: step, epoch, world size, … No tensors.
        copy: copy every tensor, so that training may change it before the snapshot is written. `HostBuffers` reuse
            the memory of the previous snapshot, which must be written already.

    Raises:
        CheckpointError: a value cannot be saved; its key path is named.

    Example:
        >>> take_snapshot({"progress": {"step": 3}}).document
        b'{"progress": {"step": 3}}'
    """
    trees: dict[str, object] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    copier: bool | Callable[[str, Tensor], Tensor]
    if isinstance(copy, HostBuffers):
        copier = copy.copy
    else:
        copier = copy
    for part_name, value in state.items():
        if not isinstance(part_name, str):
            raise CheckpointError(
                "the state to save",
                repr(part_name),
                "the parts of a checkpoint are named by strings",
            )
        trees[part_name] = encode(
            value, tensors.setdefault(part_name, {}), at=part_name, copy=copier
        )
    if isinstance(copy, HostBuffers):
        # Copies from an accelerator run until here; once it returns, training may change the tensors.
        copy.end()
    return Snapshot(dump_document(trees), tensors, encode_info(info))


def dump_document(trees: Mapping[str, object]) -> bytes:
    """Return the bytes of ``state.json``.

    Raises:
        CheckpointError: the bytes are more than `read_checkpoint` accepts.
    """
    document = json.dumps(trees, allow_nan=False).encode()
    if len(document) > MAX_DOCUMENT_BYTES:
        reason = (
            f"{in_units(len(document))} that are neither tensors nor arrays, where at most"
            f" {in_units(MAX_DOCUMENT_BYTES)} can be saved"
        )
        raise CheckpointError("the state to save", None, reason)
    return document


def encode_info(info: Mapping[str, object] | None) -> object:
    """Encode the info of a manifest.

    Raises:
        CheckpointError: ``info`` holds a tensor, an array, or another value that cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    header = encode(dict(info or {}), tensors, at="info", copy=False)
    if tensors:
        reason = "the info of a checkpoint holds no tensors or arrays"
        raise CheckpointError(
            "the state to save", f"info.{next(iter(tensors))}", reason
        )
    return header


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    info: Mapping[str, object] | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """Write a checkpoint directory. It is durable when this function returns; an error leaves no new checkpoint.

    Args:
        path: the directory to create, or its URL; missing parents are created.
        state: parts by name. The tensors of the part ``model`` go to ``model.safetensors``, and so on; all other
            values go to ``state.json``. `trainer_kit.checkpoint.encoding.encode` lists the types that can be saved.
        info: small plain data for the manifest, such as ``{"step": 1200, "epoch": 3}``.
        overwrite: replace an existing checkpoint. The old one stays whole until the new one is durable.
        staged: from `stage`: the files in this directory become part of the checkpoint.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: a value cannot be saved, the target exists, the space is too small, or I/O fails.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.read import read_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/step-00000003", {"progress": {"step": 3}}, info={"step": 3})
        ...     sorted(file.name for file in path.iterdir()), read_checkpoint(path)
        (['manifest.json', 'state.json'], {'progress': {'step': 3}})
    """
    # First: a state of many gigabytes is not encoded for a target that is refused.
    target = check_target(path, overwrite)
    # No copy: the caller waits, so nothing changes the state until it is written.
    snapshot = take_snapshot(state, info=info, copy=False)
    return write_snapshot(target, snapshot, overwrite=overwrite, staged=staged)


def write_snapshot(
    path: str | os.PathLike[str],
    snapshot: Snapshot,
    *,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """Write a snapshot as `write_checkpoint` does; this touches no training state, so any thread may call it."""
    target = check_target(path, overwrite)
    files_of_hooks: list[str] = []
    if staged is not None:
        files_of_hooks = os.listdir(staged)
    parts = name_parts(snapshot.tensors, taken=files_of_hooks)
    # All sizes are known before the first byte is written, so that a full disk is noticed first.
    needed = len(snapshot.document)
    buffers_by_name = {}
    for part_name, name in parts.items():
        if name is not None:
            size, buffers = safetensors_bytes(snapshot.tensors[part_name])
            needed += size
            buffers_by_name[name] = buffers
    with work_directory(target, needed, overwrite=overwrite, staged=staged) as work:
        files = {
            name: write_file(work / name, buffers)
            for name, buffers in buffers_by_name.items()
        }
        files[DOCUMENT] = write_file(work / DOCUMENT, [snapshot.document])
        extra = None
        if staged is not None:
            extra = staged_files(staged, files)
        # As late as possible: the number must be above those that other saves have committed meanwhile.
        committed = next_commit(target.parent)
        manifest = new_manifest(
            files, parts, snapshot.info, versions(), committed, extra=extra
        )
        # Last: a manifest never lists a file that is not whole. Leaving the context commits.
        write_file(work / MANIFEST, [dump_manifest(manifest)])
    return target


def stage(target: Path) -> Path:
    """Create a hidden work directory beside ``target``, into which hooks may write before the checkpoint is written.

    The commit of the checkpoint renames it to ``target``. `shutil.rmtree` abandons it.

    Raises:
        CheckpointError: ``target`` is not a checkpoint and may not be replaced, or the directory cannot be made.
    """
    work = hidden_path(target, "tmp")
    check_target(target, overwrite=True)
    with io_failures(target):
        make_directories(missing_directories(target.parent))
        work.mkdir()
        # Hooks write files of any name: without this one `clean_incomplete` would spare the directory as foreign.
        write_file(work / _STAGED, [])
    return work


@contextmanager
def work_directory(
    target: Location,
    needed: int,
    *,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Iterator[Location]:
    """Yield a hidden directory beside ``target``; at the end rename it to ``target``, after an error delete it.

    At a URL, `trainer_kit.checkpoint.remote.upload_directory` creates the directory. The caller syncs the files that it
    writes, and writes the manifest last.

    Args:
        target: from `check_target`; missing parents are created.
        needed: the number of bytes that will be written.
        overwrite: replace an existing checkpoint.
        staged: from `stage`: use this directory.

    Raises:
        CheckpointError: the space is too small, or I/O fails here or in the code inside.
    """
    if isinstance(target, RemotePath):
        with io_failures(target, needed), upload_directory(target) as upload:
            yield upload
        return
    work = staged or hidden_path(target, "tmp")
    new_parents = missing_directories(target.parent)
    new_directory: os.stat_result | None = None
    try:
        make_directories(new_parents)
        # Before anything is written: a full disk should not hold half a checkpoint meanwhile.
        _check_space(target, needed)
        if staged is None:
            work.mkdir()
        else:
            _check_staged(staged)
        new_directory = work.stat()
        yield work
        # From here on the manifest alone says that the save is whole.
        (work / _STAGED).unlink(missing_ok=True)
        # The names of its files must be durable before the name of the directory is.
        sync_directory(work)
        # The commit, in one of two ways: when it returns, the checkpoint is durable under its name.
        if overwrite and target.exists():
            _replace(work, target)
        else:
            _rename(work, target)
    except BaseException as error:
        # Also after a failed commit, which has given the directory its hidden name back. Where it could not, the
        # previous checkpoint has that name.
        if new_directory is None or _has_name(new_directory, work):
            shutil.rmtree(work, ignore_errors=True)
        for parent in new_parents:
            # It fails where another process has written into the directory since.
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise io_failure(target, error, needed) from error
        raise


def _has_name(directory: os.stat_result, path: Path) -> bool:
    """Whether a directory is the one at ``path`` now."""
    try:
        return os.path.samestat(directory, path.stat())
    except OSError:
        return False


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint, whole or damaged, in one step.

    Raises:
        CheckpointError: ``path`` is not a checkpoint of this library, or cannot be deleted.
    """
    target = absolute(path)
    # A wrong path must not delete the user's files.
    if not has_library_manifest(target):
        raise CheckpointError(
            target, None, "not a checkpoint of this library, so it is not deleted"
        )
    with named_failure(target, "could not be deleted"):
        if isinstance(target, RemotePath):
            delete(target)
            return
        hidden = hidden_path(target, "tmp")
        # In one step the checkpoint is gone for every reader; deleting the files takes longer.
        os.rename(target, hidden)
        # Durable before the first file goes: otherwise a crash could bring back the name with half the files.
        sync_directory(target.parent)
        _delete_directory(hidden)


def clean_incomplete(directory: str | os.PathLike[str]) -> list[str]:
    """Delete the unfinished saves and deletions of dead processes of this host; restore half-replaced checkpoints.

    Names that this library did not give, and the work of live processes and of other hosts, stay.

    Returns:
        The target names of all entries that were deleted or restored.
    """
    root = locate(directory)
    if isinstance(root, RemotePath):
        return clean_uploads(root)
    if not root.is_dir():
        return []
    cleaned: list[str] = []
    # Entries that end in .old come first: a checkpoint is restored before leftovers of its replacement are deleted.
    entries = list(root.iterdir())
    entries.sort(key=lambda entry: entry.name.endswith(".tmp"))
    stale_entries: list[tuple[Path, Hidden]] = []
    for entry in entries:
        hidden = Hidden.parse(entry.name)
        # Of a live process, or one of another host that cannot be seen, it may be a save under way.
        if hidden is not None and hidden.stale and not entry.is_symlink():
            stale_entries.append((entry, hidden))
    is_durable = bool(stale_entries) and _sync_names(root)
    for entry, hidden in stale_entries:
        # Another process may clean at the same time.
        with suppress(FileNotFoundError):
            if _clean_entry(entry, hidden, is_durable):
                cleaned.append(hidden.target)
    if cleaned:
        # A restored checkpoint must not disappear again with a power failure.
        sync_directory(root)
    return cleaned


def _sync_names(directory: Path) -> bool:
    """Whether the names in a directory are durable now: some file systems cannot do that for a directory."""
    try:
        sync_directory(directory)
    except OSError:
        return False
    return True


def _clean_entry(entry: Path, hidden: Hidden, is_durable: bool) -> bool:
    """Delete or restore a hidden entry of a dead process; False where it stays.

    Args:
        entry: the file or directory.
        hidden: its parsed name.
        is_durable: whether the names in its directory are.
    """
    if entry.is_file():
        if hidden.target not in _SINGLE_FILES:
            return False
        entry.unlink()
        return True
    if not entry.is_dir():
        return False
    target = entry.parent / hidden.target
    # Killed in `_replace` between its two renames: the new checkpoint never got the name, so the old one counts.
    if hidden.suffix == "old" and not os.path.lexists(target):
        if not has_library_manifest(entry) and not _holds_only_a_save(entry):
            return False
        os.rename(entry, target)
        return True
    if not _holds_only_a_save(entry):
        return False
    # It may be the checkpoint that another one replaced just before the kill: that one must be durable first.
    if not is_durable and os.path.lexists(target):
        return False
    shutil.rmtree(entry, ignore_errors=True)
    return True


def check_target(path: str | os.PathLike[str], overwrite: bool) -> Location:
    """Return ``path``, absolute, if a checkpoint may be written there.

    Raises:
        CheckpointError: the name is hidden, or something exists there that may not be replaced.
    """
    target = absolute(path)
    if not target.name or target.name.startswith("."):
        raise CheckpointError(
            target,
            None,
            "a name that starts with a dot is not a checkpoint",
            fix="use another name",
        )
    with io_failures(target):
        if isinstance(target, RemotePath):
            exists = not is_vacant(target)
        else:
            exists = os.path.lexists(target)
    if exists and not overwrite:
        raise CheckpointError(
            target,
            None,
            "it exists already",
            fix="pass overwrite=True, or use another name",
        )
    # Also with overwrite=True: a wrong path must not cost the user another directory.
    if exists and not has_library_manifest(target):
        raise CheckpointError(
            target, None, "not a checkpoint of this library, so it is not overwritten"
        )
    return target


def name_parts(
    tensors: Mapping[str, Collection[object]],
    suffix: str = SHARD,
    taken: Iterable[str] = (),
) -> dict[str, str | None]:
    """Return a file name for each part, made from the part's name if possible; None for a part without tensors.

    Args:
        tensors: the tensors of each part.
        suffix: the suffix of the file names.
        taken: names of other files.
    """
    names: dict[str, str | None] = {}
    # Some file systems ignore case.
    used = {name.casefold() for name in taken}
    for part_name, members in tensors.items():
        if not members:
            names[part_name] = None
            continue
        name = part_name + suffix
        if not FILE_NAME.fullmatch(name) or name.casefold() in used:
            # One more name than are used, so one of them is free.
            numbered = [f"part{number}{suffix}" for number in range(len(used) + 1)]
            name = next(name for name in numbered if name.casefold() not in used)
        names[part_name] = name
        used.add(name.casefold())
    return names


def _check_space(target: Path, needed: int) -> None:
    usage = shutil.disk_usage(target.parent)
    # Some network file systems report a total of 0.
    if usage.total and needed > usage.free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_failure(
    target: Location,
    error: OSError,
    needed: int,
) -> CheckpointError:
    """Make the `CheckpointError` for an ``error`` while ``needed`` bytes were written to ``target``."""
    if isinstance(target, RemotePath):
        reason = error.strerror or str(error) or type(error).__name__
        return CheckpointError(target, None, f"{reason} (need {in_units(needed)})")
    try:
        # The target's own directory may not exist yet.
        parent = next(parent for parent in target.parents if parent.exists())
        free = in_units(shutil.disk_usage(parent).free)
    except OSError:
        free = "unknown"
    fix = None
    # Not every system has an error for quotas.
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        fix = "free some space, or keep fewer checkpoints (save_top_k)"
    return CheckpointError(
        target,
        None,
        f"{error.strerror or error} (need {in_units(needed)}, free {free})",
        fix=fix,
    )


@contextmanager
def io_failures(target: Location, needed: int = 0) -> Iterator[None]:
    """Turn an ``OSError`` inside into its `io_failure`."""
    try:
        yield
    # One of them is an OSError too, and says already what is wrong.
    except CheckpointError:
        raise
    except OSError as error:
        raise io_failure(target, error, needed) from error


def _replace(work: Path, target: Path) -> None:
    """Give ``work`` the name of the checkpoint ``target``, and delete that one once the new one is durable."""
    # A directory that is not empty cannot be replaced by a rename, so the two names are swapped.
    if _exchange(work, target):
        replaced = work
        try:
            sync_directory(target.parent)
        except BaseException as error:
            # Whether the swap is durable is unknown: the save fails, and the old checkpoint gets its name back.
            if _exchange(work, target):
                raise
            # It is the only checkpoint that is surely durable: a failed save does not delete it.
            old = hidden_path(target, "old")
            try:
                os.rename(work, old)
            except OSError:
                old = work
            if not isinstance(error, OSError):
                # An interrupt stays an interrupt.
                raise
            reason = f"{error}; the previous checkpoint is now {old.name}"
            raise OSError(errno.EIO, reason) from error
    else:
        # In two steps, between which the target is absent.
        replaced = hidden_path(target, "old")
        # After a kill from here on, `clean_incomplete` restores it.
        os.rename(target, replaced)
        try:
            _rename(work, target)
        except BaseException:
            os.rename(replaced, target)
            raise
    # The new checkpoint is durable, so no error may fail the save any more; `clean_incomplete` deletes leftovers.
    with suppress(OSError):
        _carry_over(replaced, target)
        _delete_directory(replaced)


def _rename(work: Path, target: Path) -> None:
    os.rename(work, target)
    try:
        sync_directory(target.parent)
    except BaseException:
        # The name may not be durable, so the checkpoint must not exist.
        os.rename(target, work)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step (renameat2, RENAME_EXCHANGE); False if kernel or file system cannot."""
    if sys.platform != "linux":
        return False
    import ctypes

    # Python has no function for this call, and older C libraries neither.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    result = rename(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    return bool(result == 0)


@cache
def versions() -> dict[str, str]:
    """Return the versions of trainer_kit and torch."""
    return {
        "trainer_kit": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": str(torch.__version__),
    }


def _check_staged(work: Path) -> None:
    """Refuse files of hooks that have the name of a checkpoint's own file."""
    for name in (MANIFEST, DOCUMENT, LAYOUT):
        if os.path.lexists(work / name):
            reason = f"a hook wrote {name}, which is a file of the checkpoint itself"
            fix = "let the hook write into its own directory: os.path.join(output_dir, 'mine')"
            raise CheckpointError(work / name, None, reason, fix=fix)


def staged_files(work: Path, checkpoint_files: Collection[str]) -> FileEntries:
    """Make the files that hooks wrote into a work directory durable, and return their manifest entries by path.

    Args:
        work: the directory.
        checkpoint_files: the files of the checkpoint itself.

    Raises:
        CheckpointError: an entry is neither a file nor a directory.
    """
    entries: FileEntries = {}
    for directory, directory_names, file_names in os.walk(work):
        for name in (*directory_names, *file_names):
            path = Path(directory, name)
            relative = path.relative_to(work).as_posix()
            mode = path.lstat().st_mode
            if relative in checkpoint_files or relative == _STAGED:
                continue
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise CheckpointError(
                    path,
                    None,
                    "a hook wrote something that is neither a file nor a directory",
                )
            # Syncs a file too; not on Windows, where a read-only file cannot be synced.
            sync_directory(path)
            size = path.stat().st_size
            entries[relative] = {"size": size, "xxh3_64": checksum(path)}
        # The names in each directory too, not only the contents.
        sync_directory(Path(directory))
    return dict(sorted(entries.items()))


def _carry_over(replaced: Path, target: Path) -> None:
    """Move the files that other programs wrote into a replaced checkpoint to its replacement."""
    try:
        manifest = read_manifest(replaced)
    except CheckpointError:
        return
    if "extra" not in manifest:
        return
    # What the old manifest lists belongs to the old checkpoint; the rest was added later, and only moved.
    known_names = {MANIFEST, *manifest["files"], *_first_names(manifest["extra"])}
    for entry in replaced.iterdir():
        if entry.name not in known_names and not os.path.lexists(target / entry.name):
            os.rename(entry, target / entry.name)


def _holds_only_a_save(directory: Path) -> bool:
    """Whether a hidden directory holds only files of an unfinished save or deletion of this library."""
    foreign = {file.name for file in directory.iterdir() if not is_library_file(file)}
    if not foreign or _STAGED in foreign:
        return True
    # Killed between the deletion of the `_STAGED` file and the commit, or in a deletion: the manifest knows the files.
    try:
        return foreign <= _first_names(read_manifest(directory).get("extra", {}))
    except CheckpointError:
        return False


def _delete_directory(directory: Path) -> None:
    """Delete a hidden directory, foreign files first: after a kill `_holds_only_a_save` is True for what remains."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif not is_library_file(entry):
            entry.unlink(missing_ok=True)
    shutil.rmtree(directory)


def _first_names(paths: Collection[str]) -> set[str]:
    return {PurePosixPath(path).parts[0] for path in paths}
