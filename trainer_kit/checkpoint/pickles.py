"""What ``torch.save`` wrote: read with ``weights_only=True`` and no other way, and tensors alone are taken of it."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location

__all__ = ["EXTRA_STATE", "tensors_of", "torch_load"]

EXTRA_STATE: Final = "_extra_state"
"""What torch calls what modules keep besides tensors."""
_UNSAFE: Final = "if you trust its author, load it yourself and save only its state_dict, best as safetensors"


def torch_load(file: Path, device: torch.device | str, mapped: bool = False) -> Any:
    """The content of a file.

    Args:
        file: of this machine.
        device: where tensors go.
        mapped: nothing of them is read before it is used.

    Raises:
        CheckpointError: it needs more than tensors and plain values, and could run code.
    """
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("it is compressed, as torch.save never writes it")
        content = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a hostile file provokes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(file, None, f"torch.load(weights_only=True) refused it: {reason}", fix=_UNSAFE) from error
    return content


def tensors_of(file: Location, content: Any, most: float = math.inf) -> dict[str, Tensor]:
    """The tensors of a state_dict.

    Args:
        file: where it lies, for the error.
        content: of it.
        most: bytes that one of them can have.

    Raises:
        CheckpointError: something else is in it.
    """
    if not isinstance(content, dict):
        raise CheckpointError(file, None, f"it holds a {type(content).__name__}, not a state_dict")
    weights = {}
    for name, value in content.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            if value.numel() * value.element_size() > most:  # strides of 0 make a byte stand for all memory
                raise CheckpointError(file, name, f"a tensor of {list(value.shape)} is larger than its file")
            weights[name] = value.detach()
        elif not (isinstance(name, str) and name.endswith(EXTRA_STATE)):
            raise CheckpointError(
                file,
                name if isinstance(name, str) else f"a {type(name).__name__}",
                f"a {type(value).__name__} where a state_dict has a tensor",
                fix="save a state_dict",
            )
    return weights
