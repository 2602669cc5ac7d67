"""Collect the data of the page from a run's directory."""

from __future__ import annotations

import os
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import is_url
from trainer_kit.loggers.journal import journal_record
from trainer_kit.loggers.layout import flatten, plain
from trainer_kit.report.events import EVENTS, has_ended, read_events
from trainer_kit.state.records import RUN, read_records

__all__ = ["JOURNAL", "MOST_POINTS", "RunDirectory", "find_runs", "thinned"]

JOURNAL: Final = "journal.jsonl"
MOST_POINTS: Final = 200_000
"""The most points of a curve; a longer one keeps the lowest and the highest value of each interval."""
_FIELDS: Final = ("step", "time", "counts", "hparams")
_COUNTS: Final = ("samples", "tokens")  # further x-axes of curves, if the run has counted them
_KINDS: Final = {"hung": "hang", "killed": "killed"}  # marks of ends without an exception
_AT_ONCE: Final = 1000  # lines read between two pauses
_RATES: Final = 400  # points of the curve of steps per second

_Floats = npt.NDArray[np.float64]


class _Series:
    """The values of one metric, in the order in which they were logged."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("d"), array("d"), array("f")
        self.samples, self.tokens = array("d"), array("d")

    def append(self, step: float, time: float, value: float, counts: Mapping[str, Any]) -> None:
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        self.samples.append(_number(counts.get("samples")))
        self.tokens.append(_number(counts.get("tokens")))

    def cut(self, step: float) -> None:
        """Drop the values of steps after ``step``, which a restart repeats."""
        kept = np.array(self.steps) <= step
        if not kept.all():
            for name, values in list(vars(self).items()):
                setattr(self, name, array(values.typecode, np.array(values)[kept].tobytes()))


class _Fit:
    """One fit in a directory, with its restarts."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.series: dict[str, _Series] = {}
        self.hparams: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []


