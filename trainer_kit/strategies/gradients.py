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


def clip_gradients(
    parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
) -> Tensor | None:
    """Clip whole gradients.

    Args:
        parameters: whose gradients; those without one are left out.
        value: the largest norm of all gradients together, or the largest absolute value of each element.
        algorithm: ``"norm"`` (Pascanu et al., 2013) or ``"value"``.
        norm_type: the p of the norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before, on the device; None when clipping by value.
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
    """Clip gradients of which this rank may hold a part, by what `clip_gradients` would do to the whole.

    Args:
        parameters: of any mix: in parts over one mesh or several, and whole ones that all ranks hold alike.
        value: as there.
        algorithm: as there.
        norm_type: as there, above 0.
        stages: ranks with other parameters of the same model.
        repeated: parameters that count once, on another of these ranks.

    Returns:
        The norm before, on the device; None when clipping by value.

    Raises:
        ConfigurationError: for another way to clip, and for a norm that parts of a whole do not have.
    """
    given = [(p, p.grad) for p in parameters if p.grad is not None]
    counted = [gradient for p, gradient in given if p not in repeated] if repeated else None
    return clip_parts([gradient for _, gradient in given], value, algorithm, norm_type, stages, counted)


def clip_parts(
    gradients: Sequence[Tensor],
    value: float | Tensor,
    algorithm: str,
    norm_type: float = 2.0,
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
    if not norm_type > 0:
        raise ConfigurationError(
            "gradients that are divided are clipped by a p-norm", found=f"norm_type={norm_type}", fix="give p above 0"
        )
    norm = total_norm(gradients if counted is None else counted, norm_type)
    if stages is not None:  # in one dtype: a stage may have no gradient
        norm = torch.linalg.vector_norm(stages.all_gather(norm.to(torch.float64)), norm_type)
    factor = (value / (norm + 1e-6)).clamp(max=1.0)  # no look at whether it is needed: that would be a sync
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in map(local, gradients):
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, same in by_device.items():
        torch._foreach_mul_(same, factor.to(device))
    return norm


def spread_overflow(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Where any rank's gradients overflowed, none of any rank's stays finite: all of them skip the step, or none does.

    Args:
        gradients: of this rank, which has some; on its device.
        group: of the ranks that have the others; none of them looks at a value.
    """
    parts = [local(gradient) for gradient in gradients]
    overflowed = _norm(parts, torch.inf).isfinite().logical_not_().float()
    dist.all_reduce(overflowed, dist.ReduceOp.MAX, group=group)
    torch._foreach_add_(parts, torch.where(overflowed > 0, torch.nan, 0.0))


def total_norm(gradients: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradients together, over all ranks; one exchange for each way in which they are divided.

    Norms are gathered, and their norm is taken as torch takes that of several tensors: no power of theirs overflows
    before one process's would, and a NaN of any rank is seen, which reductions to the largest pass over.
    """
    norms: list[Tensor] = []
    by_layout: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        placements = getattr(gradient, "placements", ())
        axes = tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())
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
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _norm(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """That of what this rank holds: of what is divided unevenly it may be nothing, which has no largest value."""
    held = [part for part in parts if part.numel()]
    return nn.utils.get_total_norm(held, norm_type) if held else parts[0].new_zeros(())


def local(gradient: Tensor) -> Tensor:
    """What this rank holds of a gradient."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _unknown(algorithm: str) -> ConfigurationError:
    return ConfigurationError("unknown way to clip gradients", found=repr(algorithm), fix='use "norm" or "value"')
