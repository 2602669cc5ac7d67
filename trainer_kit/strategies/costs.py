"""What strategies have in common when they say what a rank holds and sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs, Exchange, part_bytes

__all__ = ["held_in_parts", "held_whole", "own_part", "ring"]


def ring(times: int, ranks: int, size: int) -> int:
    """Bytes that a rank sends where ``size`` go around a ring.

    Args:
        times: 1 to gather or to reduce into parts, 2 for both, which is an all-reduce.
        ranks: in the ring.
        size: bytes of the whole.

    Example:
        >>> ring(2, 4, 1000)  # 2 (n - 1) / n
        1500
    """
    return times * (ranks - 1) * size // ranks


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


def held_whole(module: nn.Module, layout: str, exchanges: list[Exchange] | None = None) -> Costs:
    """Every rank holds everything, or what it has of a module that is divided already."""
    return held_in_parts({p: own_part(p) for p in module.parameters()}, layout, exchanges)


def held_in_parts(parts: Mapping[nn.Parameter, Tensor], layout: str, exchanges: list[Exchange] | None = None) -> Costs:
    """A rank holds, and steps, its part of each parameter.

    Args:
        parts: this rank's.
        layout: the axes, and who holds what.
        exchanges: of a step; those that move nothing are left out.
    """
    return Costs(
        layout=layout,
        parameters=part_bytes(parts.values()),
        gradients=part_bytes(part for part in parts.values() if part.requires_grad),
        stepped=lambda group: [parts[p] if p in parts else own_part(p) for p in group],
        exchanges=[exchange for exchange in exchanges or () if exchange.sent != 0],
    )