@final
class RunDirectory:
    """The content of a run's directory. Each `read` continues where the last one ended.

    Args:
        directory: a directory with a ``journal.jsonl``.

    Example:
        >>> import tempfile
        >>> from trainer_kit.loggers import JSONLLogger
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     JSONLLogger(directory, "", "").log_metrics({"loss": 0.5}, step=3)
        ...     run = RunDirectory(directory)
        ...     run.read()
        ...     [series["name"] for series in run.described()[0]["series"]]
        ['loss']
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._forget()

    def _forget(self) -> None:
        self._offset = self._inode = self._seen = 0
        self._fits = [_Fit("")]

    def read(self, pause: Callable[[], Any] = lambda: None) -> None:
        """Read the lines added to the journal and the events since the last call.

        Args:
            pause: called after every thousand lines.
        """
        journal = self.directory / JOURNAL
        if not journal.exists():
            self._take_events(read_events(self.directory), None)
            return
        with journal.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._forget()
            self._inode = status.st_ino
            events = read_events(self.directory)
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if self._seen < len(events):
                    self._take_events(events, self._offset)
                self._offset += len(line)
                self._take(line)
                if number % _AT_ONCE == 0:
                    pause()
        self._take_events(events, None)

    def _take_events(self, events: list[dict[str, Any]], offset: int | None) -> None:
        """Process events up to the first one after ``offset`` in the journal; None: all."""
        while self._seen < len(events):
            event = events[self._seen]
            at, fit = event.get("journal"), self._fits[-1]
            if offset is not None and isinstance(at, int) and at > offset:
                return
            self._seen += 1
            last = _last(fit.events)
            if event["event"] == "end" and last and last.get("status") == "hung":
                continue  # the error of a rank that waited for the one that hung
            if (
                event["event"] == "start"
                and last
                and last["event"] == "start"
                and _differ(last, event)
            ):
                fit.events.append(_killed(fit))
            if event["event"] == "start" and event.get("stage") == "fit":
                key, step = str(event.get("run", "")), _number(event.get("step"))
                if fit.events and fit.key != key and step == 0:
                    self._fits.append(fit := _Fit(key))
                elif fit.events:
                    for series in fit.series.values():
                        series.cut(step)
                fit.key = key
            fit.events.append(event)

    def _take(self, line: bytes) -> None:
        try:
            record = journal_record(line)
        except ValueError:  # skip a damaged line
            return
        fit = self._fits[-1]
        if isinstance(record.get("hparams"), dict):
            fit.hparams.update(record["hparams"])
        step, time = _number(record.get("step")), _number(record.get("time"))
        counts = record["counts"] if isinstance(record.get("counts"), dict) else {}
        for name, value in record.items():
            if name not in _FIELDS and isinstance(value, (int, float)):
                series = fit.series.get(name)
                if series is None:
                    series = fit.series[name] = _Series()
                series.append(step, time, value, counts)

    @property
    def finished(self) -> bool:
        """Whether no fit is running in the directory, according to its events."""
        return all(_status(_completed(fit)) != "running" for fit in self._fits[-1:])

    def described(self) -> list[dict[str, Any]]:
        """Return the data of the page, one entry per fit: plain data, arrays as base64."""
        several = len(self._fits) > 1
        return [
            self._described(
                fit,
                f"{self.directory.resolve().name or self.directory}{f', fit {n}' if several else ''}",
            )
            for n, fit in enumerate(self._fits, 1)
        ]

    def _described(self, fit: _Fit, name: str) -> dict[str, Any]:
        events = _completed(fit)
        starts = [event for event in events if event["event"] == "start"]
        fits = [event for event in starts if event.get("stage") == "fit"]
        ends = [event for event in events if event["event"] == "end"]
        times = [each.times[i] for each in fit.series.values() for i in (0, -1)]
        times += [_number(event.get("time")) for event in events]
        begun = min(times, default=0.0)
        curves, packed = _curves(fit.series, [_number(event.get("time")) for event in fits], begun)
        newest = (fits or starts or [{}])[-1]
        steps = [_number(event.get("step")) for event in events]
        steps += [max(each.steps) for each in fit.series.values() if each.steps]
        configuration = list(newest.get("configuration") or [])
        if not configuration:
            configuration = [
                ["Hyperparameters", key, value, "logged"]
                for key, value in flatten(fit.hparams).items()
            ]
        failed = [
            {"step": event.get("step"), **event["exception"]}
            for event in ends
            if event.get("exception")
        ]
        found: dict[str, Any] = {
            "name": name,
            "path": str(self.directory.resolve()),
            "title": str(newest.get("title") or name),
            "status": _status(events),
            "begun": begun,
            "seconds": max(times, default=0.0) - begun,
            "step": max(steps, default=0),
            "marks": sorted(self._marks(events, fit.key), key=lambda mark: mark["time"]),
            "configuration": plain(configuration),
            "explain": newest.get("explain") or "",
            "environment": newest.get("environment") or [],
            "exceptions": failed,
        }
        for mark in found["marks"]:
            mark["time"] -= begun
            mark.update(
                {
                    count: float(np.interp(mark["step"], *known))
                    for count, known in _counted(fit).items()
                }
            )
        return {**mask_secrets(found), "axes": packed, "series": curves}

    def _marks(self, events: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        marks = _marks(events)
        announced = {mark["text"] for mark in marks}
        marks += [mark for mark in self._kept(key) if mark["text"] not in announced]
        return [
            {**mark, "text": mark["text"].removeprefix(f"{self.directory.resolve()}{os.sep}")}
            for mark in marks
        ]

    def _kept(self, key: str) -> list[dict[str, Any]]:
        """Return the existing checkpoints: events name only those that a running fit has announced."""
        records = read_records(self.directory / RUN) or []
        places = [
            place for record in records if record.id == key or not key for place in record.places
        ]
        found = (
            one
            for place in dict.fromkeys(places)
            if not is_url(place)
            for one in checkpoints(place)
        )
        return [
            {
                "kind": "checkpoint",
                "step": one.step or 0,
                "time": one.created.timestamp(),
                "text": str(one.path),
            }
            for one in found
            if one.info.get("run", "") in ("", key)
        ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _last(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] in ("start", "end")), None)


def _status(events: list[dict[str, Any]]) -> str:
    last = _last(events)
    return (
        ""
        if last is None
        else "running"
        if last["event"] == "start"
        else str(last.get("status", ""))
    )


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two events are from different processes; older events do not record their process."""
    return one.get("process") is not None and one["process"] != other.get("process")


