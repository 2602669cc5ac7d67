"""A directory of checkpoints: list them, name them ``last`` and ``best``, and set damaged ones aside."""

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
from typing import Any, Final, final

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
    "repair",
    "set_aside",
    "similar",
]

_INDEX: Final = "index.json"
_FORMAT: Final = "trainer_kit.index"
_MOST: Final = 16 << 20  # bytes of an index
_LATEST: Final = 253402300799  # the last second that a datetime can represent


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
        if (
            entry.name.startswith(".")
            or DAMAGED.fullmatch(entry.name)
            or entry.is_symlink()
            or not is_complete(entry)
        ):
            continue
        try:
            info, number, time = (
                read_info(entry),
                commit_number(entry),
                (entry / MANIFEST).stat().st_mtime_ns,
            )
        except (CheckpointError, OSError):  # deleted in the meantime
            continue
        seconds = time / 1e9 if number is None else number / 1e6
        created = datetime.fromtimestamp(min(max(seconds, 0), _LATEST), timezone.utc)
        records.append(CheckpointRecord(entry, step_of(info), created, info))
    records.sort(key=lambda record: commit_order(record.path))
    return records


def commit_order(path: Location) -> tuple[int, int, int, str]:
    """Return a key that sorts checkpoints, of one directory or of several, by the order of their commits.

    Checkpoints of earlier versions have no number of a commit: they count as older than all that have one, and are
    sorted by step and time among themselves. Without a readable manifest the time of the directory decides, so that a
    damaged checkpoint that may be the newest is noticed.
    """
    number = commit_number(path)
    if number is not None:
        return number, 0, 0, path.name
    time = _time(path)
    try:
        step = step_of(read_info(path))
    except CheckpointError:
        return time // 1000, 0, time, path.name
    return 0, -1 if step is None else step, time, path.name


def entries(root: Location) -> list[Any]:
    """Return the entries of a directory; an absent directory has no entries.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    with named_failure(root, "the directory cannot be read"):
        return list(root.iterdir()) if root.is_dir() else []


def mark(
    directory: str | os.PathLike[str], **names: str | os.PathLike[str] | None
) -> None:
    """Give names to checkpoints of ``directory``, durably and all at once; None removes a name.

    If a new ``last`` cannot be written, the index is deleted: its ``last`` is out of date.

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
        _mark(root, names)
    except CheckpointError:
        if names.get("last") is not None:
            # An old index would name an earlier checkpoint; without an index the newest one is found by its commit.
            with suppress(OSError):
                (root / _INDEX).unlink()
        raise


def _mark(root: Location, names: Mapping[str, str | os.PathLike[str] | None]) -> None:
    index = read_index(root) or {}
    for name, path in names.items():
        if path is None:
            index.pop(name, None)
            continue
        target = absolute(path)
        within = _within(root, target)
        if within is None or not is_complete(target):
            raise CheckpointError(
                target,
                None,
                f"not a complete checkpoint in {root}, so it cannot be {name!r}",
            )
        index[name] = within
    index = dict(sorted(index.items()))
    content = (
        json.dumps(
            {"format": _FORMAT, "version": 1, "names": index, "sha256": digest(index)},
            indent=1,
        )
        + "\n"
    )
    with named_failure(root / _INDEX, "could not be written"):
        replace_file(root / _INDEX, content.encode())


def _within(root: Location, target: Location) -> str | None:
    if isinstance(root, RemotePath) or isinstance(target, RemotePath):
        start = f"{root / 'x'}"[:-1]
        return (
            str(target).removeprefix(start) if str(target).startswith(start) else None
        )
    return target.relative_to(root).as_posix() if root in target.parents else None


def lookup(directory: str | os.PathLike[str], name: str) -> Location | None:
    """Return the checkpoint of this name, or None.

    If the index is missing or damaged, or its ``last`` is absent or torn, ``last`` is the newest complete checkpoint.
    """
    root = locate(directory)
    entry = (read_index(root) or {}).get(name)
    if entry is not None and is_complete(root / entry):
        return root / entry
    if name != "last":
        return None
    newest = checkpoints(root)
    return newest[-1].path if newest else None


def read_index(directory: str | os.PathLike[str]) -> dict[str, str] | None:
    """Return the paths of the named checkpoints of a directory; None if the index is missing or damaged.

    Raises:
        CheckpointError: the storage fails.
    """
    file = locate(directory) / _INDEX
    try:
        content = load_json(file, read_file(file, _MOST))
    except (OSError, CheckpointError) as error:
        if isinstance(file, RemotePath) and not isinstance(
            error, (FileNotFoundError, CheckpointError)
        ):
            raise CheckpointError(
                file, None, f"cannot be read: {error}"
            ) from error  # a new index would lose its names
        return None
    names = (
        content.get("names")
        if isinstance(content, dict) and content.get("format") == _FORMAT
        else None
    )
    if not isinstance(names, dict) or content.get("sha256", digest(names)) != digest(
        names
    ):
        return None
    return {
        name: path
        for name, path in names.items()
        if isinstance(path, str) and _inside(PurePosixPath(path))
    }


