"""Directories of safetensors in Hugging Face's layout: one file, or several with an index that says what is where."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import read_file, read_header, read_tensors
from trainer_kit.checkpoint.manifest import DOCUMENT, LAYOUT, MANIFEST, load_json
from trainer_kit.core.errors import CheckpointError

__all__ = ["find_weight_files", "holds_weight_files", "read_index", "read_weight_files"]

_INDEX: Final = ".safetensors.index.json"
_MOST: Final = 64 << 20


def holds_weight_files(path: Path) -> bool:
    """Whether this is a directory for `find_weight_files`: of weights, and no checkpoint of ours, whole or not."""
    if not path.is_dir() or any(os.path.lexists(path / name) for name in (MANIFEST, DOCUMENT, LAYOUT)):
        return False
    signs = ("*.safetensors", f"*{_INDEX}", ".metadata", "*/.metadata")
    return any(True for sign in signs for _ in path.glob(sign))


def find_weight_files(directory: Path, index: Path | None = None) -> list[Path]:
    """The safetensors files of ``directory``, which an index must name, where there is one.

    Args:
        directory: where they are.
        index: the file that names them, where there are several such.

    Raises:
        CheckpointError: there are none; the index lacks a file or names one elsewhere; or torch's distributed
            checkpoint stands there, whose ``.metadata`` is a pickle and is not read.
    """
    for metadata in (directory / ".metadata", *sorted(directory.glob("*/.metadata"))):
        if os.path.lexists(metadata):
            raise CheckpointError(
                metadata.parent,
                None,
                "torch's distributed checkpoint: its .metadata is a pickle, which can run any code when it is read",
                fix="if you trust its author, convert it yourself: python -m torch.distributed.checkpoint.format_utils "
                "dcp_to_torch DIRECTORY FILE.pt, and merge FILE.pt",
            )
    indices = [index] if index is not None else sorted(directory.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise CheckpointError(directory, None, f"several indices: {', '.join(index.name for index in indices)}")
    if not indices:
        found = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("."))
        if not found:
            raise CheckpointError(directory, None, "neither a checkpoint, nor safetensors files")
        return found
    places = read_index(indices[0])
    files = [directory / name for name in sorted(set(places.values()))]
    held = {name: file.name for file in files for name in read_header(file)}
    for name, file_name in places.items():
        if held.get(name) != file_name:
            raise CheckpointError(directory / file_name, name, f"{indices[0].name} says it is here, and it is not")
    return files


def read_index(index: Path) -> dict[str, str]:
    """The file that holds each weight, beside ``index``; each is there.

    Raises:
        CheckpointError: it is no index of weights, or names a file that is missing or elsewhere.
    """
    try:
        content = load_json(index, read_file(index, _MOST))
        places: dict[str, str] = content.get("weight_map", content)
        names = sorted(set(places.values()))
        if not all(
            isinstance(name, str) and name == os.path.basename(name) and name not in ("", "..") for name in names
        ):
            raise CheckpointError(index, "weight_map", "a file that is not one of this directory")
    except OSError as error:
        raise CheckpointError(index, None, f"it cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(index, "weight_map", "this is no index of weights") from error
    for name in names:
        if not (index.parent / name).is_file():
            raise CheckpointError(index.parent / name, None, f"{index.name} names it, and it is not there")
    return places


def read_weight_files(files: list[Path], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of several files.

    Raises:
        CheckpointError: one cannot be read, or two hold the same name.
    """
    weights: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_tensors(file, device).items():
            if name in weights:
                raise CheckpointError(file, name, "another file of this directory holds it too")
            weights[name] = tensor
    return weights
