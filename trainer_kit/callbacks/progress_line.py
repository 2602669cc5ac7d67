"""The line that `TQDMProgressBar` draws: in place on a terminal, else as lines of plain text now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Protocol, TextIO, final

__all__ = ["Line", "PlainLine", "TerminalLine", "View"]

_TERMINAL_INTERVAL: Final = 0.1
_PLAIN_INTERVAL: Final = 10.0
# Layouts of the line, the first that fits is drawn; None is tqdm's own, with the bar.
_OF_TOTAL: Final = (
    None,
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{desc}: {n_fmt}/{total_fmt}{postfix}",
)
_OF_UNKNOWN: Final = (None, "{desc}: {n_fmt} [{elapsed}{postfix}]", "{desc}: {n_fmt}{postfix}")


@dataclass
class View:
    """What the line is about.

    Attributes:
        title: such as ``Epoch 3``.
        total: batches in all, or None where nobody knows.
        first: batches done before it was shown.
        done: batches done by now.
        began: when it was shown, on the monotonic clock; later by as long as it was set aside.
    """

    title: str
    total: int | None
    first: int
    done: int
    began: float

    @property
    def rate(self) -> float:
        """Batches a second."""
        return (self.done - self.first) / max(monotonic() - self.began, 1e-9)


class Line(Protocol):
    """Where a `View` is drawn."""

    due: float
    """When it is to be drawn next, on the monotonic clock."""

    def show(self, view: View) -> None:
        """Be about ``view`` from now on."""

    def draw(self, view: View, metrics: Mapping[str, Any]) -> None:
        """It has moved."""

    def finish(self, view: View, metrics: Mapping[str, Any]) -> None:
        """It is complete."""

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        """Print above it."""

    def close(self, leave: bool) -> None:
        """Leave the terminal as it was, with or without the last state of the line."""


@final
class TerminalLine:
    """One line, drawn in place.

    Args:
        bar: a tqdm bar that has not been drawn. A ``bar_format`` of its own stays.
    """

    def __init__(self, bar: Any) -> None:
        self.due = 0.0
        self._bar, self._format = bar, bar.bar_format
        self._bar.delay = 0.0  # its constructor would have drawn an empty line
        if measure := self._bar.dynamic_ncols:
            # Terminals without a size (of containers, of recorders) say 0 by 0, and would be shown nothing.
            self._bar.dynamic_ncols = lambda stream: _sized(*measure(stream))

    def show(self, view: View) -> None:
        bar = self._bar
        bar.total, bar.initial, bar.desc = view.total, view.first, view.title
        self.draw(view, {})

    def draw(self, view: View, metrics: Mapping[str, Any]) -> None:
        now, bar = monotonic(), self._bar
        self.due = now + _TERMINAL_INTERVAL
        bar.n, bar.last_print_t = view.done, bar._time()
        bar.start_t = bar.last_print_t - (now - view.began)
        self._fit(metrics)
        bar.refresh()

    def _fit(self, metrics: Mapping[str, Any]) -> None:
        """Choose the longest form of the line that fits the terminal: first the decoration is dropped, then values."""
        bar = self._bar
        if self._format is not None:
            bar.postfix = _shown(metrics)
            return
        bar.bar_format = None
        facts = bar.format_dict
        columns = facts["ncols"] or math.inf
        # Losses are the last values to be dropped.
        names = sorted(metrics, key=lambda name: "loss" not in name)
        texts = [_shown(metrics)]
        texts += [
            f"{_shown({name: metrics[name] for name in names[:count]})}, ..." for count in range(len(names))[:0:-1]
        ]
        layouts = _OF_TOTAL if bar.total and bar.n <= bar.total else _OF_UNKNOWN
        for layout, text in [*((layout, texts[0]) for layout in layouts), *((layouts[-1], text) for text in texts[1:])]:
            bar.bar_format, bar.postfix = layout, text
            drawn = bar.format_meter(**{**facts, "ncols": None, "bar_format": layout, "postfix": text})
            if len(drawn) <= columns:
                return
        shortest = _shown({name: metrics[name] for name in names[:1]}) or bar.desc
        bar.bar_format = shortest[: int(columns)].replace("{", "{{").replace("}", "}}")

    def finish(self, view: View, metrics: Mapping[str, Any]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        self._bar.write(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        self._bar.leave = leave
        self._bar.close()


@final
class PlainLine:
    """A line of text at most every ten seconds, and one whenever something is complete."""

    def __init__(self, file: TextIO) -> None:
        self.due = monotonic() + _PLAIN_INTERVAL
        self._file = file

    def show(self, view: View) -> None:
        """Nothing to tell yet."""

    def draw(self, view: View, metrics: Mapping[str, Any]) -> None:
        self.due = monotonic() + _PLAIN_INTERVAL
        total = "" if view.total is None else f"/{view.total}"
        values = _shown(metrics)
        line = f"{view.title}: {view.done}{total} batches, {view.rate:.4g}/s{', ' * bool(values)}{values}"
        print(line, file=self._file, flush=True)

    def finish(self, view: View, metrics: Mapping[str, Any]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        print(text, end=end, file=file)

    def close(self, leave: bool) -> None:
        """Nothing stays open."""


def _sized(columns: int | None, rows: int | None) -> tuple[int | None, int | None]:
    return 80 if columns == 0 else columns, 24 if rows == 0 else rows


def _shown(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_number(value)}" for name, value in metrics.items())


def _number(value: Any) -> str:
    if not isinstance(value, float) and hasattr(value, "item"):
        value = value.item()  # of `get_metrics`: sync point
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1e6 else f"{value:.3e}"
