"""Nested batches and tensors: move them to a device, get the local shard, check that values are finite."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.torch_private import stored_values
from trainer_kit.core.types import Function, Nested

__all__ = [
    "BLOCKING",
    "Kinds",
    "are_finite",
    "children",
    "is_tensor",
    "local",
    "map_leaves",
    "map_tensors",
    "move_to_device",
    "require_tensor",
    "sequence_like",
    "tensors_of",
    "to_float32",
]

# Copies to these devices always block; a non-blocking copy to mps has given wrong values.
BLOCKING = ("cpu", "mps")

Kinds: TypeAlias = "type | tuple[type, ...] | None"
"""Classes of leaves, as ``isinstance`` takes them; None: every object with a method ``to``."""
_K = TypeVar("_K")
_NO_CONTAINERS: Final = (str, bytes, bytearray, memoryview, range)
"""Sequences whose items are no values of a batch."""


def move_to_device(
    batch: Nested, device: torch.device | str, non_blocking: bool = True
) -> Nested:
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

    def move(leaf: Any) -> object:
        if isinstance(leaf, Tensor):
            return leaf.to(device) if wait else leaf.to(device, non_blocking=True)
        moved = leaf.to(device)
        # Some `to` methods work in place and return None.
        return leaf if moved is None else moved

    return map_leaves(batch, move)


def sequence_like(model: Nested, parts: Iterable[object]) -> Nested:
    """Create a list or tuple of the class of ``model``, also of a named tuple."""
    cls = type(model)
    if hasattr(model, "_fields"):
        return cls(*parts)
    return cls(parts)


def map_tensors(batch: Nested, change: Callable[[Tensor], object]) -> Nested:
    """Call ``change`` on every tensor of a batch; see `map_leaves`.

    Example:
        >>> map_tensors({"x": torch.ones(1), "name": "a"}, lambda tensor: tensor + 1)
        {'x': tensor([2.]), 'name': 'a'}
    """
    return map_leaves(batch, change, Tensor)


def map_leaves(
    node: Nested,
    change: Callable[[Any], object],
    kinds: Kinds = None,
    other: Callable[[Any], object] | None = None,
) -> Nested:
    """Call ``change`` on every leaf of a batch; the one function that walks a batch and changes it.

    Mappings (also those that only behave like one), lists, tuples, named tuples, other sequences and dataclasses
    (frozen, with slots, with fields that ``__init__`` does not take) are walked. No container is changed: one without a
    changed leaf is returned itself, any other as a copy of its class.

    Args:
        node: a batch, an output, or any nesting.
        change: returns the value that replaces a leaf.
        kinds: the classes of leaves; None: everything with a method ``to``, as tensors have.
        other: called with everything that is neither a leaf nor a container; None: it stays as it is.
    """
    if kinds is not None:
        is_leaf = isinstance(node, kinds)
    elif isinstance(node, Tensor):
        is_leaf = True
    else:
        is_leaf = not isinstance(node, type) and callable(getattr(node, "to", None))
    if is_leaf:
        return change(node)
    # The leaf test comes first: a batch of a tokenizer is a mapping and has a method ``to``.
    if isinstance(node, Mapping):
        items = {
            key: map_leaves(child, change, kinds, other) for key, child in node.items()
        }
        # The same object, so that callers see by ``is`` that nothing has changed.
        if all(items[key] is child for key, child in node.items()):
            return node
        return _mapping_like(node, items)
    if isinstance(node, Sequence) and not isinstance(node, _NO_CONTAINERS):
        values = [map_leaves(child, change, kinds, other) for child in node]
        pairs = zip(values, node, strict=True)
        if all(value is child for value, child in pairs):
            return node
        return _sequence_with(node, values)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        changed: dict[str, object] = {}
        for (_, name), child in children(node):
            value = map_leaves(child, change, kinds, other)
            if value is not child:
                changed[name] = value
        if changed:
            return _dataclass_with(node, changed)
        return node
    if other is None:
        return node
    return other(node)


def _mapping_like(node: Mapping[_K, object], items: dict[_K, object]) -> Nested:
    """Make a mapping of the class of ``node`` that holds ``items``, which have the same keys."""
    if type(node) is dict:
        return items
    if isinstance(node, MutableMapping):
        mapping = copy.copy(node)
        # Not ``update``, which raises in outputs of transformers.
        for key, value in items.items():
            mapping[key] = value
        return mapping
    cls: Function = type(node)
    try:
        return cls(items)
    except TypeError:
        # The constructor takes something else than its items: a plain dict has them at least.
        return items


def _sequence_with(node: Sequence[object], values: list[Nested]) -> Nested:
    """Make a sequence of the class of ``node`` that holds ``values``, which are as many."""
    if type(node) is list:
        return values
    if not isinstance(node, MutableSequence):
        return sequence_like(node, values)
    sequence = copy.copy(node)
    # One by one, since a deque takes no slice.
    for index, value in enumerate(values):
        sequence[index] = value
    return sequence


def _dataclass_with(node: object, changed: Mapping[str, object]) -> Nested:
    """Make a copy of a dataclass object with other values in some fields."""
    # Not dataclasses.replace, which calls ``__init__`` and refuses fields that it does not take.
    clone = copy.copy(node)
    for name, value in changed.items():
        # Works for frozen dataclasses too; nothing else refers to the copy yet.
        object.__setattr__(clone, name, value)
    return clone


def children(node: Nested) -> Iterator[tuple[tuple[str, Any], Nested]]:
    """Iterate over the direct contents of a mapping, a sequence or a dataclass; anything else has none.

    Yields:
        The way to a value, ``("item", key)`` or ``("field", name)``, and the value.

    Example:
        >>> list(children({"x": 1})), list(children(["a"])), list(children("abc"))
        ([(('item', 'x'), 1)], [(('item', 0), 'a')], [])
    """
    if isinstance(node, Mapping):
        yield from ((("item", key), child) for key, child in node.items())
    elif isinstance(node, Sequence):
        if not isinstance(node, _NO_CONTAINERS):
            yield from ((("item", index), child) for index, child in enumerate(node))
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        for field in dataclasses.fields(node):
            try:
                child = getattr(node, field.name)
            except AttributeError:
                # A field that ``__init__`` does not take, and that was never set.
                continue
            yield ("field", field.name), child


def tensors_of(batch: Nested) -> Iterator[Tensor]:
    """Iterate over the tensors of a batch or an output, in order: of mappings, sequences and dataclasses.

    Example:
        >>> [tensor.ndim for tensor in tensors_of({"x": torch.zeros(2, 2), "pair": (torch.zeros(2), "a")})]
        [2, 1]
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    for _, child in children(batch):
        yield from tensors_of(child)


