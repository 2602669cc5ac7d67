"""How the workers of a loader begin."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, final

from torch.utils.data import get_worker_info

__all__ = ["EndsWithParent"]

_GRACE = 10.0
"""Seconds for what a worker is about to finish."""


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
