"""What is done to gradients: whole ones on one device, and those of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group

__all__ = ["clip_gradients", "clip_parts", "clip_sharded_gradients", "local", "spread_overflow", "total_norm"]


def clip_gradients(parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> Tensor | None:
    """Clip whole gradients.

    Args:
        parameters: whose gradients; those without one are left out.
        value: the largest norm of all gradients together, or the largest absolute value of each element.
        algorithm: ``"norm"`` (Pascanu et al., 2013) or ``"value"``.

    Returns:
        The norm before, on the device; None when clipping by value.
    """
    if algorithm == "norm":
        return nn.utils.clip_grad_norm_(parameters, value)
    if algorithm != "value":
        raise _unknown(algorithm)
    nn.utils.clip_grad_value_(parameters, value)
    return None


def clip_sharded_gradients(
    parameters: Iterable[nn.Parameter],
    value: float,
    algorithm: str,
    stages: Group | None = None,
    repeated: Collection[nn.Parameter] = (),
) -> Tensor | None:
    """Clip gradients of which this rank may hold a part, by what `clip_gradients` would do to the whole.

    Args:
        parameters: of any mix: in parts over one mesh or several, and whole ones that all ranks hold alike.
        value: as there.
        algorithm: as there.
        stages: ranks with other parameters of the same model.
        repeated: parameters that count once, on another of these ranks.

    Returns:
        The norm before, on the device; None when clipping by value.
    """
    given = [(p, p.grad) for p in parameters if p.grad is not None]
    counted = [gradient for p, gradient in given if p not in repeated] if repeated else None
    return clip_parts([gradient for _, gradient in given], value, algorithm, stages, counted)


def clip_parts(
    gradients: Sequence[Tensor],
    value: float | Tensor,
    algorithm: str,
    stages: Group | None = None,
    counted: Sequence[Tensor] | None = None,
) -> Tensor | None:
    """As `clip_sharded_gradients`, of the gradients themselves; the norm is that of those ``counted``."""
    if algorithm == "value":
        for gradient in gradients:
            local(gradient).clamp_(min=-value, max=value)  # type: ignore[arg-type]  # its stub has no float with a Tensor
        return None
    if algorithm != "norm":
        raise _unknown(algorithm)
    norm = total_norm(gradients if counted is None else counted)
    if stages is not None:  # in one dtype: a stage may have no gradient
        norm = stages.all_reduce(norm.to(torch.float64).square()).sqrt()
    factor = (value / (norm + 1e-6)).clamp(max=1.0)  # no look at whether it is needed: that would be a sync
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, same in by_device.items():
        torch._foreach_mul_(same, factor.to(device))
    return norm


def spread_overflow(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Where any rank's gradients overflowed, none of any rank's stays finite: all of them skip the step, or none does.

    Args:
        gradients: of this rank, which has some; on its device.
        group: of the ranks that have the others; none of them looks at a value.
    """
    parts = [local(gradient) for gradient in gradients]
    largest = torch.stack(torch._foreach_norm(parts, torch.inf)).max()  # NaN, where there is one
    overflowed = largest.isfinite().logical_not_().float()
    dist.all_reduce(overflowed, dist.ReduceOp.MAX, group=group)
    torch._foreach_add_(parts, torch.where(overflowed > 0, torch.nan, 0.0))


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, over all ranks; one exchange for each way in which they are divided."""
    squares: list[Tensor] = []
    by_layout: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        placements = getattr(gradient, "placements", ())
        axes = tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())
        by_layout.setdefault((mesh, axes), []).append(local(gradient))
    for (mesh, axes), parts in by_layout.items():
        square = nn.utils.get_total_norm(parts).square()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        squares.append(square)
    if not squares:
        return torch.zeros(())
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


def local(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _unknown(algorithm: str) -> ConfigurationError:
    return ConfigurationError("unknown way to clip gradients", found=repr(algorithm), fix='use "norm" or "value"')
