"""Weights from wherever they come: our checkpoints, safetensors, ``torch.save``, Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import read_tensors
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import CheckpointError

__all__ = ["read_module", "read_weights"]

_ZIP, _PICKLE, _JSON = b"PK", b"\x80", b"{"
_UNSAFE: Final = "if you trust its author, load it yourself and save only its state_dict, best as safetensors"


def read_weights(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A module's tensors by name, for ``module.load_state_dict``.

    Args:
        path: a checkpoint directory of ours (its part ``model``); a safetensors file; a ``torch.save`` file that holds
            a state_dict; or a Lightning ``.ckpt`` (its ``state_dict``). The content decides, not the suffix.
        device: where the tensors go.

    Raises:
        CheckpointError: for anything else. ``torch.save`` files are read with ``weights_only=True`` and no other way:
            one that needs more could run code, and is refused.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, f"{directory}/old.ckpt")
        ...     read_weights(f"{directory}/old.ckpt")
        {'w': tensor([1., 1.])}
    """
    file = Path(path)
    if file.is_dir():
        return _tensors(file, read_checkpoint(file, parts=["model"], device=device)["model"])
    try:
        with open(file, "rb") as stream:
            start = stream.read(9)
    except OSError as error:
        raise CheckpointError(file, None, f"it cannot be read: {error.strerror}") from error
    if start[8:] == _JSON:  # behind the length of the header
        return read_tensors(file, device)
    if start.startswith((_ZIP, _PICKLE)):
        return _tensors(file, _torch_load(file, device))
    raise CheckpointError(
        file,
        None,
        "this is neither a checkpoint directory, nor safetensors, nor a torch.save file",
        fix="check how it was written, and whether it was copied in full",
    )


def _torch_load(file: Path, device: torch.device | str) -> Any:
    try:
        content = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # whatever a hostile file provokes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(file, None, f"torch.load(weights_only=True) refused it: {reason}", fix=_UNSAFE) from error
    nested = content.get("state_dict") if isinstance(content, dict) else None
    return nested if isinstance(nested, dict) else content


def _tensors(file: Path, content: Any) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(file, None, f"it holds a {type(content).__name__}, not a state_dict")
    weights = {}
    for name, value in content.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            weights[name] = value.detach()
        elif not (isinstance(name, str) and name.endswith("_extra_state")):
            raise CheckpointError(
                file, str(name), f"a {type(value).__name__} where a state_dict has a tensor", fix="save a state_dict"
            )
    return weights


def read_module(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and the hyperparameters beside them (none where there are none), for ``load_from_checkpoint``."""
    file = Path(path)
    weights = read_weights(file)
    if file.is_dir():
        parts = ["hyper_parameters"] if _has_hparams(file) else []
        kept = read_checkpoint(file, parts=parts).get("hyper_parameters", {})
    else:
        with open(file, "rb") as stream:
            is_pickled = stream.read(2).startswith((_ZIP, _PICKLE[:1]))
        content = torch.load(file, map_location="cpu", weights_only=True) if is_pickled else {}
        kept = content.get("hyper_parameters", {})
    return weights, dict(kept)


def _has_hparams(directory: Path) -> bool:
    return "hyper_parameters" in read_manifest(directory)["parts"]
