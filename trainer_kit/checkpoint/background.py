"""Saving in the background: reused host memory for the copy of a state, and one thread per save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

__all__ = ["Background", "HostBuffers"]

_T = TypeVar("_T")


@final
class HostBuffers:
    """Host memory that each save reuses: a copy into fresh memory takes several times as long.

    A tensor gets the memory of the tensor with the same name in the previous save, if shape and dtype are equal. The
    next save frees what this one does not use.

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
        self._previous: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the host; a copy from an accelerator is complete only after `end`."""
        on_accelerator = tensor.device.type != "cpu"
        if on_accelerator:
            self._devices.add(tensor.device)
        shape, dtype = tensor.shape, tensor.dtype
        # The buffers of the save before are free: it is written when the next one begins.
        buffer = self._previous.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
            # Only into pinned memory does a copy from an accelerator run beside the host.
            buffer = torch.empty(shape, dtype=dtype, pin_memory=on_accelerator)
        self._current[name] = buffer
        return buffer.copy_(tensor, non_blocking=on_accelerator)

    def end(self) -> None:
        """Wait until all copies of this save are complete."""
        for device in self._devices:
            # Copies from the accelerator run until here.
            torch.accelerator.synchronize(device)  # sync point: a checkpoint
        # What this save did not use is freed here, for example after a model has shrunk.
        self._previous = self._current
        self._current = {}
        self._devices = set()


@final
class Background(Generic[_T]):
    """One call in its own thread.

    Args:
        act: the call; it must not touch anything that training changes.
        done: called in that thread after ``act`` has returned or raised.
        thread: False: the call runs in the first thread that waits for it, for a rank that may have no second thread.

    Example:
        >>> Background(lambda: 3, done=lambda: None).result()
        3
    """

    def __init__(
        self,
        act: Callable[[], _T],
        done: Callable[[], None],
        thread: bool = True,
    ) -> None:
        self.since = time.monotonic()
        self._future: futures.Future[_T] = futures.Future()
        # A daemon, so that a process which must end at once does not wait for its storage; others call `result`.
        self._thread = threading.Thread(
            target=self._run, args=(act, done), name="checkpoint", daemon=True
        )
        self._waits = not thread
        if thread:
            self._thread.start()

    def _run(
        self,
        act: Callable[[], _T],
        done: Callable[[], None],
    ) -> None:
        try:
            self._future.set_result(act())
        except BaseException as error:
            # Raised by `result`, in the thread that calls it.
            self._future.set_exception(error)
        # After the future is set: `wait` returns True in a thread that `done` wakes.
        done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until ``act`` has ended, at most ``seconds``; return whether it has."""
        # A question without a wait (0) must not run the call.
        if seconds != 0:
            self._run_here()
        return bool(futures.wait([self._future], seconds).done)

    def result(self) -> _T:
        """Wait for the thread; return or raise what ``act`` returned or raised."""
        self._run_here()
        # The thread, not only the future: `done` must have been called when this returns.
        if self._thread.ident is not None:
            self._thread.join()
        return self._future.result()

    def _run_here(self) -> None:
        if self._waits:
            # First: the call may fail, and must not run again.
            self._waits = False
            self._thread.run()
