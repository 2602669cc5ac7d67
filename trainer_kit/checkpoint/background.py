"""Saving behind the training thread: memory to copy a state into, and one thread a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

__all__ = ["Background", "HostBuffers"]

_T = TypeVar("_T")


@final
class HostBuffers:
    """Host memory that is used again for each save: copying into fresh memory takes several times as long.

    A tensor gets the memory that the tensor of the same name had, if it still fits. What a save did not use is freed
    by the next one.

    Example:
        >>> buffers = HostBuffers()
        >>> weight = torch.ones(2)
        >>> copy = buffers.copy("weight", weight)
        >>> buffers.end()
        >>> weight.zero_(), copy
        (tensor([0., 0.]), tensor([1., 1.]))
        >>> buffers.copy("weight", weight) is copy
        True
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy on the host; from an accelerator it is complete only after `end`."""
        there = tensor.device.type != "cpu"
        if there:
            self._devices.add(tensor.device)
        buffer = self._before.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=there)
        self._now[name] = buffer
        return buffer.copy_(tensor, non_blocking=there)

    def end(self) -> None:
        """Everything was copied."""
        for device in self._devices:
            torch.accelerator.synchronize(device)  # sync point: copies from the accelerator run until here
        self._before, self._now, self._devices = self._now, {}, set()


@final
class Background(Generic[_T]):
    """One call in a thread of its own, which ends with it.

    Args:
        act: is called; it must not touch what training changes.
        done: is called in that thread once ``act`` has ended, however it did.

    Example:
        >>> Background(lambda: 3, done=lambda: None).result()
        3
    """

    def __init__(self, act: Callable[[], _T], done: Callable[[], None]) -> None:
        self.since = time.monotonic()
        self._act, self._done = act, done
        self._value: _T
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # Whoever needs its result waits for it: a process that is told to end at once does not wait for its storage.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._act()
        except BaseException as error:  # raised by `result`, in the thread that asks
            self._error = error
        self._ended.set()  # ahead of `done`: who is woken by it finds that it has ended
        self._done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, or for so long; returns whether it has."""
        return self._ended.wait(seconds)

    def result(self) -> _T:
        """Wait until it has ended; what it returned, or what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
