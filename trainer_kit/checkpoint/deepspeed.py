"""Directories that DeepSpeed itself wrote: where weights lie in them, and which of them only DeepSpeed can read.

A file format, not a part of the engine: weights load into every strategy, without DeepSpeed and without its engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import tensors_of, torch_load
from trainer_kit.core.errors import CheckpointError

__all__ = ["DeepSpeedContent", "DeepSpeedFiles", "deepspeed_content", "deepspeed_weights", "find_deepspeed"]

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


_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_STEP: Final = "step"


@final
@dataclass
class DeepSpeedContent:
    """What a run goes on from.

    Attributes:
        weights: by name; what is trained in full precision where ZeRO wrote it.
        moments: of each parameter, by name.
        placed: without ZeRO: moments of each group's parameters in order, with the ``master`` in half precision.
        rates: learning rates of the groups; none where nobody says.
        schedule: the scheduler's state; None where the engine had none.
        step: optimizer steps of the run, those that were skipped among them.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    placed: list[list[dict[str, Any]]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    schedule: Mapping[str, Any] | None = None
    step: int = 0


def deepspeed_weights(theirs: DeepSpeedFiles, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A module's tensors by name.

    Raises:
        CheckpointError: files are damaged, missing, or not what DeepSpeed writes.
    """
    return _weights(theirs, _engine_state(theirs.states[0], device), device)


def deepspeed_content(theirs: DeepSpeedFiles) -> DeepSpeedContent:
    """All that is read of them; every tensor whole, on the CPU.

    Raises:
        CheckpointError: as `deepspeed_weights`.
    """
    state = _engine_state(theirs.states[0], "cpu")
    step, schedule = state.get("global_steps", 0), state.get("lr_scheduler")
    found = DeepSpeedContent(_weights(theirs, state, "cpu"), step=step)
    if isinstance(schedule, Mapping):
        found.schedule = schedule
        rates = schedule.get("_last_lr")
        found.rates = [rate for rate in rates if isinstance(rate, float)] if isinstance(rates, list) else []
    if theirs.parameters:
        found.moments = dict(_moments(theirs, found.weights, _shared(state), step - state.get("skipped_steps", 0)))
    else:
        found.placed, rates = _placed(theirs.states[0], state.get("optimizer"))
        found.rates = rates or found.rates
    return found


def _engine_state(file: Path, device: torch.device | str) -> dict[str, Any]:
    content = torch_load(file, device)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        raise CheckpointError(file, "module", "there is no state_dict")
    return content


def _weights(theirs: DeepSpeedFiles, state: Mapping[str, Any], device: torch.device | str) -> dict[str, Tensor]:
    first = theirs.states[0]
    kept, size = state["module"], first.stat().st_size
    if not theirs.parameters:
        return tensors_of(first, kept, size)
    # What is trained lies apart in full precision, and buffers as float32: those of the module are as they were.
    buffers, frozen = state.get("buffer_names") or (), state.get("frozen_param_shapes") or {}
    shapes = _shapes(state)
    divided = any(isinstance(kept.get(name), Tensor) and kept[name].shape != shape for name, shape in frozen.items())
    weights = tensors_of(first, {n: v for n, v in kept.items() if n in buffers or (n in frozen and not divided)}, size)
    if divided:
        weights |= _put_together(theirs, frozen, device)
    for name, file in theirs.parameters.items():
        if name not in weights and name not in frozen:
            weights[name] = _one(file, name, device, shapes.get(name))
    return weights | {name: weights[one] for name, one in _shared(state).items() if one in weights}


def _shapes(state: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Of what is trained, whole: stage 3 writes it flat."""
    groups = state.get("param_shapes")
    return {name: shape for group in groups for name, shape in group.items()} if isinstance(groups, list) else {}


def _shared(state: Mapping[str, Any]) -> dict[str, str]:
    shared = state.get("shared_params")
    return dict(shared) if isinstance(shared, dict) else {}


def _put_together(
    theirs: DeepSpeedFiles, frozen: Mapping[str, torch.Size], device: torch.device | str
) -> dict[str, Tensor]:
    """Stage 3: what is frozen lies in the files of all ranks, a part in each."""
    parts = [(file, _engine_state(file, device).get("frozen_param_fragments") or {}) for file in theirs.states]
    found = {}
    for name, shape in frozen.items():
        pieces = [tensors_of(file, {name: of.get(name)}, file.stat().st_size)[name].view(-1) for file, of in parts]
        found[name] = _shaped(torch.cat(pieces), shape, theirs.states[0], name)
    return found


def _one(file: Path, name: str, device: torch.device | str, shape: torch.Size | None) -> Tensor:
    content = torch_load(file, device)
    value = content.get("param") if isinstance(content, dict) else content
    tensor = tensors_of(file, {name: value}, file.stat().st_size)[name]
    return tensor if shape is None else _shaped(tensor, shape, file, name)


def _shaped(tensor: Tensor, shape: torch.Size, file: Path, name: str) -> Tensor:
    """Of a flat one, which may be filled up behind."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() != 1 or tensor.numel() < shape.numel():
        raise CheckpointError(file, name, f"a tensor of {list(tensor.shape)} where {list(shape)} is said")
    return tensor[: shape.numel()].view(shape)


def _moments(
    theirs: DeepSpeedFiles, weights: Mapping[str, Tensor], shared: Mapping[str, str], steps: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    aliases = {first: name for name, first in shared.items()}
    for name, file in theirs.parameters.items():
        files = {key: file.with_name(f"{key}.pt") for key in _MOMENTS}
        if not all(one.exists() for one in files.values()):
            continue  # it has never had a gradient, is frozen, or no parameter
        own: dict[str, Any] = {key: _one(one, name, "cpu", weights[name].shape) for key, one in files.items()}
        counted = file.with_name("step.pt")
        # Stage 3 and fused optimizers count for all parameters at once; all of them are stepped in each step.
        number = torch_load(counted, "cpu") if counted.exists() else steps
        own[_STEP] = torch.as_tensor(number, dtype=torch.float32)
        yield name, own
        if name in aliases:  # the module may call what is shared by the other name
            yield aliases[name], own


def _placed(file: Path, state: Any) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """Without ZeRO: torch's ``state_dict``, around which half precision has masters."""
    if not isinstance(state, dict):
        return [], []
    inner = state.get("optimizer_state_dict", state)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return [], []
    masters: Sequence[Any] | None = state.get("fp32_groups")
    if "fp32_groups_flat" in state:
        raise CheckpointError(
            file, "fp32_groups_flat", "masters are in flat groups, which say nothing of their parameters",
            fix="train its last steps with ZeRO's stage 1, and pass what ds_to_universal makes of that",
        )  # fmt: skip
    groups = []
    for number, group in enumerate(inner["param_groups"]):
        own = [dict(inner["state"].get(index, {})) for index in group["params"]]
        if masters is not None:
            own = [{**one, "master": master} for one, master in zip(own, masters[number], strict=True)]
        groups.append(own)
    return groups, [group["lr"] for group in inner["param_groups"] if "lr" in group]
