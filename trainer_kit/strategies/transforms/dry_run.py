"""What a step may do to its batch when it runs more than once on it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.seed import preserved_rng

__all__ = ["copied", "drawing", "shapes_of", "tensors_of", "untouched"]


def copied(batch: Any) -> Any:
    """Other containers with the same tensors in them: what is popped from one is still in the other.

    Args:
        batch: dicts, lists and tuples, in any order; anything else is not copied.

    Example:
        >>> batch = {"tokens": [1, 2], "labels": [3]}
        >>> copied(batch).pop("labels"), list(batch)
        ([3], ['tokens', 'labels'])
    """
    if isinstance(batch, tuple):
        parts = [copied(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = copied(value)
        return made
    if isinstance(batch, list):
        same = copy.copy(batch)
        same[:] = [copied(part) for part in batch]
        return same
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


@contextmanager
def untouched(batch: Any) -> Iterator[None]:
    """Inside, nothing is written into the tensors of a batch.

    Raises:
        StrategyError: something was: it would be written once more in the second run.
    """
    before = [(tensor, tensor._version) for tensor in tensors_of(batch) if not tensor.is_inference()]
    yield
    for tensor, version in before:
        if tensor._version != version:
            raise StrategyError(
                "training_step writes into its batch ahead of the pipelined model, and that part runs twice",
                found=f"a tensor of shape {tuple(tensor.shape)} was changed in place",
                fix="make a new one (y = y * 10), or do it behind the model's call or in on_after_batch_transfer",
            )


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """What decides about the shapes of everything that is computed from a batch."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensors_of(batch))


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Every global generator starts from ``seed``; outside they are where they were."""
    with preserved_rng(device):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
