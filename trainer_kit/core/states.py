"""What a Trainer is doing, as Lightning's enums and record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from lightning_utilities.core.enums import StrEnum

__all__ = [
    "RunningStage",
    "TrainerFn",
    "TrainerState",
    "TrainerStatus",
    "names_validation",
]

# A whole word, so that "value_loss" and "interval" do not match.
_VALIDATION: Final = re.compile(r"(?i)(?<![a-z])val(id|idation)?(?![a-z])")


def names_validation(name: str) -> bool:
    """Whether a logged value is, by its name, one of a validation.

    Example:
        >>> names_validation("val_loss"), names_validation("loss/valid"), names_validation("value_loss")
        (True, True, False)
    """
    return _VALIDATION.search(name) is not None


class TrainerStatus(StrEnum):
    """The status of an entry point."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(StrEnum):
    """The entry points of a Trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The current activity of an entry point; in a fit: training, sanity check or validation."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it validates, tests or checks."""
        return self in (
            RunningStage.VALIDATING,
            RunningStage.TESTING,
            RunningStage.SANITY_CHECKING,
        )

    @property
    def dataloader_prefix(self) -> str:
        """The prefix in names such as ``val_dataloader`` or ``num_val_batches``."""
        if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING):
            return "val"
        return str(self.value)


@dataclass(frozen=True)
class TrainerState:
    """The state of a Trainer at one moment.

    Attributes:
        status: whether an entry point runs, and how the last one ended.
        fn: the running or last entry point.
        stage: its current activity; None between entry points.

    Example:
        >>> TrainerState(TrainerStatus.RUNNING, TrainerFn.FITTING, RunningStage.VALIDATING).stage == "validate"
        True
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the last entry point ended without an exception or signal."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self.status.stopped
