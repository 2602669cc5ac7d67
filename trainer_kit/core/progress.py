"""The progress of a run, as counts of completed epochs, batches and steps, and durations in those units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final

from trainer_kit.core.errors import DurationError

__all__ = ["Duration", "DurationLike", "Progress"]


@dataclass(slots=True)
class Progress:
    """Completed epochs, batches, optimizer steps, samples and tokens of a fit.

    Attributes:
        epoch: completed epochs. Within epoch e (counted from 0) this is e.
        batch: micro-batches trained on, as the loader of this rank yields them.
        step: optimizer steps (in manual optimization: batches), one per iteration of the loop.
        samples: samples trained on, over all ranks.
        tokens: tokens trained on, over all ranks; counted if ``GradientAccumulation`` or ``max_duration`` needs them.
        epoch_batch: micro-batches completed in the running epoch.
        seconds: training time, including the time before a resume.

    Example:
        >>> p = Progress(epoch=1, step=20)
        >>> q = Progress(); q.load_state_dict(p.state_dict()); q == p
        True
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch_batch: int = 0
    seconds: float = 0.0

    def pass_batches(self, count: int) -> None:
        """Count micro-batches that are read and not trained on.

        Args:
            count: how many; it is added to ``batch`` and ``epoch_batch``.
        """
        self.batch += count
        self.epoch_batch += count

    def state_dict(self) -> dict[str, int | float]:
        """All counts, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Restore the counts of ``state``; a count that an older state lacks is unchanged.

        Args:
            state: counts by name, as `state_dict` returns them; other names are ignored.

        Raises:
            ValueError: a value is not a count: an integer from 0 to 2**63 - 1, or for ``seconds`` also a float.
        """
        # Everything is checked before anything is changed.
        for field in fields(self):
            value = state.get(field.name, 0)
            types: tuple[type, ...] = (int,)
            if field.name == "seconds":
                types = (int, float)
            # ``type``, not isinstance: True is an int too.
            is_count = type(value) in types and 0 <= value < 2**63
            if not is_count:
                raise ValueError(f"{field.name}={value!r} is not a count")
        for name in self.state_dict().keys() & state.keys():
            setattr(self, name, state[name])


