"""The hang timeout: the user's value, or a multiple of the duration of ordinary steps."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import Final, final

from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.progress import Duration, DurationLike
from trainer_kit.hang.position import Position

__all__ = ["PATIENT", "ProgressClock", "chosen_timeout"]

_VARIABLE: Final = "TRAINER_KIT_HANG_TIMEOUT"
_MIN_TIMEOUT: Final = 60.0
_STEP_FACTOR: Final = 10
"""The multiple of the slowest ordinary step."""
_FIRST_STEPS: Final = 3
"""The number of steps in which libraries load, compile and tune."""
PATIENT: Final = 1800.0
"""The timeout in seconds of phases that may take long, equal to torch's timeout of collectives."""
_SIGNAL_GRACE: Final = 15.0
"""Half of the seconds that torchrun and SLURM wait before SIGKILL."""
_OFF: Final = ("off", "0", "false", "no")


def chosen_timeout(value: DurationLike | bool | None) -> float | None:
    """Parse the argument ``hang_timeout``.

    Args:
        value: seconds, a duration such as ``"5min"``, or a timedelta; False, 0 or ``"off"``: no watchdog; None or
            True: the value of ``TRAINER_KIT_HANG_TIMEOUT``, else the default.

    Returns:
        Seconds; infinite for no watchdog, None for the default.

    Raises:
        ConfigurationError: ``value`` is not a duration.
    """
    if value is None or value is True:
        value = os.environ.get(_VARIABLE) or None
    if value is None:
        return None
    if value is False or value == 0 or str(value).lower() in _OFF:
        return math.inf
    if isinstance(value, str) and value.replace(".", "", 1).isdigit():
        value = float(value)
    duration: Duration | None = None
    with suppress(DurationError):
        duration = Duration.parse(value, "s")
    # "25ba" is a duration too, but not of time.
    if duration is None or duration.unit != "s" or duration.value <= 0:
        raise ConfigurationError(
            "hang_timeout must be a duration",
            found=repr(value),
            fix='pass hang_timeout="5min", a number of seconds, or False to disable it',
        )
    return float(duration.value)


@final
class ProgressClock:
    """Measures how long a rank makes no progress; not thread-safe.

    Args:
        timeout: the user's timeout, or None.
        now: the monotonic time in seconds.
        step: the number of completed steps.
    """

    def __init__(self, timeout: float | None, now: float, step: int) -> None:
        self.timeout = timeout
        self.slowest = 0.0
        self.since = now
        self.step = step
        self._first_step = step
        self.position: Position | None = None
        self._token: tuple[int, object] | None = None
        self._step_since = now
        # Whether the current step was observed from its start, and had no long phase.
        self._ordinary = False

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return min(5.0, max(0.1, (self.timeout or _MIN_TIMEOUT) / 40))

    def look(
        self, position: Position, step: int, token: object, now: float, paused: float
    ) -> None:
        """Record one observation.

        Args:
            position: the position of the main thread.
            step: the number of completed steps.
            token: a value that changes with each progress.
            now: the monotonic time in seconds.
            paused: seconds for which this process did not run.
        """
        # A process that was stopped made no progress, and could not: that time does not count.
        self.since += paused
        self._step_since += paused
        moved = self.position is None or position.frames != self.position.frames
        progressed = (step, token) != self._token
        # A phase that may take long counts as progress as long as its frames change: a download, but not a deadlock.
        if progressed or position.debugged or (position.patient and moved):
            self._token = (step, token)
            self.since = now
        if step != self.step:
            # Steps with a validation or a checkpoint say nothing about the duration of a step.
            if self._ordinary:
                self.slowest = max(self.slowest, now - self._step_since)
            self.step = step
            self._step_since = now
            self._ordinary = True
        if position.patient:
            self._ordinary = False
        self.position = position

    @property
    def limit(self) -> float:
        """The seconds without progress after which this rank hangs, in its current phase."""
        limit = self.timeout
        if limit is None:
            limit = max(_MIN_TIMEOUT, _STEP_FACTOR * self.slowest)
        starts = self.step - self._first_step < _FIRST_STEPS
        if starts or self._is_patient:
            return max(limit, PATIENT)
        return limit

    @property
    def _is_patient(self) -> bool:
        """Whether the current phase may take long."""
        position = self.position
        if position is None:
            return False
        if position.phase == "compilation":
            return True
        # A waiting rank asks early: its remaining time depends on the rank for which it waits.
        return self.timeout is None and position.patient and not position.call

    @property
    def grace(self) -> float:
        """The seconds without progress after SIGTERM that count as a hang: more than an ordinary step takes."""
        # The signal asked for this checkpoint.
        if self.position is not None and self.position.phase == "checkpoint":
            return math.inf
        return max(min(_SIGNAL_GRACE, self.timeout or _SIGNAL_GRACE), 2 * self.slowest)
