"""Reading checkpoints: the manifest first, then checksums, then the state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_kit.checkpoint.codec import decode
from trainer_kit.checkpoint.files import read_file, read_tensors
from trainer_kit.checkpoint.layout import Assembled, ShardFiles, read_layout
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    DOCUMENT_MOST,
    LAYOUT,
    MANIFEST,
    check_content,
    check_files,
    check_sizes,
    files_of,
    is_sharded,
    listed,
    load_json,
    read_manifest,
    shards_of,
)
from trainer_kit.checkpoint.remote import fetched
from trainer_kit.core.errors import CheckpointError, did_you_mean
from trainer_kit.core.location import Location, locate

__all__ = [
    "check_parts",
    "descriptions",
    "is_complete",
    "read_checkpoint",
    "read_info",
    "read_trees",
    "size_of",
    "step_of",
    "verify_checkpoint",
]


def read_checkpoint(
    path: str | os.PathLike[str],
    parts: Iterable[str] | None = None,
    verify: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The state that was written, by part; what several ranks wrote is put together whole.

    Args:
        path: a checkpoint directory, or its URL.
        parts: which parts to read; None for all. Only their files are read, and checksummed.
        verify: compare checksums before anything is decoded. The manifest, the list of files and their sizes are
            checked in any case.
        device: where tensors go, each with memory of its own. Generator states belong on the CPU.

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
    manifest = read_manifest(locate(path))
    root = files_of(locate(path), manifest)
    check_files(root, manifest)
    wanted = check_parts(root, manifest, parts)
    names = [*descriptions(manifest), *(name for part in wanted for name in shards_of(manifest, part))]
    check_sizes(root, manifest, names)  # before anything is fetched
    with fetched(root, names) as here:
        if verify:
            check_content(here, manifest, names)
        return _decode(here, manifest, wanted, device)


def _decode(root: Path, manifest: Mapping[str, Any], parts: list[str], device: torch.device | str) -> dict[str, Any]:
    trees, document = read_trees(root, parts), root / DOCUMENT
    if is_sharded(manifest):
        layout = read_layout(root, manifest)
        with ShardFiles(root) as files:
            whole = {part: Assembled(files, layout[part], device) for part in parts}
            return {part: decode(trees[part], whole[part], at=part, file=document) for part in parts}
    state = {}
    for part in parts:
        tensors: dict[str, Tensor] = {}
        for file in shards_of(manifest, part):
            tensors |= read_tensors(root / file, device)
        state[part] = decode(trees[part], tensors, at=part, file=document)
    return state


def check_parts(root: Location, manifest: Mapping[str, Any], parts: Iterable[str] | None) -> list[str]:
    """The names in ``parts``, None for all there are.

    Raises:
        CheckpointError: the checkpoint has no such part.
    """
    known = manifest["parts"]
    wanted = list(known if parts is None else parts)
    for part in wanted:
        if part not in known:
            fix = did_you_mean(part, known) if known else None
            raise CheckpointError(root, part, "this checkpoint has no such part", fix=fix)
    return wanted


def descriptions(manifest: Mapping[str, Any]) -> list[str]:
    """The files that say how the others are to be read."""
    return [DOCUMENT, LAYOUT] if is_sharded(manifest) else [DOCUMENT]


def read_trees(root: Path, parts: Iterable[str]) -> dict[str, Any]:
    """What ``state.json`` holds of these parts, not yet decoded.

    Raises:
        CheckpointError: it is damaged, or lacks one of them.
    """
    document = root / DOCUMENT
    try:
        trees = load_json(document, read_file(document, DOCUMENT_MOST))
    except OSError as error:
        raise CheckpointError(document, None, f"the file cannot be read: {error}") from error
    for part in parts:
        if not isinstance(trees, dict) or part not in trees:
            raise CheckpointError(document, part, "the manifest names this part, but it is not in the file")
    found: dict[str, Any] = trees
    return found


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check the manifest, the list of files, and every byte of them.

    Returns:
        The manifest: ``format``, ``version``, ``info``, ``versions``, ``parts`` (name to tensor file, or, where
        there are ``shards``, to the files of the ranks) and ``files`` (name to size in bytes and xxh3-64); and, where
        others may write into it, as hooks do, ``extra`` (likewise, by path).

    Raises:
        CheckpointError: naming the first file that is missing, foreign or damaged, and why.
    """
    manifest = read_manifest(locate(path))
    root = files_of(locate(path), manifest)
    check_files(root, manifest)
    check_content(root, manifest, list(listed(manifest)))
    if is_sharded(manifest):
        with fetched(root, [LAYOUT]) as here:
            read_layout(here, manifest)
    return manifest


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``info`` a checkpoint was written with; reads only its manifest.

    Raises:
        CheckpointError: when there is no manifest, or it is damaged.
    """
    root = locate(path)
    info = decode(read_manifest(root).get("info"), {}, at="info", file=root / MANIFEST)
    if not isinstance(info, dict):
        raise CheckpointError(root / MANIFEST, "info", "the info is not a dict")
    return info


def size_of(path: str | os.PathLike[str]) -> int:
    """The bytes of a checkpoint's files, as its manifest lists them."""
    return sum(entry["size"] for entry in listed(read_manifest(locate(path))).values())


def step_of(info: Mapping[str, Any]) -> int | None:
    """The optimizer steps that an ``info`` speaks of; None where it has no such number."""
    step = info.get("step")
    return step if type(step) is int and -(2**63) <= step < 2**63 else None


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint stands here with every file in its full size; checksums are not read."""
    try:
        manifest = read_manifest(locate(path))
        check_files(files_of(locate(path), manifest), manifest)
    except CheckpointError:
        return False
    return True
