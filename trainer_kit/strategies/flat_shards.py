"""A rank's piece of a parameter, where an engine steps flat ones of several parameters, and the whole of all pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Piece", "unkept", "whole_of"]


@final
@dataclass(frozen=True)
class Piece:
    """Where this rank has its piece of a parameter.

    Attributes:
        master: what the optimizer steps.
        start: the first element in it.
        first: the first element in the parameter.
        count: how many; 0 where other ranks have all of it.
        divided: whether other ranks have other pieces.
    """

    master: Tensor
    start: int
    first: int
    count: int
    divided: bool = True

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of the master, or of a moment of it; a view."""
        return tensor.detach().view(-1).narrow(0, self.start, self.count)

    def in_whole(self, tensor: Tensor) -> Tensor:
        """The same elements of the whole parameter, or of a whole moment of it; a view where it is contiguous."""
        return tensor.detach().reshape(-1).narrow(0, self.first, self.count)


def whole_of(
    piece: Piece, shape: torch.Size, tensor: Tensor, keep: bool, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The pieces of all ranks as one tensor, on the CPU; zeros that take no memory where it is not kept.

    Args:
        piece: this rank's.
        shape: of the whole parameter.
        tensor: the master, or a moment of it.
        keep: whether this rank wants the values; every rank calls it.
        group: those that have the pieces; all ranks by default.
    """
    if not piece.divided:
        return piece.of(tensor).view(shape).clone() if keep else unkept(shape, tensor.dtype)
    whole = torch.zeros(shape.numel(), dtype=tensor.dtype, device=_exchange_device(tensor))
    piece.in_whole(whole).copy_(piece.of(tensor))
    # As integers, of which all but one are zero: every bit arrives, the sign of a zero too.
    dist.all_reduce(whole.view(torch.int32 if whole.element_size() == 4 else torch.int16), group=group)
    if not keep:
        return unkept(shape, tensor.dtype)
    return whole.view(shape).cpu()  # sync point: a checkpoint


def unkept(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that takes the memory of one element: who looks at a state on any rank finds its shapes."""
    return torch.zeros((), dtype=dtype).expand(shape)


def _exchange_device(tensor: Tensor) -> torch.device:
    """Where collectives run: an offloaded master is on the host."""
    if tensor.device.type == "cpu" and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
