"""Read checkpoint directories that DeepSpeed wrote: weights in full precision, Adam's moments, and the schedule.

``ds_to_universal`` writes master weights to ``zero/<name>/fp32.pt``, and the moments to ``exp_avg.pt`` and
``exp_avg_sq.pt`` beside it: in the shape of the parameter for stages 1 and 2, flat for stage 3. Without ZeRO the state
of an optimizer is by position, as in torch.

This is a file format, not a part of the engine: weights load into every strategy, without DeepSpeed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import tensors_of, torch_load
from trainer_kit.checkpoint.torch_private import LAST_RATES
from trainer_kit.core.errors import CheckpointError

__all__ = [
    "DeepSpeedContent",
    "DeepSpeedFiles",
    "deepspeed_content",
    "deepspeed_weights",
    "find_deepspeed",
]

_POINTERS: Final = ("latest_universal", "latest")
_STATES: Final = "*_model_states.pt"
_MAX_NAME_BYTES: Final = 4096
"""Bytes of the name of a step's directory: more than any file system takes."""


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The readable files of a DeepSpeed directory.

    Attributes:
        parameters: the file of each parameter, with the tensor under ``param``; empty if ``states`` holds them.
        states: the engine's state files, with the module's ``state_dict`` under ``module``; for stage 3 one per rank.
    """

    parameters: Mapping[str, Path]
    states: Sequence[Path]


def find_deepspeed(path: Path) -> DeepSpeedFiles | None:
    """Find the files that ``ds_to_universal``, or DeepSpeed without ZeRO, wrote; None in any other directory.

    Args:
        path: a directory of steps, or the directory of one step.

    Raises:
        CheckpointError: ZeRO wrote the directory as pickles that only DeepSpeed can assemble; the fix has the command.
    """
    directory = _find_step(path)
    if directory is None:
        return None
    states = sorted(directory.glob(_STATES))
    parameter_files = sorted(directory.glob("zero/*/fp32.pt"))
    if parameter_files:
        parameters = {file.parent.name: file for file in parameter_files}
        return DeepSpeedFiles(parameters, sorted(states, key=_rank))
    # With ZeRO the master weights lie in such files, in parts.
    if len(states) == 1 and not any(directory.glob("*_optim_states.pt")):
        return DeepSpeedFiles({}, states)
    universal = f"{directory.parent}-universal"
    command = (
        f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {directory}"
    )
    raise CheckpointError(
        directory,
        None,
        "DeepSpeed wrote it, in parts that only DeepSpeed can assemble",
        fix=f"{command} --output_folder {universal}/{directory.name} --inject_missing_state, and pass {universal} as"
        " weights, or to accelerator.load_state to resume from it",
    )


def _rank(file: Path) -> int:
    """Return the rank in a file name; sorted as text, names of ten or more ranks are in another order."""
    match = re.match(r"zero_pp_rank_(\d+)_", file.name)
    if match is None:
        return 0
    return int(match[1])


def _find_step(path: Path) -> Path | None:
    """Return the directory of one step, or None."""
    if any(path.glob(_STATES)):
        return path
    for pointer in _POINTERS:
        try:
            with open(path / pointer, encoding="utf-8") as file:
                name = file.read(_MAX_NAME_BYTES).strip()
        except (OSError, ValueError):
            continue
        # The file may name any path; only a directory beside it is one of its steps.
        leads_out = name != os.path.basename(name) or name in ("", ".", "..")
        if not leads_out and any((path / name).glob(_STATES)):
            return path / name
    return None


_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


_State = dict[str, Any]


@final
@dataclass
class DeepSpeedContent:
    """The state that a run resumes from.

    Attributes:
        weights: by name; trained weights in full precision if ZeRO wrote them.
        moments: the moments of each parameter, by name.
        moments_by_position: without ZeRO: the moments of each group's parameters in order, in half precision with the
            ``master``.
        rates: the learning rates of the groups; empty if they are unknown.
        schedule: the scheduler's state; None if the engine had no scheduler.
        step: optimizer steps of the run, including skipped steps.
    """

    weights: dict[str, Tensor]
    moments: dict[str, _State] = field(default_factory=dict)
    moments_by_position: list[list[_State]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    schedule: Mapping[str, Any] | None = None
    step: int = 0


def deepspeed_weights(
    files: DeepSpeedFiles,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return a module's tensors by name.

    Raises:
        CheckpointError: a file is missing, damaged, or not in DeepSpeed's format.
    """
    return _weights(files, _engine_state(files.states[0], device), device)


