"""The directories a fit writes checkpoints to: held by this run alone, tried and cleaned before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.location import Location, absolute
from trainer_kit.state.runs import begin_run, distinct, recorded_places
from trainer_kit.training.session import Session

__all__ = [
    "checkpoint_directories",
    "clean_directory",
    "discarded",
    "take_directories",
]

_STEP: Final = re.compile(r"\bstep[-=](\d+)")


def checkpoint_directories(trainer: Session) -> list[Location]:
    """Of the callbacks that keep checkpoints, in their order, else the run's own; the first takes what has no path."""
    named = (getattr(keeper, "dirpath", None) for keeper in trainer.checkpoint_callbacks)
    found = [absolute(directory) for directory in named if directory]
    return list(dict.fromkeys(found)) or [trainer.checkpoint_dir]


def take_directories(trainer: Session, cleanup: list[Callable[[BaseException | None], Any]]) -> list[str]:
    """Lock them, remove what dead runs left half written, and record the run. Rank 0 does it, all learn of a refusal.

    Args:
        trainer: whose callbacks say where.
        cleanup: is given what closes the record and lets go again.

    Returns:
        The names of what was removed; a run that is not resumed has said so already.

    Raises:
        CheckpointError: another run writes there, or nobody can.
    """
    if trainer.checkpoint_callback is None or trainer.settings.fast:
        trainer.record = trainer.taken = None
        return []

    def take() -> list[str]:
        taken, names = trainer.taken, list[str]()
        places = [absolute(directory) for directory in checkpoint_directories(trainer)]
        before = recorded_places(trainer)
        locks: list[Callable[[BaseException | None], Any]] = []
        try:
            for directory in distinct([*places, *(place for place in before if place.is_dir())]):
                locks.append(_releasing(DirectoryLock(directory)))
                found = clean_directory(directory)
                names += found
                if taken is None and found:
                    trainer.print(f"{discarded(found)} in {directory}")
            begin_run(trainer, places, cleanup)
        finally:
            cleanup.extend(locks)
        return names

    return on_rank_zero(trainer.strategy.world, take)


def _releasing(lock: DirectoryLock) -> Callable[[BaseException | None], None]:
    return lambda error: lock.release()


def clean_directory(directory: Location) -> list[str]:
    """Discard what dead runs left half written there; returns its names."""
    with suppress(OSError):  # what stays is hidden and harmless
        return clean_incomplete(directory)
    return []


def discarded(names: list[str]) -> str:
    """What was removed, for people.

    Example:
        >>> discarded(["step-00000130"]), discarded([".lock", "step-00000120-v1", "epoch=3"])
        ('discarded 1 incomplete save (step 130)', 'discarded 3 incomplete saves (.lock, step 120, epoch=3)')
    """
    steps = [f"step {int(match[1])}" if (match := _STEP.search(name)) else name for name in names]
    return f"discarded {len(names)} incomplete save{'s' * (len(names) > 1)} ({', '.join(steps)})"
