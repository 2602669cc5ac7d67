"""The one kind of progress bar."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

__all__ = ["bar_class"]


@cache
def bar_class() -> Any:
    """tqdm's, imported when the first bar is drawn, without what several processes would need.

    Example:
        >>> issubclass(bar_class(), __import__("tqdm").tqdm)
        True
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        # No thread that watches over slow bars, and no lock shared between processes: one rank draws.
        monitor_interval = 0
        _lock = threading.RLock()

    return Bar