def _completed(fit: _Fit) -> list[dict[str, Any]]:
    """Return the events of a fit; add an end event if its process has ended without one."""
    last = _last(fit.events)
    gone = last is not None and last["event"] == "start" and has_ended(last.get("process"))
    return [*fit.events, _killed(fit)] if gone else fit.events


def _killed(fit: _Fit) -> dict[str, Any]:
    """Return the end event that a killed process could not record, with the time of its last record."""
    step = max((max(each.steps) for each in fit.series.values() if each.steps), default=0.0)
    times = [_number(event.get("time")) for event in fit.events]
    times += [each.times[-1] for each in fit.series.values() if each.times]
    text = f"ended from outside (SIGKILL, or its machine); the last logged values are of step {step:.0f}"
    exception = {"headline": text, "text": ""}
    return {
        "event": "end",
        "status": "killed",
        "step": step,
        "time": max(times, default=0.0),
        "exception": exception,
    }


def _marks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the marks on curves and in lists: restarts, evaluations, warnings, notes, exceptions."""
    marks, fits = [], 0
    for event in events:
        kind, step = event["event"], _number(event.get("step"))
        text, stage = str(event.get("text", "")), str(event.get("stage", ""))
        if kind == "start" and stage == "fit":
            fits += 1
            kind = "start" if fits == 1 else "restart"
            text = f"{'started' if fits == 1 else f'restart {fits - 1}'} at step {step:.0f}, {event.get('place', '')}"
        elif kind == "start":
            text = f"{stage} began"
        elif kind == "end":
            failure = event.get("exception")
            kind = _KINDS.get(str(event.get("status")), "exception") if failure else "end"
            text = str(failure.get("headline")) if failure else f"{stage} {event.get('status', '')}"
        marks.append({"kind": kind, "step": step, "time": _number(event.get("time")), "text": text})
    return marks


def _curves(
    series: dict[str, _Series], starts: list[float], begun: float
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return every series in the page's format, and the axes that they share.

    An axis has steps, seconds since ``begun``, and samples and tokens if the run has counted them.
    """
    curves: list[dict[str, Any]] = []
    packed: list[dict[str, str]] = []
    known: dict[bytes, int] = {}

    def add(
        name: str, steps: _Floats, xs: dict[str, _Floats], values: npt.NDArray[np.float32]
    ) -> None:
        finite = np.isfinite(values)
        bad = np.flatnonzero(~finite)
        low = int(np.where(finite, values, np.inf).argmin())
        high = int(np.where(finite, values, -np.inf).argmax())
        where = thinned(values)
        axis = {
            "steps": steps[where].astype("<f8"),
            "seconds": (xs["times"][where] - begun).astype("<f4"),
        }
        axis |= {count: xs[count][where].astype("<f8") for count in counted}
        number = known.setdefault(b"".join(each.tobytes() for each in axis.values()), len(packed))
        if number == len(packed):
            packed.append({kind: _base64(each) for kind, each in axis.items()})
        facts = {"last": values[-1], "low": values[low], "high": values[high]}
        curves.append(
            {
                "name": name,
                "axis": number,
                "values": _base64(values[where].astype("<f4")),
                "count": len(values),
                "bad": len(bad),
                "firstBad": float(steps[bad[0]]) if len(bad) else None,
                "lowStep": float(steps[low]),
                "highStep": float(steps[high]),
                **{
                    fact: float(value) if np.isfinite(value) else str(value)
                    for fact, value in facts.items()
                },
            }
        )

    counted = [
        count for count in _COUNTS if any(any(getattr(each, count)) for each in series.values())
    ]
    longest: tuple[_Floats, dict[str, _Floats]] = (np.array([]), {"times": np.array([])})
    for name, each in series.items():
        steps, xs = (
            np.array(each.steps),
            {kind: np.array(getattr(each, kind)) for kind in ("times", *counted)},
        )
        add(name, steps, xs, np.array(each.values, np.float32))
        longest = max(longest, (steps, xs), key=lambda one: len(one[0]))
    ends, rates = _rate(longest[0], longest[1]["times"], starts)
    if len(ends) > 1:
        add(
            "steps per second",
            longest[0][ends],
            {kind: each[ends] for kind, each in longest[1].items()},
            rates,
        )
    return curves, packed


