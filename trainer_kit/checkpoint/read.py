"""Read checkpoints: first the manifest, then checksums, then the state.

The order protects the reader, since anybody may have written the files: the manifest's own checksum and shape; exactly
the listed files in their sizes; sizes against the headers of the files; only then are contents fetched, compared with
their checksums, and decoded. A step relies on what the steps before it have checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.encoding import Tree, decode
from trainer_kit.checkpoint.files import read_tensors
from trainer_kit.checkpoint.layout import Assembled, ShardFiles, read_layout
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
    Manifest,
    check_content,
    check_files,
    check_sizes,
    commit_number,
    files_directory,
    files_of_part,
    is_sharded,
    listed_files,
    read_json,
    read_manifest,
)
from trainer_kit.checkpoint.remote import fetch_files
from trainer_kit.core.errors import (
    CheckpointError,
    MissingCheckpointError,
    did_you_mean,
)
from trainer_kit.core.location import Location, RemotePath, absolute, locate

__all__ = [
    "RUN_PARTS",
    "ResolvedCheckpoint",
    "describe_existing",
    "description_files",
    "directories_with_checkpoints",
    "files_for",
    "is_complete",
    "missing_checkpoint",
    "open_checkpoint",
    "read_checkpoint",
    "read_info",
    "read_parts",
    "read_trees",
    "resolve_checkpoint",
    "size_of",
    "step_of",
    "verify_checkpoint",
]

_MAX_DIRECTORIES: Final = 1000
"""Directories to look into, on one level, in search of checkpoints."""
_MAX_DEPTH: Final = 4
"""A directory of runs has them in run/checkpoints/step-3, or in name/run/checkpoints/step-3."""
_MAX_NAMES: Final = 4
"""Checkpoints of a directory that an error names."""

RUN_PARTS: Final = frozenset(
    (
        "buffers",
        "callbacks",
        "configuration",
        "data",
        "data_ranks",
        "datamodule",
        "datamodule_hparams_name",
        "datamodule_hyper_parameters",
        "inside_step",
        "loaders",
        "loggers",
        "lr_schedulers",
        "metrics",
        "optimizer_states",
        "owes_validation",
        "precision",
        "progress",
        "rng",
        "seed",
        "stop",
        "stride",
        "trainable",
        # Of callbacks that average weights:
        "averaging_state",
        "current_model_state",
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
    return read_parts(_resolve_or_describe(path), parts, verify, device)


@final
@dataclass(frozen=True)
class ResolvedCheckpoint:
    """A checkpoint whose manifest, list of files and their sizes were checked.

    Attributes:
        root: the directory of its files.
        manifest: the verified manifest.
    """

    root: Location
    manifest: Manifest

    @property
    def parts(self) -> list[str]:
        """The names of its parts."""
        return list(self.manifest["parts"])


def resolve_checkpoint(path: str | os.PathLike[str]) -> ResolvedCheckpoint:
    """Return the checkpoint at ``path``, checked without reading content.

    Raises:
        CheckpointError: naming file and reason, for a missing, damaged or foreign file.
    """
    location = locate(path)
    manifest = read_manifest(location)
    root = files_directory(location, manifest)
    check_files(root, manifest)
    return ResolvedCheckpoint(root, manifest)


def read_parts(
    checkpoint: ResolvedCheckpoint,
    parts: Iterable[str] | None = None,
    verify: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Return what `read_checkpoint` returns, of a checkpoint that is resolved."""
    with _fetch_parts(checkpoint, parts) as (directory, wanted):
        manifest = checkpoint.manifest
        if verify:
            # Before decoding, so that damage is named by its file and not by what it breaks.
            check_content(directory, manifest, files_for(manifest, wanted))
        return _decode(directory, manifest, wanted, device)


@contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    parts: Iterable[str] | None,
) -> Iterator[tuple[Path, Manifest, list[str]]]:
    """Check the manifest, the list of files and their sizes, and fetch the files of ``parts`` from a URL.

    Yields:
        A local directory with the files, the manifest, and the names of the parts.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    checkpoint = _resolve_or_describe(path)
    with _fetch_parts(checkpoint, parts) as (directory, wanted):
        yield directory, checkpoint.manifest, wanted


@contextmanager
def _fetch_parts(
    checkpoint: ResolvedCheckpoint, parts: Iterable[str] | None
) -> Iterator[tuple[Path, list[str]]]:
    """A local directory with the files of these parts, and their names."""
    root, manifest = checkpoint.root, checkpoint.manifest
    existing = checkpoint.parts
    wanted = existing
    if parts is not None:
        wanted = list(parts)
    for part_name in wanted:
        if part_name not in existing:
            fix = None
            if existing:
                fix = did_you_mean(part_name, existing)
            raise CheckpointError(
                root, part_name, "this checkpoint has no such part", fix=fix
            )
    names = files_for(manifest, wanted)
    # Before any file is fetched: a manifest could name files larger than this disk.
    check_sizes(root, manifest, names)
    with fetch_files(root, names) as directory:
        yield directory, wanted


def _resolve_or_describe(path: str | os.PathLike[str]) -> ResolvedCheckpoint:
    """Like `resolve_checkpoint`; the error for a missing checkpoint says which ones exist near ``path``."""
    try:
        return resolve_checkpoint(path)
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
    directory = path
    if not path.is_dir():
        directory = path.parent
    existing = describe_existing([absolute(directory), *directories])
    return MissingCheckpointError(path, reason, found=existing, fix=fix)


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
    distinct = list({str(directory): directory for directory in directories}.values())
    # A dict without values: two directories may lead to the same checkpoints, whose line is wanted once, in order.
    lines: dict[str, None] = {}
    for directory in distinct:
        for parent, paths in directories_with_checkpoints(directory):
            lines[_describe_names(parent, [path.name for path in paths])] = None
    if lines:
        return "; ".join(list(lines)[:_MAX_NAMES])
    empty = [str(directory) for directory in distinct if directory.is_dir()]
    if empty:
        return f"no checkpoint is in {', '.join(empty)}"
    return f"{', '.join(map(str, distinct))} does not exist"


def _describe_names(directory: Location, names: list[str]) -> str:
    """A line about the checkpoints of a directory; the newest is the last of ``names``."""
    *earlier, newest = names
    if not earlier:
        return f"{directory} has {newest}"
    dots = ""
    if len(earlier) > _MAX_NAMES:
        dots = "…, "
    return f"{directory} has {dots}{', '.join(earlier[-_MAX_NAMES:])} and, the newest, {newest}"


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
    for _ in range(_MAX_DEPTH):
        with_checkpoints: list[tuple[Location, list[Location]]] = []
        next_level: list[Location] = []
        for parent in level:
            subdirectories = _visible_directories(parent)
            next_level += subdirectories
            paths = [path for path in subdirectories if is_complete(path)]
            if paths:
                # Those of earlier versions have no number, and count as older than all that have one.
                paths.sort(key=lambda path: commit_number(path) or 0)
                with_checkpoints.append((parent, paths))
        if with_checkpoints:
            return with_checkpoints
        # The search serves a message only: it must not walk through a whole file system.
        level = next_level[:_MAX_DIRECTORIES]
    return []


def _visible_directories(directory: Location) -> list[Location]:
    # Absent, not a directory, or not readable for this user: the message is then about other directories.
    try:
        subdirectories = _subdirectories(directory)
    except OSError:
        return []
    visible = [entry for entry in subdirectories if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: entry.name)


def _subdirectories(directory: Location) -> list[Location]:
    if isinstance(directory, RemotePath):
        return [entry for entry in directory.iterdir() if entry.is_dir()]
    # The kernel says which entries are directories, without a call for each.
    with os.scandir(directory) as entries:
        return [
            Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)
        ]


def files_for(manifest: Manifest, parts: Iterable[str]) -> list[str]:
    """Return the names of the files that hold these parts, including their descriptions."""
    names = description_files(manifest)
    for part_name in parts:
        names += files_of_part(manifest, part_name)
    return names


def _decode(
    root: Path,
    manifest: Manifest,
    parts: list[str],
    device: torch.device | str,
) -> dict[str, Any]:
    document = root / DOCUMENT
    trees = read_trees(root, parts)
    state = {}
    if is_sharded(manifest):
        layout = read_layout(root, manifest)
        # Each tensor is assembled when decoding comes to it, so that chunks and tensors are not in memory twice.
        with ShardFiles(root) as files:
            for part_name in parts:
                assembled = Assembled(files, layout[part_name], device)
                state[part_name] = decode(
                    trees[part_name], assembled, at=part_name, file=document
                )
        return state
    for part_name in parts:
        tensors: dict[str, Tensor] = {}
        for file in files_of_part(manifest, part_name):
            tensors |= read_tensors(root / file, device)
        state[part_name] = decode(
            trees[part_name], tensors, at=part_name, file=document
        )
    return state


def description_files(manifest: Manifest) -> list[str]:
    """Return the names of the files that describe the tensors in the other files."""
    if is_sharded(manifest):
        return [DOCUMENT, LAYOUT]
    return [DOCUMENT]


def read_trees(root: Path, parts: Iterable[str]) -> dict[str, Tree]:
    """Return the content of ``state.json`` by part, not yet decoded.

    Raises:
        CheckpointError: the file is damaged, or lacks one of ``parts``.
    """
    document = root / DOCUMENT
    trees: dict[str, Tree] = read_json(document)
    for part_name in parts:
        if not isinstance(trees, dict) or part_name not in trees:
            raise CheckpointError(
                document,
                part_name,
                "the manifest names this part, but it is not in the file",
            )
    return trees


def verify_checkpoint(path: str | os.PathLike[str]) -> Manifest:
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
    checkpoint = _resolve_or_describe(path)
    root, manifest = checkpoint.root, checkpoint.manifest
    check_content(root, manifest, list(listed_files(manifest)))
    # Whole files do not show that their chunks cover each tensor.
    if is_sharded(manifest):
        with fetch_files(root, [LAYOUT]) as directory:
            read_layout(directory, manifest)
    return manifest


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``info`` that a checkpoint was written with; read only its manifest.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    root = locate(path)
    tree = read_manifest(root).get("info")
    info = decode(tree, {}, at="info", file=root / MANIFEST)
    if not isinstance(info, dict):
        raise CheckpointError(root / MANIFEST, "info", "the info is not a dict")
    return info


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the size of a checkpoint's files in bytes, from its manifest."""
    return sum(
        entry["size"] for entry in listed_files(read_manifest(locate(path))).values()
    )


def step_of(info: Mapping[str, object]) -> int | None:
    """Return the number of optimizer steps in an ``info``; None if it has no valid number."""
    step = info.get("step")
    # A file may hold any value; a bool is an int for isinstance.
    if type(step) is not int or not -(2**63) <= step < 2**63:
        return None
    return step


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint with every file in its full size; checksums are not compared."""
    # Sizes show a torn copy or a full disk; reading every byte would make each listing as slow as a load.
    try:
        resolve_checkpoint(path)
    except CheckpointError:
        return False
    return True
