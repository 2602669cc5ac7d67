"""Read checkpoints: first the manifest, then checksums, then the state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.checkpoint.encoding import decode
from trainer_kit.checkpoint.files import read_tensors
from trainer_kit.checkpoint.layout import Assembled, ShardFiles, read_layout
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
    check_content,
    check_files,
    check_sizes,
    commit_number,
    files_of,
    is_sharded,
    listed,
    read_json,
    read_manifest,
    shards_of,
)
from trainer_kit.checkpoint.remote import fetched
from trainer_kit.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    did_you_mean,
)
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "OF_A_RUN",
    "describe_existing",
    "descriptions",
    "directories_with_checkpoints",
    "files_for",
    "is_complete",
    "missing_checkpoint",
    "opened",
    "read_checkpoint",
    "read_info",
    "read_trees",
    "size_of",
    "step_of",
    "verify_checkpoint",
]

_MOST_BELOW: Final = 1000
"""Directories to look into, on one level, in search of checkpoints."""
_LEVELS: Final = 4
"""A directory of runs has them in run/checkpoints/step-3, or in name/run/checkpoints/step-3."""
_NAMED: Final = 4
"""Checkpoints of a directory that an error names."""

OF_A_RUN: Final = frozenset(
    (
        *(
            "buffers",
            "callbacks",
            "configuration",
            "data",
            "data_ranks",
            "datamodule",
            "datamodule_hyper_parameters",
        ),
        *(
            "inside_step",
            "loaders",
            "loggers",
            "lr_schedulers",
            "metrics",
            "optimizer_states",
            "owes_validation",
        ),
        *("precision", "progress", "rng", "seed", "stop", "stride", "trainable"),
        *(
            "averaging_state",
            "current_model_state",
        ),  # of callbacks that average weights
    )
)
"""Parts of a checkpoint that only a resumed run restores; they are not read where only the weights are wanted."""


def read_checkpoint(
    path: str | os.PathLike[str],
    parts: Iterable[str] | None = None,
    verify: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Return the state of a checkpoint by part; sharded tensors are assembled.

    Args:
        path: a checkpoint directory, or its URL.
        parts: the parts to read; None for all. Only their files are read and verified.
        verify: compare checksums before decoding. The manifest, the list of files and their sizes are always checked.
        device: the device of the tensors, which share no memory. Generator states belong on the CPU.

    Raises:
        CheckpointError: naming file and reason, for a missing, damaged or foreign file or an unknown part.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/first", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     read_checkpoint(path, parts=["model"])
        {'model': {'w': tensor([1., 1.])}}
    """
    with opened(path, parts) as (root, manifest, wanted):
        if verify:
            check_content(root, manifest, files_for(manifest, wanted))
        return _decode(root, manifest, wanted, device)


@contextmanager
def opened(
    path: str | os.PathLike[str], parts: Iterable[str] | None
) -> Iterator[tuple[Path, dict[str, Any], list[str]]]:
    """Check the manifest, the list of files and their sizes, and fetch the files of ``parts`` from a URL.

    Yields:
        A local directory with the files, the manifest, and the names of the parts.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    root, manifest = _checked_or_named(path)
    known = manifest["parts"]
    wanted = list(known if parts is None else parts)
    for part in wanted:
        if part not in known:
            fix = did_you_mean(part, known) if known else None
            raise CheckpointError(
                root, part, "this checkpoint has no such part", fix=fix
            )
    names = files_for(manifest, wanted)
    check_sizes(root, manifest, names)  # before any file is fetched
    with fetched(root, names) as here:
        yield here, manifest, wanted


def _checked(path: str | os.PathLike[str]) -> tuple[Location, dict[str, Any]]:
    """Return the directory of a checkpoint's files and its manifest, both checked without reading content."""
    manifest = read_manifest(locate(path))
    root = files_of(locate(path), manifest)
    check_files(root, manifest)
    return root, manifest


def _checked_or_named(path: str | os.PathLike[str]) -> tuple[Location, dict[str, Any]]:
    """Like `_checked`; the error for a missing checkpoint says which ones exist near ``path``."""
    try:
        return _checked(path)
    except MissingCheckpointError as error:
        raise missing_checkpoint(locate(path), error.reason, fix=error.fix) from None


def missing_checkpoint(
    path: Location,
    reason: str,
    directories: Iterable[Location] = (),
    fix: str | None = None,
) -> MissingCheckpointError:
    """Return the error for a path at which there is no checkpoint; it says which checkpoints are near.

    Args:
        path: as the user gave it.
        reason: what is missing.
        directories: of checkpoints, besides ``path`` and its parent.
        fix: what to do about it.
    """
    near = absolute(path if path.is_dir() else path.parent)
    return MissingCheckpointError(
        path, reason, found=describe_existing([near, *directories]), fix=fix
    )


def describe_existing(directories: Iterable[Location]) -> str:
    """Return which complete checkpoints exist in these directories, or on a level below, for an error.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (3, 6):
        ...         path = write_checkpoint(f"{directory}/run/step-{step}", {})
        ...     describe_existing([path.parent.parent]).replace(directory, "logs")
        'logs/run has step-3 and, the newest, step-6'
    """
    places = list({str(place): place for place in directories}.values())
    lines: list[str] = []
    for place in places:
        for directory, paths in directories_with_checkpoints(place):
            *earlier, newest = [path.name for path in paths]
            shown = ", ".join(earlier[-_NAMED:])
            dots = "…, " if len(earlier) > _NAMED else ""
            lines.append(
                f"{directory} has {f'{dots}{shown} and, the newest, ' if earlier else ''}{newest}"
            )
    if lines:
        return "; ".join(list(dict.fromkeys(lines))[:_NAMED])
    present = [str(place) for place in places if place.is_dir()]
    if present:
        return f"no checkpoint is in {', '.join(present)}"
    return f"{', '.join(map(str, places))} does not exist"