def _counted(fit: _Fit) -> dict[str, tuple[_Floats, _Floats]]:
    """Return the steps and counts of the longest series, which place the marks."""
    longest = max(fit.series.values(), key=lambda each: len(each.steps), default=_Series())
    order = np.argsort(np.array(longest.steps), kind="stable")
    steps, found = (
        np.array(longest.steps)[order],
        {count: np.array(getattr(longest, count)) for count in _COUNTS},
    )
    return {count: (steps, values[order]) for count, values in found.items() if values.any()}


def _rate(
    steps: _Floats, times: _Floats, starts: Iterable[float]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Return steps per second between logged values, in at most `_RATES` intervals, and the values that end these.

    No interval spans a restart.
    """
    at = np.arange(0, len(steps), max(1, len(steps) // _RATES))
    sitting = np.searchsorted(np.array(sorted(starts)), times[at], side="right")
    forward = (np.diff(steps[at]) > 0) & (np.diff(times[at]) > 0) & (np.diff(sitting) == 0)
    rates = np.diff(steps[at])[forward] / np.diff(times[at])[forward]
    return at[1:][forward], rates.astype(np.float32)


def thinned(values: npt.NDArray[np.float32], most: int = MOST_POINTS) -> npt.NDArray[np.intp]:
    """Select the values to keep of a long curve: the lowest and highest of each interval, the first and the last.

    Args:
        values: the values of one series.
        most: the approximate number of values to keep.

    Example:
        >>> thinned(np.array([0, 5, 1, 1, 9, 1, 1, 1], np.float32), most=4).tolist()
        [0, 1, 4, 5, 7]
    """
    if len(values) <= most:
        return np.arange(len(values))
    length = -(-2 * len(values) // most)
    rows = -(-len(values) // length)
    low, high = (np.full(rows * length, fill, np.float32) for fill in (np.inf, -np.inf))
    low[: len(values)] = high[: len(values)] = values
    low[np.isnan(low)], high[np.isnan(high)] = np.inf, -np.inf
    first = np.arange(rows) * length
    picked = [
        first + low.reshape(rows, length).argmin(1),
        first + high.reshape(rows, length).argmax(1),
        np.array([0, len(values) - 1]),
    ]
    return np.unique(np.minimum(np.concatenate(picked), len(values) - 1))


def _base64(values: npt.NDArray[Any]) -> str:
    return b64encode(values.tobytes()).decode()


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the run directories in each path: the path itself, and those below it.

    Raises:
        ConfigurationError: a path contains no run directory.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(
            {file.parent for name in (JOURNAL, EVENTS) for file in path.rglob(name)}, key=_in_order
        )
        if not inside:
            fix = "name the directory that a Trainer prints as its log_dir, or one above it"
            raise ConfigurationError(
                f"{path} contains no run", found=f"no {JOURNAL} in this directory", fix=fix
            )
        found += inside
    return list(dict.fromkeys(found))


def _in_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that puts version_2 before version_10."""
    parts = str(path).replace("_", os.sep).split(os.sep)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
