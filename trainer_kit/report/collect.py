"""Collect the data of the page from a run's directory."""

from __future__ import annotations

import math
import os
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import is_url
from trainer_kit.core.types import JsonObject
from trainer_kit.loggers.journal import journal_record
from trainer_kit.loggers.layout import flatten, plain
from trainer_kit.report.events import EVENTS, has_ended, read_events
from trainer_kit.report.goodput import Goodput, account_of_run
from trainer_kit.report.pulse import take_pulse
from trainer_kit.state.records import RUN, read_records

__all__ = [
    "JOURNAL",
    "MOST_POINTS",
    "Event",
    "Mark",
    "RunDirectory",
    "find_runs",
    "thinned",
]

JOURNAL: Final = "journal.jsonl"
MOST_POINTS: Final = 200_000
"""The most points of a curve; a longer one keeps the lowest and the highest value of each interval."""
_FIELDS: Final = ("step", "time", "counts", "hparams")
_COUNTS: Final = ("samples", "tokens")
"""Further x-axes of curves, if the run has counted them."""
_MARK_OF_STATUS: Final = {"hung": "hang", "killed": "killed"}
"""Marks of ends without an exception."""
_LINES_BETWEEN_PAUSES: Final = 1000
_RATE_POINTS: Final = 400
"""Points of the curve of steps per second."""

Event: TypeAlias = JsonObject
"""A record of events.jsonl."""
Mark: TypeAlias = JsonObject
"""A mark on curves: its kind, step, time and text, and the counts of its step."""
_Floats: TypeAlias = npt.NDArray[np.float64]
_Float32s: TypeAlias = npt.NDArray[np.float32]
_Indices: TypeAlias = npt.NDArray[np.intp]


class _Series:
    """The values of one metric, in the order in which they were logged."""

    def __init__(self) -> None:
        # Arrays, not lists: a week's run has millions of values, and a list takes four times the memory.
        self.steps = array("d")
        self.times = array("d")
        self.values = array("d")
        self.samples = array("d")
        self.tokens = array("d")

    def append(
        self, step: float, time: float, value: float, counts: Mapping[str, object]
    ) -> None:
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        self.samples.append(_number(counts.get("samples")))
        self.tokens.append(_number(counts.get("tokens")))

    def cut(self, step: float) -> None:
        """Drop the values of steps after ``step``, which a restart repeats."""
        valid = np.array(self.steps) <= step
        if valid.all():
            return
        # Every column is cut by the same mask, so that index i stays one value in all of them.
        for name, values in list(vars(self).items()):
            content = np.array(values)[valid].tobytes()
            setattr(self, name, array(values.typecode, content))


