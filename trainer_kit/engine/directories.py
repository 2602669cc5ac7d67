"""The directories a fit writes checkpoints to: held by this run alone, tried and cleaned before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.core.errors import CheckpointError

__all__ = ["checkpoint_directories", "take_directories"]


def checkpoint_directories(trainer: Any) -> list[Path]:
    """Of the callbacks that keep checkpoints, in their order, else the run's own; the first takes what has no path."""
    named = (getattr(keeper, "dirpath", None) for keeper in trainer.checkpoint_callbacks)
    found = [Path(os.path.abspath(directory)) for directory in named if directory]
    return list(dict.fromkeys(found)) or [trainer.run_dir / "checkpoints"]


def take_directories(trainer: Any, cleanup: list[Callable[[BaseException | None], Any]]) -> None:
    """Lock them, and remove what dead runs left half written. Rank 0 does it, every rank learns of a refusal.

    Args:
        trainer: whose callbacks say where.
        cleanup: is given what lets go again.

    Raises:
        CheckpointError: another run writes there, or nobody can.
    """
    if trainer.checkpoint_callback is None or trainer.settings.fast:
        return
    world = trainer.strategy.world
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            for directory in checkpoint_directories(trainer):
                lock = DirectoryLock(directory)
                cleanup.append(_releasing(lock))
                _clean(trainer, directory)
        except CheckpointError as error:
            problem = error
    problem = world.broadcast(problem)
    if problem is not None:
        raise problem


def _releasing(lock: DirectoryLock) -> Callable[[BaseException | None], None]:
    return lambda error: lock.release()


def _clean(trainer: Any, directory: Path) -> None:
    count = 0
    with suppress(OSError):  # what stays is hidden and harmless
        count = clean_incomplete(directory)
    if count:
        trainer.print(f"discarded {count} incomplete save{'s' * (count > 1)} in {directory}")
