"""How the workers of a loader begin."""

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

__all__ = ["EndsWithParent", "heard_context"]

_GRACE = 10.0
"""Seconds for what a worker is about to finish."""

_PATIENCE = (5.0, 10.0, 20.0, 40.0)
"""Seconds for a forked process to reach its first line, which takes milliseconds, at the first attempt and the next."""


@final
class EndsWithParent:
    """A ``worker_init_fn`` after which a worker process ends when its parent has, even if that was before it began.

    torch's own watch looks for another parent than the one at its start; if that was killed just before, the worker
    waits for its next index for ever, with all the memory that it holds.

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
    wait([parent])  # readable once nobody holds the other end: it was made before this process was
    time.sleep(_GRACE)
    os._exit(1)


def heard_context(given: BaseContext | None) -> BaseContext | None:
    """A multiprocessing context that forks as ``given`` does and returns only from a start that has succeeded.

    A fork copies locks as they are at that moment, also those of threads that the copy does not have: a worker may wait
    for one before its first line, and its parent for the worker, for ever. CPython before 3.10.15 and 3.11.10 has such
    a lock, taken by any thread of a library that enters Python, as gloo's do (python/cpython#112275). A worker that
    does not begin has done nothing: it is ended and forked once more.

    Args:
        given: the loader's own; None: the default.

    Returns:
        ``given`` where its processes are not forked, or in a way of the user's own.
    """
    # Asking without `allow_none` would settle the default, which a script may still choose.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    forks = sys.platform != "win32" and type(given or multiprocessing.get_context(default)) is ForkContext
    return _Heard() if forks else given


if sys.platform != "win32":
    from multiprocessing.context import ForkContext, ForkProcess
    from multiprocessing.popen_fork import Popen

    @final
    class _HeardProcess(ForkProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Popen:
            for patience in _PATIENCE:
                reader, process_obj.begins = multiprocessing.Pipe(duplex=False)
                started = ForkProcess._Popen(process_obj)
                heard = False
                try:
                    process_obj.begins.close()
                    heard = reader.poll(patience)  # also by its end, which is told where the first batch is awaited
                finally:
                    reader.close()
                    if not heard:
                        started.kill()
                        started.wait()
                        started.close()
                if heard:
                    return started
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
    class _Heard(ForkContext):
        Process = _HeardProcess
