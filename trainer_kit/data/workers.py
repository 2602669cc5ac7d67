"""Start the workers of a loader so that they never hang or outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, final

from torch.utils.data import get_worker_info

from trainer_kit.core.errors import LaunchError

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

    Args:
        own: the user's function, if any.
    """

    def __init__(self, own: Callable[[int], Any] | None) -> None:
        self.own = own

    def __call__(self, worker_id: int) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and getattr(get_worker_info(), "worker_method", None) != "thread":
            threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()
        if self.own is not None:
            self.own(worker_id)


def _follow(parent: int) -> None:
    wait([parent])  # readable when the parent has closed the other end of the pipe
    time.sleep(_GRACE)
    os._exit(1)


def checked_context(given: BaseContext | None) -> BaseContext | None:
    """Return a multiprocessing context that forks like ``given``, and verifies that each forked process has started.

    A fork copies locked locks, including those of threads that the new process does not have: a worker may wait for
    such a lock before its first line, and its parent for the worker, forever. CPython before 3.10.15 and 3.11.10 has
    such a lock; any thread of a library that enters Python takes it, as gloo's threads do (python/cpython#112275). A
    worker that does not start has done nothing, so it is killed and forked again.

    Args:
        given: the context of the loader; None: the default.

    Returns:
        ``given`` itself if it does not fork, or is not torch's or the standard library's fork context.
    """
    # Without `allow_none` this call would fix the default, which a script may still choose.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    forks = sys.platform != "win32" and type(given or multiprocessing.get_context(default)) is ForkContext
    return _CheckedContext() if forks else given


if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess
    from multiprocessing.popen_fork import Popen

    @final
    class _CheckedProcess(ForkProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Popen:
            for patience in _PATIENCE:
                reader, process_obj.begins = multiprocessing.Pipe(duplex=False)
                process = ForkProcess._Popen(process_obj)
                started = False
                try:
                    process_obj.begins.close()
                    started = reader.poll(patience)  # also True if the worker has ended; the loader reports that
                finally:
                    reader.close()
                    if not started:
                        process.kill()
                        process.wait()
                        process.close()
                if started:
                    return process
                warnings.warn(
                    f"a loader's worker did not begin within {patience:.0f} s of its fork, as one that waits for a "
                    "lock of a thread that it does not have; it was ended, and another one is forked",
                    stacklevel=2,
                )
            raise LaunchError(
                "a loader's worker does not begin",
                found=f"{len(_PATIENCE)} forks of this process that did not reach their first line, the last one "
                f"within {_PATIENCE[-1]:.0f} s",
                fix='pass multiprocessing_context="forkserver" to the DataLoader: such workers copy no locks',
            )

        def run(self) -> None:
            begins: Any = self.__dict__.pop("begins")
            begins.send_bytes(b"1")
            begins.close()
            super().run()

    @final
    class _CheckedContext(ForkContext):
        Process = _CheckedProcess
