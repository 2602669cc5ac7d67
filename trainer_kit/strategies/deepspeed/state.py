"""Weights and moments of a DeepSpeed engine by the user's own parameters, and what a rank holds of them and sends.

Below stage 3 the engine keeps one flat master for each group of parameters, of which a rank holds a piece; at stage 3
it keeps several, and shards parameters, too. Checkpoints hold whole tensors in full precision, as every other strategy
writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.costs import Costs
from trainer_kit.core.display import plural
from trainer_kit.core.protocols import Group
from trainer_kit.core.state_names import (
    load_module_weights,
    named_state,
    names_in,
    plain_state,
    report_differences,
    without_wrappers,
)
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.state import (
    FlatShard,
    States,
    gather_flat,
    placeholder_tensor,
)

__all__ = [
    "deepspeed_costs",
    "find_flat_shards",
    "load_module",
    "load_optimizer",
    "module_state",
    "optimizer_states",
]

_EngineOptimizer: TypeAlias = Any
"""The optimizer of DeepSpeed's engine, of one of four classes by stage and precision, with other attributes each."""
_STEP: Final = "step"
_STAGE_LAYOUTS: Final = (
    "nothing is sharded",
    "optimizer state and masters are sharded",
    "gradients, optimizer state and masters are sharded",
    "everything is sharded; small parameters also have a full copy",
)
_ALIGNED: Final = 2
"""The engine rounds a flat group up to a multiple of so many elements a rank."""


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of the whole parameter; at stage 3 the parameter itself is empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def find_flat_shards(optimizer: _EngineOptimizer) -> dict[nn.Parameter, FlatShard]:
    """Find this rank's piece of every parameter whose master is another tensor; `optimizer` is the engine's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return _find_stage_3_shards(optimizer)
    has_partitions = hasattr(optimizer, "fp32_groups_flat_partition")
    if hasattr(optimizer, "bit16_groups") or has_partitions:  # stages 1 and 2
        return _find_stage_2_shards(optimizer)
    shards: dict[nn.Parameter, FlatShard] = {}
    if hasattr(optimizer, "fp32_groups_flat"):
        # Stage 0 in low precision with DeepSpeed's fused Adam: one master for a group.
        masters = optimizer.fp32_groups_flat
        for group, master in zip(optimizer.fp16_groups, masters, strict=True):
            start = 0
            for parameter in group:
                size = parameter.numel()
                shards[parameter] = FlatShard(master, start, 0, size, is_sharded=False)
                start += size
    elif hasattr(optimizer, "fp32_groups"):
        # Stage 0 in low precision with any other optimizer: one master for a parameter.
        parameters = chain.from_iterable(optimizer.fp16_groups)
        masters = chain.from_iterable(optimizer.fp32_groups)
        for parameter, master in zip(parameters, masters, strict=True):
            size = parameter.numel()
            shards[parameter] = FlatShard(master, 0, 0, size, is_sharded=False)
    return shards


def _find_stage_2_shards(optimizer: _EngineOptimizer) -> dict[nn.Parameter, FlatShard]:
    """Stages 1 and 2: each rank has one master for a group, which holds fragments of some parameters."""
    shards: dict[nn.Parameter, FlatShard] = {}
    groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    masters = masters or optimizer.fp32_groups_flat_partition
    for group, master in zip(groups, masters, strict=True):
        for parameter in group:
            fragment = parameter._hp_mapping
            # All of it is on other ranks: the parameter still takes part in each gathering.
            if fragment is None:
                shards[parameter] = FlatShard(master, 0, 0, 0)
                continue
            in_master = fragment.hp_fragment_address
            in_parameter = fragment.lp_fragment_address
            shards[parameter] = FlatShard(
                master, in_master.start, in_parameter.start, in_parameter.numel
            )
    return shards


def _find_stage_3_shards(optimizer: _EngineOptimizer) -> dict[nn.Parameter, FlatShard]:
    """Stage 3: each parameter is sharded evenly, and each rank has its part in one of several masters."""
    shards: dict[nn.Parameter, FlatShard] = {}
    for parameter in chain.from_iterable(optimizer.fp16_groups):
        parameter_id = optimizer.get_param_id(parameter)
        master_index, master_start, size = optimizer.grad_position[parameter_id]
        first = min(
            size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel
        )
        length = min(size, parameter.ds_numel - first)  # the last shards are padded
        master = optimizer.fp32_partitioned_groups_flat[master_index]
        shards[parameter] = FlatShard(master, master_start, first, length)
    return shards


def module_state(
    shards: Mapping[nn.Parameter, FlatShard],
    module: nn.Module,
    local_state: SavedState,
    keep: bool,
) -> StateDict:
    """``module.state_dict()`` with full weights in full precision. Every rank must call it.

    Args:
        shards: this rank's shards of the module's parameters.
        module: the user's.
        local_state: the module's ``state_dict``, which every rank has.
        keep: whether this rank needs the values; else weights are zeros that take no memory.
    """
    state = dict(local_state)
    weights: dict[nn.Parameter, Tensor] = {}
    for name, parameter in named_state(module).items():
        if name not in state:
            continue
        # Shared parameters are gathered once, on every rank in the same order.
        if parameter not in weights:
            shard = shards.get(parameter)
            weights[parameter] = _gather_weight(parameter, shard, state[name], keep)
        state[name] = weights[parameter]
    return state


def _gather_weight(
    parameter: nn.Parameter, shard: FlatShard | None, local_weight: Tensor, keep: bool
) -> Tensor:
    """The full weight in full precision: of the master if there is one, else of the parameter."""
    is_partitioned = hasattr(parameter, "ds_id")
    if shard is not None and (is_partitioned or parameter.dtype != shard.master.dtype):
        return gather_flat(shard, _full_shape(parameter), shard.master, keep)
    if not is_partitioned:
        return local_weight  # not rounded, and complete on every rank
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        if not keep:
            return placeholder_tensor(_full_shape(parameter), parameter.dtype)
        return parameter.detach().clone().cpu()  # sync point: a checkpoint


def load_module(
    shards: Mapping[nn.Parameter, FlatShard],
    module: nn.Module,
    state: SavedState,
    strict: bool,
    world: Group,
) -> None:
    """Restore `module_state`, or a ``state_dict`` of the same module under any other strategy."""
    state = without_wrappers(state)
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        _load_partitioned(module, state, strict, world)
    else:
        load_module_weights(module, state, strict)
    # The engine steps the masters, and writes them over the weights after its next step.
    for name, parameter in named_state(module).items():
        shard = shards.get(parameter)
        if shard is not None and name in state:
            # The parameter may be in half precision; its master is not rounded.
            master = shard.view_in_master(shard.master)
            master.copy_(shard.view_in_parameter(state[name]))


def _load_partitioned(
    module: nn.Module, state: SavedState, strict: bool, world: Group
) -> None:
    """Stage 3: gather one parameter at a time, and write rank 0's value into it on all ranks."""
    import deepspeed

    parameters = named_state(module)
    # Before the first gathering, which all ranks have to enter.
    fail_together(world, lambda: _check_names(module, parameters, state, strict))
    loaded: set[nn.Parameter] = set()
    for name, parameter in parameters.items():
        if name not in state or parameter in loaded:
            continue
        loaded.add(parameter)
        gathered = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with gathered, torch.no_grad():
            if dist.get_rank() == 0:
                parameter.copy_(state[name])
    buffers = {name: value for name, value in state.items() if name not in parameters}
    module.load_state_dict(names_in(module, buffers), strict=False)


