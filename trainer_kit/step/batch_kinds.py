"""What a captured step depends on of its batch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_kit.core.types import Batch

__all__ = ["CaptureRefused", "copy_containers", "describe_batch"]

_CONSTANTS: Final = (int, float, bool, str, type(None))
"""Values that a graph has as constants."""


class CaptureRefused(Exception):
    """A step cannot be captured; the text says why."""


def describe_batch(batch: Batch, tensors: list[Tensor]) -> Hashable:
    """What a graph depends on of a batch: equal for batches that one graph can run.

    Args:
        batch: of tensors and constants, in tuples, lists and dicts.
        tensors: the tensors of the batch are appended to it.

    Raises:
        CaptureRefused: something in the batch is neither a tensor nor a constant.

    Example:
        >>> import torch
        >>> describe_batch(torch.zeros(2), []) == describe_batch(torch.ones(2), [])
        True
    """
    kind = batch.__class__
    if kind is Tensor:
        if batch.layout is not torch.strided or batch.is_nested:
            raise CaptureRefused("the batch holds a sparse or nested tensor")
        if batch.requires_grad:
            raise CaptureRefused("a tensor of the batch needs a gradient")
        tensors.append(batch)
        return (
            batch.shape,
            batch.stride(),
            batch.dtype,
            batch.device,
        )
    if kind is dict:
        values = [describe_batch(value, tensors) for value in batch.values()]
        return kind, tuple(batch), tuple(values)
    if kind is PackedSequence:
        raise CaptureRefused("the batch holds a packed sequence")
    if kind is list or isinstance(batch, tuple):
        return kind, tuple([describe_batch(value, tensors) for value in batch])
    if kind in _CONSTANTS:
        return kind, batch
    raise CaptureRefused(f"the batch holds a {kind.__name__}")


def copy_containers(batch: Batch) -> Batch:
    """The same tensors in containers of their own, which a step may change.

    Example:
        >>> copy_containers({"x": [1, 2]})
        {'x': [1, 2]}
    """
    kind = type(batch)
    if kind is dict:
        return {key: copy_containers(value) for key, value in batch.items()}
    if kind is list or kind is tuple:
        return kind(map(copy_containers, batch))
    if isinstance(batch, tuple):
        # A namedtuple.
        return kind(*map(copy_containers, batch))
    return batch
