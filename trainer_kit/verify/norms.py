"""Batch norms in a process that trains on the batches of several ranks: by rank, or of all ranks together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Final, final

import torch
from torch import Tensor, nn

from trainer_kit.core.torch_private import (
    CHECKPOINTED_MODULE,
    COMPILED_MODULE,
    BatchNorm,
)
from trainer_kit.verify.torch_private import FSDP_MODULE

__all__ = [
    "DividedNorms",
    "Shares",
    "batch_norms",
    "canonical",
    "join_norms",
    "joined",
    "rows_of_shares",
    "synced_norms",
]

_WRAPPERS: Final = frozenset({CHECKPOINTED_MODULE, COMPILED_MODULE, FSDP_MODULE})

Shares = dict[tuple[int, int], list[list[int]]]
"""The dataset's indices that each rank read, by (step, micro-batch)."""


def canonical(name: str) -> str:
    """The name of a module or parameter without the wrappers of torch.

    Example:
        >>> canonical("net.0._checkpoint_wrapped_module.weight")
        'net.0.weight'
    """
    return ".".join(
        component for component in name.split(".") if component not in _WRAPPERS
    )


def batch_norms(module: nn.Module) -> list[str]:
    """The names of the batch norms that normalize with the statistics of a rank's batch.

    Example:
        >>> batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()))
        ['1']
    """
    return [
        name
        for name, layer in _norms(module)
        if not isinstance(layer, nn.SyncBatchNorm)
    ]


def synced_norms(module: nn.Module) -> list[str]:
    """The names of the batch norms that normalize with the statistics of all ranks.

    Example:
        >>> synced_norms(nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.SyncBatchNorm(2).eval()))
        ['1']
    """
    return [
        name
        for name, layer in _norms(module)
        if isinstance(layer, nn.SyncBatchNorm) and layer.training
    ]


def _norms(module: nn.Module) -> list[tuple[str, BatchNorm]]:
    """Batch norms that normalize with the statistics of their batch."""
    norms = []
    for name, layer in module.named_modules():
        if not isinstance(layer, BatchNorm):
            continue
        # Without running statistics it has only those of its batch, in eval mode too.
        if layer.training or not layer.track_running_stats:
            norms.append((canonical(name), layer))
    return norms


_Forward = Callable[[Tensor], Tensor]


def join_norms(
    module: nn.Module,
    names: Collection[str],
    exchange: Callable[[Tensor, _Forward], Tensor],
) -> None:
    """Let batch norms call ``exchange`` with their input and their forward; it returns their output."""
    for name, layer in module.named_modules():
        if canonical(name) in names:
            # A hook of torch could change the output, and not leave out the forward.
            vars(layer)["forward"] = partial(_forward_with, exchange, layer.forward)


def _forward_with(
    exchange: Callable[[Tensor, _Forward], Tensor], forward: _Forward, value: Tensor
) -> Tensor:
    return exchange(value, forward)


def joined(values: Sequence[Tensor], forward: _Forward) -> list[Tensor]:
    """The outputs of a batch norm for several inputs, which it normalizes together; their lengths may differ.

    Example:
        >>> norm = nn.BatchNorm1d(1, affine=False)
        >>> outputs = joined([torch.zeros(2, 1, 3), torch.ones(1, 1, 5)], norm)
        >>> [output.shape for output in outputs]
        [torch.Size([2, 1, 3]), torch.Size([1, 1, 5])]
    """
    # A batch norm normalizes each channel over all other dimensions. As rows of channels,
    # inputs of different lengths fit into one tensor.
    channels_last = [value.movedim(1, -1) for value in values]
    rows = [value.flatten(0, -2) for value in channels_last]
    joined_rows = torch.cat(rows)
    # A batch norm checks the number of dimensions of its input.
    spatial = [1] * (values[0].ndim - 2)
    shape = (*joined_rows.shape, *spatial)
    inputs = joined_rows.reshape(shape)
    normalized = forward(inputs)
    lengths = list(map(len, rows))
    output_rows = normalized.flatten(1)
    sections = torch.split(output_rows, lengths)
    outputs = []
    for section, value in zip(sections, channels_last, strict=True):
        output = section.reshape(value.shape)
        outputs.append(output.movedim(-1, 1))
    return outputs


def rows_of_shares(
    ids: Sequence[int], shares: Sequence[Sequence[int]]
) -> list[Tensor] | None:
    """The rows of a batch that each share has; None where they are not the same samples.

    Example:
        >>> rows_of_shares([7, 3, 5, 1], [[3, 1], [5, 7]])
        [tensor([1, 3]), tensor([2, 0])]
    """
    if sorted(chain.from_iterable(shares)) != sorted(ids):
        return None
    # A sample may be in a batch several times: each share takes the next of its rows.
    rows_by_sample: dict[int, list[int]] = defaultdict(list)
    for row, sample in enumerate(ids):
        rows_by_sample[sample].append(row)
    rows = []
    for share in shares:
        share_rows = [rows_by_sample[sample].pop(0) for sample in share]
        rows.append(torch.tensor(share_rows))
    return rows


@final
class DividedNorms:
    """Batch norms that normalize each rank's rows of the batch by themselves.

    Args:
        module: its batch norms are changed: this process trains it for one comparison only.
        rows: returns the rows of each rank in the batch that runs; None: not known.

    Attributes:
        whole: the names of those whose input does not have the batch as its first dimension: they stay as they are.
    """

    def __init__(
        self, module: nn.Module, rows: Callable[[], list[Tensor] | None]
    ) -> None:
        self.rows = rows
        self.whole: set[str] = set()
        for name, layer in module.named_modules():
            # A SyncBatchNorm of one process already has the rows of all ranks.
            if not isinstance(layer, BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
                continue
            # No hook of torch calls a forward several times.
            vars(layer)["forward"] = self._divided(canonical(name), layer.forward)

    def _divided(
        self, name: str, forward: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        def forward_shares(value: Tensor) -> Tensor:
            rows = self.rows()
            # The first dimension is not the batch, for example after a flatten.
            if rows is None or sum(map(len, rows)) != len(value):
                self.whole.add(name)
                return forward(value)
            outputs = []
            for share in rows:
                share_value = value[share.to(value.device)]
                outputs.append(forward(share_value))
            # Back to the order of the rows in the batch.
            order = torch.cat(rows).argsort()
            return torch.cat(outputs)[order.to(value.device)]

        return forward_shares
