"""Gathers tensors of all ranks so that gradients flow back to each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer_kit.core.protocols import Group

__all__ = ["gather_with_gradients"]


def gather_with_gradients(tensor: Tensor, group: Group) -> Tensor:
    """Stack a tensor over the ranks of a group: shape (ranks, *shape); backward sums the gradients of all ranks.

    Every rank must call it, and backward must reach it on every rank.

    Args:
        tensor: of this rank.
        group: the ranks.
    """
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = ctx.group.all_reduce(gradients[0].contiguous().clone())
        return total[ctx.group.rank], None
