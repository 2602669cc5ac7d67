"""A directory of checkpoints: which are there, and which of them are called ``last`` and ``best``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any, Final, final

from trainer_kit.checkpoint.files import read_file
from trainer_kit.checkpoint.manifest import DAMAGED, MANIFEST, digest, load_json
from trainer_kit.checkpoint.read import is_complete, read_info, step_of
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = ["CheckpointRecord", "checkpoints", "entries", "lookup", "mark", "read_index"]

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
