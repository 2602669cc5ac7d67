"""Count the samples of a batch whose loader does not count them, and apply limits to numbers of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, final

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError
from trainer_kit.core.tensors import children

__all__ = [
    "BatchSizes",
    "EpochLength",
    "batch_size_of",
    "epoch_length",
    "limit_batches",
    "size_reader",
]

_PLAIN: Final = (str, bytes, range, int, float, complex, np.generic, type(None))
"""Values without samples in them."""
_Path = tuple[tuple[str, Any], ...]


def batch_size_of(batch: Any) -> int:
    """Estimate the number of samples in a batch: the first size of the first tensor or NumPy array in it.

    Args:
        batch: any nesting of mappings, sequences and dataclasses. 0-dimensional tensors are ignored.

    Returns:
        Without a tensor, the length of the first list of strings; without that, 1.

    Example:
        >>> import torch
        >>> batch_size_of({"scale": torch.tensor(2.0), "x": torch.zeros(3, 5)}), batch_size_of([["a", "b"]])
        (3, 2)
    """
    for _, tensor in _tensors(batch, ()):
        return _rows(tensor)
    return _strings(batch) or 1


@final
class BatchSizes:
    """Count the samples of batches from their content, for loaders that do not count them.

    Attributes:
        doubt: the reason, found in the first batch, why the count may be wrong, or None.

    Example:
        >>> import torch
        >>> sizes = BatchSizes()
        >>> [count for _, count in sizes.pairs([torch.zeros(3, 5), torch.zeros(2, 5)])], sizes.doubt
        ([3, 2], None)
        >>> sizes = BatchSizes()
        >>> sizes.total([{"edges": torch.zeros(9, 2), "labels": torch.zeros(4)}]), sizes.doubt
        (9, 'its tensors have 9 and 4 rows; 9 are counted')
    """

    def __init__(self) -> None:
        self.doubt: str | None = None
        self._read: Callable[[Any], tuple[Any, int]] | None = None

    def pairs(self, batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Return each batch with its number of samples."""
        return chain.from_iterable(self._runs_of_pairs(iter(batches)))

    def total(self, batches: Sequence[Any]) -> int:
        """Return the number of samples of several batches."""
        if not batches:
            return 0
        pairs = map(self._reader(batches[0]), batches)
        return sum(map(itemgetter(1), pairs))

    def _runs_of_pairs(
        self, batches: Iterator[Any]
    ) -> Iterator[Iterable[tuple[Any, int]]]:
        for batch in batches:
            read = self._reader(batch)
            yield (read(batch),)
            del batch  # its memory is free while the next one is read
            # ``map`` adds no Python frame between the loader and the reader.
            yield map(read, batches)

    def _reader(self, batch: Any) -> Callable[[Any], tuple[Any, int]]:
        if self._read is None:
            self.doubt = _doubt(batch)
            self._read = size_reader(batch)
        return self._read


def _doubt(batch: Any) -> str | None:
    rows = list(dict.fromkeys(_rows(tensor) for _, tensor in _tensors(batch, ())))
    if len(rows) > 1:
        return f"its tensors have {' and '.join(map(str, rows[:4]))} rows; {rows[0]} are counted"
    if rows or _strings(batch):
        return None
    opaque = next(_opaque(batch), None)
    if opaque is None:
        return None
    return f"a {type(opaque).__name__} shows no tensor; 1 is counted"


def _pair(batch: Any) -> tuple[Any, int]:
    return batch, batch_size_of(batch)


def size_reader(batch: Any) -> Callable[[Any], tuple[Any, int]]:
    """Return the fastest function from a batch like this one to (batch, `batch_size_of`); it accepts other batches too.

    Example:
        >>> import torch
        >>> read = size_reader((torch.zeros(3, 5), torch.zeros(3)))
        >>> read((torch.zeros(2, 5), torch.zeros(2)))[1], read({"x": torch.zeros(4)})[1]
        (2, 4)
    """
    path, tensor = next(_tensors(batch, ()), ((), None))
    if not isinstance(tensor, Tensor):
        return _pair
    steps: list[tuple[Any, Any]] = []
    node = batch
    for access, key in path:
        if access == "field":  # read as an attribute, not by ``node[key]``
            return _pair
        steps.append((type(node), key))
        node = node[key]

    def read(batch: Any) -> tuple[Any, int]:
        inner = batch
        try:
            for kind, key in steps:
                if type(inner) is not kind:  # compared first: tensors have items too
                    return _pair(batch)
                inner = inner[key]
            return batch, inner.size(0)
        except (AttributeError, IndexError, KeyError, TypeError):
            # a batch of another structure
            return _pair(batch)

    return read