def directories_with_checkpoints(
    directory: Location,
) -> list[tuple[Location, list[Location]]]:
    """Return the complete checkpoints in a directory; if it has none, those in the directories on the next level below.

    A run's directory has them in its directory ``checkpoints``, a directory of runs further below.

    Args:
        directory: the directory of checkpoints, of a run or of runs.

    Returns:
        The directories that have checkpoints, each with these in the order of their commits.
    """
    level = [directory]
    for _ in range(_LEVELS):
        having: list[tuple[Location, list[Location]]] = []
        below: list[Location] = []
        for place in level:
            inside = _visible_directories(place)
            paths = [path for path in inside if is_complete(path)]
            paths.sort(key=lambda path: commit_number(path) or 0)
            below += inside
            if paths:
                having.append((place, paths))
        if having:
            return having
        level = list(islice(below, _MOST_BELOW))
    return []


def _visible_directories(directory: Location) -> list[Location]:
    try:
        if isinstance(directory, RemotePath):
            found: list[Location] = [
                entry for entry in directory.iterdir() if entry.is_dir()
            ]
        else:
            with (
                os.scandir(directory) as entries
            ):  # the kernel says which are directories, without a call for each
                found = [
                    Path(entry.path)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                ]
    except OSError:  # absent, not a directory, or not readable for this user
        return []
    return sorted(
        (entry for entry in found if not entry.name.startswith(".")),
        key=lambda entry: entry.name,
    )


def files_for(manifest: Mapping[str, Any], parts: Iterable[str]) -> list[str]:
    """Return the names of the files that hold these parts, including their descriptions."""
    return [
        *descriptions(manifest),
        *(name for part in parts for name in shards_of(manifest, part)),
    ]


def _decode(
    root: Path,
    manifest: Mapping[str, Any],
    parts: list[str],
    device: torch.device | str,
) -> dict[str, Any]:
    trees, document = read_trees(root, parts), root / DOCUMENT
    if is_sharded(manifest):
        layout = read_layout(root, manifest)
        with ShardFiles(root) as files:
            whole = {part: Assembled(files, layout[part], device) for part in parts}
            return {
                part: decode(trees[part], whole[part], at=part, file=document)
                for part in parts
            }
    state = {}
    for part in parts:
        tensors: dict[str, Tensor] = {}
        for file in shards_of(manifest, part):
            tensors |= read_tensors(root / file, device)
        state[part] = decode(trees[part], tensors, at=part, file=document)
    return state


def descriptions(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that describe the tensors in the other files."""
    return [DOCUMENT, LAYOUT] if is_sharded(manifest) else [DOCUMENT]


def read_trees(root: Path, parts: Iterable[str]) -> dict[str, Any]:
    """Return the content of ``state.json`` by part, not yet decoded.

    Raises:
        CheckpointError: the file is damaged, or lacks one of ``parts``.
    """
    document = root / DOCUMENT
    trees = read_json(document)
    for part in parts:
        if not isinstance(trees, dict) or part not in trees:
            raise CheckpointError(
                document,
                part,
                "the manifest names this part, but it is not in the file",
            )
    found: dict[str, Any] = trees
    return found


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check the manifest, the list of files, and every byte of the files.

    Args:
        path: a checkpoint directory, or its URL.

    Returns:
        The manifest: ``format``, ``version``, ``info``, ``versions``, ``parts`` (the tensor file of each part; in a
        checkpoint with ``shards`` the files of the ranks) and ``files`` (size in bytes and xxh3-64 by name). A
        checkpoint into which hooks may write has ``extra`` (size and xxh3-64 by path).

    Raises:
        CheckpointError: naming the first file that is missing, foreign or damaged, and the reason.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/step-3", {"model": {"w": torch.ones(2)}}, info={"step": 3})
        ...     verify_checkpoint(path)["info"]
        {'step': 3}
    """
    root, manifest = _checked_or_named(path)
    check_content(root, manifest, list(listed(manifest)))
    if is_sharded(manifest):
        with fetched(root, [LAYOUT]) as here:
            read_layout(here, manifest)
    return manifest


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``info`` that a checkpoint was written with; read only its manifest.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    root = locate(path)
    info = decode(read_manifest(root).get("info"), {}, at="info", file=root / MANIFEST)
    if not isinstance(info, dict):
        raise CheckpointError(root / MANIFEST, "info", "the info is not a dict")
    return info


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size of a checkpoint's files in bytes, from its manifest."""
    return sum(entry["size"] for entry in listed(read_manifest(locate(path))).values())


def step_of(info: Mapping[str, Any]) -> int | None:
    """Return the number of optimizer steps in an ``info``; None if it has no valid number."""
    step = info.get("step")
    return step if type(step) is int and -(2**63) <= step < 2**63 else None


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint with every file in its full size; checksums are not compared."""
    try:
        _checked(path)
    except CheckpointError:
        return False
    return True
