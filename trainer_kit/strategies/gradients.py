"""Gradient clipping and norms, for full gradients and for gradients that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import local

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
    gradients = (
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return [local(gradient) for gradient in gradients if gradient is not None]


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
    given = [(p, p.grad) for p in parameters if p.grad is not None]
    counted = (
        [gradient for p, gradient in given if p not in repeated] if repeated else None
    )
    return clip_parts(
        [gradient for _, gradient in given],
        value,
        algorithm,
        norm_type,
        stages,
        counted,
    )


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
    if not norm_type > 0:
        raise ConfigurationError(
            "sharded gradients are clipped by a p-norm with p above 0",
            found=f"norm_type={norm_type}",
            fix="pass p above 0",
        )
    norm = total_norm(gradients if counted is None else counted, norm_type)
    if stages is not None:  # one dtype for all: a stage may have no gradient
        norm = torch.linalg.vector_norm(
            stages.all_gather(norm.to(torch.float64)), norm_type
        )
    factor = (value / (norm + 1e-6)).clamp(
        max=1.0
    )  # unconditional: reading the norm would be a sync point
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, same in by_device.items():
        torch._foreach_mul_(same, factor.to(device))
    return norm


def spread_overflow(
    gradients: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Make every rank's gradients NaN if those of any rank overflowed, so that all ranks skip the step together.

    Args:
        gradients: this rank's gradients, at least one, on its device.
        group: the ranks that hold the other gradients. No value is read on the host.
    """
    parts = [local(gradient) for gradient in gradients]
    overflowed = _norm(parts, torch.inf).isfinite().logical_not_().float()
    dist.all_reduce(overflowed, dist.ReduceOp.MAX, group=group)
    torch._foreach_add_(parts, torch.where(overflowed > 0, torch.nan, 0.0))


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients over all ranks; one all-gather for each mesh axis that shards some of them.

    The norms of the ranks are gathered and combined as torch combines the norms of several tensors. Summing p-th powers
    instead could overflow earlier than on one process, and a max reduction can lose the NaN of a rank.
    """
    norms: list[Tensor] = []
    by_layout: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        placements = getattr(gradient, "placements", ())
        axes = tuple(
            axis
            for axis, placement in enumerate(placements)
            if not placement.is_replicate()
        )
        by_layout.setdefault((mesh, axes), []).append(local(gradient))
    for (mesh, axes), parts in by_layout.items():
        norm = _norm(parts, norm_type)
        for axis in axes:
            theirs = [torch.empty_like(norm) for _ in range(mesh.size(axis))]
            dist.all_gather(theirs, norm, group=mesh.get_group(axis))
            norm = torch.linalg.vector_norm(torch.stack(theirs), norm_type)
        norms.append(norm)
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return total


def _norm(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of this rank's shards; an uneven shard may be empty, and an empty tensor has no maximum."""
    held = [part for part in parts if part.numel()]
    return nn.utils.get_total_norm(held, norm_type) if held else parts[0].new_zeros(())


def _unknown(algorithm: str) -> ConfigurationError:
    return ConfigurationError(
        "unknown clipping algorithm", found=repr(algorithm), fix='use "norm" or "value"'
    )
