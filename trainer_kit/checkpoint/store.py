"""A directory of checkpoints: list them, name them ``last`` and ``best``, and set damaged ones aside.

The order of checkpoints is `commit_order`: by the number that each manifest got at its commit (its time in
microseconds), or by the time of the directory where the manifest cannot be read. The index (``index.json``) only gives
names: a resume tries its ``last`` first (`candidates`), and takes the first sound one (`newest_verified`), which need
not be the newest commit. The index can be lost at any time: without it the newest commit is ``last``.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, final

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.files import named_failure, read_file
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.manifest import (
    DAMAGED,
    MANIFEST,
    commit_number,
    digest,
    load_json,
    read_manifest,
    was_checkpoint,
)
from trainer_kit.checkpoint.read import (
    describe_existing,
    is_complete,
    read_info,
    step_of,
    verify_checkpoint,
)
from trainer_kit.checkpoint.remote import move
from trainer_kit.core.atomic_files import replace_file, sync_directory
from trainer_kit.core.errors import CheckpointError, MissingCheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "CheckpointRecord",
    "Repair",
    "candidates",
    "checkpoints",
    "commit_order",
    "entries",
    "lookup",
    "mark",
    "newest_verified",
    "read_index",
    "refuse_directory_of_checkpoints",
    "repair",
    "set_aside",
    "similar",
]

_INDEX: Final = "index.json"
_FORMAT: Final = "trainer_kit.index"
_MAX_BYTES: Final = 16 << 20
"""Bytes of an index: a file that anybody may have put there cannot exhaust the memory."""
_LATEST: Final = 253402300799
"""The last second since 1970 that a datetime can represent."""


@final
@dataclass(frozen=True)
class CheckpointRecord(os.PathLike[str]):
    """A complete checkpoint; it can be passed as a path.

    Attributes:
        path: its directory; at a URL a `RemotePath`, whose text is the URL.
        step: the number of optimizer steps before it was taken, from its info; None if the info has no step.
        created: when it was committed (UTC); of an earlier version's checkpoint the time of its manifest.
        info: the info that it was written with.
    """

    path: Location
    step: int | None
    created: datetime
    info: dict[str, Any] = field(compare=False)

    def __fspath__(self) -> str:
        return str(self.path)


def checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """Return the complete checkpoints directly in ``directory``, in the order of their commits: the newest is the last.

    Neither names nor steps decide: a later run in the same directory may have fewer steps. Hidden, torn, foreign and
    damaged entries and symbolic links are skipped. Sizes are compared, checksums are not:
    `trainer_kit.checkpoint.read.verify_checkpoint` compares them. For an absent directory the list is empty.

    Args:
        directory: the directory, or its URL.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (20, 3):
        ...         _ = write_checkpoint(f"{directory}/step-{step}", {}, info={"step": step})
        ...     [record.path.name for record in checkpoints(directory)]
        ['step-20', 'step-3']
    """
    records = []
    for entry in entries(locate(directory)):
        if not _is_visible(entry) or entry.is_symlink() or not is_complete(entry):
            continue
        # A run that writes here may delete a checkpoint while it is looked at: then it counts as absent.
        try:
            info = read_info(entry)
            number = commit_number(entry)
            written_ns = (entry / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):
            continue
        seconds = written_ns / 1e9
        if number is not None:
            seconds = number / 1e6
        # A file's time may be any number, for which a datetime raises.
        created = datetime.fromtimestamp(min(max(seconds, 0), _LATEST), timezone.utc)
        records.append(CheckpointRecord(entry, step_of(info), created, info))
    records.sort(key=lambda record: commit_order(record.path))
    return records


def _is_visible(entry: Location) -> bool:
    """Whether an entry of a directory is neither hidden, as a save under way is, nor set aside."""
    return not entry.name.startswith(".") and not DAMAGED.fullmatch(entry.name)


def commit_order(path: Location) -> tuple[int, int, int, str]:
    """Return a key that sorts checkpoints, of one directory or of several, by the order of their commits.

    Checkpoints of earlier versions have no number of a commit: they count as older than all that have one, and are
    sorted by step and time among themselves. Without a readable manifest the time of the directory decides, so that a
    damaged checkpoint that may be the newest is noticed.
    """
    number = commit_number(path)
    # The name last, so that the order never depends on that of the directory's entries.
    if number is not None:
        return number, 0, 0, path.name
    modified_ns = _modified_ns(path)
    try:
        step = step_of(read_info(path))
    except CheckpointError:
        # Microseconds, as commit numbers are.
        return modified_ns // 1000, 0, modified_ns, path.name
    if step is None:
        step = -1
    return 0, step, modified_ns, path.name


def entries(root: Location) -> list[Location]:
    """Return the entries of a directory; an absent directory has no entries.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    with named_failure(root, "the directory cannot be read"):
        if not root.is_dir():
            return []
        return list(root.iterdir())


