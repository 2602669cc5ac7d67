"""The private name of torch's schedulers that the Accelerator uses, checked with torch 2.13 and 2.14."""

from __future__ import annotations

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["count_call", "counts_calls"]

_COUNT = "_step_count"


def counts_calls(scheduler: object) -> bool:
    """Whether a scheduler counts its calls, to compare them with those of its optimizer; chained ones do not.

    Where torch has no such count it warns of nothing, and nothing is counted.
    """
    return hasattr(scheduler, _COUNT)


def count_call(scheduler: LRScheduler) -> None:
    """Count a call that the Accelerator has left out, as the optimizer counts its own."""
    scheduler._step_count += 1
