"""From the host to the device: moving a batch, and moving the next one while this one is computed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from trainer_kit.data.order import EMPTY

__all__ = ["Ahead", "map_movable", "move_to_device"]

# Copies to these are finished when the call returns, whatever one asks for; asking has led to wrong values on mps.
_BLOCKING = ("cpu", "mps")


def move_to_device(batch: Any, device: torch.device | str, non_blocking: bool = True) -> Any:
    """A batch with all its tensors on ``device``.

    Args:
        batch: any nesting of mappings, lists, tuples, namedtuples and dataclasses; tensors and other objects with
            ``.to(device)`` are moved, everything else is left alone.
        device: where to.
        non_blocking: do not wait for copies to an accelerator.

    Returns:
        The same object where nothing had to be moved; containers are copied, never changed.

    Example:
        >>> batch = {"x": torch.zeros(2), "name": "a"}
        >>> move_to_device(batch, "cpu") is batch, move_to_device(batch, "meta")["x"].device.type
        (True, 'meta')
    """
    device = torch.device(device)
    wait = not non_blocking or device.type in _BLOCKING

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device) if wait else leaf.to(device, non_blocking=True)
        moved = leaf.to(device)
        # A `to` that works in place and returns nothing.
        return leaf if moved is None else moved

    return map_movable(batch, move)


def map_movable(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """``leaf`` of everything that has a ``to``; a container in which nothing changed is returned as it is."""
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
            return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
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
            # Also for frozen ones: the copy is nobody else's yet.
            object.__setattr__(clone, name, value)
        return clone
    return node


def _pinned(batch: Any) -> Any:
    """The batch in memory from which a copy is really asynchronous; what is pinned already is returned as it is."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            host = leaf.device.type == "cpu" and leaf.layout == torch.strided
            return leaf.pin_memory() if host else leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return map_movable(batch, pin)


@cache
def _side_stream(device: torch.device) -> torch.Stream | None:
    """The stream that batches are copied on: one for good, for memory of one stream is not used again on another."""
    drives = torch.accelerator.current_accelerator()
    return torch.Stream(device) if drives is not None and drives.type == device.type else None


@final
class Ahead:
    """Hands out moved batches, the next of which is on its way while this one is computed.

    Each batch is pinned and copied on a stream of its own; the current stream waits for the copy, the host does not.
    An error in reading or moving the next batch arrives at its own turn.

    Args:
        iterator: batches on the host. It is read one batch ahead of what was handed out: cut it where reading must
            stop. `EMPTY` is handed on.
        move: ``move(batch)``: the batch on the device.
        device: the accelerator; None: no stream and no pinning, only the order (a test, or a CPU), as for a device
            that torch does not drive itself.

    Example:
        >>> moved = []
        >>> ahead = Ahead(iter([1, 2, 3]), lambda batch: moved.append(batch) or batch * 10)
        >>> next(ahead), moved
        (10, [1, 2])
    """

    def __init__(self, iterator: Iterable[Any], move: Callable[[Any], Any], device: torch.device | None = None) -> None:
        self._iterator, self._move, self._device = iter(iterator), move, device
        self._stream = None if device is None or device.type in _BLOCKING else _side_stream(device)
        self._waiting: _Ready | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ready = self._waiting or self._read()
        if ready.error is not None:
            # An iterator that has ended stays so; after another error, reading goes on.
            self._waiting = ready if isinstance(ready.error, StopIteration) else None
            raise ready.error
        if ready.event is not None:
            torch.accelerator.current_stream(self._device).wait_event(ready.event)
        self._waiting = self._read()
        return ready.batch

    def _read(self) -> _Ready:
        try:
            batch = next(self._iterator)
            if batch is EMPTY:
                return _Ready(batch)
            if self._stream is None:
                return _Ready(self._move(batch))
            batch = _pinned(batch)
            # The copy may reuse memory of an earlier batch: it waits for the steps that are queued by now. The step
            # for which this batch is read ahead comes after them, and that is what the copy runs beside.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                return _Ready(self._move(batch), event=self._stream.record_event())
        except Exception as error:
            return _Ready(error=error)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A batch that was read and moved, or the error that came instead."""

    batch: Any = None
    event: Any = None
    error: Exception | None = None
