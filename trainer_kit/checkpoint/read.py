"""Reading checkpoints: the manifest first, then checksums, then the state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.codec import decode
from trainer_kit.checkpoint.files import read_file, read_tensors
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    DOCUMENT_MOST,
    MANIFEST,
    check_content,
    check_files,
    files_of,
    load_json,
    read_manifest,
)
from trainer_kit.checkpoint.remote import fetched
from trainer_kit.core.errors import CheckpointError, did_you_mean
from trainer_kit.core.location import locate

__all__ = ["is_complete", "read_checkpoint", "read_info", "size_of", "step_of", "verify_checkpoint"]


def read_checkpoint(
    path: str | os.PathLike[str],
    parts: Iterable[str] | None = None,
    verify: bool = True,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The state that was written, by part.

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
    shards = manifest["parts"]
    wanted = list(shards if parts is None else parts)
    for part in wanted:
        if part not in shards:
            fix = did_you_mean(part, shards) if shards else None
            raise CheckpointError(root, part, "this checkpoint has no such part", fix=fix)
    names = [DOCUMENT, *(shards[part] for part in wanted if shards[part] is not None)]
    with fetched(root, names) as here:
        if verify:
            check_content(here, manifest, names)
        return _decode(here, {part: shards[part] for part in wanted}, device)


def _decode(root: Path, shards: dict[str, str | None], device: torch.device | str) -> dict[str, Any]:
    document = root / DOCUMENT
    try:
        trees = load_json(document, read_file(document, DOCUMENT_MOST))
    except OSError as error:
        raise CheckpointError(document, None, f"the file cannot be read: {error}") from error
    state = {}
    for part, shard in shards.items():
        if not isinstance(trees, dict) or part not in trees:
            raise CheckpointError(document, part, "the manifest names this part, but it is not in the file")
        tensors = {} if shard is None else read_tensors(root / shard, device)
        state[part] = decode(trees[part], tensors, at=part, file=document)
    return state


def verify_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Check the manifest, the list of files, and every byte of them.

    Returns:
        The manifest: ``format``, ``version``, ``info``, ``versions``, ``parts`` (name to tensor file) and ``files``
        (name to size in bytes and xxh3-64).

    Raises:
        CheckpointError: naming the first file that is missing, foreign or damaged, and why.
    """
    manifest = read_manifest(locate(path))
    root = files_of(locate(path), manifest)
    check_files(root, manifest)
    check_content(root, manifest, list(manifest["files"]))
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
    return sum(entry["size"] for entry in read_manifest(locate(path))["files"].values())


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
