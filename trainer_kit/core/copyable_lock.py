"""`Lock`: a lock that objects can keep and still be copied and pickled."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import final

__all__ = ["Lock"]


@final
class Lock(AbstractContextManager[None]):
    """A reentrant lock; a copy, also one in another process, is a new lock.

    Example:
        >>> import copy
        >>> lock = Lock()
        >>> with lock, lock:
        ...     copy.deepcopy(lock) is lock
        False
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()
