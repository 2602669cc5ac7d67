"""Weights and moments of a DeepSpeed engine by the user's own parameters, and what a rank holds of them and sends.

Below stage 3 the engine keeps one flat master for each group of parameters, of which a rank holds a piece; at stage 3
it keeps several, and divides parameters, too. Checkpoints hold whole tensors in full precision, as every other strategy
writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs
from trainer_kit.core.protocols import Group
from trainer_kit.core.state_names import (
    load_module_weights,
    named_state,
    names_in,
    plain_state,
    report_differences,
    without_wrappers,
)
from trainer_kit.strategies.state import (
    FlatShard,
    States,
    gather_flat,
    placeholder_tensor,
)

__all__ = [
    "deepspeed_costs",
    "find_pieces",
    "load_module",
    "load_optimizer",
    "module_state",
    "optimizer_states",
]

_STEP: Final = "step"
_LAYOUTS: Final = (
    "nothing is divided",
    "optimizer state and masters are divided",
    "gradients, optimizer state and masters are divided",
    "everything is divided, small parameters are whole besides",
)
_ALIGNED: Final = (
    2  # the engine rounds a flat group up to a multiple of so many elements a rank
)


def _shape_of(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; at stage 3 the parameter itself is empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def find_pieces(optimizer: Any) -> dict[nn.Parameter, FlatShard]:
    """Find this rank's piece of every parameter whose master is another tensor; `optimizer` is the engine's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return dict(_pieces_of_stage_3(optimizer))
    found: dict[nn.Parameter, FlatShard] = {}
    if hasattr(optimizer, "bit16_groups") or hasattr(
        optimizer, "fp32_groups_flat_partition"
    ):  # stages 1 and 2
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        masters = (
            getattr(optimizer, "single_partition_of_fp32_groups", None)
            or optimizer.fp32_groups_flat_partition
        )
        for group, master in zip(groups, masters, strict=True):
            for parameter in group:
                fragment = parameter._hp_mapping
                if fragment is None:  # all of it is on other ranks
                    found[parameter] = FlatShard(master, 0, 0, 0)
                else:
                    own = fragment.lp_fragment_address
                    found[parameter] = FlatShard(
                        master, fragment.hp_fragment_address.start, own.start, own.numel
                    )
    elif hasattr(
        optimizer, "fp32_groups_flat"
    ):  # stage 0, low precision, DeepSpeed's fused Adam
        for group, master in zip(
            optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True
        ):
            start = 0
            for parameter in group:
                found[parameter] = FlatShard(
                    master, start, 0, parameter.numel(), is_sharded=False
                )
                start += parameter.numel()
    elif hasattr(
        optimizer, "fp32_groups"
    ):  # stage 0, low precision, any other optimizer
        for group, masters in zip(
            optimizer.fp16_groups, optimizer.fp32_groups, strict=True
        ):
            for parameter, master in zip(group, masters, strict=True):
                found[parameter] = FlatShard(
                    master, 0, 0, parameter.numel(), is_sharded=False
                )
    return found


def _pieces_of_stage_3(optimizer: Any) -> Iterator[tuple[nn.Parameter, FlatShard]]:
    for group in optimizer.fp16_groups:
        for parameter in group:
            number, start, size = optimizer.grad_position[
                optimizer.get_param_id(parameter)
            ]
            first = size * dist.get_rank(parameter.ds_process_group)
            count = max(
                0, min(size, parameter.ds_numel - first)
            )  # the last ranks' pieces are padded
            yield (
                parameter,
                FlatShard(
                    optimizer.fp32_partitioned_groups_flat[number],
                    start,
                    min(first, parameter.ds_numel),
                    count,
                ),
            )