def deepspeed_content(files: DeepSpeedFiles) -> DeepSpeedContent:
    """Return the state of a run, with whole tensors on the CPU.

    Raises:
        CheckpointError: as `deepspeed_weights`.
    """
    state = _engine_state(files.states[0], "cpu")
    step = state.get("global_steps", 0)
    weights = _weights(files, state, "cpu")
    schedule = state.get("lr_scheduler")
    if not isinstance(schedule, Mapping):
        schedule = None
    rates = _scheduled_rates(schedule)
    if files.parameters:
        # Adam counts updates, and a step with an overflow is none.
        updates = step - state.get("skipped_steps", 0)
        moments = _read_moments(files, weights, _shared_names(state), updates)
        return DeepSpeedContent(
            weights, moments=moments, rates=rates, schedule=schedule, step=step
        )
    by_position, group_rates = _moments_by_position(
        files.states[0], state.get("optimizer")
    )
    return DeepSpeedContent(
        weights,
        moments_by_position=by_position,
        rates=group_rates or rates,
        schedule=schedule,
        step=step,
    )


def _scheduled_rates(schedule: Mapping[str, Any] | None) -> list[float]:
    rates = None
    if schedule is not None:
        rates = schedule.get(LAST_RATES)
    if not isinstance(rates, list):
        return []
    # The file may be of any version: other values are no rates.
    return [rate for rate in rates if isinstance(rate, float)]


def _engine_state(file: Path, device: torch.device | str) -> _State:
    content = torch_load(file, device)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        raise CheckpointError(file, "module", "the file contains no state_dict")
    return content


def _weights(
    files: DeepSpeedFiles,
    state: _State,
    device: torch.device | str,
) -> dict[str, Tensor]:
    first_file = files.states[0]
    max_bytes = first_file.stat().st_size
    module = state["module"]
    if not files.parameters:
        return tensors_of(first_file, module, max_bytes)
    # Trained weights are in their own files in full precision. Take buffers from the module: its dtypes are unchanged.
    buffers = state.get("buffer_names") or ()
    frozen = state.get("frozen_param_shapes") or {}
    # Stage 3 shards frozen parameters too: then the module has only this rank's part of each.
    is_divided = any(
        isinstance(module.get(name), Tensor) and module[name].shape != shape
        for name, shape in frozen.items()
    )
    whole_frozen = frozen
    if is_divided:
        whole_frozen = {}
    values = {
        name: value
        for name, value in module.items()
        if name in buffers or name in whole_frozen
    }
    weights = tensors_of(first_file, values, max_bytes)
    if is_divided:
        weights |= _assemble_frozen(files, frozen, device)
    shapes = _trained_shapes(state)
    for name, file in files.parameters.items():
        # Buffers and frozen parameters have been taken from the module already.
        if name not in weights and name not in frozen:
            weights[name] = _read_tensor(file, name, device, shapes.get(name))
    shared = {
        name: weights[first_name]
        for name, first_name in _shared_names(state).items()
        if first_name in weights
    }
    return weights | shared


def _trained_shapes(state: _State) -> dict[str, torch.Size]:
    """Return the shapes of trained parameters, which stage 3 writes flat."""
    shapes: dict[str, torch.Size] = {}
    groups = state.get("param_shapes")
    if isinstance(groups, list):
        for group in groups:
            shapes.update(group)
    return shapes


def _shared_names(state: _State) -> dict[str, str]:
    """Each further name of a shared parameter, with its first name."""
    shared = state.get("shared_params")
    if isinstance(shared, dict):
        return dict(shared)
    return {}