def _tensors(node: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(node, (Tensor, np.ndarray)):
        if node.ndim:
            yield path, node
    elif isinstance(node, PackedSequence):
        yield path, node
    else:
        for step, child in children(node):
            yield from _tensors(child, (*path, step))


def _rows(tensor: Any) -> int:
    if isinstance(tensor, PackedSequence):
        return int(tensor.batch_sizes[0])  # on the host: no synchronization
    return int(tensor.shape[0])


def _opaque(node: Any) -> Iterator[Any]:
    """Yield objects of unknown types, which may contain samples."""
    if isinstance(node, (Mapping, Sequence)) or dataclasses.is_dataclass(node):
        for _, child in children(node):
            yield from _opaque(child)
    elif not isinstance(node, (*_PLAIN, Tensor, np.ndarray)):
        yield node


def _strings(node: Any) -> int:
    """Return the length of the first list of strings; 0 if there is none."""
    if isinstance(node, (list, tuple)) and node:
        if all(isinstance(child, (str, bytes)) for child in node):
            return len(node)
    for _, child in children(node):
        count = _strings(child)
        if count:
            return count
    return 0


def limit_batches(
    length: int | None, limit: int | float | None, name: str
) -> int | None:
    """Return the number of batches to read.

    Args:
        length: the batches of the loader, None if unknown.
        limit: an int counts batches; a float from 0.0 to 1.0 is a fraction of ``length``; 1.0 and None mean all.
        name: the name of the argument, for errors.

    Returns:
        The number of batches, None if unknown.

    Raises:
        DataError: a limit out of range, a fraction of an unknown length, a fraction that is less than one batch.

    Example:
        >>> limit_batches(10, 0.25, "limit_val_batches"), limit_batches(10, 25, "limit_val_batches")
        (2, 10)
    """
    if limit is None:
        return length
    argument = f"{name}={limit!r}"
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 0:
        raise DataError(
            f"{name} must be a number of batches or a fraction",
            found=argument,
            fix="pass a value such as 100 or 0.25",
        )
    if isinstance(limit, int):
        if length is None:
            return limit
        return min(length, limit)
    if not limit <= 1.0:
        raise DataError(
            f"{name} as a float must be a fraction from 0.0 to 1.0",
            found=argument,
            fix="pass an int to count batches",
        )
    if limit == 0.0:
        return 0
    if limit == 1.0:
        return length
    if length is None:
        raise DataError(
            f"{name} is a fraction, but the number of batches is unknown",
            found=f"{argument} for a loader without __len__",
            fix="pass a number of batches (an int), or 1.0 for all",
        )
    count = int(length * limit)
    if length and count == 0:
        raise DataError(
            f"{name} selects no batch",
            found=f"{argument} of {plural(length, 'batch')} is less than one",
            fix=f"at least {1 / length:.3g}, or an int",
        )
    return count


@dataclasses.dataclass(frozen=True)
class EpochLength:
    """How many micro-batches of a loader make an epoch.

    Attributes:
        expected: the number of micro-batches by the loader's length and the user's limit; None if unknown.
        limit: where reading stops although there may be more data; None: at the end of the data.
        certain: whether no epoch has more than ``expected`` micro-batches. A length that the user's code computes is
            a hint: the data may have more.
    """

    expected: int | None
    limit: int | None
    certain: bool


def epoch_length(
    length: int | None, exact: bool, limit: int | float | None, name: str
) -> EpochLength:
    """Return the length of an epoch.

    Args:
        length: the batches of the loader, None if unknown.
        exact: whether ``length`` is certain.
        limit: see `limit_batches`; a fraction is taken of ``length``, certain or not.
        name: the name of the argument, for errors.

    Raises:
        DataError: see `limit_batches`.

    Example:
        >>> epoch_length(10, exact=False, limit=1.0, name="limit_train_batches")
        EpochLength(expected=10, limit=None, certain=False)
        >>> epoch_length(10, exact=False, limit=4, name="limit_train_batches")
        EpochLength(expected=4, limit=4, certain=True)
    """
    if not exact and length == 0:
        length = None  # a stream that claims to have no batch
    expected = limit_batches(length, limit, name)
    stops_at = expected
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        stops_at = None
    elif isinstance(limit, int):
        stops_at = limit
    certain = expected is not None and (exact or expected == stops_at)
    return EpochLength(expected, stops_at, certain)