_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTER: Final = {
    "ep": "epoch",
    "ba": "batch",
    "st": "step",
    "sp": "samples",
    "tok": "tokens",
    "s": "seconds",
}
_ABBREVIATIONS: Final = {
    **dict.fromkeys(("epoch", "epochs"), "ep"),
    **dict.fromkeys(("batch", "batches"), "ba"),
    **dict.fromkeys(("step", "steps"), "st"),
    **dict.fromkeys(("sample", "samples"), "sp"),
    **dict.fromkeys(("token", "tokens"), "tok"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("mins", "minute", "minutes", "m"), "min"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
}
"""By word that people write for a unit, the unit."""
_CLOCK: Final = re.compile(r"\s*(\d+):(\d\d):(\d\d):(\d\d)\s*")
# No sign: a negative length gets the error of a text that cannot be read.
_PATTERN: Final = re.compile(
    r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]+)\s*"
)


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training in one unit.

    Args:
        value: how many; whole for counted units.
        unit: ``ep`` epochs, ``ba`` micro-batches, ``st`` optimizer steps, ``sp`` samples, ``tok`` tokens,
            ``s`` seconds, ``dur`` a fraction of the whole run.

    Raises:
        DurationError: for an unknown unit, a negative value, or a fraction of a counted unit.

    Example:
        >>> Duration.parse("3ep"), Duration.parse("1e6sp"), Duration.parse("2h"), Duration.parse(7, "st")
        (Duration('3ep'), Duration('1000000sp'), Duration('7200.0s'), Duration('7st'))
        >>> Duration.parse("5000ba").reached(Progress(batch=5000))
        True
    """

    value: int | float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in (*_COUNTER, "dur"):
            raise DurationError(
                f"unknown unit {self.unit!r} of a duration",
                fix="use one of: ep, ba, st, sp, tok, s, min, h, d, dur",
            )
        # Not ``value < 0``, which is false for NaN.
        if not self.value >= 0 or self.value == float("inf"):
            raise DurationError(
                "a duration is a finite number, zero or more",
                found=f"{self.value}{self.unit}",
            )
        if self.unit not in ("s", "dur") and self.value != int(self.value):
            raise DurationError(
                "this unit takes integers only",
                found=f"{self.value}{self.unit}",
                fix="round it",
            )

    def __repr__(self) -> str:
        return f"Duration('{self}')"

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    @property
    def counter(self) -> str:
        """The field of ``Progress`` that this duration is compared with."""
        if self.unit == "dur":
            raise DurationError(
                "a fraction of the run is not a count",
                found=str(self),
                fix='use a unit that is counted: "500ba"',
            )
        return _COUNTER[self.unit]

    @classmethod
    def parse(cls, length: DurationLike, unit: str | None = None) -> Duration:
        """Read a duration.

        Args:
            length: a ``Duration``, a string such as ``"3ep"``, a ``timedelta``, its arguments as a dict, time as
                ``"DD:HH:MM:SS"``, or a number of ``unit``.
            unit: what a bare number counts; None refuses bare numbers.
        """
        if isinstance(length, Duration):
            return length
        if isinstance(length, timedelta):
            return cls(length.total_seconds(), "s")
        if isinstance(length, Mapping):
            return cls(_seconds(length), "s")
        # True is an int, and a switch where a length belongs is a mistake.
        if isinstance(length, bool) or not isinstance(length, (int, float, str)):
            raise DurationError(
                "a duration must be a string with a unit, or a number",
                found=repr(length),
                fix='write "3ep", "5000ba", "2h", …',
            )
        if isinstance(length, (int, float)):
            if unit is None:
                raise DurationError(
                    "this duration needs a unit",
                    found=repr(length),
                    fix=f'write "{length}ep"',
                )
            return cls(_whole(length, unit), unit)
        if clock := _CLOCK.fullmatch(length):
            days, hours, minutes, seconds = map(int, clock.groups())
            length_in_seconds = timedelta(
                days=days, hours=hours, minutes=minutes, seconds=seconds
            ).total_seconds()
            return cls(length_in_seconds, "s")
        match = _PATTERN.fullmatch(length.lower())
        if match is None:
            raise DurationError(
                "this duration cannot be read",
                found=repr(length),
                fix='write "3ep", "5000ba", "1e9tok", "2h", "00:02:00:00", "0.3dur"',
            )
        number = float(match[1].replace("_", ""))
        name = match[2]
        abbreviation = _ABBREVIATIONS.get(name)
        if abbreviation is not None:
            raise DurationError(
                "units of a duration are abbreviated",
                found=repr(length),
                fix=f'write "{match[1]}{abbreviation}"',
            )
        if name in _SECONDS:
            return cls(number * _SECONDS[name], "s")
        return cls(_whole(number, name), name)

    def reached(self, progress: Progress) -> bool:
        """Whether ``progress`` has come this far.

        Args:
            progress: the counts of a fit.

        Raises:
            DurationError: the unit is ``dur``, a fraction of the run, which no count has.
        """
        return bool(getattr(progress, self.counter) >= self.value)


DurationLike = Duration | str | int | float | timedelta | Mapping[str, float]


def _seconds(parts: Mapping[str, float]) -> float:
    try:
        if not parts:
            raise TypeError("no unit")
        return timedelta(**parts).total_seconds()
    except TypeError as error:
        raise DurationError(
            "this is not a duration in units of time",
            found=f"{dict(parts)}",
            fix="use days, hours, minutes, seconds, …",
        ) from error


def _whole(number: float, unit: str) -> int | float:
    """An int where the unit is counted and the number is whole: 1e6 samples are 1000000."""
    if unit in ("s", "dur") or number % 1 != 0:
        return number
    return int(number)