class _Fit:
    """One fit in a directory, with its restarts."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.series: dict[str, _Series] = {}
        self.hparams: dict[str, object] = {}
        self.events: list[Event] = []

    @property
    def longest_series(self) -> _Series:
        """The series with the most values."""
        return max(
            self.series.values(),
            key=lambda series: len(series.steps),
            default=_Series(),
        )

    def cut(self, step: float) -> None:
        """Drop the values of steps after ``step``."""
        for series in self.series.values():
            series.cut(step)


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
        self._reset()

    def _reset(self) -> None:
        self._offset = 0
        self._inode = 0
        self._processed_events = 0
        self._fits = [_Fit("")]

    def read(self, pause: Callable[[], object] = lambda: None) -> None:
        """Read the lines added to the journal and the events since the last call.

        Args:
            pause: called after every thousand lines.
        """
        journal = self.directory / JOURNAL
        if not journal.exists():
            self._process_events(read_events(self.directory), None)
            return
        with journal.open("rb") as file:
            # Of the open file: the path may name another one by the time that it is read.
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode
            truncated = status.st_size < self._offset
            if replaced or truncated:
                self._reset()
            self._inode = status.st_ino
            events = read_events(self.directory)
            file.seek(self._offset)
            for number, line in enumerate(file, 1):
                # The writer has not finished this line: the next `read` starts with it.
                if not line.endswith(b"\n"):
                    break
                # Before the line: a restart that happened here cuts the values that come before it.
                if self._processed_events < len(events):
                    self._process_events(events, self._offset)
                self._offset += len(line)
                self._process_line(line)
                # Parsing holds the interpreter, which the training thread needs between two steps.
                if number % _LINES_BETWEEN_PAUSES == 0:
                    pause()
        self._process_events(events, None)

    def _process_events(self, events: list[Event], offset: int | None) -> None:
        """Process events up to the first one after ``offset`` in the journal; None: all."""
        while self._processed_events < len(events):
            event = events[self._processed_events]
            # Only the start of a fit has an offset; other events change no values, and need no order among them.
            journal_offset = event.get("journal")
            if offset is not None and isinstance(journal_offset, int):
                if journal_offset > offset:
                    return
            self._processed_events += 1
            self._process_event(event)

    def _process_event(self, event: Event) -> None:
        fit = self._fits[-1]
        previous = _last_boundary(fit.events)
        # The watchdog has ended the run already; this is the error of a rank that waited for the one that hung.
        if event["event"] == "end" and previous and previous.get("status") == "hung":
            return
        if event["event"] == "start":
            # Two starts of different processes without an end between them: the first process was killed.
            if previous and previous["event"] == "start" and _differ(previous, event):
                fit.events.append(_killed_event(fit))
            if event.get("stage") == "fit":
                fit = self._start_fit(event)
        fit.events.append(event)

    def _start_fit(self, event: Event) -> _Fit:
        """Return the fit that an event starts: a new one, or the last one from the step of its restart."""
        fit = self._fits[-1]
        key = str(event.get("run", ""))
        step = _number(event.get("step"))
        # Two signs of a new fit: another run's key, and no steps yet. A fit from a checkpoint continues the curves.
        if fit.events and fit.key != key and step == 0:
            fit = _Fit(key)
            self._fits.append(fit)
        elif fit.events:
            fit.cut(step)
        fit.key = key
        return fit

    def _process_line(self, line: bytes) -> None:
        try:
            record = journal_record(line)
        except ValueError:
            # A damaged line costs its own values, not the page.
            return
        fit = self._fits[-1]
        if isinstance(record.get("hparams"), dict):
            fit.hparams.update(record["hparams"])
        step = _number(record.get("step"))
        time = _number(record.get("time"))
        counts = record.get("counts")
        if not isinstance(counts, dict):
            counts = {}
        for name, value in record.items():
            if name in _FIELDS or not isinstance(value, (int, float)):
                continue
            series = fit.series.get(name)
            if series is None:
                series = fit.series[name] = _Series()
            series.append(step, time, value, counts)

    def read_events(self) -> None:
        """Read the events alone, without the logged values."""
        self._process_events(read_events(self.directory), None)

    def goodputs(self) -> list[Goodput | None]:
        """The account of time of each fit; None where it has recorded none."""
        pulse = take_pulse(self.directory)
        accounts = []
        for fit in self._fits:
            last_record = None
            if pulse is not None and _is_of_last_start(pulse, fit):
                last_record = pulse
            accounts.append(account_of_run(fit.events, last_record))
        return accounts

    @property
    def finished(self) -> bool:
        """Whether no fit is running in the directory, according to its events."""
        return _status(_completed_events(self._fits[-1])) != "running"

    def values(self) -> dict[str, tuple[_Floats, _Floats]]:
        """The steps and the values of the last fit by name, at most about `MOST_POINTS` of each."""
        columns = {}
        for name, series in self._fits[-1].series.items():
            values = np.array(series.values)
            selected = thinned(values.astype(np.float32))
            columns[name] = (np.array(series.steps)[selected], values[selected])
        return columns

    def described(self) -> list[JsonObject]:
        """Return the data of the page, one entry per fit: plain data, arrays as base64."""
        fits = zip(self.names(), self._fits, self.goodputs(), strict=True)
        return [self._describe_fit(fit, name, goodput) for name, fit, goodput in fits]

    def names(self) -> list[str]:
        """What a reader calls each fit."""
        name = self.directory.resolve().name or str(self.directory)
        if len(self._fits) == 1:
            return [name]
        return [f"{name}, fit {number}" for number in range(1, len(self._fits) + 1)]

    def _describe_fit(
        self, fit: _Fit, name: str, goodput: Goodput | None
    ) -> JsonObject:
        events = _completed_events(fit)
        starts = [event for event in events if event["event"] == "start"]
        fit_starts = [event for event in starts if event.get("stage") == "fit"]
        times = [_number(event.get("time")) for event in events]
        steps = [_number(event.get("step")) for event in events]
        for series in fit.series.values():
            times += [series.times[0], series.times[-1]]
            if series.steps:
                steps.append(max(series.steps))
        start_time = min(times, default=0.0)
        fit_start_times = [_number(event.get("time")) for event in fit_starts]
        time_rows: list[tuple[str, float, float]] = []
        if goodput is not None:
            time_rows = goodput.rows()
        curves = _Curves(fit.series, start_time)
        curves.add_all()
        curves.add_rate(fit.longest_series, fit_start_times)
        # A restart may have another configuration: the page shows the newest, of a fit if there is one.
        newest_start = (fit_starts or starts or [{}])[-1]
        description: JsonObject = {
            "name": name,
            "path": str(self.directory.resolve()),
            "title": str(newest_start.get("title") or name),
            "status": _status(events),
            "begun": start_time,
            "seconds": max(times, default=0.0) - start_time,
            "step": max(steps, default=0),
            "marks": self._marks_of_fit(fit, events, start_time),
            "configuration": plain(_configuration(newest_start, fit.hparams)),
            "explain": newest_start.get("explain") or "",
            "environment": newest_start.get("environment") or [],
            "exceptions": _exceptions(events),
            "goodput": time_rows,
        }
        # Without the curves: masking looks at every string, and theirs are megabytes of base64.
        masked: JsonObject = mask_secrets(description)
        return {**masked, "axes": curves.axes, "series": curves.curves}

    def _marks_of_fit(
        self, fit: _Fit, events: list[Event], start_time: float
    ) -> list[Mark]:
        """Return the marks in the order of their times, which count from the start, with a place on each axis."""
        counts = _counts_of_steps(fit.longest_series)
        marks = self._marks(events, fit.key)
        marks.sort(key=lambda mark: mark["time"])
        for mark in marks:
            mark["time"] -= start_time
            # Marks have no samples and tokens of their own: they lie between those of the logged steps around them.
            for count, (steps, values) in counts.items():
                mark[count] = float(np.interp(mark["step"], steps, values))
        return marks

    def _marks(self, events: list[Event], key: str) -> list[Mark]:
        # An event names a checkpoint by the same path as the directory does: each is shown once.
        marks = _event_marks(events)
        announced = {mark["text"] for mark in marks}
        for mark in self._checkpoint_marks(key):
            if mark["text"] not in announced:
                marks.append(mark)
        # Paths inside the run are shown relative to it; the comparison above needs whole ones.
        prefix = f"{self.directory.resolve()}{os.sep}"
        for mark in marks:
            mark["text"] = mark["text"].removeprefix(prefix)
        return marks

    def _checkpoint_marks(self, key: str) -> list[Mark]:
        """Return the existing checkpoints: events name only those that a running fit has announced."""
        # A dict as an ordered set: a resumed run records the same directory again.
        directories: dict[str, None] = {}
        for record in read_records(self.directory / RUN) or []:
            if record.id == key or not key:
                directories.update(dict.fromkeys(record.checkpoint_directories))
        marks: list[Mark] = []
        for directory in directories:
            # Listing remote storage may take seconds, and needs credentials that the reader of a report may lack.
            if is_url(directory):
                continue
            for checkpoint in checkpoints(directory):
                # Several runs may save to one directory.
                if checkpoint.info.get("run", "") not in ("", key):
                    continue
                mark = {
                    "kind": "checkpoint",
                    "step": checkpoint.step or 0,
                    "time": checkpoint.created.timestamp(),
                    "text": str(checkpoint.path),
                }
                marks.append(mark)
        return marks


def _is_of_last_start(pulse: JsonObject, fit: _Fit) -> bool:
    """Whether the process of a pulse is that of the last start of a fit, whose account no event has yet."""
    for event in reversed(fit.events):
        if event["event"] == "account":
            return False
        if event["event"] == "start" and event.get("stage") == "fit":
            return bool(event.get("process") == pulse.get("process"))
    return False


def _number(value: object) -> float:
    """The value as a float; 0 for anything else: the files may be of an older version, or edited."""
    if isinstance(value, (int, float)):
        return float(value)
    return 0.0


def _last_boundary(events: list[Event]) -> Event | None:
    """Return the last event that starts or ends something."""
    for event in reversed(events):
        if event["event"] in ("start", "end"):
            return event
    return None


def _status(events: list[Event]) -> str:
    boundary = _last_boundary(events)
    if boundary is None:
        return ""
    if boundary["event"] == "start":
        return "running"
    return str(boundary.get("status", ""))


def _differ(event: Event, other: Event) -> bool:
    """Whether two events are from different processes; older events do not record their process."""
    process = event.get("process")
    return process is not None and process != other.get("process")


def _completed_events(fit: _Fit) -> list[Event]:
    """Return the events of a fit; add an end event if its process has ended without one."""
    boundary = _last_boundary(fit.events)
    if boundary is None or boundary["event"] != "start":
        return fit.events
    if not has_ended(boundary.get("process")):
        return fit.events
    return [*fit.events, _killed_event(fit)]


def _killed_event(fit: _Fit) -> Event:
    """Return the end event that a killed process could not record, with the time of its last record."""
    step = max(
        (max(series.steps) for series in fit.series.values() if series.steps),
        default=0.0,
    )
    times = [_number(event.get("time")) for event in fit.events]
    times += [series.times[-1] for series in fit.series.values() if series.times]
    headline = (
        "ended from outside (SIGKILL, or its machine); "
        f"the last logged values are of step {step:.0f}"
    )
    return {
        "event": "end",
        "status": "killed",
        "step": step,
        "time": max(times, default=0.0),
        "exception": {"headline": headline, "text": ""},
    }


def _configuration(start: Event, hparams: Mapping[str, object]) -> list[list[object]]:
    """Return the rows of the configuration: those of the start event, or else the logged hyperparameters."""
    rows = list(start.get("configuration") or [])
    if rows:
        return rows
    return [
        ["Hyperparameters", key, value, "logged"]
        for key, value in flatten(hparams).items()
    ]


def _exceptions(events: list[Event]) -> list[JsonObject]:
    """Return the exceptions that ended something, each with its step."""
    exceptions = []
    for event in events:
        if event["event"] == "end" and event.get("exception"):
            exceptions.append({"step": event.get("step"), **event["exception"]})
    return exceptions


def _event_marks(events: list[Event]) -> list[Mark]:
    """Return the marks on curves and in lists: restarts, evaluations, warnings, notes, exceptions."""
    marks: list[Mark] = []
    fits = 0
    for event in events:
        kind = event["event"]
        # Seconds, which are a table of their own.
        if kind == "account":
            continue
        step = _number(event.get("step"))
        text = str(event.get("text", ""))
        stage = str(event.get("stage", ""))
        # Only fits count: a validation after a fit is no restart.
        if kind == "start" and stage == "fit":
            fits += 1
            verb = "started"
            if fits > 1:
                kind = "restart"
                verb = f"restart {fits - 1}"
            text = f"{verb} at step {step:.0f}, {event.get('place', '')}"
        elif kind == "start":
            text = f"{stage} began"
        elif kind == "end" and event.get("exception"):
            kind = _MARK_OF_STATUS.get(str(event.get("status")), "exception")
            text = str(event["exception"].get("headline"))
        elif kind == "end":
            text = f"{stage} {event.get('status', '')}"
        marks.append(
            {
                "kind": kind,
                "step": step,
                "time": _number(event.get("time")),
                "text": text,
            }
        )
    return marks


@final
class _Curves:
    """Every series of a fit in the page's format, and the axes that they share.

    An axis has steps, seconds since ``start_time``, and samples and tokens if the run has counted them.

    Args:
        series: by the name of the metric.
        start_time: seconds since 1970.
    """

    def __init__(self, series: Mapping[str, _Series], start_time: float) -> None:
        self.curves: list[JsonObject] = []
        self.axes: list[dict[str, str]] = []
        self._series = series
        self._start_time = start_time
        # Metrics that are logged together share their points, which the page holds once.
        self._axis_numbers: dict[bytes, int] = {}
        self._counts = []
        for count in _COUNTS:
            if any(any(getattr(values, count)) for values in series.values()):
                self._counts.append(count)

    def add_all(self) -> None:
        """Add the curve of each metric."""
        for name, series in self._series.items():
            self._add(name, self._axis_of(series), np.array(series.values, np.float32))

    def add_rate(self, series: _Series, restarts: list[float]) -> None:
        """Add the curve of steps per second between the values of a series.

        Args:
            series: the longest one.
            restarts: times of the starts of fits, which no interval spans.
        """
        axis = self._axis_of(series)
        ends, rates = _steps_per_second(axis["steps"], axis["times"], restarts)
        # One interval is a point, which shows no change of speed.
        if len(ends) > 1:
            rate_axis = {kind: values[ends] for kind, values in axis.items()}
            self._add("steps per second", rate_axis, rates)

    def _axis_of(self, series: _Series) -> dict[str, _Floats]:
        kinds = ("steps", "times", *self._counts)
        return {kind: np.array(getattr(series, kind)) for kind in kinds}

    def _add(self, name: str, axis: dict[str, _Floats], values: _Float32s) -> None:
        steps = axis["steps"]
        # Facts of all values, before thinning: the page states how many are not finite, and where the extremes are.
        finite = np.isfinite(values)
        bad = np.flatnonzero(~finite)
        low = int(np.where(finite, values, np.inf).argmin())
        high = int(np.where(finite, values, -np.inf).argmax())
        first_bad = None
        if len(bad):
            first_bad = float(steps[bad[0]])
        selected = thinned(values)
        curve = {
            "name": name,
            "axis": self._number_axis(axis, selected),
            "values": _base64(values[selected].astype("<f4")),
            "count": len(values),
            "bad": len(bad),
            "firstBad": first_bad,
            "lowStep": float(steps[low]),
            "highStep": float(steps[high]),
        }
        curve["last"] = _finite_or_text(values[-1])
        curve["low"] = _finite_or_text(values[low])
        curve["high"] = _finite_or_text(values[high])
        self.curves.append(curve)

    def _number_axis(self, axis: dict[str, _Floats], selected: _Indices) -> int:
        """Return the position in ``axes`` of the selected points, which are added if no curve has them yet."""
        # Little-endian: the page reads them as typed arrays, which have the byte order of nearly every machine.
        # Steps and counts need 53 bits; 24 bits of seconds are exact to a second in half a year.
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for kind, values in axis.items():
            points = values[selected]
            if kind == "times":
                seconds = points - self._start_time
                columns["seconds"] = seconds.astype("<f4")
            else:
                columns[kind] = points.astype("<f8")
        content = b"".join(column.tobytes() for column in columns.values())
        number = self._axis_numbers.setdefault(content, len(self.axes))
        if number == len(self.axes):
            encoded = {kind: _base64(column) for kind, column in columns.items()}
            self.axes.append(encoded)
        return number


def _finite_or_text(value: np.float32) -> float | str:
    """The number; NaN and infinity as text, which JSON cannot hold as numbers."""
    if np.isfinite(value):
        return float(value)
    return str(value)


def _counts_of_steps(series: _Series) -> dict[str, tuple[_Floats, _Floats]]:
    """Return the steps of a series in order, and the samples and tokens counted at each, which place the marks."""
    # `np.interp` needs ascending steps, and a user may log an earlier one.
    order = np.argsort(np.array(series.steps), kind="stable")
    steps = np.array(series.steps)[order]
    counts = {}
    for count in _COUNTS:
        values = np.array(getattr(series, count))
        # All zero: the run has not counted them, and its page gets no such axis.
        if values.any():
            counts[count] = (steps, values[order])
    return counts


def _steps_per_second(
    steps: _Floats, times: _Floats, starts: Iterable[float]
) -> tuple[_Indices, _Float32s]:
    """Return steps per second between logged values, in at most `_RATE_POINTS` intervals, and where these end.

    No interval spans a restart.
    """
    stride = max(1, len(steps) // _RATE_POINTS)
    points = np.arange(0, len(steps), stride)
    point_times = times[points]
    new_steps = np.diff(steps[points])
    seconds = np.diff(point_times)
    # The number of starts before a point; two points of different numbers have a pause between them.
    start_times = np.array(sorted(starts))
    starts_before = np.searchsorted(start_times, point_times, side="right")
    within_fit = np.diff(starts_before) == 0
    # A validation logs the same step twice, and the clock of a machine may be set back.
    moved_on = (new_steps > 0) & (seconds > 0)
    valid = moved_on & within_fit
    rates = new_steps[valid] / seconds[valid]
    return points[1:][valid], rates.astype(np.float32)


def thinned(values: _Float32s, most: int = MOST_POINTS) -> _Indices:
    """Select the values to keep of a long curve: the lowest and highest of each interval, the first and the last.

    Args:
        values: the values of one series.
        most: the approximate number of values to keep.

    Example:
        >>> thinned(np.array([0, 5, 1, 1, 9, 1, 1, 1], np.float32), most=4).tolist()
        [0, 1, 4, 5, 7]
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    # Each interval gives two values, so it has twice as many as one in `most` would.
    length = math.ceil(2 * count / most)
    low = _intervals(values, length, np.inf)
    high = _intervals(values, length, -np.inf)
    starts = length * np.arange(len(low))
    lowest = starts + low.argmin(axis=1)
    highest = starts + high.argmax(axis=1)
    ends = np.array([0, count - 1])
    selected = np.concatenate([lowest, highest, ends])
    # Sorted, each once. In an interval of NaN alone the search may select the padding behind the last value.
    return np.unique(selected.clip(max=count - 1))


