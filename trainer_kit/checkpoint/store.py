"""A directory of checkpoints: which are there, and which of them are called ``last`` and ``best``."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any, Final, final

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.files import read_file
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.checkpoint.manifest import DAMAGED, MANIFEST, digest, load_json, read_manifest, was_checkpoint
from trainer_kit.checkpoint.read import is_complete, read_info, step_of, verify_checkpoint
from trainer_kit.checkpoint.remote import move
from trainer_kit.core.atomic_files import replace_file, sync_directory
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "CheckpointRecord",
    "Repair",
    "candidates",
    "checkpoints",
    "entries",
    "lookup",
    "mark",
    "newest_verified",
    "read_index",
    "repair",
    "set_aside",
]

_INDEX: Final = "index.json"
_FORMAT: Final = "trainer_kit.index"
_MOST: Final = 16 << 20  # bytes of an index
_LATEST: Final = 253402300799  # the last second that a datetime can say


@final
@dataclass(frozen=True)
class CheckpointRecord(os.PathLike[str]):
    """A complete checkpoint, usable wherever a path is.

    Attributes:
        path: its directory; at a URL a `RemotePath`, whose text is the URL.
        step: optimizer steps it was taken after, from its info; None when that does not say.
        created: when it was finished (UTC), as the file system says: nothing timed is inside a checkpoint.
        info: what it was written with.
    """

    path: Location
    step: int | None
    created: datetime
    info: dict[str, Any] = field(compare=False)

    def __fspath__(self) -> str:
        return str(self.path)


def checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointRecord]:
    """The complete checkpoints directly in ``directory``, by step (those without one first), then by age.

    Hidden, torn and foreign entries, symbolic links and what was set aside as damaged are not counted. Sizes are
    compared, checksums are not: `trainer_kit.checkpoint.read.verify_checkpoint` does that. An absent directory has
    none.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (20, 3):
        ...         _ = write_checkpoint(f"{directory}/step-{step}", {}, info={"step": step})
        ...     [record.path.name for record in checkpoints(directory)]
        ['step-3', 'step-20']
    """
    records = []
    for entry in entries(locate(directory)):
        if entry.name.startswith(".") or DAMAGED.fullmatch(entry.name) or entry.is_symlink() or not is_complete(entry):
            continue
        try:
            info, time = read_info(entry), (entry / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):  # deleted while we look
            continue
        created = datetime.fromtimestamp(min(max(time / 1e9, 0), _LATEST), timezone.utc)
        records.append((time, CheckpointRecord(entry, step_of(info), created, info)))
    records.sort(key=lambda item: (-1 if item[1].step is None else item[1].step, item[0], item[1].path.name))
    return [record for _, record in records]


def entries(root: Location) -> list[Any]:
    """What stands directly in a directory; an absent one has nothing.

    Raises:
        CheckpointError: nobody can say what is there.
    """
    try:
        return list(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(root, None, f"the directory cannot be read: {error.strerror or error}") from error


def mark(directory: str | os.PathLike[str], **names: str | os.PathLike[str] | None) -> None:
    """Give checkpoints of ``directory`` names, durably and all at once; None takes a name away.

    Where the new ``last`` cannot be written down, the index goes: what it says of it is out of date.

    Raises:
        CheckpointError: when a path is not a complete checkpoint inside ``directory``, or the index cannot be written.

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
            # An old index would lead back behind a checkpoint that is there; without one it is found by its step.
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
            raise CheckpointError(target, None, f"not a complete checkpoint in {root}, so it cannot be {name!r}")
        index[name] = within
    index = dict(sorted(index.items()))
    content = json.dumps({"format": _FORMAT, "version": 1, "names": index, "sha256": digest(index)}, indent=1) + "\n"
    try:
        replace_file(root / _INDEX, content.encode())
    except OSError as error:
        raise CheckpointError(root / _INDEX, None, f"could not be written: {error}") from error


def _within(root: Location, target: Location) -> str | None:
    if isinstance(root, RemotePath) or isinstance(target, RemotePath):
        start = f"{root / 'x'}"[:-1]
        return str(target).removeprefix(start) if str(target).startswith(start) else None
    return target.relative_to(root).as_posix() if root in target.parents else None


