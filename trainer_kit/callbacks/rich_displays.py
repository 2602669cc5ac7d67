"""`RichProgressBar` and `RichModelSummary`: the progress of a run and the table of its module, drawn by rich."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TextIO, final

from trainer_kit.callbacks.model_summary import ModelSummary, ModelSummaryTable
from trainer_kit.callbacks.progress_bar import (
    Line,
    PlainLine,
    ProgressBar,
    TerminalLine,
    View,
    new_bar,
    shown_values,
)
from trainer_kit.core.arguments import check_type
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.notebook import message_stream, widget_bar_class
from trainer_kit.core.protocols import TrainerLike

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RichModelSummary", "RichProgressBar", "RichProgressBarTheme"]

_TERMINAL_INTERVAL = 0.1


@final
@dataclass(frozen=True)
class RichProgressBarTheme:
    """Styles of a `RichProgressBar`, in rich's words (``"green"``, ``"bold #ff8800"``).

    Attributes:
        description: of the title.
        progress_bar: of the part that is done.
        progress_bar_finished: of the whole bar once everything is done.
        progress_bar_pulse: of the bar while the number of batches is unknown.
        batch_progress: of the count of batches.
        time: of the elapsed and the remaining time.
        processing_speed: of the batches a second.
        metrics: of the values.
        metrics_text_delimiter: between two values.
        metrics_format: a format specification for floats.

    Example:
        >>> RichProgressBarTheme(progress_bar="green").metrics_format
        '.3g'
    """

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3g"


class RichProgressBar(ProgressBar):
    """A colored bar on stderr; below it the values logged with ``prog_bar=True``, in as many lines as they need.

    What is not a terminal gets the plain lines of `TQDMProgressBar`. A notebook shows the bar in the output of the cell
    if ipywidgets is installed, otherwise the line of `TQDMProgressBar`.

    Args:
        refresh_rate: draw at most once in this many batches; 0 for never.
        leave: keep the finished bar of each epoch.
        theme: styles.
        console_kwargs: arguments of ``rich.console.Console``, such as ``{"file": sys.stdout, "width": 100}``.

    Raises:
        ConfigurationError: without rich, and for a negative number.

    A subclass may override what `ProgressBar` has, and `configure_columns`.

    Example:
        >>> RichProgressBar(refresh_rate=10, leave=True).refresh_rate
        10
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _require_rich(type(self).__name__)
        if refresh_rate < 0:
            raise ConfigurationError(
                "refresh_rate must be ≥ 0",
                found=f"refresh_rate={refresh_rate}",
            )
        check_type(
            "RichProgressBar",
            "theme",
            theme,
            RichProgressBarTheme | None,
            "RichProgressBarTheme | None",
        )
        super().__init__()
        self.refresh_rate = refresh_rate
        self.leave = leave
        self.theme = theme or RichProgressBarTheme()
        self._console_kwargs = dict(console_kwargs or {})

    def configure_columns(self, trainer: TrainerLike) -> Sequence[Any]:
        """The columns of the bar: rich's ``ProgressColumn`` objects, or format strings for its tasks.

        The fields of a task are ``{task.fields[batches]}``, ``{task.fields[time]}`` and ``{task.fields[speed]}``.

        Args:
            trainer: the running Trainer.
        """
        from rich.progress import BarColumn, TextColumn

        theme = self.theme
        bar = BarColumn(
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        return [
            TextColumn("{task.description}", style=theme.description or "none"),
            bar,
            TextColumn("{task.fields[batches]}", style=theme.batch_progress or "none"),
            TextColumn("{task.fields[time]}", style=theme.time),
            TextColumn("{task.fields[speed]}", style=theme.processing_speed),
        ]

    def _open_line(self, kind: str, title: str) -> tuple[Line | None, str]:
        console = self._new_console()
        if console.is_jupyter and widget_bar_class() is None:
            # rich draws in place by a widget only.
            return TerminalLine(new_bar("")), title
        if not (console.is_terminal or console.is_jupyter):
            return PlainLine(console.file), title  # type: ignore[arg-type]  # IO[str], of which it calls print alone
        columns = self.configure_columns(self.trainer)
        make_bars = _bars_class()
        bars = make_bars(self.theme.metrics, *columns, console=console)
        return _RichLine(bars, self.theme), title

    def _new_console(self) -> Console:
        from rich.console import Console

        if "file" in self._console_kwargs:
            # In a notebook rich would write to the cell instead.
            return Console(**{"force_jupyter": False, **self._console_kwargs})
        return Console(file=message_stream(), **self._console_kwargs)


@final
class _RichLine:
    """A bar and its values, drawn in place by rich's live display."""

    def __init__(self, bars: Any, theme: RichProgressBarTheme) -> None:
        self.due = 0.0
        self._bars = bars
        self._theme = theme
        self._task: Any = None

    def show(self, view: View) -> None:
        if self._task is None:
            self._task = self._bars.add_task(
                view.title, total=view.total, batches="", time="", speed=""
            )
            self._bars.start()
        self.draw(view, {})

    def draw(self, view: View, metrics: Mapping[str, object]) -> None:
        bars = self._bars
        theme = self._theme
        drawn_at = monotonic()
        self.due = drawn_at + _TERMINAL_INTERVAL
        elapsed = drawn_at - view.began
        rate = view.rate
        total = "?"
        if view.total is not None:
            total = str(view.total)
        remaining = "?"
        if view.total is not None and rate:
            remaining = _format_clock((view.total - view.done) / rate)
        values = shown_values(
            metrics, theme.metrics_text_delimiter, theme.metrics_format
        )
        bars.show_values(values)
        # rich counts from the first drawing; `began` leaves out the time of validations.
        task = next(task for task in bars.tasks if task.id == self._task)
        task.start_time = bars.get_time() - elapsed
        # Not by `update`, which ignores None: an unknown total pulses.
        task.total = view.total
        bars.update(
            self._task,
            description=view.title,
            completed=view.done,
            batches=f"{view.done}/{total}",
            time=f"{_format_clock(elapsed)} < {remaining}",
            speed=f"{rate:.2f} batch/s",
        )
        bars.refresh()

    def finish(self, view: View, metrics: Mapping[str, object]) -> None:
        self.draw(view, metrics)

    def write(self, text: str, end: str, file: TextIO | None) -> None:
        console = self._bars.console
        if file is None:
            file = sys.stdout
        # In a notebook below the bar, which has an output of its own.
        if console.is_jupyter:
            file.write(text + end)
        # On the terminal through rich, which moves the bar down.
        elif file.isatty() or file is console.file:
            console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
        else:
            file.write(text + end)

    def close(self, leave: bool) -> None:
        self._bars.live.transient = not leave
        self._bars.stop()


@cache
def _bars_class() -> Any:
    """rich's ``Progress`` with a text below it, imported when the first bar is drawn; it starts no thread."""
    from rich.progress import Progress
    from rich.text import Text

    class Bars(Progress):
        def __init__(self, style: str, *columns: Any, console: Any) -> None:
            # Before `super`, which renders.
            self._values = ""
            self._style = style
            super().__init__(
                *columns,
                console=console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )

        def get_renderables(self) -> Any:
            yield from super().get_renderables()
            if self._values:
                yield Text(self._values, style=self._style, overflow="fold")

        def show_values(self, text: str) -> None:
            self._values = text

    return Bars


def _format_clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes:02d}:{seconds:02d}"
    if hours:
        return f"{hours}:{text}"
    return text


