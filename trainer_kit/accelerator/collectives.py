"""What several processes exchange: nested tensors, and small objects. Every process makes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.core.collective_errors import compare, same_everywhere, signature
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import Group

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "each_tensor",
    "gather",
    "gather_object",
    "gather_rows",
    "pad_across_processes",
    "reduce",
]

_REDUCTIONS: Final = ("sum", "mean", "max", "min", "none")


def each_tensor(data: Any, act: Callable[[Tensor], Any], *, strict: bool = False) -> Any:
    """``act`` on every tensor of a nesting of tuples, lists and mappings; their types are kept.

    Args:
        data: the nesting.
        act: is given each tensor.
        strict: raise for a leaf that is no tensor, instead of leaving it as it is.

    Raises:
        ConfigurationError: a leaf is no tensor.
    """
    if isinstance(data, Tensor):
        return act(data)
    if isinstance(data, (list, tuple)):
        parts = [each_tensor(part, act, strict=strict) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    if isinstance(data, Mapping):
        return type(data)({key: each_tensor(part, act, strict=strict) for key, part in data.items()})  # type: ignore[call-arg]
    if strict:
        raise ConfigurationError(
            "only tensors, in lists, tuples and mappings, travel between processes here",
            found=type(data).__name__,
            fix="gather_object(...) for small objects of any kind",
        )
    return data


def gather(group: Group, data: Any, call: str = "gather") -> Any:
    """Tensors of all processes one after the other, along the first dimension; scalars make a vector.

    Args:
        group: the processes.
        data: nested tensors, of equal shape on every process.
        call: the name in errors.

    Returns:
        The same nesting; each tensor has shape ``(processes * n, ...)``.

    Raises:
        RankError: on every process, where shapes, dtypes or structure differ.
    """
    same_everywhere(group, call, data)
    return each_tensor(data, lambda tensor: _gathered(group, tensor), strict=True)


def _gathered(group: Group, tensor: Tensor) -> Tensor:
    whole = tensor.unsqueeze(0) if tensor.ndim == 0 else tensor
    return whole.clone() if group.size == 1 else group.all_gather(whole).flatten(0, 1)


def gather_rows(group: Group, data: Any, size: int, counts: list[int]) -> Any:
    """Results of a batch of all processes, one after the other, without those of samples that are there twice.

    Args:
        group: the processes.
        data: nested tensors. Those with an entry for each sample of the batch are cut to ``counts``; others may differ
            in length, and all of them is kept. Scalars make a vector.
        size: samples of the batch on this process.
        counts: how many of each process's samples are not there twice.

    Raises:
        RankError: on every process, where tensors differ in more than their length.
    """
    lengths, sizes = _lengths(group, "gather_for_metrics", data, 0, size, alike=True)
    found = iter(lengths)

    def one(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return _gathered(group, tensor)
        theirs = next(found)
        keep = counts if theirs == sizes else theirs
        parts = _gathered(group, _padded(tensor, max(theirs))).tensor_split(group.size)
        return torch.cat([part[:count] for part, count in zip(parts, keep, strict=True)])

    return each_tensor(data, one)


def _lengths(
    group: Group, call: str, data: Any, dim: int, size: int = 0, alike: bool = False
) -> tuple[list[list[int]], list[int]]:
    """How long each tensor that has ``dim`` is along it on every process; and every process's ``size``.

    One exchange, and a second one only where the tensors of a process differ in length. ``alike``: their other
    dimensions and dtypes must be equal, not only the number of dimensions.
    """
    mine: list[int] = []

    def described(tensor: Tensor) -> str:
        shape: list[Any] = list(tensor.shape)
        if -tensor.ndim <= dim < tensor.ndim:
            mine.append(shape[dim])
            shape[dim] = "*"
        return f"({', '.join(map(str, shape))}) {tensor.dtype}" if alike else f"{tensor.ndim} dimensions"

    text = f"{call}({signature(data, described)})"
    rows = compare(group, text, (mine[0] if mine else 0, float(len(set(mine)) < 2), size))
    sizes = [int(row[2]) for row in rows]
    if all(row[1] for row in rows):
        return [[int(row[0]) for row in rows]] * len(mine), sizes
    return [list(map(int, theirs)) for theirs in zip(*group.agree(list(map(float, mine))), strict=True)], sizes


def _padded(tensor: Tensor, longest: int, dim: int = 0, value: float = 0, first: bool = False) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = longest - shape[dim]
    if not shape[dim]:
        return tensor
    rest = tensor.new_full(shape, value)
    return torch.cat([rest, tensor] if first else [tensor, rest], dim)


def gather_object(group: Group, data: Any) -> list[Any]:
    """Small picklable values of all processes: lists are joined, anything else makes a list in rank order."""
    everyone = group.all_gather_object(data)
    if all(isinstance(part, (list, tuple)) for part in everyone):
        return [item for part in everyone for item in part]
    return everyone


def reduce(group: Group, data: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Nested tensors reduced over the processes, every process gets the result; the arguments are left alone.

    Args:
        group: the processes.
        data: nested tensors, of equal shape on every process.
        reduction: ``"sum"``, ``"mean"`` (of whole numbers too: the mean is a float), ``"max"``, ``"min"``, or
            ``"none"``: the tensors as they are.
        scale: the result is multiplied by it.

    Raises:
        ConfigurationError: an unknown reduction.
        RankError: on every process, where shapes, dtypes or structure differ.
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(f"unknown reduction {reduction!r}", fix=did_you_mean(str(reduction), _REDUCTIONS))

    if reduction == "none":
        return each_tensor(data, lambda tensor: tensor)
    same_everywhere(group, f"reduce by {reduction}", data)

    def one(tensor: Tensor) -> Tensor:
        whole = tensor.detach().clone()
        if reduction == "mean" and not whole.is_floating_point() and not whole.is_complex():
            whole = whole.to(torch.get_default_dtype())
        whole = group.all_reduce(whole, reduction)
        return whole if scale == 1.0 else whole * scale

    return each_tensor(data, one)


def broadcast(group: Group, data: Any, source: int = 0) -> Any:
    """Nested tensors of process ``source`` for everyone; shapes and dtypes are equal everywhere.

    Raises:
        RankError: on every process, where they are not.
    """
    same_everywhere(group, f"broadcast from process {source}", data)
    return each_tensor(data, lambda tensor: group.broadcast(tensor.detach().clone(), source), strict=True)


def broadcast_object_list(group: Group, values: list[Any], source: int = 0) -> list[Any]:
    """Small picklable values of process ``source``, in place."""
    values[:] = group.broadcast(list(values), source)
    return values


def pad_across_processes(group: Group, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Nested tensors, each as long along ``dim`` as the longest of all processes, so that they can be gathered.

    Args:
        group: the processes.
        data: nested tensors that differ in length along ``dim`` only.
        dim: the dimension; tensors that do not have it are left alone.
        pad_index: what the rest is filled with.
        pad_first: fill up at the beginning.

    Raises:
        RankError: on every process, where the structure or numbers of dimensions differ.
    """
    lengths = iter(_lengths(group, "pad_across_processes", data, dim)[0])

    def one(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        return _padded(tensor, max(next(lengths)), dim, pad_index, pad_first)

    return each_tensor(data, one, strict=True)
