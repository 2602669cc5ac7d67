"""The directories a fit writes checkpoints to: held by this run alone, tried and cleaned before the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from trainer_kit.checkpoint.commit import clean_incomplete
from trainer_kit.checkpoint.lock import DirectoryLock
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, absolute
from trainer_kit.core.protocols import Group

__all__ = ["checkpoint_directories", "clean_directory", "on_rank_zero", "take_directories"]

_T = TypeVar("_T")


def checkpoint_directories(trainer: Any) -> list[Location]:
    """Of the callbacks that keep checkpoints, in their order, else the run's own; the first takes what has no path."""
    named = (getattr(keeper, "dirpath", None) for keeper in trainer.checkpoint_callbacks)
    found = [absolute(directory) for directory in named if directory]
    return list(dict.fromkeys(found)) or [trainer.checkpoint_dir]


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

    def take() -> None:
        for directory in checkpoint_directories(trainer):
            cleanup.append(_releasing(DirectoryLock(directory)))
            clean_directory(trainer, directory)

    on_rank_zero(trainer.strategy.world, take)


def on_rank_zero(world: Group, act: Callable[[], _T]) -> _T:
    """What ``act`` returns, or the `CheckpointError` it raises, on every rank; only rank 0 calls it."""
    done: _T | None = None
    problem: CheckpointError | None = None
    if world.rank == 0:
        try:
            done = act()
        except CheckpointError as error:
            problem = error
    done, problem = world.broadcast((done, problem))
    if problem is not None:
        raise problem
    return cast(_T, done)


def _releasing(lock: DirectoryLock) -> Callable[[BaseException | None], None]:
    return lambda error: lock.release()


def clean_directory(trainer: Any, directory: Location) -> None:
    """Discard what dead runs left half written there, and say so once."""
    count = 0
    with suppress(OSError):  # what stays is hidden and harmless
        count = clean_incomplete(directory)
    if count:
        trainer.print(f"discarded {count} incomplete save{'s' * (count > 1)} in {directory}")
