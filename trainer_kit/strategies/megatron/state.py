"""What Megatron's optimizer keeps, by the module's parameters, and their places among the tensor ranks.

Without its distributed optimizer every data rank steps, and keeps, all that its tensor rank has. With it a data rank
steps a flat piece of each parameter: the pieces are put together for a checkpoint, and taken out of the whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.protocols import Group
from trainer_kit.strategies.flat_shards import Piece, whole_of
from trainer_kit.strategies.gradients import local
from trainer_kit.strategies.state import part_of

__all__ = ["TensorParts", "find_pieces", "keep_state", "kept_state"]

_STEP: Final = "step"


@final
class TensorParts:
    """Knows what a tensor rank's part is a part of.

    Args:
        ranks: of a tensor parallel group.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._meshes: dict[str, Any] = {}

    def counts(self, parameter: Any) -> bool:
        """Whether a parameter is a part, or that of the first tensor rank, which stands for the same of the others."""
        if self._ranks == 1 or getattr(parameter, "tensor_model_parallel", False):
            return True
        from megatron.core import parallel_state

        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)

    def placed(self, value: Tensor, parameter: Any) -> Tensor:
        """The value with its place among the tensor ranks, where ``parameter``, whose it is, is a part."""
        if self._ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return value
        from megatron.core import parallel_state
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        there = value.device.type  # what is put together for a checkpoint is on the host
        if there not in self._meshes:
            self._meshes[there] = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), there)
        place = [Shard(parameter.partition_dim)]
        return DTensor.from_local(value.detach(), self._meshes[there], place, run_check=False)


def find_pieces(stepper: Any, parameters: Iterable[nn.Parameter], divided: bool) -> dict[nn.Parameter, Piece]:
    """What of each parameter is stepped on this rank.

    Args:
        stepper: Megatron's, around one of torch's.
        parameters: those that are trained.
        divided: whether it is the distributed one.
    """
    if not divided:
        masters = {p: getattr(p, "main_param", p) for p in parameters}
        return {p: Piece(master, 0, 0, p.numel(), divided=False) for p, master in masters.items()}
    found = {p: Piece(torch.empty(0, device=p.device), 0, 0, 0) for p in parameters}
    for whole, parts in (
        (stepper.model_fp32_groups, stepper.shard_fp32_groups),
        (stepper.model_float16_groups, stepper.shard_fp32_from_float16_groups),
    ):
        for ours, theirs in zip(whole, parts, strict=True):
            for parameter, master in zip(ours, theirs, strict=True):
                place = stepper._get_model_param_range_map(parameter)["param"]
                found[parameter] = Piece(master, 0, place.start, place.end - place.start)
    return found


def kept_state(
    stepper: Any, pieces: Mapping[nn.Parameter, Piece], parts: TensorParts, data: Group, keep: bool
) -> dict[nn.Parameter, dict[str, Any]]:
    """What Megatron's optimizer keeps of each parameter, as torch's would. Every rank must call it.

    Args:
        stepper: Megatron's, around one of torch's.
        pieces: of the module's parameters.
        parts: their places.
        data: the ranks that have the pieces.
        keep: whether this rank wants the values; else they are zeros that take no memory.
    """
    kinds, steps = _kinds(stepper.optimizer)
    if any(piece.divided for piece in pieces.values()):  # a rank may have nothing but what fills the last bucket up
        kinds, steps = max(data.all_gather_object((kinds, steps)), key=lambda told: len(told[0]))
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, piece in pieces.items() if kinds else ():
        own = stepper.optimizer.state.get(piece.master, {})
        found[parameter] = {} if steps is None else {_STEP: torch.tensor(steps, dtype=torch.float32)}
        for name, dtype in kinds.items():
            moment = own.get(name, torch.empty(0, dtype=dtype, device=parameter.device))
            whole = whole_of(piece, parameter.shape, moment, keep, getattr(data, "group", None))
            found[parameter][name] = parts.placed(whole, parameter)
    return found


def _kinds(optimizer: Any) -> tuple[dict[str, torch.dtype], float | None]:
    """What there is of each parameter, and how many steps were taken: of a parameter in torch, of a group elsewhere."""
    steps = next((group[_STEP] for group in optimizer.param_groups if _STEP in group), None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if own := optimizer.state.get(parameter):
                kinds = {name: v.dtype for name, v in own.items() if isinstance(v, Tensor) and name != _STEP}
                steps = own.get(_STEP, steps)
                return kinds, None if steps is None else float(steps)  # sync point: a checkpoint
    return {}, None


def keep_state(
    stepper: Any,
    pieces: Mapping[nn.Parameter, Piece],
    state: Mapping[nn.Parameter, Mapping[str, Any]],
    parts: TensorParts,
) -> None:
    """Each rank takes its pieces of what `kept_state` found, or of torch's own state.

    Args:
        stepper: as there.
        pieces: as there.
        state: of any layout.
        parts: as there.
    """
    # As Apex and TransformerEngine have it, which Megatron prefers to torch's.
    by_group = not type(stepper.optimizer).__module__.startswith("torch.")
    for parameter, saved in state.items():
        piece, own = pieces[parameter], dict(saved)
        steps = own.pop(_STEP, None)
        if steps is not None:
            for group in stepper.optimizer.param_groups if by_group else ():
                group[_STEP] = int(steps)  # sync point: a checkpoint
        if not piece.count:
            continue
        like, master = parts.placed(parameter.detach(), parameter), piece.master
        mine: dict[str, Any] = {}
        if steps is not None and not by_group:
            mine[_STEP] = torch.as_tensor(steps, dtype=torch.float32, device="cpu").clone()
        for name, value in own.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                part = local(part_of(value, like)).detach()
                value = piece.in_whole(part).view(master.shape).to(master.device, copy=True)
            mine[name] = value
        stepper.optimizer.state[master] = mine
