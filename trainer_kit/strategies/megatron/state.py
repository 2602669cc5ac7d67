"""The state of Megatron's optimizer by the module's parameters, their tensor parallel layout, and costs.

Without the distributed optimizer every data rank steps, and holds, everything that its tensor rank has. With it a data
rank steps a flat piece of each parameter: saving gathers the pieces, loading takes them out of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs
from trainer_kit.core.display import plural
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.state import FlatShard, gather_flat, shard_like

__all__ = [
    "Stepper",
    "TensorLayout",
    "find_flat_shards",
    "load_state",
    "megatron_costs",
    "optimizer_states",
]

Stepper: TypeAlias = Any
"""Megatron's optimizer around one of torch's: the library has no types, and need not be installed."""
_STEP: Final = "step"


@final
class TensorLayout:
    """The layout of parameters among the tensor ranks.

    Args:
        ranks: of a tensor parallel group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meshes: dict[str, Any] = {}

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Whether a norm counts the gradient of this rank: ranks with equal gradients count once."""
        if self._ranks == 1 or getattr(parameter, "tensor_model_parallel", False):
            return True
        from megatron.core import parallel_state

        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def as_dtensor(self, value: Tensor, parameter: Any) -> Tensor:
        """The value of a parameter: a ``DTensor`` over the tensor ranks if they split the parameter."""
        if self._ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return value
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        device_type = value.device.type  # gathered state is on the host
        if device_type not in self._meshes:
            group = parallel_state.get_tensor_model_parallel_group()
            self._meshes[device_type] = DeviceMesh.from_group(group, device_type)
        mesh = self._meshes[device_type]
        placements = [Shard(parameter.partition_dim)]
        return DTensor.from_local(value.detach(), mesh, placements, run_check=False)


def find_flat_shards(
    stepper: Stepper, parameters: Iterable[nn.Parameter], distributed: bool
) -> dict[nn.Parameter, FlatShard]:
    """Find which elements of each parameter this rank steps.

    Args:
        stepper: Megatron's optimizer, around one of torch's.
        parameters: those that are trained.
        distributed: whether the optimizer is the distributed one.
    """
    shards: dict[nn.Parameter, FlatShard] = {}
    for parameter in parameters:
        if distributed:
            shards[parameter] = _empty_shard(parameter)
        else:
            master = getattr(parameter, "main_param", parameter)
            size = parameter.numel()
            shards[parameter] = FlatShard(master, 0, 0, size, is_sharded=False)
    if not distributed:
        return shards
    # Float32 parameters are their own masters; those in half precision have masters in float32.
    groups = [*stepper.model_fp32_groups, *stepper.model_float16_groups]
    master_groups = [
        *stepper.shard_fp32_groups,
        *stepper.shard_fp32_from_float16_groups,
    ]
    for group, masters in zip(groups, master_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            elements = stepper._get_model_param_range_map(parameter)["param"]
            length = elements.end - elements.start
            shards[parameter] = FlatShard(master, 0, elements.start, length)
    return shards


def _empty_shard(parameter: nn.Parameter) -> FlatShard:
    return FlatShard(torch.empty(0, device=parameter.device), 0, 0, 0)


def optimizer_states(
    stepper: Stepper,
    shards: Mapping[nn.Parameter, FlatShard],
    layout: TensorLayout,
    data: Group,
    keep: bool,
) -> dict[nn.Parameter, StateDict]:
    """The state of each parameter as torch's optimizer would have it. Every rank must call it.

    Args:
        stepper: Megatron's optimizer, around one of torch's.
        shards: this rank's shards of the module's parameters.
        layout: the layout of the parameters.
        data: the ranks that have the shards.
        keep: whether this rank needs the values; else they are zeros that take no memory.
    """
    dtypes, steps = _describe_state(stepper.optimizer)
    if any(shard.is_sharded for shard in shards.values()):
        # A rank may hold only padding of the last bucket, and then has no state: take another rank's description.
        descriptions = data.all_gather_object((dtypes, steps))
        dtypes, steps = max(descriptions, key=lambda description: len(description[0]))
    states: dict[nn.Parameter, StateDict] = {}
    if not dtypes:
        return states
    for parameter, shard in shards.items():
        shard_state = stepper.optimizer.state.get(shard.master, {})
        states[parameter] = {}
        if steps is not None:
            states[parameter][_STEP] = torch.tensor(steps, dtype=torch.float32)
        for name, dtype in dtypes.items():
            moment = shard_state.get(name)
            if moment is None:
                moment = torch.empty(0, dtype=dtype, device=parameter.device)
            full = gather_flat(shard, parameter.shape, moment, keep, data.group)
            states[parameter][name] = layout.as_dtensor(full, parameter)
    return states


def _describe_state(optimizer: Any) -> tuple[dict[str, torch.dtype], float | None]:
    """Names and dtypes of a parameter's state, and the number of steps, which torch counts for each parameter."""
    counts = [group[_STEP] for group in optimizer.param_groups if _STEP in group]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            dtypes = {
                name: value.dtype
                for name, value in state.items()
                if isinstance(value, Tensor) and name != _STEP
            }
            steps = state.get(_STEP, counts[0] if counts else None)
            if steps is None:
                return dtypes, None
            return dtypes, float(steps)  # sync point: a checkpoint
    return {}, None


