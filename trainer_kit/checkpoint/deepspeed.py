"""Directories that DeepSpeed itself wrote: where weights lie in them, and which of them only DeepSpeed can read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainer_kit.core.errors import CheckpointError

__all__ = ["DeepSpeedFiles", "find_deepspeed"]

_POINTERS: Final = ("latest_universal", "latest")
_STATES: Final = "*_model_states.pt"
_MOST: Final = 4096  # bytes of a name


@dataclass(frozen=True)
class DeepSpeedFiles:
    """What can be read.

    Attributes:
        parameters: the file of each, with the tensor under ``param``; none where ``states`` holds them.
        states: the engine's, with what the module's ``state_dict`` had under ``module``; of stage 3 one of each rank.
    """

    parameters: Mapping[str, Path]
    states: Sequence[Path]


def find_deepspeed(path: Path) -> DeepSpeedFiles | None:
    """What is in what ``ds_to_universal`` wrote, or DeepSpeed without ZeRO; None where DeepSpeed wrote nothing.

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
        return DeepSpeedFiles(parameters, sorted(states, key=_rank))
    if len(states) == 1 and not any(tag.glob("*_optim_states.pt")):
        return DeepSpeedFiles({}, states)
    made = f"{tag.parent}-universal"
    raise CheckpointError(
        tag,
        None,
        "DeepSpeed wrote it, in parts that only DeepSpeed puts together",
        fix=f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {tag} --output_folder {made}/{tag.name}"
        f" --inject_missing_state, and pass {made}, as weights, or to accelerator.load_state to go on from it",
    )


def _rank(file: Path) -> int:
    """By number: of ten ranks and more, names are in another order."""
    found = re.match(r"zero_pp_rank_(\d+)_", file.name)
    return 0 if found is None else int(found[1])


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