def _require_rich(name: str) -> None:
    from lightning_utilities.core.imports import RequirementCache

    requirement = RequirementCache("rich>=13")
    if not requirement:
        raise ConfigurationError(
            f"{name} needs rich",
            found=str(requirement),
            fix="pip install 'trainer-kit[rich]'",
        )


@final
class RichModelSummary(ModelSummary):
    """`ModelSummary`, as a table of rich on stderr.

    Args:
        max_depth: levels of submodules; -1 for all, 0 prints nothing.
        header_style: of the names of the columns, in rich's words.

    Raises:
        ConfigurationError: without rich, and for another depth.

    Example:
        >>> RichModelSummary(max_depth=2).max_depth
        2
    """

    def __init__(self, max_depth: int = 1, header_style: str = "bold magenta") -> None:
        _require_rich(type(self).__name__)
        super().__init__(max_depth)
        self.header_style = header_style

    def show(self, table: ModelSummaryTable, costs: Sequence[str]) -> None:
        from rich.console import Console
        from rich.table import Table

        console = Console(file=message_stream())
        cells = table.cells()
        if table.rows:
            rich_table = Table(header_style=self.header_style)
            for name in cells[0]:
                justify: Literal["left", "right"] = "left"
                if name in ("Params", "FLOPs"):
                    justify = "right"
                rich_table.add_column(name, justify=justify, overflow="fold")
            for row in cells[1:]:
                rich_table.add_row(*row)
            console.print(rich_table, markup=False)
        for line in [*table.totals(), *costs]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
