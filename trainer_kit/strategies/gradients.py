"""Gradient clipping and norms, for full gradients and for gradients that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local
from trainer_kit.core.torch_private import add_to_each, multiply_each

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "clip_gradients",
    "clip_parts",
    "clip_sharded_gradients",
    "local_gradients",
    "spread_overflow",
    "total_norm",
]


def local_gradients(optimizer: Optimizer) -> list[Tensor]:
    """This rank's parts of the gradients that an optimizer steps."""
    gradients: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients.append(local(parameter.grad))
    return gradients


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    value: float,
    algorithm: str,
    norm_type: float = 2.0,
) -> Tensor | None:
    """Clip gradients that this rank holds in full.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        value: the maximum total norm, or the maximum absolute value of each element.
        algorithm: ``"norm"`` (Pascanu et al., 2013) or ``"value"``.
        norm_type: the p of the norm; ``inf`` for the largest absolute value.

    Returns:
        The total norm before clipping, on the device; None when clipping by value.
    """
    if algorithm == "norm":
        return nn.utils.clip_grad_norm_(parameters, value, norm_type)
    if algorithm != "value":
        raise _unknown(algorithm)
    nn.utils.clip_grad_value_(parameters, value)
    return None


def clip_sharded_gradients(
    parameters: Iterable[nn.Parameter],
    value: float,
    algorithm: str,
    norm_type: float = 2.0,
    stages: Group | None = None,
    repeated: Collection[nn.Parameter] = (),
) -> Tensor | None:
    """Clip sharded gradients, with the result that `clip_gradients` has on the full gradients.

    Args:
        parameters: any mix of parameters sharded over one or more meshes and parameters replicated on all ranks.
        value: as in `clip_gradients`.
        algorithm: as in `clip_gradients`.
        norm_type: as in `clip_gradients`; must be above 0.
        stages: the ranks that hold other parameters of the same model (pipeline stages).
        repeated: tied parameters that another of these ranks adds to the norm.

    Returns:
        The total norm before clipping, on the device; None when clipping by value.

    Raises:
        ConfigurationError: for an unknown algorithm, or a norm type that cannot be combined from shards.
    """
    # A tied parameter's gradient is clipped on each rank that holds a copy, and counted in the norm of one.
    gradients: list[Tensor] = []
    counted: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            if parameter not in repeated:
                counted.append(parameter.grad)
    return clip_parts(gradients, value, algorithm, norm_type, stages, counted)


def clip_parts(
    gradients: Sequence[Tensor],
    value: float | Tensor,
    algorithm: str,
    norm_type: float = 2.0,
    stages: Group | None = None,
    counted: Sequence[Tensor] | None = None,
) -> Tensor | None:
    """Like `clip_sharded_gradients`, given the gradients; the norm is computed from ``counted`` if given."""
    if algorithm == "value":
        for gradient in gradients:
            local(gradient).clamp_(min=-value, max=value)  # type: ignore[arg-type]  # its stub has no float with a Tensor
        return None
    if algorithm != "norm":
        raise _unknown(algorithm)
    # Norms of shards cannot be combined to a norm with p = 0, which counts elements. `not >` also refuses NaN.
    if not norm_type > 0:
        raise ConfigurationError(
            "sharded gradients are clipped by a p-norm with p above 0",
            found=f"norm_type={norm_type}",
            fix="pass p above 0",
        )
    norm = total_norm(gradients if counted is None else counted, norm_type)
    if stages is not None:
        # One dtype for all: a stage may have no gradient.
        stage_norms = stages.all_gather(norm.to(torch.float64))
        norm = torch.linalg.vector_norm(stage_norms, norm_type)
    # Unconditional: reading the norm would be a sync point.
    factor = (value / (norm + 1e-6)).clamp(max=1.0)
    # One kernel for all gradients of a device; with offload some are in host memory.
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, shards in by_device.items():
        multiply_each(shards, factor.to(device))
    return norm


def spread_overflow(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Make every rank's gradients NaN if those of any rank overflowed, so that all ranks skip the step together.

    Args:
        gradients: this rank's gradients, at least one, on its device.
        group: the ranks that hold the other gradients. No value is read on the host.
    """
    shards = [local(gradient) for gradient in gradients]
    # The largest absolute value is not finite if any is, so one number says it of all.
    largest = _local_norm(shards, torch.inf)
    overflowed = largest.isfinite().logical_not_().float()
    dist.all_reduce(overflowed, dist.ReduceOp.MAX, group=group)
    # Zeros are added if nothing overflowed: no value is read on the host.
    poison = torch.where(overflowed > 0, torch.nan, 0.0)
    add_to_each(shards, poison)


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients over all ranks; one all-gather for each mesh axis that shards some of them.

    The norms of the ranks are gathered and combined as torch combines the norms of several tensors. Summing p-th powers
    instead could overflow earlier than on one process, and a max reduction can lose the NaN of a rank.
    """
    # One norm for each layout: the other shards of a gradient are on the ranks of its own axes.
    norms: list[Tensor] = []
    for (mesh, axes), shards in _group_by_layout(gradients).items():
        norm = _local_norm(shards, norm_type)
        if mesh is not None:
            for axis in axes:
                norm = _combine_over_axis(norm, mesh, axis, norm_type)
        norms.append(norm)
    if not norms:
        return torch.zeros(())
    on_one_device = [norm.to(norms[0].device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(on_one_device), norm_type)
    return total


def _group_by_layout(
    gradients: Sequence[Tensor],
) -> dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]]:
    """This rank's shards, by their mesh and the indices of the mesh axes that shard them."""
    by_layout: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        placements = enumerate(getattr(gradient, "placements", ()))
        axes = tuple(
            axis for axis, placement in placements if not placement.is_replicate()
        )
        by_layout.setdefault((mesh, axes), []).append(local(gradient))
    return by_layout


def _combine_over_axis(
    norm: Tensor, mesh: DeviceMesh, axis: int, norm_type: float
) -> Tensor:
    norms = [torch.empty_like(norm) for _ in range(mesh.size(axis))]
    dist.all_gather(norms, norm, group=mesh.get_group(axis))
    combined: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return combined


def _local_norm(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of this rank's shards; an uneven shard may be empty, and an empty tensor has no maximum."""
    nonempty = [shard for shard in shards if shard.numel()]
    if not nonempty:
        return shards[0].new_zeros(())
    return nn.utils.get_total_norm(nonempty, norm_type)


def _unknown(algorithm: str) -> ConfigurationError:
    return ConfigurationError(
        "unknown clipping algorithm", found=repr(algorithm), fix='use "norm" or "value"'
    )