def _check_names(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    state: SavedState,
    strict: bool,
) -> None:
    """Raise torch's own error, as every other strategy does."""
    errors: list[str] = []
    for name, parameter in parameters.items():
        shape = _full_shape(parameter)
        if name in state and state[name].shape != shape:
            errors.append(
                f"size mismatch for {name}: copying a param with shape {state[name].shape} from checkpoint,"
                f" the shape in current model is {shape}."
            )
    module_names = set(plain_state(module))
    missing = module_names - state.keys()
    unexpected = state.keys() - module_names
    if not strict:
        report_differences(missing, unexpected)
    else:
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                listed = ", ".join(map(repr, sorted(names)))
                errors.append(f"{kind} key(s) in state_dict: {listed}.")
    if errors:
        title = f"Error(s) in loading state_dict for {type(module).__name__}:"
        raise RuntimeError("\n\t".join([title, *errors]))


def optimizer_states(
    shards: Mapping[nn.Parameter, FlatShard], optimizer: Optimizer, keep: bool
) -> dict[nn.Parameter, StateDict]:
    """The full state of each parameter; every rank must call it. Without ``keep``: zeros that take no memory."""
    states: dict[nn.Parameter, StateDict] = {}
    for parameter, shard in shards.items():
        shard_state = optimizer.state.get(shard.master)
        if not shard_state:
            continue
        state = dict(shard_state)
        for key, value in shard_state.items():
            if not isinstance(value, Tensor):
                continue
            if key != _STEP and value.shape == shard.master.shape:
                state[key] = gather_flat(shard, _full_shape(parameter), value, keep)
            else:
                state[key] = value.clone()
        states[parameter] = state
    return states


