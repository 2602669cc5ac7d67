"""The short batches of a stream: divided among the processes, and filled up so that each gets equally many samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["Turn", "evened"]

Turn = list[tuple[Any, int]]
"""A batch for each process, with its number of samples."""
_PLAIN: Final = (str, bytes, int, float, type(None))
_NESTED: Final = (Tensor, Mapping, list, tuple)
_REFUSED: Final = (TypeError, ValueError, KeyError, IndexError, RuntimeError)  # of batches that cannot be cut


def evened(turn: Turn, processes: int, columns: bool) -> tuple[Turn, list[int]]:
    """The samples of a short turn in equal parts, filled up from its own beginning.

    So what it is filled up with does not depend on where the reading began, and a resumed epoch ends as the whole one.
    Batches that cannot be joined (padded to different lengths) are filled up one by one, each from its own samples.
    Batches that cannot be cut stay as they are, and a process without one gets a copy of another's.

    Args:
        turn: at least one batch, at most one for each process.
        processes: how many parts.
        columns: a list in a batch has an entry for each field of a sample, as torch's own ``collate_fn`` makes it.

    Returns:
        The parts; and how many samples of each are not there twice.

    Example:
        >>> evened([(torch.tensor([1, 2]), 2), (torch.tensor([3]), 1)], 2, True)
        ([(tensor([1, 2]), 2), (tensor([3, 1]), 2)], [2, 1])
    """
    batches, sizes = [batch for batch, _ in turn], [size for _, size in turn]
    total = sum(sizes)
    each = -(-total // processes)
    rows = [row % total for row in range(each * processes)] if total else []
    try:
        made = [_taken(batches, sizes, rows[at : at + each], columns) for at in range(0, each * processes, each or 1)]
        if len(made) == processes:
            return [(part, each) for part in made], [min(each, max(0, total - r * each)) for r in range(processes)]
    except _REFUSED:
        pass
    longest, parts = max(sizes), turn
    try:
        parts = [
            (_taken([batch], [size], [row % size for row in range(longest)], columns), longest) for batch, size in turn
        ]
    except (*_REFUSED, ZeroDivisionError):
        pass
    return [parts[i % len(parts)] for i in range(processes)], sizes + [0] * (processes - len(sizes))


def _taken(parts: Sequence[Any], sizes: Sequence[int], rows: Sequence[int], columns: bool) -> Any:
    """The samples ``rows`` of several batches together; raises for what has not an entry for each sample."""
    one = parts[0]
    if isinstance(one, Tensor) and all(part.ndim and len(part) == n for part, n in zip(parts, sizes, strict=True)):
        return torch.cat(list(parts))[list(rows)]
    if isinstance(one, Mapping):
        return type(one)({key: _taken([part[key] for part in parts], sizes, rows, columns) for key in one})  # type: ignore[call-arg]
    if isinstance(one, (list, tuple)):
        lengths = [len(part) for part in parts]
        if lengths == list(sizes) and not any(isinstance(item, _NESTED) for part in parts for item in part):
            items = [item for part in parts for item in part]
            return type(one)([items[row] for row in rows])
        if len(set(lengths)) > 1 or (lengths == list(sizes) and not columns):
            raise TypeError("a list of samples, or of fields")
        made = [_taken(column, sizes, rows, columns) for column in zip(*parts, strict=True)]
        return type(one)(*made) if hasattr(one, "_fields") else type(one)(made)
    scalar = isinstance(one, Tensor) and not one.ndim
    if (scalar or isinstance(one, _PLAIN)) and all(bool(one == part) for part in parts):
        return one  # it belongs to no sample
    raise TypeError(f"a {type(one).__name__} that has no entry for each sample, or differs from batch to batch")
