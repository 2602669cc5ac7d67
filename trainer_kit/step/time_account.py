"""The time of a fit in parts that leave no gap, measured at borders between steps: a step itself pays for none of it.

A border is where something other than training begins or ends (a validation, a save), and at three steps: the first
two of this process, and the last one that an earlier start of the run has completed. Between two borders only steps
run, all of them useful or all repeated, and the loader of windows counts how long they wait for data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, TypeAlias, final

from trainer_kit.core.progress import Progress

__all__ = ["PARTS", "DataWait", "TimeAccount"]

PARTS: Final = (
    "useful",
    "repeated",
    "startup",
    "checkpoint",
    "data",
    "evaluation",
    "hang",
    "down",
)
"""The parts of a run's life. A process measures all but ``hang`` and ``down``, which its records tell."""
DataWait: TypeAlias = tuple[float, float, bool]
"""Seconds that steps have waited for data up to a time of ``perf_counter``, that time, and whether one waits since."""
_STEPS: Final = "steps"
"""Training steps, which count as useful or repeated, and before the first one is completed as start-up."""
_OVER: Final = "over"
"""Nothing: the fit is over."""
_NEVER: Final = 2**62
"""A step that no run reaches."""


@final
@dataclass(frozen=True)
class _Border:
    """The last border.

    Attributes:
        category: of what began here, of `PARTS` or steps.
        time: of ``perf_counter``, in seconds.
        step: completed steps.
        first: whether no step of this process is completed.
        farthest: the most steps that the run has ever completed, also before a restart.
        data_seconds: the wait for data up to here.
        seconds: of each part up to here.
    """

    category: str
    time: float
    step: int
    first: bool
    farthest: int
    data_seconds: float
    seconds: Mapping[str, float]