def load_optimizer(
    shards: Mapping[nn.Parameter, FlatShard], optimizer: Optimizer, state: States
) -> None:
    """Restore `optimizer_states`, or the state of the same parameters under any other strategy."""
    # By their module: torch counts steps in tensors, DeepSpeed's own optimizers in integers.
    counts_in_tensors = type(optimizer).__module__.startswith("torch.")
    for parameter, shard in shards.items():
        if parameter not in state:
            continue
        shape = _full_shape(parameter)
        shard_state = optimizer.state[shard.master]
        for key, value in state[parameter].items():
            if key == _STEP:
                steps = float(value)  # no sync point: of a checkpoint
                shard_state[key] = int(steps)
                if counts_in_tensors:
                    shard_state[key] = torch.tensor(steps, dtype=torch.float32)
            elif not isinstance(value, Tensor):
                shard_state[key] = value
            elif value.shape != shape:
                shard_state[key] = value.clone()
            else:
                if key not in shard_state:
                    moment = torch.zeros_like(shard.master, requires_grad=False)
                    shard_state[key] = moment
                target = shard.view_in_master(shard_state[key])
                target.copy_(shard.view_in_parameter(value))


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
        ranks: over which it is sharded.
        precision: the run's, by name.
        groups: parameters of the optimizer, which at stage 3 has the masters of a group only while it steps it.
    """
    low_dtypes = {"bf16": torch.bfloat16, "16-m": torch.float16, "16-t": torch.float16}
    low_dtype = low_dtypes.get(precision[:4])
    parameters = list(module.parameters())
    sizes = {p: _full_shape(p).numel() for p in parameters}
    trained = [p for p in parameters if p.requires_grad]
    group_iterator = cycle(groups)

    def count_bytes(parameter: nn.Parameter, sharded: bool) -> int:
        itemsize = (low_dtype or parameter.dtype).itemsize
        if sharded:
            return _divide(sizes[parameter], ranks) * itemsize
        return sizes[parameter] * itemsize

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if any(p not in sizes for p in group):
            return list(group)  # the engine's own masters
        group = group or next(group_iterator, [])
        counts = [sizes[p] for p in group if p.requires_grad]
        if 1 <= stage <= 2:
            counts = [_ALIGNED * _divide(_divide(sum(counts), _ALIGNED), ranks)]
        elif stage == 3:
            counts = [sum(_divide(count, ranks) for count in counts)]
        return [
            torch.empty(count, device="meta", requires_grad=True) for count in counts
        ]

    masters = sum(master.numel() * 4 for master in stepped(trained))
    if stage == 0 and low_dtype is None:
        masters = 0
    return Costs(
        layout=f"ZeRO stage {stage} over {plural(ranks, 'rank')}: {_STAGE_LAYOUTS[stage]}",
        parameters=sum(count_bytes(p, sharded=stage == 3) for p in parameters),
        gradients=sum(count_bytes(p, sharded=stage >= 2) for p in trained),
        stepped=stepped,
        masters=masters,
        exchanges=_describe_exchanges(stage, ranks) if ranks > 1 else [],
    )


def _divide(count: int, ranks: int) -> int:
    """The size of the largest part."""
    return -(-count // ranks)


def _describe_exchanges(stage: int, ranks: int) -> list[str]:
    over = f"over {plural(ranks, 'rank')}"
    if stage == 0:
        return [f"gradients: all-reduce {over}"]
    if stage < 3:
        when = ", in each backward" if stage == 2 else ""
        return [
            f"gradients: reduce {over}, to who steps them{when}",
            f"stepped parameters: all-gather {over}",
        ]
    return [
        f"parameters: all-gather {over} for each forward, and again for backward",
        f"gradients: reduce {over}, to who steps them, in each backward",
    ]
