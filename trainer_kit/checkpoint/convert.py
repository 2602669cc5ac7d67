"""Weights for other programs: one safetensors file, Hugging Face's layout, or a ``torch.save`` file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import TENSOR_DTYPES, in_bytes, safetensors_bytes, tied_names, write_file
from trainer_kit.checkpoint.weights import read_weights
from trainer_kit.core.atomic_files import hidden_path, sync_directory
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import RemotePath, absolute

__all__ = ["ExportFormat", "export"]

ExportFormat = Literal["huggingface", "safetensors", "torch"]
_SUFFIXES: Final[dict[str, ExportFormat]] = {
    "": "huggingface",
    ".safetensors": "safetensors",
    ".bin": "torch",
    ".ckpt": "torch",
    ".pt": "torch",
    ".pth": "torch",
}


def export(
    checkpoint: str | os.PathLike[str] | Mapping[str, Tensor],
    target: str | os.PathLike[str],
    format: ExportFormat | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write the weights of a checkpoint as other programs read them; complete and durable, or absent.

    Args:
        checkpoint: verified first; or anything else that `trainer_kit.checkpoint.weights.read_weights` reads; or the
            weights themselves, by name.
        target: what to make; its parents are made too.
        format: ``"safetensors"``: one file. ``"huggingface"``: a directory with ``model.safetensors``, or, where that
            would be larger than a shard, ``model-00001-of-0000n.safetensors`` and ``model.safetensors.index.json``.
            ``"torch"``: a ``torch.save`` file (a zip file with a pickle, for ``torch.load(weights_only=True)``). None:
            by the suffix of ``target``; without one, Hugging Face's. A tied weight is stored once, under its first
            name.
        max_shard_size: bytes, or ``"5GB"``, ``"200MB"``, ``"1GiB"``; a single tensor may be larger.

    Returns:
        ``target``, absolute.

    Raises:
        CheckpointError: the checkpoint is damaged, the target exists or cannot be written, or a tensor has a dtype
            that safetensors does not hold.
        ConfigurationError: for a format or size that is not understood.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_checkpoint(f"{directory}/step-3", {"model": {"w": torch.ones(2), "v": torch.ones(3)}})
        ...     _ = export(path, f"{directory}/hub", max_shard_size=12)
        ...     sorted(file.name for file in Path(f"{directory}/hub").iterdir())
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    path = absolute(target)
    if isinstance(path, RemotePath):
        raise ConfigurationError(
            "weights are exported to this machine", found=str(path), fix="export to a local path, and copy it there"
        )
    kind, limit = _choose(path, format), in_bytes(max_shard_size, "max_shard_size", least=1)
    if os.path.lexists(path):
        raise CheckpointError(path, None, "it exists already", fix="use another name, or delete it first")
    weights = dict(checkpoint) if isinstance(checkpoint, Mapping) else read_weights(checkpoint)
    if kind != "torch":
        _check_dtypes("the weights" if isinstance(checkpoint, Mapping) else checkpoint, weights)
    work = hidden_path(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(work, kind, weights, limit)
        os.rename(work, path)
        sync_directory(path.parent)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):
            work.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(path, None, f"could not be written: {error.strerror or error}") from error
        raise
    return path


def _choose(path: Path, format: str | None) -> str:
    chosen = _SUFFIXES.get(path.suffix.lower()) if format is None else format
    if chosen is None or chosen not in get_args(ExportFormat):
        raise ConfigurationError(
            "it is not clear what to export to",
            found=f"format={format!r}, target {path.name!r}",
            fix=f"pass format as one of {', '.join(get_args(ExportFormat))}",
        )
    return chosen


def _check_dtypes(checkpoint: object, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise CheckpointError(
                checkpoint, name, f"safetensors files do not hold {tensor.dtype}", fix='export with format="torch"'
            )


def _write(work: Path, kind: str, weights: dict[str, Tensor], limit: int) -> None:
    if kind == "safetensors":
        write_file(work, safetensors_bytes(weights)[1])
    elif kind == "torch":
        with open(work, "xb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
    else:
        work.mkdir()
        _write_shards(work, weights, limit)
        sync_directory(work)


def _write_shards(work: Path, weights: Mapping[str, Tensor], limit: int) -> None:
    """Layout: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints."""
    shards: list[dict[str, Tensor]] = [{}]
    tied, shard_of = tied_names(weights), dict[str, dict[str, Tensor]]()
    filled = total = 0
    for name, tensor in weights.items():
        if name in tied:  # its file says that it is the same tensor; the index does not name it
            shard_of[tied[name]][name] = tensor
            continue
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shard_of[name] = shards[-1]
        shards[-1][name] = tensor
        filled, total = filled + size, total + size
    if len(shards) == 1:
        write_file(work / "model.safetensors", safetensors_bytes(shards[0])[1])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(work / file, safetensors_bytes(shard)[1])
        places.update({name: file for name in shard if name not in tied})
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": places}
    content = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(work / "model.safetensors.index.json", [content.encode()])