def _intervals(values: _Float32s, length: int, neutral: float) -> _Float32s:
    """The values in rows of ``length``; ``neutral``, which no search selects, pads the last and means NaN."""
    rows = math.ceil(len(values) / length)
    padded = np.full(rows * length, neutral, np.float32)
    padded[: len(values)] = values
    padded[np.isnan(padded)] = neutral
    return padded.reshape(rows, length)


def _base64(values: npt.NDArray[np.generic]) -> str:
    return b64encode(values.tobytes()).decode()


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Return the run directories in each path: the path itself, and those below it.

    Raises:
        ConfigurationError: a path contains no run directory.
    """
    runs: list[Path] = []
    for path in map(Path, paths):
        # A run that was killed early, or that has no journal, still has events.
        files = [*path.rglob(JOURNAL), *path.rglob(EVENTS)]
        directories = {file.parent for file in files}
        if not directories:
            raise ConfigurationError(
                f"{path} contains no run",
                found=f"no {JOURNAL} in this directory",
                fix="name the directory that a Trainer prints as its log_dir, or one above it",
            )
        runs += sorted(directories, key=_natural_order)
    # A path may lie below another one: each run is returned once.
    return list(dict.fromkeys(runs))


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key that puts version_2 before version_10."""
    parts = str(path).replace("_", os.sep).split(os.sep)
    return [
        (0, int(component), "") if component.isdigit() else (1, 0, component)
        for component in parts
    ]
