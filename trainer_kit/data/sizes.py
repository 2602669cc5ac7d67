"""How many samples a batch has, and how many batches a limit leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from trainer_kit.core.errors import DataError

__all__ = ["batch_size_of", "limit_batches", "size_reader"]

_Path = tuple[tuple[str, Any], ...]


def batch_size_of(batch: Any) -> int:
    """The number of samples of a batch: the first size of the first tensor in it.

    Args:
        batch: any nesting of mappings, sequences and dataclasses. 0-dimensional tensors are passed over.

    Returns:
        Without a tensor, the length of the first list of strings; without that, 1.

    Example:
        >>> import torch
        >>> batch_size_of({"scale": torch.tensor(2.0), "x": torch.zeros(3, 5)}), batch_size_of([["a", "b"]])
        (3, 2)
    """
    for _, found in _tensors(batch, ()):
        if isinstance(found, PackedSequence):
            return int(found.batch_sizes[0])  # lives on the host: no sync
        return int(found.size(0))
    return _strings(batch) or 1


def size_reader(batch: Any) -> Callable[[Any], int]:
    """The fastest way to `batch_size_of` for batches built like this one; any other is still read correctly.

    Example:
        >>> import torch
        >>> read = size_reader((torch.zeros(3, 5), torch.zeros(3)))
        >>> read((torch.zeros(2, 5), torch.zeros(2))), read({"x": torch.zeros(4)})
        (2, 4)
    """
    path, found = next(iter(_tensors(batch, ())), ((), None))
    if not isinstance(found, Tensor) or len(path) > 2 or any(how == "field" for how, _ in path):
        return batch_size_of
    keys = [key for _, key in path]
    if not keys:
        return _direct
    if len(keys) == 1:
        return _one_deep(type(batch), keys[0])
    return _two_deep(type(batch), keys[0], type(batch[keys[0]]), keys[1])


# What another structure raises on the way to `.size(0)`. Types are compared first: a tensor has an item 0 too.
_OTHER = (AttributeError, IndexError, KeyError, TypeError)


def _direct(batch: Any) -> int:
    try:
        return batch.size(0)  # type: ignore[no-any-return]
    except _OTHER:
        return batch_size_of(batch)


def _one_deep(kind: Any, key: Any) -> Callable[[Any], int]:
    def read(batch: Any) -> int:
        if type(batch) is kind:
            try:
                return batch[key].size(0)  # type: ignore[no-any-return]
            except _OTHER:
                pass
        return batch_size_of(batch)

    return read


def _two_deep(kind: Any, outer: Any, inner_kind: Any, inner: Any) -> Callable[[Any], int]:
    def read(batch: Any) -> int:
        if type(batch) is kind:
            try:
                if type(part := batch[outer]) is inner_kind:
                    return part[inner].size(0)  # type: ignore[no-any-return]
            except _OTHER:
                pass
        return batch_size_of(batch)

    return read


def _children(node: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(node, Mapping):
        yield from ((("item", key), child) for key, child in node.items())
    elif isinstance(node, Sequence) and not isinstance(node, (str, bytes, range)):
        yield from ((("item", i), child) for i, child in enumerate(node))
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield from ((("field", field.name), getattr(node, field.name)) for field in dataclasses.fields(node))


def _tensors(node: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(node, Tensor):
        if node.dim():
            yield path, node
    elif isinstance(node, PackedSequence):
        yield path, node
    else:
        for step, child in _children(node):
            yield from _tensors(child, (*path, step))


def _strings(node: Any) -> int:
    """The length of the first list of strings; 0 when there is none."""
    if isinstance(node, (list, tuple)) and node and all(isinstance(child, str) for child in node):
        return len(node)
    for _, child in _children(node):
        if count := _strings(child):
            return count
    return 0


def limit_batches(length: int | None, limit: int | float | None, name: str) -> int | None:
    """How many batches are read.

    Args:
        length: batches of the loader, None when unknown.
        limit: an int counts batches; a float from 0.0 to 1.0 is a fraction of ``length``; 1.0 and None are all.
        name: the argument, for errors.

    Returns:
        The number of batches, None when unknown.

    Raises:
        DataError: a limit out of range, a fraction of an unknown length, a fraction that is less than one batch.

    Example:
        >>> limit_batches(10, 0.25, "limit_val_batches"), limit_batches(10, 25, "limit_val_batches")
        (2, 10)
    """
    if limit is None:
        return length
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit < 0:
        raise DataError(
            f"{name} is a number of batches or a fraction", found=f"{name}={limit!r}", fix="e.g. 100 or 0.25"
        )
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if not limit <= 1.0:
        raise DataError(
            f"{name} as a float is a fraction, 0.0 to 1.0",
            found=f"{name}={limit!r}",
            fix="pass an int to count batches",
        )
    if limit in (0.0, 1.0):
        return length if limit else 0
    if length is None:
        raise DataError(
            f"{name} is a fraction of a length that nobody knows",
            found=f"{name}={limit!r} for a loader without __len__",
            fix="pass a number of batches (an int), or 1.0 for all",
        )
    if length and int(length * limit) == 0:
        raise DataError(
            f"{name} leaves no batch",
            found=f"{name}={limit!r} of {length} batches is less than one",
            fix=f"at least {1 / length:.3g}, or an int",
        )
    return int(length * limit)
