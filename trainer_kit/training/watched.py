"""The hang watchdog of a fit, and of an evaluation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from trainer_kit.hang.hang_watchdog import hang_watchdog
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.run import Fit
from trainer_kit.training.session import Session

__all__ = ["watched_evaluation", "watched_fit"]


def watched_fit(trainer: Session, run: Fit, timeout: float | None) -> AbstractContextManager[None]:
    """A context in which a thread ends this process if the fit hangs.

    Args:
        trainer: has the run's directory.
        run: the fit whose progress is watched.
        timeout: see `trainer_kit.hang.hang_timeout.chosen_timeout`.
    """
    progress, world = run.progress, run.strategy.world

    def position() -> tuple[int, Any]:
        return progress.step, (progress.batch, progress.epoch)

    return hang_watchdog(
        world.rank, world.size, timeout, position, lambda: _directory(trainer), note=partial(trainer.note, "hang")
    )


def watched_evaluation(trainer: Session, run: Evaluation, timeout: float | None) -> AbstractContextManager[None]:
    """`watched_fit` for ``validate``, ``test`` and ``predict``."""
    world = run.strategy.world

    def position() -> tuple[int, Any]:
        return run.batches, None

    return hang_watchdog(
        *(world.rank, world.size, timeout, position, lambda: _directory(trainer)),
        unit="batch",
        note=partial(trainer.note, "hang"),
    )


def _directory(trainer: Session) -> Path | None:
    return None if trainer.settings.fast else trainer.run_dir