def module_state(
    pieces: Mapping[nn.Parameter, FlatShard],
    module: nn.Module,
    own: Mapping[str, Any],
    keep: bool,
) -> dict[str, Any]:
    """``module.state_dict()`` with whole weights in full precision. Every rank must call it.

    Args:
        pieces: of the module's parameters.
        module: the user's.
        own: the module's ``state_dict``, which every rank has.
        keep: whether this rank needs the values; else weights are zeros that take no memory.
    """
    state = dict(own)
    seen: dict[nn.Parameter, Tensor] = {}
    for name, parameter in named_state(module).items():
        if name not in state:
            continue
        if parameter not in seen:
            piece = pieces.get(parameter)
            if piece is None:
                seen[parameter] = _frozen_weight(parameter, state[name], keep)
            elif parameter.dtype == piece.master.dtype and not hasattr(
                parameter, "ds_id"
            ):
                seen[parameter] = state[name]  # not rounded, and whole on every rank
            else:
                seen[parameter] = gather_flat(
                    piece, _shape_of(parameter), piece.master, keep
                )
        state[name] = seen[parameter]
    return state


def _frozen_weight(parameter: nn.Parameter, own: Tensor, keep: bool) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return own
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        if not keep:
            return placeholder_tensor(_shape_of(parameter), parameter.dtype)
        return parameter.detach().clone().cpu()  # sync point: a checkpoint


def load_module(
    pieces: Mapping[nn.Parameter, FlatShard],
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    world: Group,
) -> None:
    """Restore `module_state`, or a ``state_dict`` of the same module under any other strategy."""
    state = without_wrappers(state)
    divided = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    if divided:
        _load_divided(module, state, strict, world)
    else:
        load_module_weights(module, state, strict)
    for name, parameter in named_state(module).items():
        piece = pieces.get(parameter)
        if piece is not None and name in state:
            # The parameter may be in half precision; its master is not rounded.
            piece.view_in_master(piece.master).copy_(
                piece.view_in_parameter(state[name])
            )


def _load_divided(
    module: nn.Module, state: Mapping[str, Any], strict: bool, world: Group
) -> None:
    """Stage 3: gather one parameter at a time, and write rank 0's value into it on all ranks."""
    import deepspeed

    parameters = named_state(module)
    fail_together(world, lambda: _check_names(module, parameters, state, strict))
    done: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        if name in state and parameter not in done:
            done.add(parameter)
            with (
                deepspeed.zero.GatheredParameters([parameter], modifier_rank=0),
                torch.no_grad(),
            ):
                if dist.get_rank() == 0:
                    parameter.copy_(state[name])
    rest = {name: value for name, value in state.items() if name not in parameters}
    module.load_state_dict(names_in(module, rest), strict=False)


def _check_names(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
    strict: bool,
) -> None:
    """Raise torch's own error, as every other strategy does."""
    wrong = [
        f"size mismatch for {name}: copying a param with shape {state[name].shape} from checkpoint, the shape in"
        f" current model is {_shape_of(parameter)}."
        for name, parameter in parameters.items()
        if name in state and state[name].shape != _shape_of(parameter)
    ]
    known = set(plain_state(module))
    if not strict:
        report_differences(known - state.keys(), state.keys() - known)
    else:
        for kind, names in (
            ("Missing", known - state.keys()),
            ("Unexpected", state.keys() - known),
        ):
            if names:
                wrong.append(
                    f"{kind} key(s) in state_dict: {', '.join(map(repr, sorted(names)))}."
                )
    if wrong:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t"
            + "\n\t".join(wrong)
        )


def optimizer_states(
    pieces: Mapping[nn.Parameter, FlatShard], optimizer: Optimizer, keep: bool
) -> dict[nn.Parameter, dict[str, Any]]:
    """The whole state of each parameter; every rank must call it. Without ``keep``: zeros that take no memory."""
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, piece in pieces.items():
        own = optimizer.state.get(piece.master)
        if not own:
            continue
        found[parameter] = {
            key: gather_flat(piece, _shape_of(parameter), value, keep)
            if isinstance(value, Tensor)
            and key != _STEP
            and value.shape == piece.master.shape
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in own.items()
        }
    return found


