"""Weights and moments of a DeepSpeed engine by the user's own parameters: whole, in full precision, and back.

Below stage 3 the engine keeps one flat master of each group of parameters, of which a rank holds a piece; at stage 3
it keeps several, and parameters, too, are in pieces. What is written here is what any other strategy writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import together
from trainer_kit.core.protocols import Group
from trainer_kit.strategies.flat_shards import Piece, unkept, whole_of

__all__ = ["find_pieces", "load_module", "load_optimizer", "module_state", "optimizer_states", "shape_of"]

_STEP: Final = "step"


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; stage 3 leaves an empty one."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def find_pieces(optimizer: Any) -> dict[nn.Parameter, Piece]:
    """Of every parameter whose master is another tensor than itself; `optimizer` is the engine's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return dict(_pieces_of_stage_3(optimizer))
    found: dict[nn.Parameter, Piece] = {}
    if hasattr(optimizer, "bit16_groups") or hasattr(optimizer, "fp32_groups_flat_partition"):  # stages 1 and 2
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        masters = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
        for group, master in zip(groups, masters, strict=True):
            for parameter in group:
                here = parameter._hp_mapping
                if here is None:
                    found[parameter] = Piece(master, 0, 0, 0)
                else:
                    flat, own = here.hp_fragment_address, here.lp_fragment_address
                    found[parameter] = Piece(master, flat.start, own.start, own.numel)
    elif hasattr(optimizer, "fp32_groups_flat"):  # stage 0, low precision, DeepSpeed's fused Adam
        for group, master in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            start = 0
            for parameter in group:
                found[parameter] = Piece(master, start, 0, parameter.numel(), divided=False)
                start += parameter.numel()
    elif hasattr(optimizer, "fp32_groups"):  # stage 0, low precision, any other optimizer
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                found[parameter] = Piece(master, 0, 0, parameter.numel(), divided=False)
    return found


def _pieces_of_stage_3(optimizer: Any) -> Iterator[tuple[nn.Parameter, Piece]]:
    for group in optimizer.fp16_groups:
        for parameter in group:
            number, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = size * dist.get_rank(parameter.ds_process_group)
            count = max(0, min(size, parameter.ds_numel - first))  # the last ranks' pieces are padded
            yield (
                parameter,
                Piece(optimizer.fp32_partitioned_groups_flat[number], start, min(first, parameter.ds_numel), count),
            )


def _whole(parameter: nn.Parameter, piece: Piece, tensor: Tensor, keep: bool) -> Tensor:
    return whole_of(piece, shape_of(parameter), tensor, keep)


def module_state(
    pieces: Mapping[nn.Parameter, Piece], module: nn.Module, own: Mapping[str, Any], keep: bool
) -> dict[str, Any]:
    """``module.state_dict()`` with whole weights in full precision. Every rank must call it.

    Args:
        pieces: of its parameters.
        module: the user's.
        own: its ``state_dict``, which every rank has.
        keep: whether this rank wants the values; else weights are zeros that take no memory.
    """
    state = dict(own)
    seen: dict[nn.Parameter, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in state:
            continue
        if parameter not in seen:
            piece = pieces.get(parameter)
            if piece is None:
                seen[parameter] = _frozen(parameter, state[name], keep)
            elif parameter.dtype == piece.master.dtype and not hasattr(parameter, "ds_id"):
                seen[parameter] = state[name]  # nothing is rounded, and every rank has all of it
            else:
                seen[parameter] = _whole(parameter, piece, piece.master, keep)
        state[name] = seen[parameter]
    return state


def _frozen(parameter: nn.Parameter, there: Tensor, keep: bool) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return there
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        if not keep:
            return unkept(shape_of(parameter), parameter.dtype)
        return parameter.detach().clone().cpu()  # sync point: a checkpoint


def load_module(
    pieces: Mapping[nn.Parameter, Piece], module: nn.Module, state: Mapping[str, Any], strict: bool, world: Group
) -> None:
    """Put `module_state` back, or a ``state_dict`` of the same module under any other strategy."""
    divided = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if divided:
        _load_divided(module, state, strict, world)
    else:
        module.load_state_dict(state, strict=strict)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        piece = pieces.get(parameter)
        if piece is not None and name in state:
            # What the forward computes with may be rounded; the master is not.
            piece.of(piece.master).copy_(piece.in_whole(state[name]))


def _load_divided(module: nn.Module, state: Mapping[str, Any], strict: bool, world: Group) -> None:
    """Stage 3: one parameter at a time is whole, and rank 0's value is given to all."""
    import deepspeed

    parameters = dict(module.named_parameters(remove_duplicate=False))
    together(world, lambda: _check_names(module, parameters, state, strict))
    done: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        if name in state and parameter not in done:
            done.add(parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    parameter.copy_(state[name])
    module.load_state_dict({name: value for name, value in state.items() if name not in parameters}, strict=False)


def _check_names(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
    strict: bool,
) -> None:
    """In torch's words, as for every other strategy."""
    wrong = [
        f"size mismatch for {name}: copying a param with shape {state[name].shape} from checkpoint, the shape in"
        f" current model is {shape_of(parameter)}."
        for name, parameter in parameters.items()
        if name in state and state[name].shape != shape_of(parameter)
    ]
    there = set(module.state_dict())
    if strict:
        for kind, names in (("Missing", there - state.keys()), ("Unexpected", state.keys() - there)):
            if names:
                wrong.append(f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}.")
    if wrong:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(wrong))


def optimizer_states(
    pieces: Mapping[nn.Parameter, Piece], optimizer: Optimizer, keep: bool
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of each parameter, whole. Every rank must call it; zeros that take no memory where not kept."""
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, piece in pieces.items():
        own = optimizer.state.get(piece.master)
        if not own:
            continue
        found[parameter] = {
            key: _whole(parameter, piece, value, keep)
            if isinstance(value, Tensor) and key != _STEP and value.shape == piece.master.shape
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in own.items()
        }
    return found


def load_optimizer(
    pieces: Mapping[nn.Parameter, Piece], optimizer: Optimizer, state: Mapping[nn.Parameter, Mapping[str, Any]]
) -> None:
    """Put `optimizer_states` back, or the state of the same parameters under any other strategy."""
    as_tensor = type(optimizer).__module__.startswith("torch.")
    for parameter, piece in pieces.items():
        own = optimizer.state[piece.master] if parameter in state else {}
        for key, value in state.get(parameter, {}).items():
            if key == _STEP:
                own[key] = _step(value, as_tensor)
            elif isinstance(value, Tensor) and value.shape == shape_of(parameter):
                if key not in own:
                    own[key] = torch.zeros_like(piece.master, requires_grad=False)
                piece.of(own[key]).copy_(piece.in_whole(value))
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value


def _step(value: Any, as_tensor: bool) -> Any:
    """torch counts in tensors, DeepSpeed's own optimizers in integers."""
    if as_tensor:
        return torch.as_tensor(float(value), dtype=torch.float32)  # no sync point: a checkpoint's, on the host
    return int(value)  # no sync point: as above