@final
class TimeAccount:
    """Seconds of each part of a fit since this object was created.

    Another thread may read it at any time; the thread of training alone calls what changes it.

    Args:
        progress: of the fit.
        data_wait: returns how long its steps have waited for data.

    Example:
        >>> account = TimeAccount(Progress(), lambda: (0.0, 0.0, False))
        >>> with account.during("evaluation"):
        ...     pass
        >>> sorted(name for name, seconds in account.seconds().items() if seconds)
        ['evaluation', 'startup']
    """

    def __init__(self, progress: Progress, data_wait: Callable[[], DataWait]) -> None:
        self._progress = progress
        self._data_wait = data_wait
        self._border = _Border(
            category="startup",
            time=perf_counter(),
            step=progress.step,
            first=True,
            farthest=0,
            data_seconds=data_wait()[0],
            seconds=dict.fromkeys(PARTS, 0.0),
        )
        # Of earlier starts of the run.
        self._earlier_seconds: Mapping[str, float] = {}
        # The steps completed before training began; no step until then.
        self._first_step = _NEVER
        # Seconds in the first step; None until it is completed.
        self._first_seconds: float | None = None

    # -- what a reader gets ------------------------------------------------------------------------------------

    def seconds(self) -> dict[str, float]:
        """Seconds of each of `PARTS` up to now."""
        border = self._progress_border()
        return _seconds_of(border, perf_counter() - border.time, 0.0)

    def last_progress(self) -> tuple[dict[str, float], str]:
        """Seconds of each of `PARTS` up to the last progress, and the part that runs since then.

        Progress is a border, and where steps wait for data or have it.
        """
        border = self._progress_border()
        return dict(border.seconds), _kind(border)

    def seconds_of_run(self) -> dict[str, float]:
        """Seconds of each of `PARTS`, with those of earlier starts."""
        seconds = self.seconds()
        for category, earlier_seconds in self._earlier_seconds.items():
            seconds[category] += earlier_seconds
        return seconds

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self._progress.step

    # -- what the fit calls ------------------------------------------------------------------------------------

    def continue_run(
        self, age: float, farthest: int, earlier_seconds: Mapping[str, float]
    ) -> None:
        """Count what came before this object.

        Args:
            age: the seconds since this start of the run began; those before this object are start-up.
            farthest: the most steps that an earlier start of the run has completed.
            earlier_seconds: of each part in earlier starts.
        """
        self._earlier_seconds = dict(earlier_seconds)
        self.mark()
        seconds = dict(self._border.seconds)
        seconds["startup"] += max(0.0, age - sum(seconds.values()))
        farthest = max(farthest, self._border.farthest)
        self._border = replace(self._border, seconds=seconds, farthest=farthest)

    def begin_training(self) -> None:
        """Steps run from here on."""
        self._first_step = self._progress.step
        self._enter(_STEPS)

    def end_training(self) -> None:
        """No step runs any more."""
        self._enter("startup")

    def fail_training(self) -> None:
        """No step runs any more, because of an error: the one that was open is trained again, so it is not useful."""
        border = self._progress_border()
        if _kind(border) == "useful":
            border = replace(border, category="repeated")
        self._border = border
        self._enter("startup")

    def stop(self) -> None:
        """Measure no more: the fit is over."""
        self._enter(_OVER)

    def mark(self) -> None:
        """Set a border between two steps."""
        self._enter(self._border.category)
        self._move_first_step()

    def next_border(self) -> int:
        """The next step after which `mark` must be called."""
        step = self._progress.step
        borders = (self._first_step + 1, self._first_step + 2, self._border.farthest)
        return min((border for border in borders if border > step), default=_NEVER)

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """A context whose time belongs to this part."""
        outer = self._border.category
        self._enter(category)
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, category: str) -> None:
        border = self._border
        # A checkpoint may be saved after the fit.
        if border.category == _OVER:
            return
        step = self._progress.step
        if step > border.step:
            border = replace(border, first=False)
        data_seconds, _, _ = self._data_wait()
        # One reading ends a part and begins the next, so that no time is lost between them.
        now = perf_counter()
        waited = data_seconds - border.data_seconds
        self._border = _Border(
            category=category,
            time=now,
            step=step,
            first=self._first_seconds is None and step <= self._first_step,
            farthest=max(border.farthest, step),
            data_seconds=data_seconds,
            seconds=_seconds_of(border, now - border.time, waited),
        )

    def _progress_border(self) -> _Border:
        """The last border, or where steps began or ended to wait for data after it."""
        # The wait first: one that is older than the border is left out, and none is mixed with an older border.
        data_seconds, since, waits = self._data_wait()
        border = self._border
        if border.category != _STEPS or since <= border.time:
            return border
        waited = data_seconds - border.data_seconds
        seconds = _seconds_of(border, since - border.time, waited)
        category = _STEPS
        if waits:
            category = "data"
        return replace(
            border,
            category=category,
            time=since,
            data_seconds=data_seconds,
            seconds=seconds,
        )

    def _move_first_step(self) -> None:
        """Count as start-up what the first step takes longer than the second one: it compiles and tunes kernels."""
        completed = self._progress.step - self._first_step
        seconds = dict(self._border.seconds)
        steps = seconds["useful"] + seconds["repeated"]
        if completed == 1 and self._first_seconds is None:
            self._first_seconds = steps
        elif completed == 2 and self._first_seconds is not None:
            excess = max(0.0, 2 * self._first_seconds - steps)
            # Steps are repeated before they are useful, so a first step that is repeated has seconds there.
            kind = "repeated" if seconds["repeated"] else "useful"
            excess = min(excess, seconds[kind])
            seconds[kind] -= excess
            seconds["startup"] += excess
            self._border = replace(self._border, seconds=seconds)
            self._first_step = _NEVER


def _seconds_of(border: _Border, elapsed: float, waited: float) -> dict[str, float]:
    """Seconds of each part, ``elapsed`` seconds after a border, of which steps have waited for data for some."""
    seconds = dict(border.seconds)
    if border.category == _OVER:
        return seconds
    if border.category == _STEPS:
        seconds["data"] += waited
        elapsed -= waited
    seconds[_kind(border)] += elapsed
    return seconds


def _kind(border: _Border) -> str:
    """The part of `PARTS` that runs since a border."""
    if border.category == _OVER:
        return "startup"
    if border.category != _STEPS:
        return border.category
    if border.first:
        return "startup"
    if border.step < border.farthest:
        return "repeated"
    return "useful"
