"""Read the frames of another thread while it runs."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import accumulate, chain, repeat, starmap
from operator import itemgetter
from types import FrameType

__all__ = ["thread_frames"]


def thread_frames(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, from the innermost to the outermost one.

    Between two bytecodes of this thread the other one continues. Its innermost frame may then belong to a generator
    that is suspended, whose caller Python 3.11 reads from memory that may be freed. So the whole walk is one call of C
    code, during which no thread can switch.

    Args:
        thread: the ``ident`` of another thread; None: it has not started.

    Returns:
        No frame, if there is no such thread.

    Example:
        >>> import threading
        >>> event = threading.Event()
        >>> thread = threading.Thread(target=event.wait)
        >>> thread.start()
        >>> thread_frames(thread.ident)[-1].f_code.co_name
        '_bootstrap'
        >>> event.set()
    """
    innermost = map(itemgetter(thread), starmap(sys._current_frames, [()]))
    frames: list[FrameType] = []
    # KeyError: there is no such thread. AttributeError: None is around the outermost frame, and has no f_back.
    with suppress(KeyError, AttributeError):
        frames.extend(accumulate(chain(innermost, repeat("f_back")), getattr))
    # The last one is that None.
    return frames[:-1]
