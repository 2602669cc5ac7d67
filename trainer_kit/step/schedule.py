"""The end of a run and the next step with work due: functions of progress alone, so equal on every rank.

No method here may read a clock, a request or a value that was logged: ranks would stop, validate or exchange at
different steps. Seconds of training are an exception that is none: `Progress.seconds` holds only what ranks agreed on.

Intervals count completed things, and take effect at the first end of a window at or after their value: inside a window
validation and checkpoints would see partly accumulated gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Duration, Progress
from trainer_kit.data import EpochLength

__all__ = ["LONGEST", "Interval", "Schedule", "check_tokens"]

# Whatever else is due: the losses that wait for a check must not pile up.
LONGEST: Final = 256
"""Steps between two looks at what is due."""


def check_tokens(argument: str, length: object, module: object) -> None:
    """Raise `ConfigurationError` for a duration in tokens if the module does not count them: it would never end.

    Args:
        argument: what the user set to ``length``, for the message.
        length: a `Duration`; anything else is accepted.
        module: counts tokens by ``loss_weight``.
    """
    if not isinstance(length, Duration) or length.unit != "tok":
        return
    if is_overridden("loss_weight", module, TrainModule):
        return
    raise ConfigurationError(
        "the number of tokens is unknown",
        found=f"{argument}={str(length)!r}, and {type(module).__name__} has no loss_weight",
        fix="def loss_weight(self, batch): return the number of tokens in batch",
    )


@final
@dataclass
class Interval:
    """What is called between two steps, each time an interval is complete.

    In steps and batches the loop looks at the step that completes it. In samples, tokens and seconds that step is not
    known beforehand: ``act`` is then called at the next step at which the loop settles for another reason. One process
    settles where logged values are flushed, several ranks also where they agree or look at signals together (about once
    a second). The delay is accepted, because a look in each step would cost every step something. Delays do not add up:
    `next_end` follows from the counts, not from the last call.

    Attributes:
        every: in a unit that `Progress` counts.
        act: what is called.
        done: complete intervals at the last call, or when training began; None before.
    """

    every: Duration
    act: Callable[[], None]
    done: int | None = None

    def complete(self, progress: Progress) -> int:
        """How many intervals are complete."""
        return int(getattr(progress, self.every.counter) // self.every.value)

    @property
    def is_counted_alike(self) -> bool:
        """Whether all ranks look at the step that completes an interval: steps and batches are known beforehand."""
        return self.every.unit in ("st", "ba")

    def start(self, progress: Progress) -> None:
        """Count from here, if training just began."""
        if self.done is None:
            self.done = self.complete(progress)

    def take_completed(self, progress: Progress) -> bool:
        """Whether an interval was completed since this was last true."""
        complete = self.complete(progress)
        if complete <= (self.done or 0):
            return False
        self.done = complete
        return True

    def next_end(self, progress: Progress) -> float:
        """Where the running interval ends, in its unit."""
        complete = max(self.complete(progress), self.done or 0)
        return (complete + 1) * self.every.value


@dataclass
class Schedule:
    """The limits and intervals of one fit.

    Attributes:
        length: the micro-batches of an epoch on this rank.
        max_epochs, max_steps, max_duration: the run ends at the first that is reached; None for none.
        min_epochs, min_steps: a stop request waits until both are reached.
        validate_every: from one validation to the next, in any unit; None for the end of the epoch.
        across_epochs: whether ``validate_every`` counts on over epochs.
        validate_epochs: epochs between validations.
        validates: whether there is anything to validate on.
        log_every: steps between flushes of logged values.
        agree_every: steps between agreements of several ranks about requests; 0 for one process.
        intervals: the actions of callbacks at their own intervals.
        intervals_validated: complete intervals of ``validate_every`` that need no validation any more.
    """

    length: EpochLength
    max_epochs: int | None
    max_steps: int | None
    max_duration: Duration | None
    min_epochs: int
    min_steps: int
    validate_every: Duration | None
    across_epochs: bool
    validate_epochs: int
    validates: bool
    log_every: int
    agree_every: int
    intervals: list[Interval] = field(default_factory=list, init=False)
    intervals_validated: int = field(default=0, init=False)

    def finished(self, progress: Progress) -> str | None:
        """Why the run is over, by its limits; None while it is not."""
        if self.max_epochs is not None and progress.epoch >= self.max_epochs:
            return f"max_epochs={self.max_epochs} reached"
        if self.max_steps is not None and progress.step >= self.max_steps:
            return f"max_steps={self.max_steps} reached"
        if self.max_duration is not None and self.max_duration.reached(progress):
            return f"max_duration={self.max_duration} reached"
        if self.length.certain and self.length.expected == 0:
            return "the training loader has no batches"
        return None

    def may_stop(self, progress: Progress) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached."""
        return progress.epoch >= self.min_epochs and progress.step >= self.min_steps

    def epoch_is_over(self, progress: Progress) -> bool:
        """Whether the running epoch has no batch left; with an uncertain length, whether that is to be expected."""
        batches = self.length.expected
        if batches is None:
            return False
        # A resumed run may be beyond the end of an epoch that has become shorter.
        if self.length.certain:
            return progress.epoch_batch >= batches
        # Data that have more batches than they claim were not over there.
        return progress.epoch_batch == batches

    def flushes(self, progress: Progress) -> bool:
        """Whether logged values of this step are handed on."""
        return progress.step % self.log_every == 0

    def agrees(self, progress: Progress) -> bool:
        """Whether ranks agree about requests at this step; one process always does."""
        return not self.agree_every or progress.step % self.agree_every == 0

    def set_limit(self, name: str, value: int | None) -> None:
        """Set ``max_epochs`` or ``max_steps`` while the fit runs, on every rank at the same step."""
        setattr(self, name, value)

    def limit_to_steps(self, steps: int) -> None:
        """End the run after this many steps, whatever its other limits are."""
        self.max_epochs = None
        self.max_duration = None
        self.max_steps = steps
        self.min_epochs = 0
        self.min_steps = 0

    def use_length(self, length: EpochLength, validate_every: Duration | None) -> None:
        """Set the length of an epoch, and the interval of validation that follows from it."""
        self.length = length
        self.validate_every = validate_every

    def set_validates(self, validates: bool) -> None:
        """Set whether there is anything to validate on."""
        self.validates = validates

    def start_epoch(self, progress: Progress) -> None:
        """Restart the interval of validation, unless it counts across epochs."""
        # Also in a run that resumes inside an epoch: what was complete by then has been validated, or the checkpoint
        # says that it is owed.
        if not self.across_epochs:
            self.mark_validated(progress)
        for interval in self.intervals:
            interval.start(progress)

    def mark_validated(self, progress: Progress) -> None:
        """Count the intervals of validation that are complete at ``progress`` as validated."""
        self.intervals_validated = self._intervals(progress)

    def _validation_counter(self, every: Duration) -> str:
        """The attribute of `Progress` that the interval of validation is counted in."""
        if every.unit == "ba" and not self.across_epochs:
            return "epoch_batch"
        return every.counter

    def _intervals(self, progress: Progress) -> int:
        if self.validate_every is None:
            return 0
        position: float = getattr(
            progress, self._validation_counter(self.validate_every)
        )
        return int(position // self.validate_every.value)

    def take_due_validation(self, progress: Progress) -> bool:
        """Whether validation runs at this step; its interval then counts as validated, so the next call is False."""
        if not self.validation_is_due(progress):
            return False
        self.mark_validated(progress)
        return True

    def validation_is_due(self, progress: Progress) -> bool:
        """Whether an interval of validation was completed since the last one that was taken; changes nothing."""
        if (
            not self.validates
            or self.validate_every is None
            or not self._epoch_counts(progress)
        ):
            return False
        return self._intervals(progress) > self.intervals_validated

    def validates_at_epoch_end(self, progress: Progress) -> bool:
        """Whether validation runs when the batches of this epoch are over."""
        return (
            self.validates
            and self.validate_every is None
            and self._epoch_counts(progress)
        )

    def _epoch_counts(self, progress: Progress) -> bool:
        return self.across_epochs or (progress.epoch + 1) % self.validate_epochs == 0

    def intervals_due(self, progress: Progress, together: bool) -> list[Interval]:
        """The intervals that were completed since they were last returned.

        Args:
            progress: of this step.
            together: whether all ranks look at this step. A signal makes one rank look alone, and steps and batches are
                the only counts for which all ranks look at the step that completes an interval.
        """
        countable = self.intervals
        if not together:
            countable = [each for each in self.intervals if each.is_counted_alike]
        return [interval for interval in countable if interval.take_completed(progress)]

    def next_step_due(self, progress: Progress, window: int) -> int:
        """The next step at which there is anything to look at, with ``window`` micro-batches a step."""
        step = progress.step
        steps = [step + LONGEST, _next_multiple(step, self.log_every)]
        if self.agree_every:
            steps.append(_next_multiple(step, self.agree_every))
        if self.max_steps is not None:
            steps.append(self.max_steps)
        for counter, target in self._goals(progress):
            if counter == "step":
                steps.append(math.ceil(target))
            elif counter in ("batch", "epoch_batch"):
                # Too early where the last window of an epoch is short; then nothing is due, and this runs again.
                batches = target - getattr(progress, counter)
                steps.append(step + max(1, math.ceil(batches / window)))
            elif counter != "epoch":
                # Of samples, tokens and seconds the number of steps is unknown.
                steps.append(step + 1)
        # What is due at this very step has just been carried out.
        return max(step + 1, min(steps))

    def _goals(self, progress: Progress) -> list[tuple[str, float]]:
        """The counts at which something is due, each as the counter of `Progress` and its value."""
        goals: list[tuple[str, float]] = []
        if self.max_duration is not None:
            goals.append((self.max_duration.counter, self.max_duration.value))
        if self.validates and self.validate_every is not None:
            counter = self._validation_counter(self.validate_every)
            next_interval = self._intervals(progress) + 1
            goals.append((counter, next_interval * self.validate_every.value))
        if not self.intervals:
            return goals
        goals += [
            (interval.every.counter, interval.next_end(progress))
            for interval in self.intervals
            if interval.is_counted_alike
        ]
        return goals

    def steps_left(self, progress: Progress) -> int | None:
        """How many steps a limit in steps leaves; None without one."""
        limits: list[int] = []
        if self.max_steps is not None:
            limits.append(self.max_steps)
        if self.max_duration is not None and self.max_duration.unit == "st":
            limits.append(int(self.max_duration.value))
        if not limits:
            return None
        return min(limits) - progress.step


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every
