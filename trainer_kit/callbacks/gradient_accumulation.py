"""`GradientAccumulation`: how many micro-batches make one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias, TypeGuard, final

from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.signatures import leave_out
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.step.schedule import check_tokens

__all__ = ["GradientAccumulation", "GradientAccumulationScheduler"]


_Start: TypeAlias = int | str | Duration
_Schedule: TypeAlias = (
    Mapping[int, int]
    | Mapping[str, int]
    | Mapping[Duration, int]
    | Mapping[int | str, int]
    | Mapping[_Start, int]
)
"""Micro-batches by the epoch, or the count, from which they hold. A mapping is invariant in its keys."""


@final
class GradientAccumulation(Callback):
    """Set the length of the accumulation window: a number, a number by epoch, or a size in samples or tokens.

    Args:
        scheduling: micro-batches for each optimizer step; ``{epoch: micro-batches}``, each from that epoch (counted
            from 0) on; a ramp such as ``{0: 1, "1e9tok": 4}``, each from the first window on that begins after so many
            tokens (``tok``), samples (``sp``), optimizer steps (``st``) or micro-batches (``ba``), all of one unit,
            where ``"0"`` is 0, for JSON; or a target over all ranks, ``"4096sp"`` or ``"1e6tok"``: each window has the
            number of whole micro-batches that comes nearest to it, by the size of the previous ones; for the first
            window, by the size of its first micro-batch. ``loss_weight`` of the module counts tokens.

    Attributes:
        scheduling: the schedule by epoch; empty with a target or a ramp.
        target: the target, or None.
        ramp: the start and the micro-batches of each part of a ramp, in order; empty without one.

    Raises:
        ConfigurationError: for anything else.

    Example:
        >>> GradientAccumulation({0: 1, 4: 2}).get_accumulate_grad_batches(7)
        2
        >>> GradientAccumulation("4096sp").target
        Duration('4096sp')
        >>> GradientAccumulation({0: 1, "1e9tok": 4}).ramp
        [(Duration('0tok'), 1), (Duration('1000000000tok'), 4)]
    """

    def __init__(self, scheduling: int | _Schedule | str | Duration) -> None:
        self.target: Duration | None = None
        self.scheduling: dict[int, int] = {}
        self.ramp: list[tuple[Duration, int]] = []
        if isinstance(scheduling, (str, Duration)):
            self.target = self._read_target(scheduling)
        elif _is_ramp(scheduling):
            self.ramp = _read_ramp(scheduling)
        else:
            self.scheduling = self._read_schedule(scheduling)
        self.epochs = sorted(self.scheduling)
        self._per_batch: float | None = None  # samples or tokens, over all ranks
        self._length = 1
        self._ramp_length = 1
        if self.ramp:
            self._ramp_length = self.ramp[0][1]
        # Micro-batches, and samples or tokens, at the start of the window.
        self._window_start = (0, 0)
        if self.target is None and not self.ramp:
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
    def _read_schedule(
        scheduling: int | _Schedule,
    ) -> dict[int, int]:
        entries: _Schedule = {}
        if isinstance(scheduling, Mapping):
            entries = scheduling
        else:
            entries = {0: scheduling}
        schedule: dict[int, int] = {}
        for epoch, length in entries.items():
            # By type: True is an int, too.
            is_epoch = type(epoch) is int and epoch >= 0
            is_length = type(length) is int and length >= 1
            if not isinstance(epoch, int) or not is_epoch or not is_length:
                raise ConfigurationError(
                    "an accumulation schedule maps epochs (from 0) to numbers of micro-batches (from 1)",
                    found=f"{scheduling!r}",
                    fix="write 4, or {0: 1, 4: 2}",
                )
            schedule[epoch] = length
        if not schedule:
            raise ConfigurationError(
                "the accumulation schedule is empty", fix="write {0: 1, 4: 2}"
            )
        # A schedule that begins later leaves the first epochs without accumulation.
        schedule.setdefault(0, 1)
        return schedule

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches per optimizer step in ``epoch``; with a target or a ramp, in the next window.

        Args:
            epoch: the epoch, counted from 0; ignored with a target, whose result is 1 until a micro-batch is measured.
        """
        if self.ramp:
            return self._ramp_length
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
        lengths = [*self.scheduling.values(), *(length for _, length in self.ramp)]
        return any(length > 1 for length in lengths)

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
        for start, _ in self.ramp:
            check_tokens("accumulate_grad_batches", start, pl_module)

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
        if self.ramp:
            self._set_length(trainer)
            return
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
        # A function of progress alone: a resume needs no state of its own.
        for start, ramp_length in self.ramp:
            if start.reached(trainer.progress):
                self._ramp_length = ramp_length
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


def _is_ramp(scheduling: object) -> TypeGuard[_Schedule]:
    if not isinstance(scheduling, Mapping):
        return False
    return any(isinstance(start, (str, Duration)) for start in scheduling)


def _read_ramp(
    scheduling: _Schedule,
) -> list[tuple[Duration, int]]:
    """Return the parts of a ramp, in order; the first one starts at 0."""
    # JSON, also on the command line, has strings as keys only.
    zeros = [start for start in scheduling if start in (0, "0")]
    starts = {start for start in scheduling if isinstance(start, (str, Duration))}
    starts.discard("0")
    units = {_read_start(start, scheduling).unit for start in starts}
    numbers = set(scheduling) - starts - {0, "0"}
    lengths_are_counts = all(
        type(length) is int and length >= 1 for length in scheduling.values()
    )
    # 0 is the same in every unit; another number would be an epoch.
    is_of_one_unit = len(units) == 1 and not numbers
    if not is_of_one_unit or len(zeros) > 1 or not lengths_are_counts:
        raise _ramp_error(scheduling)
    (unit,) = units
    parts: dict[int, int] = {}
    for start, length in scheduling.items():
        # A text "0" has no unit.
        number = start
        if start == "0":
            number = 0
        count = int(Duration.parse(number, unit).value)
        if count in parts:
            raise ConfigurationError(
                f"two parts of a ramp begin at {count} {unit}",
                found=f"{scheduling!r}",
                fix="keep one of them",
            )
        parts[count] = length
    parts.setdefault(0, 1)
    return [(Duration(start, unit), parts[start]) for start in sorted(parts)]


def _read_start(start: str | Duration, scheduling: object) -> Duration:
    try:
        duration = Duration.parse(start)
    except DurationError as error:
        raise _ramp_error(scheduling) from error
    # Seconds differ between two runs of the same program, and an epoch is written as a number.
    if duration.unit not in ("tok", "sp", "st", "ba"):
        raise _ramp_error(scheduling)
    return duration


def _ramp_error(scheduling: object) -> ConfigurationError:
    return ConfigurationError(
        "a ramp maps one unit (tok, sp, st or ba) to numbers of micro-batches (from 1)",
        found=f"{scheduling!r}",
        fix='write {0: 1, "1e9tok": 4}, or epochs as numbers: {0: 1, 4: 2}',
    )


GradientAccumulationScheduler = GradientAccumulation
"""Lightning's name."""
