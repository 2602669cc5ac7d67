"""torch's own attention over sequences in parts, on devices that have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

__all__ = ["RingAttention", "has_ring", "ring_attention"]

RingAttention = Callable[[DeviceMesh], AbstractContextManager[Callable[..., Tensor]]]

_DEVICES: Final = ("cuda",)
"""Those whose kernels return what parts of an attention are merged with; others are refused by torch."""


def has_ring(device_type: str) -> bool:
    """Whether torch has it for devices of this type.

    Example:
        >>> has_ring("cuda"), has_ring("cpu")
        (True, False)
    """
    return device_type in _DEVICES


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[Callable[..., Tensor]]:
    """Inside, also in backward, what is yielded computes attention over the whole sequence, from a part on each rank.

    ``torch.distributed.tensor.experimental.context_parallel`` (Liu et al., Ring Attention, ICLR 2024; Llama 3's form,
    which gathers keys and values, is its default). Parts are contiguous; it takes no mask and no dropout.

    Args:
        mesh: one axis.
    """
    from torch.distributed.tensor.experimental import _attention, context_parallel

    options = _attention._cp_options
    before = options.enable_load_balance
    options.enable_load_balance = False  # it reorders tokens, and positions and targets would have to follow
    nothing = torch.empty(mesh.size(), device=mesh.device_type)  # it divides what it is given, and wants something
    try:
        with context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[0], no_restore_buffers={nothing}):
            yield F.scaled_dot_product_attention
    finally:
        options.enable_load_balance = before
