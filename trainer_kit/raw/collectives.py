"""What several processes exchange: nested tensors, and small objects. Every process makes the same calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import Group

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "each_tensor",
    "gather",
    "gather_object",
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


def gather(group: Group, data: Any) -> Any:
    """Tensors of all processes one after the other, along the first dimension; scalars make a vector.

    Args:
        group: the processes.
        data: nested tensors, of equal shape on every process.

    Returns:
        The same nesting; each tensor has shape ``(processes * n, ...)``.
    """

    def one(tensor: Tensor) -> Tensor:
        whole = tensor.unsqueeze(0) if tensor.ndim == 0 else tensor
        return whole.clone() if group.size == 1 else group.all_gather(whole).flatten(0, 1)

    return each_tensor(data, one, strict=True)


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
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(f"unknown reduction {reduction!r}", fix=did_you_mean(str(reduction), _REDUCTIONS))

    def one(tensor: Tensor) -> Tensor:
        if reduction == "none":
            return tensor
        whole = tensor.detach().clone()
        if reduction == "mean" and not whole.is_floating_point() and not whole.is_complex():
            whole = whole.to(torch.get_default_dtype())
        whole = group.all_reduce(whole, reduction)
        return whole if scale == 1.0 else whole * scale

    return each_tensor(data, one)


def broadcast(group: Group, data: Any, source: int = 0) -> Any:
    """Nested tensors of process ``source`` for everyone; shapes and dtypes are equal everywhere."""
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
    """

    def one(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = int(max(row[0] for row in group.agree([tensor.shape[dim]])))
        missing = longest - tensor.shape[dim]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        rest = tensor.new_full(shape, pad_index)
        return torch.cat([rest, tensor] if pad_first else [tensor, rest], dim)

    return each_tensor(data, one, strict=True)
