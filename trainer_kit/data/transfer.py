"""Move the next batch from the host to the device while the current one is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from trainer_kit.core.tensors import BLOCKING, map_movable
from trainer_kit.data.order import EMPTY

__all__ = ["Ahead"]


def _pinned(batch: Any) -> Any:
    """Return the batch in pinned memory, from which a copy is asynchronous; pinned tensors are returned unchanged."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            host = leaf.device.type == "cpu" and leaf.layout == torch.strided
            return leaf.pin_memory() if host else leaf
        return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

    return map_movable(batch, pin)


@cache
def _side_stream(device: torch.device) -> torch.Stream | None:
    """Return the copy stream of a device. There is only one: torch does not reuse memory across streams."""
    drives = torch.accelerator.current_accelerator()
    return torch.Stream(device) if drives is not None and drives.type == device.type else None


@final
class Ahead:
    """Yield moved batches; the next batch is copied while the current one is computed.

    Each batch is pinned and copied on a separate stream; the current stream waits for the copy, the host does not. An
    error while the next batch is read or moved is raised when that batch is requested.

    Args:
        iterator: batches on the host. It is read one batch early, so it must end where reading must stop. `EMPTY` is
            yielded unchanged.
        move: ``move(batch)`` returns the batch on the device.
        device: the accelerator; None, or a device that ``torch.accelerator`` does not drive: no stream, no pinning.

    Example:
        >>> moved = []
        >>> ahead = Ahead(iter([1, 2, 3]), lambda batch: moved.append(batch) or batch * 10)
        >>> next(ahead), moved
        (10, [1, 2])
    """

    def __init__(self, iterator: Iterable[Any], move: Callable[[Any], Any], device: torch.device | None = None) -> None:
        self._iterator = iter(iterator)
        self._move = move
        self._device = device
        self._stream = None if device is None or device.type in BLOCKING else _side_stream(device)
        self._waiting: _Ready | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        ready = self._waiting or self._read()
        if ready.error is not None:
            # An iterator that has ended stays ended; after another error reading continues.
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
            # The copy may reuse the memory of an earlier batch, so it waits for all queued steps. The next step is
            # queued afterwards, and runs in parallel with the copy.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                return _Ready(self._move(batch), event=self._stream.record_event())
        except Exception as error:
            return _Ready(error=error)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A moved batch, or the error of reading or moving it."""

    batch: Any = None
    event: Any = None
    error: Exception | None = None
