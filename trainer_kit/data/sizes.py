"""Count the samples of a batch whose loader does not count them, and apply limits to numbers of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, TypeAlias, final

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError
from trainer_kit.core.tensors import children
from trainer_kit.core.types import Batch, Nested

__all__ = [
    "BatchSizes",
    "EpochLength",
    "SizeReader",
    "SizedBatch",
    "batch_size_of",
    "epoch_length",
    "limit_batches",
    "size_reader",
]

SizedBatch: TypeAlias = tuple[Batch, int]
"""A batch and its number of samples."""
SizeReader: TypeAlias = Callable[[Batch], SizedBatch]
_PLAIN: Final = (str, bytes, range, int, float, complex, np.generic, type(None))
"""Values without samples in them."""
_Rows: TypeAlias = Tensor | np.ndarray | PackedSequence
"""What shows a number of samples."""
_Path: TypeAlias = tuple[tuple[str, Any], ...]
"""The way to a tensor in a batch, as `children` yields its steps."""


def batch_size_of(batch: Batch) -> int:
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
        self._read: SizeReader | None = None

    def pairs(self, batches: Iterable[Batch]) -> Iterator[SizedBatch]:
        """Return each batch with its number of samples."""
        return chain.from_iterable(self._runs_of_pairs(iter(batches)))

    def total(self, batches: Sequence[Batch]) -> int:
        """Return the number of samples of several batches."""
        if not batches:
            return 0
        pairs = map(self._reader(batches[0]), batches)
        return sum(map(itemgetter(1), pairs))

    def _runs_of_pairs(
        self, batches: Iterator[Batch]
    ) -> Iterator[Iterable[SizedBatch]]:
        for batch in batches:
            read = self._reader(batch)
            yield (read(batch),)
            # Its memory is free while the next one is read.
            del batch
            # ``map`` adds no Python frame between the loader and the reader.
            yield map(read, batches)

    def _reader(self, batch: Batch) -> SizeReader:
        if self._read is None:
            self.doubt = _doubt(batch)
            self._read = size_reader(batch)
        return self._read


def _doubt(batch: Batch) -> str | None:
    rows = list(dict.fromkeys(_rows(tensor) for _, tensor in _tensors(batch, ())))
    if len(rows) > 1:
        return f"its tensors have {' and '.join(map(str, rows[:4]))} rows; {rows[0]} are counted"
    if rows or _strings(batch):
        return None
    opaque = next(_opaque(batch), None)
    if opaque is None:
        return None
    return f"a {type(opaque).__name__} shows no tensor; 1 is counted"


def _pair(batch: Batch) -> SizedBatch:
    return batch, batch_size_of(batch)


def size_reader(batch: Batch) -> SizeReader:
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
        # A field is read as an attribute, not by ``node[key]``.
        if access == "field":
            return _pair
        steps.append((type(node), key))
        node = node[key]

    def read(batch: Batch) -> SizedBatch:
        inner = batch
        try:
            for kind, key in steps:
                # Compared before it is indexed: tensors have items too.
                if type(inner) is not kind:
                    return _pair(batch)
                inner = inner[key]
            return batch, inner.size(0)
        except (AttributeError, IndexError, KeyError, TypeError):
            # A batch of another structure.
            return _pair(batch)

    return read


def _tensors(node: Nested, path: _Path) -> Iterator[tuple[_Path, _Rows]]:
    if isinstance(node, (Tensor, np.ndarray)):
        if node.ndim:
            yield path, node
    elif isinstance(node, PackedSequence):
        yield path, node
    else:
        for step, child in children(node):
            yield from _tensors(child, (*path, step))


def _rows(tensor: _Rows) -> int:
    if isinstance(tensor, PackedSequence):
        # Its sizes are on the host: no sync point.
        return int(tensor.batch_sizes[0])
    return int(tensor.shape[0])


def _opaque(node: Nested) -> Iterator[object]:
    """Yield objects of unknown types, which may contain samples."""
    if isinstance(node, (Mapping, Sequence)) or dataclasses.is_dataclass(node):
        for _, child in children(node):
            yield from _opaque(child)
    elif not isinstance(node, (*_PLAIN, Tensor, np.ndarray)):
        yield node


def _strings(node: Nested) -> int:
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
    # Not ``limit > 1.0``, which is false for NaN.
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
    """How many micro-batches of a loader form an epoch.

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
    # A stream that claims to have no batch: its ``len`` is only a hint.
    if not exact and length == 0:
        length = None
    expected = limit_batches(length, limit, name)
    stops_at = expected
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        stops_at = None
    elif isinstance(limit, int):
        stops_at = limit
    # A limit that counts batches is certain whatever the length is.
    certain = expected is not None and (exact or expected == stops_at)
    return EpochLength(expected, stops_at, certain)
