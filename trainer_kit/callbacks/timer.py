"""`Timer`: measures the stages of a run, and requests a stop when the time of training is used up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic
from typing import ClassVar, Final, Literal, final

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out
from trainer_kit.core.types import SavedState, StateDict

__all__ = ["Timer"]

_STAGES: Final = ("train", "validate", "test", "predict")


@final
class Timer(Callback):
    """Measure training, validation, test and prediction; request a stop once training took ``duration``.

    The clock is monotonic: setting the system time has no effect. Time used before a restart counts.

    Args:
        duration: ``"DD:HH:MM:SS"``, ``"2h"``, a ``timedelta``, or its arguments as a dict; None only measures.
        interval: ``"step"`` checks the time at the end of each optimizer step, ``"epoch"`` at the end of each epoch.
        verbose: print the stop.
        state_key: the name of the state in a checkpoint; two timers in one run need two names.

    Raises:
        ConfigurationError: for a duration or interval that cannot be read.

    Example:
        >>> timer = Timer("00:12:00:00")
        >>> timer.time_remaining(), timer.time_elapsed("train"), timer.start_time("train")
        (43200.0, 0.0, None)
    """

    never_called: ClassVar[Mapping[str, str]] = {
        "_check_time_remaining": "write a callback that calls trainer.stop"
    }

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | Duration | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
        state_key: str = "Timer",
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(
                "Timer checks the time after steps or epochs",
                found=repr(interval),
                fix=did_you_mean(interval, ("step", "epoch")),
            )
        self.interval = interval
        self.verbose = verbose
        self._state_key = state_key
        self._duration: float | None = None
        if duration is not None:
            self._duration = _parse_seconds(duration)
        # By stage, on the monotonic clock.
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        # Seconds of training before the restart.
        self._before = 0.0
        self._deadline = math.inf
        self._reported = False
        if duration is None or interval == "epoch":
            # The bus leaves out a hook that is the base class's own: steps pay only for what looks at them.
            leave_out(self, "on_train_step_end", Timer)

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint."""
        return self._state_key

    def start_time(self, stage: str = "train") -> float | None:
        """When the stage last began, in seconds of ``time.monotonic``; None if it never began.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: there is no such stage.
        """
        return self._started.get(_check_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """When the stage last ended, in seconds of ``time.monotonic``; None if it never ran, and while it runs.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: there is no such stage.
        """
        return self._ended.get(_check_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds that the stage took, or has taken so far; for training, the sum over all restarts.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: there is no such stage.
        """
        start = self._started.get(_check_stage(stage))
        # Only training is continued by a restart; a validation begins again.
        before = 0.0
        if stage == "train":
            before = self._before
        if start is None:
            return before
        ended = self._ended.get(stage, monotonic())
        return ended - start + before

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds until the stage has taken ``duration``; negative after that, None without a duration.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: with a duration: there is no such stage.
        """
        if self._duration is None:
            return None
        return self._duration - self.time_elapsed(stage)

    def state_dict(self) -> StateDict:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._before = float(state_dict["time_elapsed"].get("train", 0.0))
        # The time that the checkpoint has already counts: the clock of an earlier fit would add to it.
        self._started.pop("train", None)

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        # A new fit has the full duration; load_state_dict restores the time that a resumed fit has used.
        if stage == "fit":
            self._before = 0.0
            self._started.pop("train", None)
            self._ended.pop("train", None)

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        # A restored run may have used up its time already.
        self._stop_if_over(trainer)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._start("train")
        self._reported = False
        if self._duration is not None and self.interval == "step":
            # One number to compare with in each step, in place of a sum over restarts.
            self._deadline = self._started["train"] + self._duration - self._before

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if monotonic() >= self._deadline:
            self._stop_if_over(trainer)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.interval == "epoch":
            self._stop_if_over(trainer)

    def on_train_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end("train")

    def on_validation_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._start("validate")

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end("validate")

    def on_test_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._start("test")

    def on_test_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end("test")

    def on_predict_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._start("predict")

    def on_predict_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._end("predict")

    def _start(self, stage: str) -> None:
        self._started[stage] = monotonic()
        self._ended.pop(stage, None)

    def _end(self, stage: str) -> None:
        self._ended[stage] = monotonic()

    def _stop_if_over(self, trainer: TrainerLike) -> None:
        if self._duration is None or self.time_elapsed() < self._duration:
            return
        elapsed = timedelta(seconds=int(self.time_elapsed()))
        limit = timedelta(seconds=self._duration)
        reason = f"training took {elapsed} of {limit}"
        # Repeated at each check: a run continues until min_epochs and min_steps.
        trainer.stop(reason)
        if self.verbose and not self._reported and trainer.is_global_zero:
            self._reported = True
            trainer.print(f"time limit reached: {reason}")


def _check_stage(name: str) -> str:
    if name not in _STAGES:
        raise ConfigurationError(
            "Timer does not have this stage",
            found=repr(name),
            fix=did_you_mean(name, _STAGES),
        )
    return name


def _parse_seconds(duration: str | timedelta | Mapping[str, float] | Duration) -> float:
    if isinstance(duration, (int, float)):
        raise ConfigurationError(
            "a duration needs a unit of time",
            found=repr(duration),
            fix=f'write "{duration}s"',
        )
    length = Duration.parse(duration)
    if length.unit != "s":
        raise ConfigurationError(
            "a Timer counts time, not steps",
            found=repr(duration),
            fix='write "2h", or limit steps with max_duration',
        )
    return float(length.value)
