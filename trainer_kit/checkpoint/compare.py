"""Compare two checkpoints by part, key path and tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    """

    part: str
    key: str
    kind: Literal["missing", "shape", "dtype", "type", "value"]
    a: str
    b: str
    max_abs: float | None = None

    def __str__(self) -> str:
        where = f"{self.part}: {self.key}" if self.key else self.part
        if self.kind == "missing":
            return f"{where}: only in the {'second' if not self.a else 'first'}"
        if self.max_abs is not None:
            return f"{where}: values differ by up to {self.max_abs:.6g} ({self.a})"
        return f"{where}: {self.kind} {self.a} != {self.b}"


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> list[Difference]:
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
    state, other = read_checkpoint(a), read_checkpoint(b)
    one = {"info": read_info(a), **state}
    two = {"info": read_info(b), **other}
    try:
        parts = {**one, **two}
        return [
            found
            for p in parts
            for found in _walk(p, (), one.get(p, _ABSENT), two.get(p, _ABSENT))
        ]
    except RecursionError:
        raise CheckpointError(
            a, None, "it is nested too deeply to be compared"
        ) from None


def _walk(part: str, path: tuple[str, ...], a: Any, b: Any) -> Iterator[Difference]:
    key = ".".join(path)
    if a is _ABSENT or b is _ABSENT:
        yield Difference(
            part,
            key,
            "missing",
            "" if a is _ABSENT else _show(a),
            "" if b is _ABSENT else _show(b),
        )
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in {**a, **b}:
            yield from _walk(
                part, (*path, str(name)), a.get(name, _ABSENT), b.get(name, _ABSENT)
            )
    elif type(a) is not type(b):
        yield Difference(part, key, "type", _show(a), _show(b))
    elif isinstance(a, (list, tuple)):
        for index in range(max(len(a), len(b))):
            first, second = (
                side[index] if index < len(side) else _ABSENT for side in (a, b)
            )
            yield from _walk(part, (*path, str(index)), first, second)
    elif isinstance(a, Tensor):
        yield from _tensors(part, key, a, b)
    elif (
        isinstance(a, np.ndarray)
        and a.dtype.kind in "biufc"
        and b.dtype.kind in "biufc"
    ):
        yield from _tensors(part, key, torch.from_numpy(a), torch.from_numpy(b))
    elif _show(a, None) != _show(
        b, None
    ):  # the text of a float is exact, and NaN is NaN
        yield Difference(part, key, "value", _show(a), _show(b))


def _tensors(part: str, key: str, a: Tensor, b: Tensor) -> Iterator[Difference]:
    if a.shape != b.shape:
        yield Difference(part, key, "shape", str(list(a.shape)), str(list(b.shape)))
    elif a.dtype != b.dtype:
        yield Difference(part, key, "dtype", dtype_name(a.dtype), dtype_name(b.dtype))
    elif not same_bits(a, b):
        yield Difference(part, key, "value", _show(a), _show(b), _largest(a, b))


def _largest(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    a = a.to(wide)
    b = b.to(wide)
    difference = (a - b).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = (
        0.0  # the difference of equal infinities is NaN
    )
    return float(difference.max())


def _show(value: Any, most: int | None = _SHOWN) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    text = repr(
        sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    )
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"