def _assemble_frozen(
    files: DeepSpeedFiles,
    frozen: Mapping[str, torch.Size],
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Assemble frozen parameters of stage 3 from the files of all ranks; each file holds a part."""
    # Each file is loaded once: it holds fragments of all parameters, beside the state of a whole rank.
    fragments_by_file = []
    for file in files.states:
        fragments = _engine_state(file, device).get("frozen_param_fragments") or {}
        fragments_by_file.append((file, fragments))
    weights = {}
    for name, shape in frozen.items():
        flat = []
        for file, fragments in fragments_by_file:
            fragment = {name: fragments.get(name)}
            tensors = tensors_of(file, fragment, file.stat().st_size)
            flat.append(tensors[name].view(-1))
        weight = torch.cat(flat)
        weights[name] = _unflatten(weight, shape, files.states[0], name)
    return weights


def _read_tensor(
    file: Path,
    name: str,
    device: torch.device | str,
    shape: torch.Size | None,
) -> Tensor:
    content = torch_load(file, device)
    value = content
    if isinstance(content, dict):
        value = content.get("param")
    tensor = tensors_of(file, {name: value}, file.stat().st_size)[name]
    # Without a shape (stages 1 and 2) the file has the parameter's own.
    if shape is None:
        return tensor
    return _unflatten(tensor, shape, file, name)


def _unflatten(
    tensor: Tensor,
    shape: torch.Size,
    file: Path,
    name: str,
) -> Tensor:
    """Return a tensor in ``shape``; it may be flat with padding at its end."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() != 1 or tensor.numel() < shape.numel():
        raise CheckpointError(
            file,
            name,
            f"a tensor of {list(tensor.shape)} where {list(shape)} is expected",
        )
    return tensor[: shape.numel()].view(shape)


def _read_moments(
    files: DeepSpeedFiles,
    weights: Mapping[str, Tensor],
    shared: Mapping[str, str],
    updates: int,
) -> dict[str, _State]:
    """The moments of each parameter, by name.

    Args:
        files: of the checkpoint.
        weights: whole, by name.
        shared: each further name of a shared parameter, with its first name.
        updates: the number of steps that were not skipped.
    """
    second_names = {first: name for name, first in shared.items()}
    moments: dict[str, _State] = {}
    for name, file in files.parameters.items():
        moment_files = {key: file.with_name(f"{key}.pt") for key in _MOMENTS}
        # It never had a gradient, is frozen, or is a buffer.
        if not all(moment_file.exists() for moment_file in moment_files.values()):
            continue
        shape = weights[name].shape
        state: _State = {}
        for key, moment_file in moment_files.items():
            state[key] = _read_tensor(moment_file, name, "cpu", shape)
        # Stage 3 and fused optimizers have one count for all parameters, which are all updated in each step.
        step_file = file.with_name("step.pt")
        step = updates
        if step_file.exists():
            step = torch_load(step_file, "cpu")
        state["step"] = torch.as_tensor(step, dtype=torch.float32)
        moments[name] = state
        # The module may use the other name of a shared parameter.
        if name in second_names:
            moments[second_names[name]] = state
    return moments


def _moments_by_position(
    file: Path,
    state: object,
) -> tuple[list[list[_State]], list[float]]:
    """Return moments and learning rates without ZeRO, from torch's ``state_dict``; in half precision with masters."""
    if not isinstance(state, dict):
        return [], []
    # In half precision DeepSpeed's optimizer wraps the state_dict of torch's.
    inner = state.get("optimizer_state_dict", state)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return [], []
    if "fp32_groups_flat" in state:
        raise CheckpointError(
            file,
            "fp32_groups_flat",
            "masters are in flat groups, which do not name their parameters",
            fix="train its last steps with ZeRO's stage 1, and pass the output of ds_to_universal",
        )
    masters: Sequence[Sequence[Tensor]] | None = state.get("fp32_groups")
    groups = []
    for group_index, group in enumerate(inner["param_groups"]):
        indices = group["params"]
        states = [dict(inner["state"].get(index, {})) for index in indices]
        if masters is not None:
            pairs = zip(states, masters[group_index], strict=True)
            states = [{**moments, "master": master} for moments, master in pairs]
        groups.append(states)
    rates = [group["lr"] for group in inner["param_groups"] if "lr" in group]
    return groups, rates
