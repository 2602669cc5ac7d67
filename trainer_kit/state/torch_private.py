"""The private name of torch's schedulers that states use, checked with torch 2.13 and 2.14."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["nested_schedulers"]


def nested_schedulers(scheduler: object) -> Iterable[object]:
    """The parts of a ``SequentialLR`` or a ``ChainedScheduler``; none of other schedulers.

    Without it a resumed fit takes the base learning rates of parts from the checkpoint, where the user has set others.
    """
    parts: Iterable[object] = getattr(scheduler, "_schedulers", ())
    return parts