def mark(
    directory: str | os.PathLike[str],
    **names: str | os.PathLike[str] | None,
) -> None:
    """Give names to checkpoints of ``directory``, durably and all at once; None removes a name.

    If a new ``last`` cannot be read or written, the index is deleted: its ``last`` is out of date. A path that does not
    exist, or that lies elsewhere, leaves the index as it is.

    Raises:
        CheckpointError: a path is not a complete checkpoint inside ``directory``, or the index cannot be written.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     mark(directory, best=write_checkpoint(f"{directory}/step-3", {}))
        ...     lookup(directory, "best").name, lookup(directory, "last").name
        ('step-3', 'step-3')
    """
    root = absolute(directory)
    try:
        _write_index(root, _changed_index(root, names))
    except CheckpointError:
        # An old index would name an earlier checkpoint; without an index the newest one is found by its commit.
        last = names.get("last")
        if last is not None and _may_be_inside(root, absolute(last)):
            with suppress(OSError):
                (root / _INDEX).unlink()
        raise


def _may_be_inside(root: Location, target: Location) -> bool:
    """Whether ``target`` exists in ``root``; True, too, where the storage does not tell."""
    if _relative_path(root, target) is None:
        return False
    try:
        return target.exists()
    except OSError:
        return True


def _changed_index(
    root: Location,
    names: Mapping[str, str | os.PathLike[str] | None],
) -> dict[str, str]:
    """The paths of the index by name, after ``names`` are given or removed."""
    index = read_index(root) or {}
    for name, path in names.items():
        if path is None:
            index.pop(name, None)
            continue
        target = absolute(path)
        relative = _relative_path(root, target)
        if relative is None or not is_complete(target):
            raise CheckpointError(
                target,
                None,
                f"not a complete checkpoint in {root}, so it cannot be {name!r}",
            )
        index[name] = relative
    # Equal names give equal bytes.
    return dict(sorted(index.items()))


def _write_index(root: Location, index: dict[str, str]) -> None:
    """Replace the index whole; the lock of the directory, which a run holds, keeps others from doing so meanwhile."""
    content = {"format": _FORMAT, "version": 1, "names": index, "sha256": digest(index)}
    text = json.dumps(content, indent=1) + "\n"
    with named_failure(root / _INDEX, "could not be written"):
        replace_file(root / _INDEX, text.encode())


def _relative_path(root: Location, target: Location) -> str | None:
    """The path of ``target`` from ``root``, with slashes; None where it does not lie inside."""
    if isinstance(root, RemotePath) or isinstance(target, RemotePath):
        # With the separator that this kind of URL has.
        prefix = f"{root / 'x'}"[:-1]
        text = str(target)
        if not text.startswith(prefix):
            return None
        return text.removeprefix(prefix)
    if root not in target.parents:
        return None
    return target.relative_to(root).as_posix()


