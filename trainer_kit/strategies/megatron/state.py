"""The state of Megatron's optimizer by the module's parameters, their tensor parallel layout, and costs.

Without the distributed optimizer every data rank steps, and holds, everything that its tensor rank has. With it a data
rank steps a flat piece of each parameter: saving gathers the pieces, loading takes them out of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local
from trainer_kit.strategies.state import FlatShard, gather_flat, shard_like

__all__ = [
    "TensorParts",
    "find_pieces",
    "load_state",
    "megatron_costs",
    "optimizer_states",
]

_STEP: Final = "step"


@final
class TensorParts:
    """The layout of parameters among the tensor ranks.

    Args:
        ranks: of a tensor parallel group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meshes: dict[str, Any] = {}

    def counts(self, parameter: Any) -> bool:
        """Whether a norm counts the gradient of this rank: ranks with equal gradients count once."""
        if self._ranks == 1 or getattr(parameter, "tensor_model_parallel", False):
            return True
        from megatron.core import parallel_state

        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def placed(self, value: Tensor, parameter: Any) -> Tensor:
        """The value of a parameter: a ``DTensor`` over the tensor ranks where they divide the parameter."""
        if self._ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return value
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        kind = value.device.type  # gathered state is on the host
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(
                parallel_state.get_tensor_model_parallel_group(), kind
            )
        placements = [Shard(parameter.partition_dim)]
        return DTensor.from_local(
            value.detach(), self._meshes[kind], placements, run_check=False
        )


def find_pieces(
    stepper: Any, parameters: Iterable[nn.Parameter], divided: bool
) -> dict[nn.Parameter, FlatShard]:
    """Find which piece of each parameter this rank steps.

    Args:
        stepper: Megatron's optimizer, around one of torch's.
        parameters: those that are trained.
        divided: whether the optimizer is the distributed one.
    """
    if not divided:
        masters = {p: getattr(p, "main_param", p) for p in parameters}
        return {
            p: FlatShard(master, 0, 0, p.numel(), is_sharded=False)
            for p, master in masters.items()
        }
    found = {p: FlatShard(torch.empty(0, device=p.device), 0, 0, 0) for p in parameters}
    for whole, parts in (
        (stepper.model_fp32_groups, stepper.shard_fp32_groups),
        (stepper.model_float16_groups, stepper.shard_fp32_from_float16_groups),
    ):
        for ours, theirs in zip(whole, parts, strict=True):
            for parameter, master in zip(ours, theirs, strict=True):
                place = stepper._get_model_param_range_map(parameter)["param"]
                found[parameter] = FlatShard(
                    master, 0, place.start, place.end - place.start
                )
    return found


def optimizer_states(
    stepper: Any,
    pieces: Mapping[nn.Parameter, FlatShard],
    parts: TensorParts,
    data: Group,
    keep: bool,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of each parameter as torch's optimizer would have it. Every rank must call it.

    Args:
        stepper: Megatron's optimizer, around one of torch's.
        pieces: of the module's parameters.
        parts: the layout of the parameters.
        data: the ranks that have the pieces.
        keep: whether this rank needs the values; else they are zeros that take no memory.
    """
    kinds, steps = _kinds(stepper.optimizer)
    if any(
        piece.is_sharded for piece in pieces.values()
    ):  # a rank may hold padding of the last bucket only
        kinds, steps = max(
            data.all_gather_object((kinds, steps)), key=lambda found: len(found[0])
        )
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, piece in pieces.items() if kinds else ():
        own = stepper.optimizer.state.get(piece.master, {})
        found[parameter] = (
            {} if steps is None else {_STEP: torch.tensor(steps, dtype=torch.float32)}
        )
        for name, dtype in kinds.items():
            moment = own.get(name, torch.empty(0, dtype=dtype, device=parameter.device))
            whole = gather_flat(piece, parameter.shape, moment, keep, data.group)
            found[parameter][name] = parts.placed(whole, parameter)
    return found


def _kinds(optimizer: Any) -> tuple[dict[str, torch.dtype], float | None]:
    """Names and dtypes of a parameter's state, and the number of steps, which torch counts for each parameter."""
    steps = next(
        (group[_STEP] for group in optimizer.param_groups if _STEP in group), None
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if own := optimizer.state.get(parameter):
                kinds = {
                    name: v.dtype
                    for name, v in own.items()
                    if isinstance(v, Tensor) and name != _STEP
                }
                steps = own.get(_STEP, steps)
                return kinds, None if steps is None else float(
                    steps
                )  # sync point: a checkpoint
    return {}, None


def load_state(
    stepper: Any,
    pieces: Mapping[nn.Parameter, FlatShard],
    state: Mapping[nn.Parameter, Mapping[str, Any]],
    parts: TensorParts,
) -> None:
    """Restore this rank's pieces of `optimizer_states`, or of the state of torch's own optimizer.

    Args:
        stepper: as for `optimizer_states`, like the next and the last.
        pieces: of the module's parameters.
        state: in any layout.
        parts: the layout of the parameters.
    """
    # The optimizers of Apex and Transformer Engine, which Megatron prefers, count steps for each group.
    by_group = not type(stepper.optimizer).__module__.startswith("torch.")
    for parameter, saved in state.items():
        piece = pieces[parameter]
        own = dict(saved)
        steps = own.pop(_STEP, None)
        if steps is not None:
            for group in stepper.optimizer.param_groups if by_group else ():
                group[_STEP] = int(steps)  # sync point: a checkpoint
        if not piece.length:
            continue
        like = parts.placed(parameter.detach(), parameter)
        master = piece.master
        mine: dict[str, Any] = {}
        if steps is not None and not by_group:
            mine[_STEP] = torch.as_tensor(
                steps, dtype=torch.float32, device="cpu"
            ).clone()
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                part = local(shard_like(value, like)).detach()
                value = (
                    piece.view_in_parameter(part)
                    .view(master.shape)
                    .to(master.device, copy=True)
                )
            mine[name] = value
        stepper.optimizer.state[master] = mine


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
    low = 2 if precision.startswith(("bf16", "16")) else None
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    gradients = (
        4 * trained
    )  # Megatron sums in float32, whatever the dtype of the weights

    def stepped(group: Sequence[nn.Parameter]) -> list[Tensor]:
        if not distributed:
            return [
                torch.empty(p.shape, device="meta", requires_grad=p.requires_grad)
                for p in group
            ]
        count = sum(p.numel() for p in group if p.requires_grad)
        return [torch.empty(-(-count // data_ranks), device="meta", requires_grad=True)]

    layout = f"{data_ranks} data ranks, each with everything"
    over = f"over {data_ranks} data ranks"
    sent = [f"gradients: all-reduce {over}"]
    if distributed:
        layout = f"{data_ranks} data ranks, each with all weights and a part of the optimizer's state"
        sent = [
            f"gradients: reduce-scatter {over}",
            f"stepped parameters: all-gather {over}",
        ]
    sent = sent if data_ranks > 1 else []
    if tensor_ranks > 1:
        part = " and of the optimizer's state" if distributed else ""
        layout = f"{data_ranks} data ranks; each of {tensor_ranks} tensor ranks holds a part of every layer{part}"
        sent.append(
            f"activations: all-reduce over {tensor_ranks} tensor ranks, forward and backward"
        )
    return Costs(
        layout=layout,
        parameters=sum(
            p.numel() * (low or p.element_size()) for p in module.parameters()
        ),
        gradients=gradients,
        stepped=stepped,
        masters=0 if low is None else gradients // (data_ranks if distributed else 1),
        exchanges=sent,
    )
