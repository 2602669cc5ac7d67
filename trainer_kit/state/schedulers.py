"""The state of learning rate schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["restore_scheduler"]


def restore_scheduler(scheduler: Any, saved: Mapping[str, Any], keeps_rates: bool) -> None:
    """Put a scheduler's state back.

    Args:
        scheduler: the user's.
        saved: its state.
        keeps_rates: learning rates that the user configures differently today keep today's value.
    """
    today = [(part, part.base_lrs) for part in _parts(scheduler) if hasattr(part, "base_lrs")]
    scheduler.load_state_dict(dict(saved))
    for part, rates in today if keeps_rates else ():
        part.base_lrs = rates


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it is made of (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
