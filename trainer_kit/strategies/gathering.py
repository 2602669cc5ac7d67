"""Gathers tensors of all ranks so that gradients flow back to each of them."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_kit.core.collective_errors import same_everywhere
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import map_leaves, map_tensors

__all__ = ["TensorGroup", "gather_tree", "gather_with_gradients"]


class _Gathers(Protocol):
    rank: int

    def all_gather(self, tensor: Tensor) -> Tensor: ...
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor: ...


@final
class TensorGroup:
    """A group that a custom loop has made with torch, for collectives of tensors alone.

    Args:
        group: torch's.

    Raises:
        ConfigurationError: this process is not in the group, or ``group`` is something else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(
                "group= takes a group of torch.distributed that this process is in",
                found=repr(group),
                fix="torch.distributed.new_group(ranks), and the call on these ranks alone",
            )
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""
        sent = tensor.detach().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self._group)
        return torch.stack(received)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks into a new tensor; ``op`` is sum, mean, min or max."""
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        has_mean = reduced.is_floating_point() or reduced.is_complex()
        # The mean of integers has a fraction.
        if op == "mean" and not has_mean:
            reduced = reduced.to(torch.get_default_dtype())
        reduce_ops = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        reduce_op = reduce_ops.get(op, dist.ReduceOp.SUM)
        dist.all_reduce(reduced, reduce_op, group=self._group)
        if op == "mean":
            return reduced / self.size
        return reduced


def gather_with_gradients(tensor: Tensor, group: _Gathers) -> Tensor:
    """Stack a tensor over the ranks of a group: shape (ranks, *shape); backward sums the gradients of all ranks.

    Every rank must call it, and backward must reach it on every rank.

    Args:
        tensor: of this rank.
        group: the ranks.
    """
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def gather_tree(
    tree: Any, group: Group, device: torch.device, with_gradients: bool
) -> Any:
    """Stack every tensor of a pytree over the ranks of a group; unchanged for one rank. Every rank must call it.

    Args:
        tree: a tensor, a number, or a pytree of them.
        group: the ranks.
        device: where numbers become tensors.
        with_gradients: let gradients flow back to the tensors of all ranks.

    Raises:
        RankError: on every rank, where shapes, dtypes or structure differ.
    """
    tree = map_leaves(
        tree, lambda number: torch.tensor(number, device=device), (int, float)
    )
    same_everywhere(group, "all_gather", tree)
    if group.size == 1:
        return tree
    if with_gradients:
        return map_tensors(tree, partial(gather_with_gradients, group=group))
    return map_tensors(tree, group.all_gather)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: _Gathers) -> Tensor:
        ctx.group = group
        return group.all_gather(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # all_reduce works in place, and autograd may still use the gradient.
        total = ctx.group.all_reduce(gradients[0].contiguous().clone())
        return total[ctx.group.rank], None