def _inside(path: PurePosixPath) -> bool:
    try:
        os.fsencode(path)
    except ValueError:  # not a valid file name
        return False
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in str(path)
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
    """

    sound: list[Location]
    damaged: list[tuple[Location, CheckpointError]]
    left: list[tuple[Location, CheckpointError]]
    discarded: int


def candidates(
    directory: str | os.PathLike[str], run: str | None = None, whole_first: bool = False
) -> list[Location]:
    """Return the checkpoints of ``directory``, whole or damaged, in the order in which a resume should try them.

    First the ``last`` of the index; then the others, the newest commit first.

    Args:
        directory: of checkpoints.
        run: omit checkpoints of other runs, and those that hold only weights.
        whole_first: put checkpoints that hold only weights last.
    """
    root = locate(directory)
    index = read_index(root) or {}
    visible = (
        e
        for e in entries(root)
        if not e.name.startswith(".") and not DAMAGED.fullmatch(e.name)
    )
    content: dict[Any, tuple[Any, bool]] = {}
    with named_failure(root, "the directory cannot be read"):
        for entry in visible:
            if was_checkpoint(entry) or (_is_closed(entry) and _is_named(entry, index)):
                content[entry] = (
                    _content(entry) if whole_first or run is not None else (None, True)
                )
        of_run = [
            entry
            for entry, (writer, _) in content.items()
            if run is None or writer in (run, _ANY_RUN)
        ]
        of_run.sort(key=commit_order, reverse=True)
    of_run.sort(
        key=lambda entry: entry.name != index.get("last")
    )  # stable: the others stay in their order
    whole = [entry for entry in of_run if content[entry][1]]
    weights = [entry for entry in of_run if not content[entry][1]]
    return whole if run is not None else [*whole, *weights]


def similar(
    path: Location, directories: Iterable[Location] = (), newest: str | None = None
) -> str | None:
    """Return what to pass instead of a path that does not exist, for the ``fix`` of an error; None if nothing is near.

    Args:
        path: as the user gave it, perhaps Lightning's name of a file.
        directories: of checkpoints, besides the one of ``path``.
        newest: what means the newest checkpoint, where the caller takes such a word.
    """
    stem = path.name.removesuffix(".ckpt")
    names = {
        one.name: str(one)
        for place in reversed([path.parent, *directories])
        for one in candidates(place)
    }
    if stem in names:
        return f"pass {names[stem]}: a checkpoint is a directory, not a .ckpt file"
    word = re.sub(r"-v\d+$", "", stem).lower()
    if word in ("last", "best"):
        if newest is not None:
            return (
                f'pass "{word}": it is a name in the index of a directory, not a file'
            )
        if (found := lookup(path.parent, word)) is not None:
            return f'pass {found}: "{word}" is a name in the index of its directory, not a file'
    close = difflib.get_close_matches(stem, names, n=1)
    if close:
        return f"did you mean {names[close[0]]}?"
    near = [
        *filter(None, [newest]),
        *([f"one of: {', '.join(list(names.values())[:5])}"] if names else []),
    ]
    return f"pass {', or '.join(near)}" if names else None


def newest_verified(
    directory: str | os.PathLike[str], run: str | None = None, whole_first: bool = False
) -> tuple[Location | None, list[tuple[Location, CheckpointError]]]:
    """Return the first of `candidates` that verifies, or None, and the damaged ones before it.

    Args:
        directory: of checkpoints.
        run: only checkpoints that this run can resume from.
        whole_first: as for `candidates`.

    Raises:
        CheckpointError: a checkpoint cannot be verified: it is of a newer format, or not readable.
    """
    damaged: list[tuple[Location, CheckpointError]] = []
    for path in candidates(directory, run, whole_first):
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
    old = absolute(path)
    new, count = old.with_name(f"{old.name}.damaged"), 1
    while new.exists() or new.is_symlink():
        count += 1
        new = old.with_name(f"{old.name}.damaged-{count}")
    with named_failure(old, "could not be set aside"):
        if isinstance(old, RemotePath):
            move(old, old.with_name(new.name))
        else:
            os.rename(old, new)
            sync_directory(old.parent)
    return new


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
    lock = DirectoryLock(root)
    try:
        done = Repair([], [], [], len(clean_incomplete(root)))
        for path in candidates(root):
            try:
                problem = _damage(path)
            except CheckpointError as error:
                done.left.append((path, error))
                continue
            if problem is None:
                done.sound.append(path)
            else:
                done.damaged.append((set_aside(path), problem))
        _rebuild_index(root, done.sound)
    finally:
        lock.release()
    return done


def _rebuild_index(root: Location, sound: list[Location]) -> None:
    named = read_index(root) or {}
    known = {path.name: path for path in sound}
    names: dict[str, Location | None] = {
        name: known.get(path) for name, path in named.items() if "/" not in path
    }
    if sound:
        names["last"] = names.get("last") or sound[0]
    if names or (root / "index.json").exists():
        mark(root, **names)


def _content(path: Location) -> tuple[Any, bool]:
    """Return the run that wrote a checkpoint, and whether a run can resume from it: it holds more than weights."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return _ANY_RUN, True  # unknown; the caller must see the damage
    info = manifest.get("info")
    return info.get("run") if isinstance(info, dict) else None, "progress" in manifest[
        "parts"
    ]


def _damage(path: Location) -> CheckpointError | None:
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        cause = error.__cause__
        if error.key == "version" or (
            isinstance(cause, OSError) and cause.errno != errno.EIO
        ):
            raise
        return error
    return None


def _is_closed(path: Location) -> bool:
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


def _time(path: Location) -> int:
    for file in (path / MANIFEST, path):
        try:
            return file.stat().st_mtime_ns
        except OSError:
            continue
    return 0
