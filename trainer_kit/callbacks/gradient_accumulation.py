"""`GradientAccumulation`: how many micro-batches make one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import final

from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.step.schedule import check_tokens

__all__ = ["GradientAccumulation", "GradientAccumulationScheduler"]


@final
class GradientAccumulation(Callback):
    """Set the length of the accumulation window: a number, a number by epoch, or a size in samples or tokens.

    Args:
        scheduling: micro-batches for each optimizer step; ``{epoch: micro-batches}``, each from that epoch (counted
            from 0) on; or a target over all ranks, ``"4096sp"`` or ``"1e6tok"``: each window has the number of whole
            micro-batches that comes nearest to it, by the size of the previous ones; for the first window, by the size
            of its first micro-batch. ``loss_weight`` of the module counts tokens.

    Attributes:
        scheduling: the schedule by epoch; empty with a target.
        target: the target, or None.

    Raises:
        ConfigurationError: for anything else.

    Example:
        >>> GradientAccumulation({0: 1, 4: 2}).get_accumulate_grad_batches(7)
        2
        >>> GradientAccumulation("4096sp").target
        Duration('4096sp')
    """

    def __init__(self, scheduling: int | Mapping[int, int] | str | Duration) -> None:
        self.target: Duration | None = None
        self.scheduling: dict[int, int] = {}
        if isinstance(scheduling, (str, Duration)):
            self.target = self._read_target(scheduling)
        else:
            self.scheduling = self._read_schedule(scheduling)
        self.epochs = sorted(self.scheduling)
        self._per_batch: float | None = None  # samples or tokens, over all ranks
        self._length = 1
        # Micro-batches, and samples or tokens, at the start of the window.
        self._window_start = (0, 0)
        if self.target is None:
            # The bus leaves out a hook that is the base class's own: steps pay only for what looks at them.
            leave_out(self, "on_train_step_end", GradientAccumulation)

    @staticmethod
    def _read_target(target: str | Duration) -> Duration:
        refusal = ConfigurationError(
            "accumulation must be a number of micro-batches, or a target in samples or tokens",
            found=repr(target),
            fix='write 4, {0: 1, 4: 2}, "4096sp" or "1e6tok"',
        )
        try:
            length = Duration.parse(target)
        except DurationError as error:
            raise refusal from error
        if length.unit not in ("sp", "tok") or length.value < 1:
            raise refusal
        return length

    @staticmethod
    def _read_schedule(scheduling: int | Mapping[int, int]) -> dict[int, int]:
        schedule: dict[int, int] = {}
        if isinstance(scheduling, Mapping):
            schedule.update(scheduling)
        else:
            schedule[0] = scheduling
        for epoch, length in schedule.items():
            # By type: True is an int, too.
            is_epoch = type(epoch) is int and epoch >= 0
            is_length = type(length) is int and length >= 1
            if not is_epoch or not is_length:
                raise ConfigurationError(
                    "an accumulation schedule maps epochs (from 0) to numbers of micro-batches (from 1)",
                    found=f"{scheduling!r}",
                    fix="write 4, or {0: 1, 4: 2}",
                )
        if not schedule:
            raise ConfigurationError(
                "the accumulation schedule is empty", fix="write {0: 1, 4: 2}"
            )
        # A schedule that begins later leaves the first epochs without accumulation.
        schedule.setdefault(0, 1)
        return schedule

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches per optimizer step in ``epoch``; with a target, in the next window.

        Args:
            epoch: the epoch, counted from 0; ignored with a target, whose result is 1 until a micro-batch is measured.
        """
        if self.target is None:
            last_change = max(start for start in self.epochs if start <= epoch)
            return self.scheduling[last_change]
        if self._per_batch is None:
            return 1
        return max(1, round(self.target.value / self._per_batch))

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether a window may ever be longer than one micro-batch."""
        if self.target is not None:
            return True
        return any(length > 1 for length in self.scheduling.values())

    def state_dict(self) -> StateDict:
        if self.target is None:
            return {}
        return {"per_batch": self._per_batch}

    def load_state_dict(self, state_dict: SavedState) -> None:
        self._per_batch = state_dict.get("per_batch")

    def setup(self, trainer: TrainerLike, pl_module: ModuleLike, stage: str) -> None:
        if stage != "fit" or not self.going_to_accumulate_grad_batches():
            return
        # It describes the data of another fit.
        self._per_batch = None
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "gradients cannot be accumulated automatically in manual optimization",
                found="automatic_optimization = False",
                fix="step the optimizers every n batches in training_step, without this callback",
            )
        check_tokens("accumulate_grad_batches", self.target, pl_module)

    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if self.target is not None:
            # Known in advance where the loader has a batch size; otherwise the first micro-batch is measured.
            if self._per_batch is None and self.target.unit == "sp":
                self._per_batch = trainer.train_batch_samples or None
            self._window_start = trainer.progress.batch, self._read_count(trainer)
        self._set_length(trainer)

    def on_train_epoch_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        self._set_length(trainer)

    def on_train_step_end(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        progress = trainer.progress
        batch_at_start, count_at_start = self._window_start
        window_end = progress.batch, self._read_count(trainer)
        self._window_start = window_end
        batches = window_end[0] - batch_at_start
        count = window_end[1] - count_at_start
        # A short last batch of an epoch, or a window that the epoch cut short, does not predict the next window.
        if count <= 0 or batches != self._length:
            return
        if progress.epoch_batch != trainer.num_training_batches:
            self._per_batch = count / batches
            self._set_length(trainer)

    def _read_count(self, trainer: TrainerLike) -> int:
        """Samples or tokens so far."""
        assert self.target is not None
        return int(getattr(trainer.progress, self.target.counter))

    def _set_length(self, trainer: TrainerLike) -> None:
        length = self.get_accumulate_grad_batches(trainer.current_epoch)
        self._length = length
        measure = None
        if self.target is not None and self._per_batch is None:
            measure = partial(self._measure, trainer)
        trainer.set_accumulation(length, measure)

    def _measure(self, trainer: TrainerLike, samples: float, tokens: float) -> None:
        """Set the length of the first window by its first micro-batch."""
        assert self.target is not None
        count = samples if self.target.unit == "sp" else tokens
        # None for 0: a loader may not count.
        self._per_batch = count or None
        if self._per_batch is not None:
            self._set_length(trainer)


GradientAccumulationScheduler = GradientAccumulation
"""Lightning's name."""
