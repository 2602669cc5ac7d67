"""`EarlyStopping`: requests a stop when a logged value no longer improves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from enum import Enum
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from trainer_kit.callbacks.conditions import (
    Monitor,
    check_validation,
    epoch_ends_here,
    has_validation,
)
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.types import SavedState, StateDict

__all__ = ["EarlyStopping", "EarlyStoppingReason"]


class EarlyStoppingReason(Enum):
    """Why `EarlyStopping` requested the stop."""

    NOT_STOPPED = "not_stopped"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"
    NON_FINITE_METRIC = "non_finite_metric"


@final
class EarlyStopping(Callback):
    """Request a stop when ``monitor`` has not improved for ``patience`` checks.

    A request before ``min_epochs`` and ``min_steps`` waits for them; an improvement in the meantime withdraws it.

    Args:
        monitor: the logged value to watch.
        min_delta: an improvement counts if it is larger than this.
        patience: checks in a row without improvement before the stop.
        verbose: print every improvement and the stop.
        mode: ``"min"`` when lower is better, else ``"max"``.
        strict: raise if ``monitor`` was not logged; False skips the check.
        check_finite: stop at once when the value is NaN or infinite.
        stopping_threshold: stop at once when the value is better than this; None: no such limit.
        divergence_threshold: stop at once when the value is worse than this; None: no such limit.
        check_on_train_epoch_end: True checks at the end of training epochs, False after validation; None after
            validation where there is any. After a validation at an epoch's last step, None waits for the end of that
            epoch, so that its training values can be watched too.
        log_rank_zero_only: accepted for compatibility with Lightning, without effect: values agree on all
            ranks, and rank 0 prints.

    Attributes:
        best_score: the best value so far, a scalar tensor on the CPU.
        wait_count: checks without improvement since then.
        stopped_epoch: the epoch of the stop, 0 when there was none.
        stopping_reason: an `EarlyStoppingReason`.
        stopping_reason_message: the reason as a sentence with numbers, or None.

    Raises:
        ConfigurationError: for a bad argument; before the first step, when it would check after validation only, and
            the fit has none; at the first check, when ``monitor`` was not logged.

    Example:
        >>> stop = EarlyStopping("val_acc", mode="max", patience=2)
        >>> stop.wait_count, float(stop.best_score)
        (0, -inf)
    """

    order: ClassVar[Literal["early", "normal", "late"]] = "late"
    never_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "_run_early_stopping_check",
            "_evaluate_stopping_criteria",
            "_should_skip_check",
            "_improvement_message",
            "_validate_condition_metric",
            "_log_info",
            "mode_dict",
            "order_dict",
            "monitor_op",
        ),
        "write a Callback that calls trainer.stop(reason)",
    )

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self._monitor = Monitor(monitor, mode, "EarlyStopping")
        if patience < 0 or min_delta < 0:
            raise ConfigurationError(
                "EarlyStopping needs patience and min_delta of zero or more",
                found=f"patience={patience}, min_delta={min_delta}",
            )
        self.monitor = monitor
        self.mode = mode
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self._active = False
        self._reset()

    def _reset(self) -> None:
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._best = self._monitor.worst
        # The step whose weights the last checked value describes.
        self._checked = -1
        # Validation ran at this step, and on_train_epoch_end follows at the same step.
        self._validated = False
        # Training epochs log the value: after validation it is still the previous epoch's.
        self._logged_late = False

    @property
    def best_score(self) -> Tensor:
        return torch.tensor(self._best, dtype=torch.float64)

    @property
    def state_key(self) -> str:
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> StateDict:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self._best,
            "checked": self._checked,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
            "logged_late": self._logged_late,
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._best = float(state_dict["best_score"])
        self._checked = state_dict.get("checked", -1)
        self.stopping_reason = EarlyStoppingReason(state_dict["stopping_reason"])
        self.stopping_reason_message = state_dict["stopping_reason_message"]
        self._logged_late = state_dict["logged_late"]

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        # A run of a few batches to try the code has no trend to judge.
        self._active = stage == "fit" and not trainer.fast_dev_run
        if stage == "fit":
            # Forget another fit; a resumed fit restores its state after this.
            self._reset()

    def on_fit_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active or not self.strict:
            return
        only_after = None
        if self.check_on_train_epoch_end is False:
            only_after = "check_on_train_epoch_end=False"
        check_validation(trainer, "EarlyStopping", self.monitor, only_after)

    def on_validation_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active:
            return
        if trainer.sanity_checking:
            if self.strict:
                self._monitor.warn_unlogged(trainer)
            return
        if self.check_on_train_epoch_end:
            return
        # At the end of an epoch the check waits for the values that the epoch itself reduces and logs.
        if self.check_on_train_epoch_end is None:
            self._validated = self._logged_late or epoch_ends_here(trainer)
        if not self._validated:
            is_final = self.check_on_train_epoch_end is False
            self._check_value(trainer, is_final)

    def on_train_epoch_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not self._active or self.check_on_train_epoch_end is False:
            return
        checks_here = self.check_on_train_epoch_end or self._validated
        # Without validation there is no other time to check.
        if checks_here or not has_validation(trainer):
            self._validated = False
            self._check_value(trainer, is_final=True)

    def _check_value(self, trainer: TrainerLike, is_final: bool) -> None:
        value, logged_at = self._monitor.read(trainer)
        if value is None:
            if is_final:
                self._report_missing(trainer)
            else:
                # The end of the epoch, which follows, may log it.
                self._validated = True
                self._logged_late = True
            return
        # Checked already: no validation has run since, and counting it again would use up the patience.
        if logged_at <= self._checked:
            return
        self._checked = logged_at
        # The earlier request waits for min_epochs or min_steps.
        if self.stopping_reason_message is not None:
            trainer.withdraw_stop(self.stopping_reason_message)
        self.stopped_epoch = 0
        self.stopping_reason_message = None
        self.stopping_reason, message = self._judge_value(value)
        if self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
            trainer.stop(message)
        if message and self.verbose:
            trainer.print(message)

    def _report_missing(self, trainer: TrainerLike) -> None:
        error = self._monitor.missing(trainer)
        if self.strict:
            raise error
        if self.verbose and trainer.is_global_zero:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)

    def _judge_value(self, value: float) -> tuple[EarlyStoppingReason, str]:
        """Count one value; returns the reason to stop (or NOT_STOPPED) and a sentence with the numbers."""
        # The order decides the reported reason: a NaN is worse than anything, and compares with no threshold.
        name = self.monitor
        is_better = self._monitor.better
        if self.check_finite and not math.isfinite(value):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"{name} = {value} is not finite (best {self._best:.6g})",
            )
        goal = self.stopping_threshold
        if goal is not None and is_better(value, goal):
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"{name} = {value:.6g} reached the stopping threshold {goal:.6g}",
            )
        limit = self.divergence_threshold
        if limit is not None and is_better(limit, value):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{name} = {value:.6g} is worse than {limit:.6g}",
            )
        # Moved towards worse by the margin, the value must still be better than the best.
        margin = self.min_delta
        if self.mode == "max":
            margin = -margin
        if is_better(value + margin, self._best):
            message = f"{name} improved from {self._best:.6g} to {value:.6g}"
            self._best = value
            self.wait_count = 0
            return EarlyStoppingReason.NOT_STOPPED, message
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"{name} = {value:.6g} has not improved on {self._best:.6g} for {self.wait_count} checks",
        )
