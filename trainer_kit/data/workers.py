"""Start the workers of a loader so that they never hang or outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, MutableSequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from types import FrameType
from typing import final

from torch.utils.data import get_worker_info

from trainer_kit.core.errors import LaunchError
from trainer_kit.core.thread_frames import thread_frames
from trainer_kit.data.torch_private import FETCH_FILE

__all__ = ["EndsWithParent", "checked_context"]

_GRACE = 10.0
"""Seconds that a worker gets to finish after its parent has ended."""

_PATIENCE = (5.0, 10.0, 20.0, 40.0)
"""Seconds for a forked process to run its first line (normally milliseconds), for each attempt."""


@final
class EndsWithParent:
    """A ``worker_init_fn`` that ends a worker process when its parent ends, even if the parent ended before its start.

    torch's watchdog compares the parent with the one at the worker's start; if that parent was killed just before, the
    worker waits for its next index forever and keeps its memory.

    It also notes once a second which sample a worker reads, for messages about a worker that hangs.

    Args:
        user_function: the user's ``worker_init_fn``, if any.
        workers: how many there are.
    """

    def __init__(
        self, user_function: Callable[[int], object] | None, workers: int = 0
    ) -> None:
        self.user_function = user_function
        # Shared with the workers: each writes its own element, so it needs no lock, which a killed worker could keep.
        self._indices = RawArray("q", [-1] * workers)

    def reading(self, worker_id: int) -> str:
        """A text about the sample that a worker reads; "" if unknown."""
        if worker_id >= len(self._indices):
            return ""
        index = self._indices[worker_id]
        if index < 0:
            return ""
        return f" reads index {index} of the dataset"

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        # A worker that is a thread lives in the parent's process and must not end it.
        method = getattr(get_worker_info(), "worker_method", None)
        if parent is not None and method != "thread":
            arguments = (parent.sentinel, self._indices, worker_id)
            watcher = threading.Thread(target=_follow, args=arguments, daemon=True)
            watcher.start()
        if self.user_function is not None:
            self.user_function(worker_id)


def _follow(parent: int, indices: MutableSequence[int], worker_id: int) -> None:
    """Note once a second which sample this worker reads, until the parent ends; then end the process."""
    # Without an element to write to, the thread only waits.
    interval = None
    if worker_id < len(indices):
        interval = 1.0
    main_thread = threading.main_thread().ident
    # The sentinel is readable when the parent has closed its end.
    while not wait([parent], interval):
        indices[worker_id] = _read_index(thread_frames(main_thread))
    time.sleep(_GRACE)
    # Not sys.exit, which would end only this thread.
    os._exit(1)


def _read_index(frames: list[FrameType]) -> int:
    """The index that torch's loop over the indices of a batch has reached, -1 outside of it."""
    index: object = -1
    for frame in frames:
        if frame.f_code.co_filename.endswith(FETCH_FILE):
            index = frame.f_locals.get("idx", index)
    # A sampler may draw anything, for example a key.
    if isinstance(index, int):
        return index
    return -1


def checked_context(context: BaseContext | None) -> BaseContext | None:
    """Return a multiprocessing context that forks like ``context``, and verifies that each forked process has started.

    A fork copies locked locks, including those of threads that the new process does not have: a worker may wait for
    such a lock before its first line, and its parent for the worker, forever. CPython before 3.10.15 and 3.11.10 has
    such a lock; any thread of a library that enters Python takes it, as gloo's threads do (python/cpython#112275). A
    worker that does not start has done nothing, so it is killed and forked again.

    Args:
        context: the loader's; None: the default.

    Returns:
        ``context`` itself if it does not fork, or is not torch's or the standard library's fork context.
    """
    # Without `allow_none` this call would fix the default, which a script may still choose.
    method = multiprocessing.get_start_method(allow_none=True)
    if method is None:
        method = multiprocessing.get_all_start_methods()[0]
    if sys.platform != "win32":
        start_context = context or multiprocessing.get_context(method)
        if type(start_context) is ForkContext:
            return _CheckedContext()
    return context


if sys.platform != "win32":
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkContext, ForkProcess
    from multiprocessing.popen_fork import Popen

    @final
    class _CheckedProcess(ForkProcess):
        @staticmethod
        def _Popen(process_obj: BaseProcess) -> Popen:
            for patience in _PATIENCE:
                reader, writer = multiprocessing.Pipe(duplex=False)
                # `run` reads it in the fork.
                process_obj.__dict__["begins"] = writer
                process = ForkProcess._Popen(process_obj)
                started = False
                try:
                    # The parent's copy of the pipe's end: with it open, `poll` would not see that the worker has ended.
                    writer.close()
                    # Also True if the worker has ended; the loader reports that.
                    started = reader.poll(patience)
                finally:
                    reader.close()
                    if not started:
                        process.kill()
                        process.wait()
                        process.close()
                if started:
                    return process
                warnings.warn(
                    f"a worker of the loader did not start within {patience:.0f} s of its fork. It may wait for "
                    "a lock that another thread held at the fork; it was terminated, and another one is forked",
                    stacklevel=2,
                )
            raise LaunchError(
                "a worker process of the loader does not start",
                found=f"{len(_PATIENCE)} forks of this process that did not reach their first line, the last one "
                f"within {_PATIENCE[-1]:.0f} s",
                fix='pass multiprocessing_context="forkserver" to the DataLoader: such workers copy no locks',
            )

        def run(self) -> None:
            writer: Connection = self.__dict__.pop("begins")
            writer.send_bytes(b"1")
            writer.close()
            super().run()

    @final
    class _CheckedContext(ForkContext):
        Process = _CheckedProcess