def local(tensor: Tensor) -> Tensor:
    """The local shard of a ``DTensor``; any other tensor itself."""
    # Not ``isinstance``, which would import torch.distributed.tensor in programs that use none.
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    return to_local()


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor."""
    return isinstance(value, Tensor)


def require_tensor(leaf: object) -> NoReturn:
    """Refuse a value that is not a tensor: the argument ``other`` of `map_leaves` where only tensors can be exchanged.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        "only tensors, in lists, tuples, mappings and dataclasses, can be exchanged here",
        found=type(leaf).__name__,
        fix="use gather_object(...) for small objects of any kind",
    )


def to_float32(tensor: Tensor) -> Tensor:
    """Convert a float16 or bfloat16 tensor to float32; return any other unchanged."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


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
        shard = local(tensor.detach())
        # aminmax takes no sparse tensors; values that are not stored are 0.
        if shard.is_sparse:
            shard = stored_values(shard)
        # aminmax refuses an empty tensor, which the last ranks may have.
        if not shard.numel() or shard.dtype not in _FLOATS:
            continue
        # Minimum and maximum suffice, since they propagate NaN; no temporary of the tensor's size is allocated.
        extremes = torch.aminmax(shard)
        # sync point: a save, or a resumed run begins
        if not all(bool(extreme.isfinite()) for extreme in extremes):
            return False
    return True