def load_state(
    stepper: Stepper,
    shards: Mapping[nn.Parameter, FlatShard],
    state: Mapping[nn.Parameter, SavedState],
    layout: TensorLayout,
) -> None:
    """Restore this rank's shards of `optimizer_states`, or of the state of torch's own optimizer.

    Args:
        stepper: as for `optimizer_states`, like the next and the last.
        shards: this rank's shards of the module's parameters.
        state: in any layout.
        layout: the layout of the parameters.
    """
    # The optimizers of Apex and Transformer Engine, which Megatron prefers, count steps for each group.
    counts_by_group = not type(stepper.optimizer).__module__.startswith("torch.")
    for parameter, saved in state.items():
        shard = shards[parameter]
        shard_state = dict(saved)
        steps = shard_state.pop(_STEP, None)
        if steps is not None and counts_by_group:
            for group in stepper.optimizer.param_groups:
                group[_STEP] = int(steps)  # sync point: a checkpoint
        if not shard.length:
            continue
        like = layout.as_dtensor(parameter.detach(), parameter)
        for name, value in shard_state.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                tensor_part = local(shard_like(value, like)).detach()
                elements = shard.view_in_parameter(tensor_part).view(shard.master.shape)
                shard_state[name] = elements.to(shard.master.device, copy=True)
        if steps is not None and not counts_by_group:
            count = torch.as_tensor(steps, dtype=torch.float32, device="cpu")
            shard_state[_STEP] = count.clone()
        stepper.optimizer.state[shard.master] = shard_state


def megatron_costs(
    module: nn.Module,
    precision: str,
    data_ranks: int,
    tensor_ranks: int,
    distributed: bool = False,
) -> Costs:
    """What one rank, whose module has only its part of the layers, holds and sends.

    Args:
        module: before or after it is wrapped.
        precision: the run's, by name.
        data_ranks: among which gradients are averaged.
        tensor_ranks: that compute each layer together.
        distributed: whether each data rank holds only a part of the optimizer's state.
    """
    is_half = precision.startswith(("bf16", "16"))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    # Megatron sums in float32, whatever the dtype of the weights.
    gradients = 4 * trained

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if not distributed:
            return [
                torch.empty(p.shape, device="meta", requires_grad=p.requires_grad)
                for p in group
            ]
        count = sum(p.numel() for p in group if p.requires_grad)
        return [torch.empty(-(-count // data_ranks), device="meta", requires_grad=True)]

    masters = 0
    if is_half:
        masters = gradients // data_ranks if distributed else gradients
    weight_size = sum(
        p.numel() * (2 if is_half else p.element_size()) for p in module.parameters()
    )
    return Costs(
        layout=_describe_layout(data_ranks, tensor_ranks, distributed),
        parameters=weight_size,
        gradients=gradients,
        stepped=stepped,
        masters=masters,
        exchanges=_describe_exchanges(data_ranks, tensor_ranks, distributed),
    )


def _describe_layout(data_ranks: int, tensor_ranks: int, distributed: bool) -> str:
    if tensor_ranks > 1:
        state = " and of the optimizer's state" if distributed else ""
        return (
            f"{plural(data_ranks, 'data rank')}; each of {plural(tensor_ranks, 'tensor rank')} "
            f"holds a part of every layer{state}"
        )
    if distributed:
        return f"{plural(data_ranks, 'data rank')}, each with all weights and a part of the optimizer's state"
    return f"{plural(data_ranks, 'data rank')}, each with a full replica"


def _describe_exchanges(
    data_ranks: int, tensor_ranks: int, distributed: bool
) -> list[str]:
    lines = []
    over = f"over {plural(data_ranks, 'data rank')}"
    if data_ranks > 1 and distributed:
        lines.append(f"gradients: reduce-scatter {over}")
        lines.append(f"stepped parameters: all-gather {over}")
    elif data_ranks > 1:
        lines.append(f"gradients: all-reduce {over}")
    if tensor_ranks > 1:
        lines.append(
            f"activations: all-reduce over {plural(tensor_ranks, 'tensor rank')}, forward and backward"
        )
    return lines