def lookup(directory: str | os.PathLike[str], name: str) -> Location | None:
    """Return the checkpoint of this name, or None.

    If the index is missing or damaged, or its ``last`` is absent or torn, ``last`` is the newest complete checkpoint.
    """
    root = locate(directory)
    index = read_index(root) or {}
    if name in index and is_complete(root / index[name]):
        return root / index[name]
    # Only `last` can be found without an index: no manifest says which checkpoint was the best.
    if name != "last":
        return None
    records = checkpoints(root)
    if not records:
        return None
    return records[-1].path


def read_index(directory: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return the paths of the named checkpoints of a directory; None if the index is missing or damaged.

    Raises:
        CheckpointError: the storage fails.
    """
    file = locate(directory) / _INDEX
    try:
        content = load_json(file, read_file(file, _MAX_BYTES))
    except (FileNotFoundError, CheckpointError):
        return None
    except OSError as error:
        if not isinstance(file, RemotePath):
            return None
        # The storage may only be away for a while: a new index would lose the names in this one.
        raise CheckpointError(file, None, f"cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return None
    names = content.get("names")
    if not isinstance(names, dict):
        return None
    # Indices of earlier versions have no checksum.
    if "sha256" in content and content["sha256"] != digest(names):
        return None
    return {name: path for name, path in names.items() if _is_inside(path)}


def _is_inside(path: object) -> bool:
    """Whether an index may name this path: relative, and below the directory of the index."""
    if not isinstance(path, str) or "\0" in path:
        return False
    relative = PurePosixPath(path)
    try:
        os.fsencode(relative)
    except ValueError:
        # A lone surrogate, for which each call of the system would raise.
        return False
    return (
        bool(relative.parts)
        and not relative.is_absolute()
        and ".." not in relative.parts
    )


_ANY_RUN: Final = object()
"""The run of a checkpoint whose manifest cannot be read."""
_NUMBER: Final = re.compile(r"(\d+)(?:-v\d+)?$")


@final
@dataclass(frozen=True)
class Repair:
    """The result of `repair`.

    Attributes:
        sound: the checkpoints that verify, newest first.
        damaged: the checkpoints that were set aside, under their new names, with the error of each.
        left: checkpoints that cannot be verified: of a newer format, or not readable for this user. They stay.
        discarded: the number of unfinished entries of dead processes that were deleted or restored.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     result = repair(directory)
        >>> result.sound, result.damaged, result.discarded
        ([], [], 0)
    """

    sound: list[Location]
    damaged: list[tuple[Location, CheckpointError]]
    left: list[tuple[Location, CheckpointError]]
    discarded: int


def candidates(
    directory: str | os.PathLike[str],
    run_id: str | None = None,
    resumable_first: bool = False,
) -> list[Location]:
    """Return the checkpoints of ``directory``, whole or damaged, in the order in which a resume should try them.

    First the ``last`` of the index; then the others, the newest commit first.

    Args:
        directory: of checkpoints.
        run_id: omit checkpoints of other runs, and those that hold only weights.
        resumable_first: put checkpoints that hold only weights last.
    """
    root = locate(directory)
    index = read_index(root) or {}
    with named_failure(root, "the directory cannot be read"):
        paths = [
            entry
            for entry in entries(root)
            if _is_visible(entry) and _is_candidate(entry, index)
        ]
        weights_only: set[Location] = set()
        # Else the manifests need not be read.
        if resumable_first or run_id is not None:
            contents = {path: _contents(path) for path in paths}
            weights_only = {path for path in paths if not contents[path].is_resumable}
            if run_id is not None:
                paths = [
                    path
                    for path in paths
                    if contents[path].run_id in (run_id, _ANY_RUN)
                ]
        paths.sort(key=commit_order, reverse=True)
    # The index's `last` first: the run that wrote it chose it. Sorting is stable, so the others stay in their order.
    paths.sort(key=lambda path: path.name != index.get("last"))
    resumable = [path for path in paths if path not in weights_only]
    if run_id is not None:
        return resumable
    return [*resumable, *(path for path in paths if path in weights_only)]


def refuse_directory_of_checkpoints(path: Location) -> None:
    """Raise `CheckpointError` if ``path`` is a directory of checkpoints, such as ModelCheckpoint's.

    Raises:
        CheckpointError: the message has the newest checkpoint in it, and the names of the others.
    """
    if not path.is_dir() or (path / MANIFEST).exists():
        return
    inside = candidates(path)
    if inside:
        raise CheckpointError(
            path,
            None,
            "a directory of checkpoints, not one of them",
            found=describe_existing([path]),
            fix=f"pass {inside[0]}",
        )


def similar(
    path: Location,
    directories: Iterable[Location] = (),
    newest: str | None = None,
) -> str | None:
    """Return what to pass instead of a path that does not exist, for the ``fix`` of an error; None if nothing is near.

    Args:
        path: as the user gave it, perhaps Lightning's name of a file.
        directories: of checkpoints, besides the one of ``path``.
        newest: what means the newest checkpoint, where the caller takes such a word.
    """
    stem = path.name.removesuffix(".ckpt")
    paths: dict[str, str] = {}
    # The directory of the path comes last, so that its names count.
    for directory in reversed([path.parent, *directories]):
        paths.update(
            {candidate.name: str(candidate) for candidate in candidates(directory)}
        )
    if stem in paths:
        return f"pass {paths[stem]}: a checkpoint is a directory, not a .ckpt file"
    index_name = re.sub(r"-v\d+$", "", stem).lower()
    if index_name in ("last", "best"):
        if newest is not None:
            return f'pass "{index_name}": it is a name in the index of a directory, not a file'
        target = lookup(path.parent, index_name)
        if target is not None:
            return f'pass {target}: "{index_name}" is a name in the index of its directory, not a file'
    close = difflib.get_close_matches(stem, paths, n=1)
    if close:
        return f"did you mean {paths[close[0]]}?"
    if not paths:
        return None
    choices = f"one of: {', '.join(list(paths.values())[:5])}"
    if newest:
        return f"pass {newest}, or {choices}"
    return f"pass {choices}"


def newest_verified(
    directory: str | os.PathLike[str],
    run_id: str | None = None,
    resumable_first: bool = False,
) -> tuple[Location | None, list[tuple[Location, CheckpointError]]]:
    """Return the first of `candidates` that verifies, or None, and the damaged ones before it.

    That is the index's ``last`` if it is sound, also where another checkpoint was committed after it.

    Args:
        directory: of checkpoints.
        run_id: only checkpoints that this run can resume from.
        resumable_first: as for `candidates`.

    Raises:
        CheckpointError: a checkpoint cannot be verified: it is of a newer format, or not readable.
    """
    damaged: list[tuple[Location, CheckpointError]] = []
    for path in candidates(directory, run_id, resumable_first):
        # Every byte is read: a size alone does not show a flipped bit. Older ones are not read once one is sound.
        problem = _damage(path)
        if problem is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def set_aside(path: str | os.PathLike[str]) -> Location:
    """Rename a damaged checkpoint to ``<name>.damaged``, so that it is ignored; return the new path.

    Raises:
        CheckpointError: the checkpoint cannot be renamed.
    """
    source = absolute(path)
    target = source.with_name(f"{source.name}.damaged")
    count = 1
    while target.exists() or target.is_symlink():
        count += 1
        target = source.with_name(f"{source.name}.damaged-{count}")
    with named_failure(source, "could not be set aside"):
        if isinstance(source, RemotePath):
            move(source, source.with_name(target.name))
        else:
            os.rename(source, target)
            # Else a crash would bring the damaged one back as the newest.
            sync_directory(source.parent)
    return target


def repair(directory: str | os.PathLike[str]) -> Repair:
    """Verify every checkpoint of ``directory``, set damaged ones aside, clean up, and rewrite the index.

    Only unfinished entries of dead processes are deleted; foreign files stay. A name in the index stays if it points to
    a sound checkpoint; otherwise ``last`` becomes the newest sound checkpoint.

    Args:
        directory: a directory of checkpoints on this machine.

    Raises:
        CheckpointError: a run writes there now, or the directory is absent or not writable.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (3, 6):
        ...         path = write_checkpoint(f"{directory}/step-{step}", {}, info={"step": step})
        ...     _ = (path / "state.json").write_bytes(b"[]")
        ...     done = repair(directory)
        ...     [path.name for path in done.sound], [path.name for path, _ in done.damaged]
        (['step-3'], ['step-6.damaged'])
    """
    root = absolute(directory)
    if not root.is_dir():
        raise MissingCheckpointError(root, "this directory does not exist")
    # A run that writes there would find its checkpoints renamed.
    lock = DirectoryLock(root)
    try:
        result = Repair([], [], [], len(clean_incomplete(root)))
        for path in candidates(root):
            try:
                problem = _damage(path)
            except CheckpointError as error:
                result.left.append((path, error))
                continue
            if problem is None:
                result.sound.append(path)
            else:
                result.damaged.append((set_aside(path), problem))
        _rebuild_index(root, result.sound)
    finally:
        lock.release()
    return result


def _rebuild_index(root: Location, sound: list[Location]) -> None:
    by_name = {path.name: path for path in sound}
    names: dict[str, Location | None] = {}
    index = read_index(root) or {}
    for name, path in index.items():
        # Paths further below lie outside of what `repair` looks at.
        if "/" not in path:
            names[name] = by_name.get(path)
    # A name that points to a complete checkpoint stays, also further below: the run chose it.
    last = index.get("last")
    keeps_last = last is not None and "/" in last and is_complete(root / last)
    if sound and not keeps_last and names.get("last") is None:
        names["last"] = sound[0]
    if names or (root / _INDEX).exists():
        _write_index(root, _changed_index(root, names))


class _Contents(NamedTuple):
    """What decides whether a run may resume from a checkpoint.

    Attributes:
        run_id: of the run that wrote it; `_ANY_RUN` where that cannot be read.
        is_resumable: whether it holds more than weights.
    """

    run_id: object
    is_resumable: bool


def _contents(path: Location) -> _Contents:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        # Unknown: it may be the newest of any run, so the caller must see the damage.
        return _Contents(_ANY_RUN, is_resumable=True)
    info = manifest.get("info")
    run_id = None
    if isinstance(info, dict):
        run_id = info.get("run")
    return _Contents(run_id, is_resumable="progress" in manifest["parts"])


def _damage(path: Location) -> CheckpointError | None:
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        cause = error.__cause__
        # A newer format is not damage, nor is a storage that is away or refuses access: falling back to an older
        # checkpoint would then lose steps. Only an I/O error of the medium counts as damage.
        if error.key == "version":
            raise
        if isinstance(cause, OSError) and cause.errno != errno.EIO:
            raise
        return error
    return None


def _is_candidate(path: Location, index: Mapping[str, str]) -> bool:
    """Whether an entry is a checkpoint, whole or damaged, or may be one that cannot be looked into."""
    return was_checkpoint(path) or (_is_unreadable(path) and _is_named(path, index))


def _is_unreadable(path: Location) -> bool:
    """Whether this user may not look into a directory."""
    if isinstance(path, RemotePath):
        return False
    return (
        path.is_dir()
        and not path.is_symlink()
        and not os.access(path, os.R_OK | os.X_OK)
    )


def _is_named(path: Location, index: Mapping[str, str]) -> bool:
    """Whether a directory has the name of a checkpoint, or the index names it."""
    return _NUMBER.search(path.name) is not None or path.name in index.values()


def _modified_ns(path: Location) -> int:
    for file in (path / MANIFEST, path):
        try:
            return file.stat().st_mtime_ns
        except OSError:
            continue
    return 0
