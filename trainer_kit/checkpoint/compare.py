"""Compare two checkpoints by part, key path and tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import Tensor

from trainer_kit.checkpoint.files import dtype_name, same_bits
from trainer_kit.checkpoint.read import read_checkpoint, read_info
from trainer_kit.core.errors import CheckpointError

__all__ = ["Difference", "diff"]

_SHOWN: Final = 60
_ABSENT: Final = object()


@final
@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        part: a part of the checkpoint (``model``, ``optimizer_states``, …), or ``info``.
        key: the key path within the part, joined with dots; empty for the whole part.
        kind: ``missing`` in one of the two, or another ``shape``, ``dtype``, ``type`` or ``value``.
        a: the first checkpoint's value, shortened; empty if it is missing there.
        b: the second checkpoint's value, likewise.
        max_abs: for tensors and arrays of equal shape the largest absolute difference; NaN if only one of them is NaN,
            0.0 if only bits differ (-0.0 and 0.0). Else None.

    Example:
        >>> difference = Difference("model", "layer.weight", "value", "shape (2, 2)", "shape (2, 2)", max_abs=0.5)
        >>> difference.kind, difference.max_abs
        ('value', 0.5)
    """

    part: str
    key: str
    kind: Literal["missing", "shape", "dtype", "type", "value"]
    a: str
    b: str
    max_abs: float | None = None

    def __str__(self) -> str:
        name = self.part
        if self.key:
            name = f"{self.part}: {self.key}"
        if self.kind == "missing":
            # The text of a value is never empty, so an empty one says in which of the two it is missing.
            if self.a:
                return f"{name}: only in the first"
            return f"{name}: only in the second"
        if self.max_abs is not None:
            return f"{name}: values differ by up to {self.max_abs:.6g} ({self.a})"
        return f"{name}: {self.kind} {self.a} != {self.b}"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
) -> list[Difference]:
    """Return every difference between two checkpoints, compared bit by bit.

    Args:
        a: a checkpoint directory.
        b: another checkpoint directory.

    Raises:
        CheckpointError: one of them is damaged.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.commit import write_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     one = write_checkpoint(f"{directory}/1", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     two = write_checkpoint(f"{directory}/2", {"model": {"w": torch.zeros(2)}, "progress": {"step": 4}})
        ...     for difference in diff(one, two):
        ...         print(difference)
        model: w: values differ by up to 1 (float32 [2])
        progress: step: value 3 != 4
    """
    # Read with their checksums verified, so that a difference is never one of a damaged file.
    state_a, state_b = read_checkpoint(a), read_checkpoint(b)
    parts_a = {"info": read_info(a), **state_a}
    parts_b = {"info": read_info(b), **state_b}
    differences: list[Difference] = []
    try:
        for part_name in {**parts_a, **parts_b}:
            value_a, value_b = (
                parts_a.get(part_name, _ABSENT),
                parts_b.get(part_name, _ABSENT),
            )
            differences += _walk(part_name, (), value_a, value_b)
    except RecursionError:
        raise CheckpointError(
            a, None, "it is nested too deeply to be compared"
        ) from None
    return differences


def _walk(
    part_name: str,
    path: tuple[str, ...],
    a: Any,
    b: Any,
) -> Iterator[Difference]:
    report = partial(Difference, part_name, ".".join(path))
    if a is _ABSENT:
        yield report("missing", "", _show(b))
    elif b is _ABSENT:
        yield report("missing", _show(a), "")
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in {**a, **b}:
            value_a = a.get(name, _ABSENT)
            value_b = b.get(name, _ABSENT)
            yield from _walk(part_name, (*path, str(name)), value_a, value_b)
    elif type(a) is not type(b):
        yield report("type", _show(a), _show(b))
    elif isinstance(a, (list, tuple)):
        pairs = zip_longest(a, b, fillvalue=_ABSENT)
        for index, (item_a, item_b) in enumerate(pairs):
            yield from _walk(part_name, (*path, str(index)), item_a, item_b)
    elif isinstance(a, Tensor):
        yield from _compare_tensors(report, a, b)
    elif isinstance(a, np.ndarray) and _is_numeric(a) and _is_numeric(b):
        tensor_a = torch.from_numpy(a)
        tensor_b = torch.from_numpy(b)
        yield from _compare_tensors(report, tensor_a, tensor_b)
    # The text of a float is exact, and NaN is NaN.
    elif _text(a) != _text(b):
        yield report("value", _show(a), _show(b))


def _is_numeric(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "biufc"


def _compare_tensors(
    report: Callable[..., Difference],
    a: Tensor,
    b: Tensor,
) -> Iterator[Difference]:
    if a.shape != b.shape:
        shape_a, shape_b = list(a.shape), list(b.shape)
        yield report("shape", str(shape_a), str(shape_b))
    elif a.dtype != b.dtype:
        yield report("dtype", dtype_name(a.dtype), dtype_name(b.dtype))
    elif not same_bits(a, b):
        largest = _largest_difference(a, b)
        yield report("value", _show(a), _show(b), largest)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    # Differences of integers and of half precision overflow in their own dtype.
    wide = torch.float64
    if a.is_complex():
        wide = torch.complex128
    a = a.to(wide)
    b = b.to(wide)
    difference = (a - b).abs()
    both_nan = a.isnan() & b.isnan()
    # The difference of equal infinities is NaN.
    difference[(a == b) | both_nan] = 0.0
    return float(difference.max())


def _show(value: object) -> str:
    """The text of a value, shortened."""
    text = _text(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[: _SHOWN - 1]}…"


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(value, key=repr))
    return repr(value)