def lookup(directory: str | os.PathLike[str], name: str) -> Location | None:
    """The checkpoint of this name, or None.

    ``last`` is found without the index too: where the index is missing, damaged, or points at a checkpoint that is
    gone or torn, it is the newest complete checkpoint.
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
    """The names given in a directory, with the paths within it; None where there is no index or it is damaged.

    Raises:
        CheckpointError: a storage fails.
    """
    file = locate(directory) / _INDEX
    try:
        content = load_json(file, read_file(file, _MOST))
    except (OSError, CheckpointError) as error:
        if isinstance(file, RemotePath) and not isinstance(error, (FileNotFoundError, CheckpointError)):
            raise CheckpointError(file, None, f"cannot be read: {error}") from error  # a new one would lose its names
        return None
    names = content.get("names") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(names, dict) or content.get("sha256", digest(names)) != digest(names):
        return None
    return {name: path for name, path in names.items() if isinstance(path, str) and _inside(PurePosixPath(path))}


def _inside(path: PurePosixPath) -> bool:
    try:
        os.fsencode(path)
    except ValueError:  # no file system has such a name
        return False
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in str(path)


_ANYBODY: Final = object()
"""Who wrote what cannot be read."""
_NUMBER: Final = re.compile(r"(\d+)(?:-v\d+)?$")


@final
@dataclass(frozen=True)
class Repair:
    """What `repair` found and did.

    Attributes:
        sound: the checkpoints that verify, newest first.
        damaged: what was set aside, under its new name, with what is wrong with it.
        left: what is left alone because it cannot be judged: of a newer format, or not readable for this user.
        discarded: how many half-written entries of dead processes were removed or put back.
    """

    sound: list[Location]
    damaged: list[tuple[Location, CheckpointError]]
    left: list[tuple[Location, CheckpointError]]
    discarded: int


def candidates(directory: str | os.PathLike[str], run: str | None = None, whole_first: bool = False) -> list[Location]:
    """What is or was a checkpoint in ``directory``, damaged or not, the best to go on from first.

    That is what the index calls ``last``; then what was taken before it, by falling step; then the others.

    Args:
        directory: of checkpoints.
        run: leave out what another run wrote, and what holds weights alone.
        whole_first: what holds weights alone comes behind all that a run can go on from.
    """
    root = locate(directory)
    index = read_index(root) or {}
    counted = (e for e in entries(root) if not e.name.startswith(".") and not DAMAGED.fullmatch(e.name))
    mine = (e for e in counted if was_checkpoint(e) or (_is_closed(e) and _is_named(e, index)))
    try:
        known = {e: _content(e) if whole_first or run is not None else (None, True) for e in mine}
        ours = (e for e, (by, _) in known.items() if run is None or by in (run, _ANYBODY))
        found = sorted(((_step(e), _time(e), e) for e in ours), reverse=True)
    except OSError as error:
        raise CheckpointError(root, None, f"the directory cannot be read: {error.strerror or error}") from error
    named = index.get("last")
    last = next((step for step, _, entry in found if entry.name == named), None)
    if last is not None:
        found.sort(key=lambda item: (item[2].name != named, item[0] > last))
    whole, weights = ([entry for *_, entry in found if known[entry][1] is holds] for holds in (True, False))
    return whole if run is not None else [*whole, *weights]


def newest_verified(
    directory: str | os.PathLike[str], run: str | None = None, whole_first: bool = False
) -> tuple[Location | None, list[tuple[Location, CheckpointError]]]:
    """The first of `candidates` of which every byte is as it was written, and the damaged ones ahead of it.

    Args:
        directory: of checkpoints.
        run: only what this run can go on from.
        whole_first: as for `candidates`.

    Raises:
        CheckpointError: one cannot be judged: it is of a newer format, or may not be read.
    """
    damaged: list[tuple[Location, CheckpointError]] = []
    for path in candidates(directory, run, whole_first):
        problem = _damage(path)
        if problem is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def set_aside(path: str | os.PathLike[str]) -> Location:
    """Rename a damaged checkpoint to ``<name>.damaged``, where nothing counts it any more; returns where it is now.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    old = absolute(path)
    new, count = old.with_name(f"{old.name}.damaged"), 1
    while new.exists() or new.is_symlink():
        count += 1
        new = old.with_name(f"{old.name}.damaged-{count}")
    try:
        if isinstance(old, RemotePath):
            move(old, old.with_name(new.name))
        else:
            os.rename(old, new)
            sync_directory(old.parent)
    except OSError as error:
        raise CheckpointError(old, None, f"could not be set aside: {error.strerror or error}") from error
    return new


def repair(directory: str | os.PathLike[str]) -> Repair:
    """Verify every checkpoint of ``directory``, set damaged ones aside, clean up, and write its index anew.

    Nothing is deleted but what a dead process left half written; files of others are not touched. Names in the index
    stay where they point at a sound checkpoint; ``last`` is else the newest one.

    Raises:
        CheckpointError: a run writes there now, or the directory is not there or cannot be written to.

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
        raise CheckpointError(root, None, "there is no such directory")
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
    names: dict[str, Location | None] = {name: known.get(path) for name, path in named.items() if "/" not in path}
    if sound:
        names["last"] = names.get("last") or sound[0]
    if names or (root / "index.json").exists():
        mark(root, **names)


def _content(path: Location) -> tuple[Any, bool]:
    """Which run wrote it, and whether a run can go on from it: it holds more than weights."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return _ANYBODY, True  # nobody can tell: it is to be named
    info = manifest.get("info")
    return info.get("run") if isinstance(info, dict) else None, "progress" in manifest["parts"]


def _damage(path: Location) -> CheckpointError | None:
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        cause = error.__cause__
        if error.key == "version" or (isinstance(cause, OSError) and cause.errno != errno.EIO):
            raise
        return error
    return None


def _is_closed(path: Location) -> bool:
    if isinstance(path, RemotePath):
        return False
    return path.is_dir() and not path.is_symlink() and not os.access(path, os.R_OK | os.X_OK)


def _is_named(path: Location, index: Mapping[str, str]) -> bool:
    """Whether it is called as a checkpoint is, by its name or by the index."""
    return _NUMBER.search(path.name) is not None or path.name in index.values()


def _step(path: Location) -> int:
    """From its info if that is about these files, else from its name, else -1."""
    number = _NUMBER.search(path.name)
    step = None if number is None else int(number[1])
    if is_complete(path):
        with suppress(CheckpointError):
            step = step_of(read_info(path))
    return -1 if step is None else step


def _time(path: Location) -> int:
    for file in (path / MANIFEST, path):
        try:
            return file.stat().st_mtime_ns
        except OSError:
            continue
    return 0
