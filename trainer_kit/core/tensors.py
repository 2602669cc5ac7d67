"""Nested batches and tensors: move them to a device, get the local shard, check that values are finite."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Final

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError

__all__ = [
    "BLOCKING",
    "are_finite",
    "each_tensor",
    "is_tensor",
    "local",
    "map_movable",
    "move_to_device",
    "sequence_like",
    "tensors_of",
    "to_float32",
]

# Copies to these devices always block; a non-blocking copy to mps has given wrong values.
BLOCKING = ("cpu", "mps")


def move_to_device(batch: Any, device: torch.device | str, non_blocking: bool = True) -> Any:
    """Move all tensors of a batch to ``device``.

    Args:
        batch: any nesting of mappings, lists, tuples, namedtuples and dataclasses; tensors and other objects with
            ``.to(device)`` are moved, everything else is unchanged.
        device: the target device.
        non_blocking: do not wait for copies to an accelerator.

    Returns:
        The same object if nothing had to be moved; containers are copied, never changed.

    Example:
        >>> batch = {"x": torch.zeros(2), "name": "a"}
        >>> move_to_device(batch, "cpu") is batch, move_to_device(batch, "meta")["x"].device.type
        (True, 'meta')
    """
    device = torch.device(device)
    wait = not non_blocking or device.type in BLOCKING

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device) if wait else leaf.to(device, non_blocking=True)
        moved = leaf.to(device)
        # Some `to` methods work in place and return None.
        return leaf if moved is None else moved

    return map_movable(batch, move)


def sequence_like(given: Any, parts: Iterable[Any]) -> Any:
    """Make a list or tuple of the class of ``given``, also of a named tuple."""
    return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)


def map_movable(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply ``leaf`` to every object with a ``to`` method; a container without changes is returned itself."""
    if isinstance(node, Tensor) or (not isinstance(node, type) and callable(getattr(node, "to", None))):
        return leaf(node)
    if isinstance(node, (str, bytes, int, float)) or node is None:
        return node
    if isinstance(node, Mapping):
        items = {key: map_movable(child, leaf) for key, child in node.items()}
        if all(items[key] is child for key, child in node.items()):
            return node
        if type(node) is dict or not isinstance(node, MutableMapping):
            return items
        mapping: Any = copy.copy(node)
        for key, value in items.items():
            mapping[key] = value  # outputs of transformers have an ``update`` that raises
        return mapping
    if isinstance(node, (tuple, MutableSequence)):
        parts = [map_movable(child, leaf) for child in node]
        if all(new is old for new, old in zip(parts, node, strict=True)):
            return node
        if isinstance(node, tuple):
            return sequence_like(node, parts)
        if type(node) is list:
            return parts
        sequence: Any = copy.copy(node)
        sequence[:] = parts
        return sequence
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        changed = {name: new for name, old in fields.items() if (new := map_movable(old, leaf)) is not old}
        if not changed:
            return node
        clone = copy.copy(node)
        for name, value in changed.items():
            # Works for frozen dataclasses too; nothing else refers to the copy yet.
            object.__setattr__(clone, name, value)
        return clone
    return node


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a batch or an output, in order: of mappings, sequences and dataclasses.

    Example:
        >>> [tensor.ndim for tensor in tensors_of({"x": torch.zeros(2, 2), "pair": (torch.zeros(2), "a")})]
        [2, 1]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, MutableSequence, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name))


def local(tensor: Any) -> Tensor:
    """The local shard of a ``DTensor``; any other tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor."""
    return isinstance(value, Tensor)


def each_tensor(
    data: Any, act: Callable[[Any], Any], *, strict: bool = False, test: Callable[[Any], bool] = is_tensor
) -> Any:
    """Call ``act`` on every tensor of a nesting of tuples, lists and mappings; their types are kept.

    Args:
        data: the nesting.
        act: called with each tensor.
        strict: raise for a leaf that is not a tensor, instead of returning it unchanged.
        test: decides whether an object counts as a tensor.

    Raises:
        ConfigurationError: with ``strict``, a leaf is not a tensor.

    Example:
        >>> each_tensor({"x": [torch.tensor(1), "a"]}, lambda tensor: tensor + 1)
        {'x': [tensor(2), 'a']}
    """
    if test(data):
        return act(data)
    if isinstance(data, (list, tuple)):
        parts = [each_tensor(part, act, strict=strict, test=test) for part in data]
        return sequence_like(data, parts)
    if isinstance(data, Mapping):
        parts_of = {key: each_tensor(part, act, strict=strict, test=test) for key, part in data.items()}
        return type(data)(parts_of)  # type: ignore[call-arg]
    if strict:
        raise ConfigurationError(
            "only tensors, in lists, tuples and mappings, can be exchanged here",
            found=type(data).__name__,
            fix="use gather_object(...) for small objects of any kind",
        )
    return data


def to_float32(tensor: Tensor) -> Tensor:
    """Convert a float16 or bfloat16 tensor to float32; return any other unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor has a NaN or infinity; of a ``DTensor`` only the local shard is checked.

    Args:
        tensors: tensors on any device; only float16, bfloat16, float32 and float64 are checked.

    Example:
        >>> are_finite([torch.ones(2), torch.tensor([7])]), are_finite([torch.tensor([1.0, float("nan")])])
        (True, False)
    """
    for tensor in tensors:
        part = local(tensor.detach())
        if part.is_sparse:
            part = part._values()
        if not part.numel() or part.dtype not in _FLOATS:
            continue
        # Minimum and maximum suffice, since they propagate NaN; no temporary of the tensor's size is allocated.
        if not all(bool(end.isfinite()) for end in torch.aminmax(part)):  # sync point: a save, or a resumed run begins
            return False
    return True
