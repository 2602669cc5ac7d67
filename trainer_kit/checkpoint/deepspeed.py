"""Read checkpoint directories that DeepSpeed wrote: weights in full precision, Adam's moments, and the schedule.

``ds_to_universal`` writes master weights to ``zero/<name>/fp32.pt``, and the moments to ``exp_avg.pt`` and
``exp_avg_sq.pt`` beside it: in the shape of the parameter for stages 1 and 2, flat for stage 3. Without ZeRO the state
of an optimizer is by position, as in torch.

This is a file format, not a part of the engine: weights load into every strategy, without DeepSpeed.
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

__all__ = [
    "DeepSpeedContent",
    "DeepSpeedFiles",
    "deepspeed_content",
    "deepspeed_weights",
    "find_deepspeed",
]

_POINTERS: Final = ("latest_universal", "latest")
_STATES: Final = "*_model_states.pt"
_MOST: Final = 4096  # bytes of a name


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
    tag = _tag(path)
    if tag is None:
        return None
    states = sorted(tag.glob(_STATES))
    parameters = {file.parent.name: file for file in sorted(tag.glob("zero/*/fp32.pt"))}
    if parameters:
        return DeepSpeedFiles(parameters, sorted(states, key=_rank))
    if len(states) == 1 and not any(tag.glob("*_optim_states.pt")):
        return DeepSpeedFiles({}, states)
    universal = f"{tag.parent}-universal"
    command = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {tag}"
    raise CheckpointError(
        tag,
        None,
        "DeepSpeed wrote it, in parts that only DeepSpeed can assemble",
        fix=f"{command} --output_folder {universal}/{tag.name} --inject_missing_state, and pass {universal} as weights,"
        " or to accelerator.load_state to resume from it",
    )


def _rank(file: Path) -> int:
    """Return the rank in a file name; sorted as text, names of ten or more ranks are in another order."""
    found = re.match(r"zero_pp_rank_(\d+)_", file.name)
    return 0 if found is None else int(found[1])


def _tag(path: Path) -> Path | None:
    """Return the directory of one step, or None."""
    if any(path.glob(_STATES)):
        return path
    for pointer in _POINTERS:
        try:
            with open(path / pointer, encoding="utf-8") as file:
                name = file.read(_MOST).strip()
        except (OSError, ValueError):
            continue
        if (
            name == os.path.basename(name)
            and name not in ("", ".", "..")
            and any((path / name).glob(_STATES))
        ):
            return path / name
    return None


_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


@final
@dataclass
class DeepSpeedContent:
    """The state that a run resumes from.

    Attributes:
        weights: by name; trained weights in full precision if ZeRO wrote them.
        moments: the moments of each parameter, by name.
        placed: without ZeRO: the moments of each group's parameters in order, in half precision with the ``master``.
        rates: the learning rates of the groups; empty if they are unknown.
        schedule: the scheduler's state; None if the engine had no scheduler.
        step: optimizer steps of the run, including skipped steps.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    placed: list[list[dict[str, Any]]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    schedule: Mapping[str, Any] | None = None
    step: int = 0


def deepspeed_weights(
    theirs: DeepSpeedFiles, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return a module's tensors by name.

    Raises:
        CheckpointError: a file is missing, damaged, or not in DeepSpeed's format.
    """
    return _weights(theirs, _engine_state(theirs.states[0], device), device)


def deepspeed_content(theirs: DeepSpeedFiles) -> DeepSpeedContent:
    """Return the state of a run, with whole tensors on the CPU.

    Raises:
        CheckpointError: as `deepspeed_weights`.
    """
    state = _engine_state(theirs.states[0], "cpu")
    step, schedule = state.get("global_steps", 0), state.get("lr_scheduler")
    found = DeepSpeedContent(_weights(theirs, state, "cpu"), step=step)
    if isinstance(schedule, Mapping):
        found.schedule = schedule
        rates = schedule.get("_last_lr")
        found.rates = (
            [rate for rate in rates if isinstance(rate, float)]
            if isinstance(rates, list)
            else []
        )
    if theirs.parameters:
        found.moments = dict(
            _moments(
                theirs,
                found.weights,
                _shared(state),
                step - state.get("skipped_steps", 0),
            )
        )
    else:
        found.placed, rates = _placed(theirs.states[0], state.get("optimizer"))
        found.rates = rates or found.rates
    return found


def _engine_state(file: Path, device: torch.device | str) -> dict[str, Any]:
    content = torch_load(file, device)
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        raise CheckpointError(file, "module", "the file contains no state_dict")
    return content


def _weights(
    theirs: DeepSpeedFiles, state: Mapping[str, Any], device: torch.device | str
) -> dict[str, Tensor]:
    first = theirs.states[0]
    kept, size = state["module"], first.stat().st_size
    if not theirs.parameters:
        return tensors_of(first, kept, size)
    # Trained weights are in their own files in full precision. Take buffers from the module: its dtypes are unchanged.
    buffers = state.get("buffer_names") or ()
    frozen = state.get("frozen_param_shapes") or {}
    shapes = _shapes(state)
    divided = any(
        isinstance(kept.get(name), Tensor) and kept[name].shape != shape
        for name, shape in frozen.items()
    )
    weights = tensors_of(
        first,
        {
            n: v
            for n, v in kept.items()
            if n in buffers or (n in frozen and not divided)
        },
        size,
    )
    if divided:
        weights |= _assemble_frozen(theirs, frozen, device)
    for name, file in theirs.parameters.items():
        if name not in weights and name not in frozen:
            weights[name] = _read_tensor(file, name, device, shapes.get(name))
    return weights | {
        name: weights[one] for name, one in _shared(state).items() if one in weights
    }


def _shapes(state: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of trained parameters, which stage 3 writes flat."""
    groups = state.get("param_shapes")
    return (
        {name: shape for group in groups for name, shape in group.items()}
        if isinstance(groups, list)
        else {}
    )


def _shared(state: Mapping[str, Any]) -> dict[str, str]:
    shared = state.get("shared_params")
    return dict(shared) if isinstance(shared, dict) else {}


def _assemble_frozen(
    theirs: DeepSpeedFiles, frozen: Mapping[str, torch.Size], device: torch.device | str
) -> dict[str, Tensor]:
    """Assemble frozen parameters of stage 3 from the files of all ranks; each file holds a part."""
    parts = [
        (file, _engine_state(file, device).get("frozen_param_fragments") or {})
        for file in theirs.states
    ]
    found = {}
    for name, shape in frozen.items():
        pieces = [
            tensors_of(file, {name: of.get(name)}, file.stat().st_size)[name].view(-1)
            for file, of in parts
        ]
        found[name] = _shaped(torch.cat(pieces), shape, theirs.states[0], name)
    return found


def _read_tensor(
    file: Path, name: str, device: torch.device | str, shape: torch.Size | None
) -> Tensor:
    content = torch_load(file, device)
    value = content.get("param") if isinstance(content, dict) else content
    tensor = tensors_of(file, {name: value}, file.stat().st_size)[name]
    return tensor if shape is None else _shaped(tensor, shape, file, name)


def _shaped(tensor: Tensor, shape: torch.Size, file: Path, name: str) -> Tensor:
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


def _moments(
    theirs: DeepSpeedFiles,
    weights: Mapping[str, Tensor],
    shared: Mapping[str, str],
    steps: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    aliases = {first: name for name, first in shared.items()}
    for name, file in theirs.parameters.items():
        files = {key: file.with_name(f"{key}.pt") for key in _MOMENTS}
        if not all(one.exists() for one in files.values()):
            continue  # it never had a gradient, is frozen, or is a buffer
        own: dict[str, Any] = {
            key: _read_tensor(one, name, "cpu", weights[name].shape)
            for key, one in files.items()
        }
        counted = file.with_name("step.pt")
        # Stage 3 and fused optimizers have one count for all parameters, which are all updated in each step.
        number = torch_load(counted, "cpu") if counted.exists() else steps
        own["step"] = torch.as_tensor(number, dtype=torch.float32)
        yield name, own
        if name in aliases:  # the module may use the other name of a shared parameter
            yield aliases[name], own


def _placed(file: Path, state: Any) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """Return moments and learning rates without ZeRO, from torch's ``state_dict``; in half precision with masters."""
    if not isinstance(state, dict):
        return [], []
    inner = state.get("optimizer_state_dict", state)
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        return [], []
    masters: Sequence[Any] | None = state.get("fp32_groups")
    if "fp32_groups_flat" in state:
        raise CheckpointError(
            file,
            "fp32_groups_flat",
            "masters are in flat groups, which do not name their parameters",
            fix="train its last steps with ZeRO's stage 1, and pass the output of ds_to_universal",
        )
    groups = []
    for number, group in enumerate(inner["param_groups"]):
        own = [dict(inner["state"].get(index, {})) for index in group["params"]]
        if masters is not None:
            own = [
                {**one, "master": master}
                for one, master in zip(own, masters[number], strict=True)
            ]
        groups.append(own)
    return groups, [group["lr"] for group in inner["param_groups"] if "lr" in group]