def load_optimizer(
    pieces: Mapping[nn.Parameter, FlatShard], optimizer: Optimizer, state: States
) -> None:
    """Restore `optimizer_states`, or the state of the same parameters under any other strategy."""
    as_tensor = type(optimizer).__module__.startswith("torch.")
    for parameter, piece in pieces.items():
        own = optimizer.state[piece.master] if parameter in state else {}
        for key, value in state.get(parameter, {}).items():
            if key == _STEP:
                # torch counts steps in tensors, DeepSpeed's own optimizers in integers.
                count = float(
                    value
                )  # no sync point: a value of a checkpoint, on the host
                own[key] = (
                    torch.tensor(count, dtype=torch.float32)
                    if as_tensor
                    else int(count)
                )
            elif isinstance(value, Tensor) and value.shape == _shape_of(parameter):
                if key not in own:
                    own[key] = torch.zeros_like(piece.master, requires_grad=False)
                piece.view_in_master(own[key]).copy_(piece.view_in_parameter(value))
            else:
                own[key] = value.clone() if isinstance(value, Tensor) else value


def deepspeed_costs(
    stage: int,
    module: nn.Module,
    ranks: int,
    precision: str,
    groups: Iterable[Sequence[nn.Parameter]] = (),
) -> Costs:
    """What one rank holds and sends (Rajbhandari et al., SC 2020, chapters 5 and 7).

    Args:
        stage: of ZeRO.
        module: before or after the engine has taken it over.
        ranks: among which it is divided.
        precision: the run's, by name.
        groups: parameters of the optimizer, which at stage 3 has the masters of a group only while it steps it.
    """
    low = {"bf16": torch.bfloat16, "16-m": torch.float16, "16-t": torch.float16}.get(
        precision[:4]
    )
    parameters = list(module.parameters())
    sizes = {p: _shape_of(p).numel() for p in parameters}
    width = {p: (low or p.dtype).itemsize for p in parameters}
    trained = [p for p in parameters if p.requires_grad]
    taken = cycle(groups)

    def part(count: int) -> int:
        return -(-count // ranks)

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if any(p not in sizes for p in group):
            return list(group)  # the engine's own masters
        group = group or next(taken, [])
        counts = [sizes[p] for p in group if p.requires_grad]
        if 1 <= stage <= 2:
            counts = [_ALIGNED * part(-(-sum(counts) // _ALIGNED))]
        elif stage == 3:
            counts = [sum(map(part, counts))]
        return [
            torch.empty(count, device="meta", requires_grad=True) for count in counts
        ]

    weights = sum(sizes[p] * width[p] for p in parameters)
    gradients = sum(sizes[p] * width[p] for p in trained)
    return Costs(
        layout=f"ZeRO stage {stage} over {ranks} ranks: {_LAYOUTS[stage]}",
        parameters=sum(part(sizes[p]) * width[p] for p in parameters)
        if stage == 3
        else weights,
        gradients=sum(part(sizes[p]) * width[p] for p in trained)
        if stage >= 2
        else gradients,
        stepped=stepped,
        masters=0
        if stage == 0 and low is None
        else sum(t.numel() * 4 for t in stepped(trained)),
        exchanges=_exchanges(stage, ranks) if ranks > 1 else [],
    )


def _exchanges(stage: int, ranks: int) -> list[str]:
    over = f"over {ranks} ranks"
    if stage == 0:
        return [f"gradients: all-reduce {over}"]
    if stage < 3:
        often = ", in each backward" if stage == 2 else ""
        return [
            f"gradients: reduce {over}, to who steps them{often}",
            f"stepped parameters: all-gather {over}",
        ]
    return [
        f"parameters: all-gather {over} for each forward, and again for backward",
        f"gradients: reduce {over}, to who steps them, in each backward",
    ]
