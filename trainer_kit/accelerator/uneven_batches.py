"""Batches of different sizes on the processes of a custom training loop, filled up to equal sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from trainer_kit.core.tensors import sequence_like
from trainer_kit.core.types import Batch

__all__ = ["SizedBatch", "Turn", "evened", "filled"]

_PLAIN: Final = (str, bytes, int, float, type(None))
_NESTED: Final = (Tensor, Mapping, list, tuple)
_CANNOT_CUT: Final = (TypeError, ValueError, KeyError, IndexError, RuntimeError)
"""Raised for batches that cannot be cut."""

SizedBatch: TypeAlias = tuple[Batch, int]
"""A batch and its number of samples."""
Turn: TypeAlias = list[SizedBatch]
"""One batch per process."""


def filled(pair: SizedBatch, size: int) -> SizedBatch:
    """Fill a batch up to ``size`` samples with its own; one that cannot be cut stays unchanged."""
    batch, samples = pair
    if samples in (0, size):
        return pair
    try:
        return _repeat_rows(batch, samples, size, False), size
    except _CANNOT_CUT:
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
    shares = _share_rows(turn, processes, columns)
    if shares is not None:
        return shares
    batches = list(_fill_separately(turn, columns))
    counts = [size for _, size in turn]
    missing = processes - len(turn)
    for index in range(missing):
        # A copy of another process's batch, so all of its samples are repeats.
        batches.append(batches[index])
        counts.append(0)
    return batches, counts


def _share_rows(
    turn: Turn, processes: int, columns: bool
) -> tuple[Turn, list[int]] | None:
    """Concatenate the batches and share their rows; None if they cannot be concatenated or cut."""
    batches = [batch for batch, _ in turn]
    sizes = [size for _, size in turn]
    total = sum(sizes)
    if not total:
        return None
    # Rounded up: the last shares are filled up from the beginning.
    length = -(-total // processes)
    shares: Turn = []
    counts = []
    try:
        for rank in range(processes):
            start = rank * length
            rows = [row % total for row in range(start, start + length)]
            share = _select_rows(batches, sizes, rows, columns)
            shares.append((share, length))
            counts.append(min(length, max(0, total - start)))
    except _CANNOT_CUT:
        return None
    return shares, counts


def _fill_separately(turn: Turn, columns: bool) -> Turn:
    """Fill each batch up to the longest with its own samples; batches that cannot be cut stay unchanged."""
    longest = max(size for _, size in turn)
    batches = []
    try:
        for batch, size in turn:
            batches.append((_repeat_rows(batch, size, longest, columns), longest))
    except (*_CANNOT_CUT, ZeroDivisionError):
        return turn
    return batches


def _repeat_rows(batch: Batch, size: int, length: int, columns: bool) -> Batch:
    rows = [row % size for row in range(length)]
    return _select_rows([batch], [size], rows, columns)


def _select_rows(
    batches: Sequence[Batch], sizes: Sequence[int], rows: Sequence[int], columns: bool
) -> Batch:
    """Return the samples ``rows`` of concatenated batches; raise an error for a value without one entry per sample."""
    first = batches[0]
    if isinstance(first, Tensor) and _have_rows(batches, sizes):
        return torch.cat(list(batches))[list(rows)]
    if isinstance(first, Mapping):
        values = {}
        for key in first:
            column = [batch[key] for batch in batches]
            values[key] = _select_rows(column, sizes, rows, columns)
        # Like dict, the mappings of collate functions are made from one.
        return type(first)(values)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        return _select_of_lists(batches, sizes, rows, columns)
    is_scalar = isinstance(first, Tensor) and not first.ndim
    if is_scalar or isinstance(first, _PLAIN):
        # One value for all samples.
        if all(bool(first == batch) for batch in batches):
            return first
    raise TypeError(
        f"a {type(first).__name__} that has no entry for each sample, or differs from batch to batch"
    )


def _have_rows(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether each tensor has one row per sample."""
    return all(
        tensor.ndim and len(tensor) == size
        for tensor, size in zip(tensors, sizes, strict=True)
    )


def _select_of_lists(
    lists: Sequence[Batch], sizes: Sequence[int], rows: Sequence[int], columns: bool
) -> Batch:
    """Like `_select_rows` for lists, of samples or of the fields of samples."""
    first = lists[0]
    lengths = [len(values) for values in lists]
    has_rows = lengths == list(sizes)
    items: list[object] = []
    for values in lists:
        items.extend(values)
    if has_rows and not any(isinstance(item, _NESTED) for item in items):
        return type(first)([items[row] for row in rows])
    if len(set(lengths)) > 1 or (has_rows and not columns):
        raise TypeError("a list of samples, or of fields")
    fields = [
        _select_rows(column, sizes, rows, columns)
        for column in zip(*lists, strict=True)
    ]
    return sequence_like(first, fields)
