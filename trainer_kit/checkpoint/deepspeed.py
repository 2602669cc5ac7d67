"""Directories that DeepSpeed itself wrote: where weights lie in them, and which of them only DeepSpeed can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainer_kit.core.errors import CheckpointError

__all__ = ["DeepSpeedFiles", "find_deepspeed", "refuse_deepspeed"]

_POINTERS: Final = ("latest_universal", "latest")
_STATES: Final = "*_model_states.pt"
_MOST: Final = 4096  # bytes of a name


@dataclass(frozen=True)
class DeepSpeedFiles:
    """What can be read.

    Attributes:
        parameters: the file of each, with the tensor under ``param``; none where ``states`` holds them.
        states: the engine's, with what the module's ``state_dict`` had under ``module``.
    """

    parameters: Mapping[str, Path]
    states: Path


def find_deepspeed(path: Path) -> DeepSpeedFiles | None:
    """The weights in what ``ds_to_universal`` wrote, or DeepSpeed without ZeRO; None where DeepSpeed wrote nothing.

    Args:
        path: a directory with the steps in it, or that of one step.

    Raises:
        CheckpointError: ZeRO wrote it, in pickles that only DeepSpeed puts together; the command is in the error.
    """
    tag = _tag(path)
    if tag is None:
        return None
    states = sorted(tag.glob(_STATES))
    parameters = {file.parent.name: file for file in sorted(tag.glob("zero/*/fp32.pt"))}
    if parameters:
        return DeepSpeedFiles(parameters, states[0])
    if len(states) == 1 and not any(tag.glob("*_optim_states.pt")):
        return DeepSpeedFiles({}, states[0])
    root = tag.parent
    raise CheckpointError(
        tag,
        None,
        "DeepSpeed wrote it, in parts that only DeepSpeed puts together",
        fix=f"python {root}/zero_to_fp32.py {root} {root}-weights -t {tag.name} --safe_serialization, and pass"
        f" {root}-weights with weights_only=True",
    )


def refuse_deepspeed(path: Path) -> None:
    """Raise a CheckpointError where DeepSpeed wrote this: there are weights to be had, no run."""
    if find_deepspeed(path) is not None:
        raise CheckpointError(
            path,
            None,
            "DeepSpeed wrote it: it holds weights, not a run",
            fix="model.load_state_dict(trainer_kit.checkpoint.read_weights(path)) ahead of prepare",
        )


def _tag(path: Path) -> Path | None:
    """The directory of one step."""
    if any(path.glob(_STATES)):
        return path
    for pointer in _POINTERS:
        try:
            with open(path / pointer, encoding="utf-8") as file:
                name = file.read(_MOST).strip()
        except (OSError, ValueError):
            continue
        if name == os.path.basename(name) and name not in ("", ".", "..") and any((path / name).glob(_STATES)):
            return path / name
    return None
