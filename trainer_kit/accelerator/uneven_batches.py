"""Batches of different sizes on the processes of a custom training loop, filled up to equal sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.core.tensors import sequence_like

__all__ = ["Turn", "evened", "filled"]

_PLAIN: Final = (str, bytes, int, float, type(None))
_NESTED: Final = (Tensor, Mapping, list, tuple)
_REFUSED: Final = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
)  # raised for batches that cannot be cut

Turn = list[tuple[Any, int]]
"""One batch per process, each with its number of samples."""


def filled(pair: tuple[Any, int], size: int) -> tuple[Any, int]:
    """Fill a batch up to ``size`` samples with its own; one that cannot be cut stays unchanged."""
    batch, samples = pair
    if samples in (0, size):
        return pair
    try:
        return _taken(
            [batch], [samples], [row % samples for row in range(size)], False
        ), size
    except _REFUSED:
        return pair


def evened(turn: Turn, processes: int, columns: bool) -> tuple[Turn, list[int]]:
    """Divide the samples of a short turn into equal parts, filled up from its beginning.

    The padding does not depend on where reading began, so a resumed epoch ends like an uninterrupted one.
    Batches that cannot be concatenated (padded to different lengths) are filled up separately, from their own samples.
    Batches that cannot be cut stay unchanged, and a process without one gets a copy of another process's batch.

    Args:
        turn: at least one batch, at most one per process.
        processes: the number of parts.
        columns: a list in a batch has one entry per field of a sample, as from torch's default ``collate_fn``.

    Returns:
        The parts; and for each part the number of samples that are not repeated.

    Example:
        >>> evened([(torch.tensor([1, 2]), 2), (torch.tensor([3]), 1)], 2, True)
        ([(tensor([1, 2]), 2), (tensor([3, 1]), 2)], [2, 1])
    """
    batches, sizes = [batch for batch, _ in turn], [size for _, size in turn]
    total = sum(sizes)
    each = -(-total // processes)
    rows = [row % total for row in range(each * processes)] if total else []
    try:
        made = [
            _taken(batches, sizes, rows[at : at + each], columns)
            for at in range(0, each * processes, each or 1)
        ]
        if len(made) == processes:
            return [(part, each) for part in made], [
                min(each, max(0, total - r * each)) for r in range(processes)
            ]
    except _REFUSED:
        pass
    longest, parts = max(sizes), turn
    try:
        parts = [
            (
                _taken(
                    [batch], [size], [row % size for row in range(longest)], columns
                ),
                longest,
            )
            for batch, size in turn
        ]
    except (*_REFUSED, ZeroDivisionError):
        pass
    return [parts[i % len(parts)] for i in range(processes)], sizes + [0] * (
        processes - len(sizes)
    )


def _taken(
    parts: Sequence[Any], sizes: Sequence[int], rows: Sequence[int], columns: bool
) -> Any:
    """Return the samples ``rows`` of concatenated batches; raise an error for a value without one entry per sample."""
    one = parts[0]
    if isinstance(one, Tensor) and all(
        part.ndim and len(part) == n for part, n in zip(parts, sizes, strict=True)
    ):
        return torch.cat(list(parts))[list(rows)]
    if isinstance(one, Mapping):
        return type(one)(
            {
                key: _taken([part[key] for part in parts], sizes, rows, columns)
                for key in one
            }
        )  # type: ignore[call-arg]
    if isinstance(one, (list, tuple)):
        lengths = [len(part) for part in parts]
        if lengths == list(sizes) and not any(
            isinstance(item, _NESTED) for part in parts for item in part
        ):
            items = [item for part in parts for item in part]
            return type(one)([items[row] for row in rows])
        if len(set(lengths)) > 1 or (lengths == list(sizes) and not columns):
            raise TypeError("a list of samples, or of fields")
        made = [
            _taken(column, sizes, rows, columns) for column in zip(*parts, strict=True)
        ]
        return sequence_like(one, made)
    scalar = isinstance(one, Tensor) and not one.ndim
    if (scalar or isinstance(one, _PLAIN)) and all(bool(one == part) for part in parts):
        return one  # not a value per sample
    raise TypeError(
        f"a {type(one).__name__} that has no entry for each sample, or differs from batch to batch"
    )
