"""What strategies have in common when they say what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs, part_bytes

__all__ = ["held_in_parts", "held_whole", "own_part"]


def own_part(tensor: Any, ranks: int = 1, rank: int = 0) -> Tensor:
    """The shape, without storage, of what a rank holds of a tensor that is, or will be, divided along its first dim.

    Example:
        >>> [len(own_part(torch.zeros(5, 2), 3, rank)) for rank in range(3)]
        [2, 2, 1]
    """
    shape = list((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)
    if ranks > 1 and shape and not hasattr(tensor, "to_local"):
        rows = -(-shape[0] // ranks)
        shape[0] = max(0, min(rows, shape[0] - rank * rows))
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def held_whole(module: nn.Module, layout: str, exchanges: Sequence[str] = ()) -> Costs:
    """Every rank holds everything, or what it has of a module that is divided already."""
    return held_in_parts({p: own_part(p) for p in module.parameters()}, layout, exchanges)


def held_in_parts(parts: Mapping[nn.Parameter, Tensor], layout: str, exchanges: Sequence[str] = ()) -> Costs:
    """A rank holds, and steps, its part of each parameter.

    Args:
        parts: this rank's.
        layout: the axes, and who holds what.
        exchanges: of a step.
    """
    return Costs(
        layout=layout,
        parameters=part_bytes(parts.values()),
        gradients=part_bytes(part for part in parts.values() if part.requires_grad),
        stepped=lambda group: [parts[p] if p in parts else own_part(p) for p in group],
        exchanges=exchanges,
    )
