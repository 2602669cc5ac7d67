"""`Goodput`: every second of a run's life, over all its restarts, in one account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from trainer_kit.core.display import plural
from trainer_kit.core.types import JsonObject
from trainer_kit.report.events import has_ended
from trainer_kit.step.time_account import PARTS

__all__ = ["Goodput", "account_of_run", "goodput_table"]

_NAMES: Final = {
    "useful": "useful steps",
    "repeated": "repeated steps",
    "startup": "start-up and end",
    "checkpoint": "checkpoints",
    "data": "wait for data",
    "evaluation": "evaluation",
    "hang": "hang",
    "down": "down",
}
"""What a reader calls each part."""


@final
@dataclass(frozen=True)
class Goodput:
    """The time of a run, from its first start to its last record.

    Attributes:
        seconds: of each part, in the order of `PARTS`; they add up to ``until - begun``.
        starts: how often training started.
        begun: the first start, in seconds since 1970.
        until: the last record.
        farthest: the most optimizer steps that any start has completed.
    """

    seconds: dict[str, float]
    starts: int
    begun: float
    until: float
    farthest: int

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The part of all time in which steps were trained for the first time, from 0 to 1."""
        return self.seconds["useful"] / max(self.total, 1e-9)

    def rows(self) -> list[tuple[str, float, float]]:
        """Name, seconds and share of each part."""
        total = max(self.total, 1e-9)
        return [
            (_NAMES[category], seconds, seconds / total)
            for category, seconds in self.seconds.items()
        ]


def account_of_run(
    events: Iterable[JsonObject], pulse: JsonObject | None = None
) -> Goodput | None:
    """Add up what the starts of a run have recorded.

    Args:
        events: of the run, in the order in which they were recorded.
        pulse: what the process that runs, or was killed, has left.

    Returns:
        None where nothing was recorded: a custom loop, or an earlier version.
    """
    life = _Life()
    for event in events:
        life.add_event(event)
    if pulse is not None:
        life.add_account(pulse, ended=has_ended(pulse.get("process")))
    if not life.starts:
        return None
    return Goodput(life.seconds, life.starts, life.begun, life.until, life.farthest)


@final
class _Life:
    """The account so far."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.starts = 0
        self.begun = 0.0
        self.until = 0.0
        self.farthest = 0
        # When the watchdog has ended the present start of the fit.
        self._hung_at: float | None = None
        # Whether a fit has started whose account is not recorded yet.
        self._fit_is_open = False
        # Process and begin of each start that was added.
        self._added: list[tuple[object, object]] = []
        # When an evaluation by itself (`validate`, `test`) began.
        self._evaluation_start: float | None = None

    def add_event(self, event: JsonObject) -> None:
        """Add what an event says about the time."""
        kind, stage = event["event"], event.get("stage")
        time = event.get("time")
        if kind == "account":
            self.add_account(event, ended=True)
        # The files may be edited.
        elif not isinstance(time, (int, float)):
            return
        elif kind == "start" and stage == "fit":
            self._hung_at = None
            self._fit_is_open = True
        elif kind == "start":
            self._evaluation_start = time
        elif kind == "end" and stage != "fit":
            self._add_evaluation(time)
        elif kind == "end" and event.get("status") == "hung":
            self._hung_at = time

    def _add_evaluation(self, end: float) -> None:
        start = self._evaluation_start
        self._evaluation_start = None
        # Beside a fit it costs the run no time, and before the first one it is not a part of it.
        if start is None or self._fit_is_open or not self.starts:
            return
        self._pass_time("down", start)
        self._pass_time("evaluation", end)

    def add_account(self, record: JsonObject, ended: bool) -> None:
        """Add what one process has measured, and the time since the last one."""
        start = record.get("process"), record.get("begun")
        # A process that was killed between its event and the removal of its file has left both.
        if not _is_account(record) or start in self._added:
            return
        self._added.append(start)
        self._fit_is_open = False
        if not self.starts:
            self.begun = self.until = record["begun"]
        self.starts += 1
        self.farthest = max(self.farthest, record["step"])
        self._pass_time("down", record["begun"])
        self._add_parts(record["seconds"], record["time"])
        # Nothing has happened since the last progress: the watchdog found a hang, or the part of then went on.
        category, until = record["category"], record["until"]
        if self._hung_at is not None:
            category, until = "hang", max(self._hung_at, until)
        elif ended and category == "useful":
            # The process was killed in a step, which is trained again.
            category = "repeated"
        self._pass_time(category, until)

    def _add_parts(self, seconds: Mapping[str, float], until: float) -> None:
        for category in PARTS:
            self.seconds[category] += seconds.get(category, 0.0)
        self.until = until

    def _pass_time(self, category: str, until: float) -> None:
        """Count the time since the last one; none where the clocks of two machines disagree."""
        if until > self.until:
            self.seconds[category] += until - self.until
            self.until = until


def _is_account(record: JsonObject) -> bool:
    """Whether a record is complete: the files may be edited, or of a later version."""
    numbers = [record.get(name) for name in ("begun", "time", "until", "step")]
    seconds = record.get("seconds")
    if not isinstance(seconds, dict) or record.get("category") not in PARTS:
        return False
    numbers += seconds.values()
    return all(isinstance(number, (int, float)) for number in numbers)


def goodput_table(name: str, goodput: Goodput) -> str:
    """The account as text.

    Example:
        >>> seconds = {**dict.fromkeys(PARTS, 0.0), "useful": 90.0, "down": 10.0}
        >>> print(goodput_table("runs/a", Goodput(seconds, 2, 0.0, 100.0, 50)).splitlines()[0])
        runs/a: 90.0% of 100.0 s in useful steps, 2 starts
    """
    lines = [
        f"{name}: {goodput.share:.1%} of {goodput.total:.1f} s in useful steps, {plural(goodput.starts, 'start')}"
    ]
    for name_of_part, seconds, share in goodput.rows():
        lines.append(f"  {name_of_part:18}{seconds:14.1f} s{share:8.1%}")
    lines.append(f"  {'all':18}{goodput.total:14.1f} s")
    return "\n".join(lines)
