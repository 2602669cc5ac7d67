"""`History`: the values that a run has logged, as a small table; `InlineReport`: its page inside a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.notebook import html_page, html_table
from trainer_kit.report.collect import RunDirectory
from trainer_kit.state.records import REPORT
from trainer_kit.training.session import Session

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

__all__ = ["History", "InlineReport", "trainer_table"]

_SHOWN_ROWS: Final = 10
_Row: TypeAlias = dict[str, float]
_Floats: TypeAlias = npt.NDArray[np.float64]


@final
class History:
    """The logged values of a run, one row for each step at which something was logged.

    They are read from the run's journal when the table is created: it does not grow while the run continues, and a
    resumed run has the rows before its restart too. A name that was logged more than 200,000 times has the lowest and
    the highest value of each interval. A name that was logged twice at one step has its last value.

    Args:
        series: by name, the steps and the values of each.

    Attributes:
        names: of the values, in the order in which they were first logged.

    Example:
        >>> history = History({"loss": ([1, 2], [0.5, 0.25]), "val_loss": ([2], [0.125])})
        >>> list(history)
        [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.25, 'val_loss': 0.125}]
        >>> history
        step  loss  val_loss
        1     0.5
        2     0.25  0.125
        >>> [row["loss"] for row in history if row["step"] > 1]
        [0.25]
    """

    def __init__(
        self, series: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]]
    ) -> None:
        self.names = list(series)
        all_steps = [np.empty(0, np.int64)]
        for steps, _ in series.values():
            all_steps.append(np.asarray(steps, np.int64))
        self._steps = np.unique(np.concatenate(all_steps))
        self._values: dict[str, _Floats] = {}
        self._is_logged: dict[str, npt.NDArray[np.bool_]] = {}
        count = len(self._steps)
        for name, (steps, values) in series.items():
            rows = np.searchsorted(self._steps, steps)
            column = np.full(count, np.nan)
            column[rows] = values
            self._values[name] = column
            # NaN may be a logged value.
            is_logged = np.zeros(count, bool)
            is_logged[rows] = True
            self._is_logged[name] = is_logged

    @staticmethod
    def read_fit(trainer: Session) -> History:
        """The values of a Trainer's last fit.

        Args:
            trainer: the Trainer; its journal is read at this call.

        Raises:
            ConfigurationError: the Trainer has no logger, so there is no journal.
        """
        _check_logs(trainer, "history", "values are read from the journal of the run")
        return History.read(trainer.run_dir)

    @staticmethod
    def read(directory: str | os.PathLike[str]) -> History:
        """Read the last fit in a run's directory.

        Args:
            directory: that of a run, with its ``journal.jsonl``. Without a journal the table is empty.

        Raises:
            OSError: the journal cannot be read.
        """
        run = RunDirectory(directory)
        run.read()
        return History(run.values())

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[_Row]:
        for index in range(len(self)):
            yield self[index]

    def __getitem__(self, index: int) -> _Row:
        """The row at a position: its ``step``, and the values that were logged at it, by name.

        Raises:
            ConfigurationError: ``index`` is a slice or a name.
        """
        if isinstance(index, (slice, str)):
            raise ConfigurationError(
                "history[...] takes the position of a row",
                found=f"history[{index!r}]",
                fix="list(history)[-10:] for several rows, history.to_pandas()[name] for a column",
            )
        row: _Row = {"step": int(self._steps[index])}
        for name, column in self._values.items():
            if self._is_logged[name][index]:
                row[name] = float(column[index])
        return row

    def to_pandas(self) -> DataFrame:
        """A ``pandas.DataFrame`` with a column for each name, indexed by step; NaN where a name was not logged.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigurationError(
                "to_pandas needs pandas",
                found=str(error),
                fix="pip install pandas, or iterate over the rows: each is a dict",
            ) from error
        index = pandas.Index(self._steps, name="step")
        return pandas.DataFrame(self._values, index=index)

    def plot(self, *names: str) -> Axes:
        """Draw curves over the steps with matplotlib, and return its ``Axes``.

        Args:
            names: what to draw; without names everything but the epoch.

        Raises:
            ConfigurationError: matplotlib is not installed, or nothing was logged by such a name.
        """
        for name in names:
            if name not in self.names:
                raise ConfigurationError(
                    f"nothing was logged as {name!r}",
                    found=", ".join(self.names) or "no values",
                    fix=did_you_mean(name, self.names),
                )
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ConfigurationError(
                "plot needs matplotlib",
                found=str(error),
                fix="pip install matplotlib, or open the run's report, which has these curves",
            ) from error
        _, axes = pyplot.subplots()
        drawn = list(names)
        if not drawn:
            drawn = [name for name in self.names if name != "epoch"]
        for name in drawn:
            is_logged = self._is_logged[name]
            steps = self._steps[is_logged]
            values = self._values[name][is_logged]
            marker = ""
            # A line through one point draws nothing.
            if len(values) == 1:
                marker = "o"
            axes.plot(steps, values, marker=marker, label=name)
        axes.set_xlabel("step")
        if drawn:
            axes.legend()
        return axes

    def _cells(self) -> list[list[str]]:
        """The last rows as texts."""
        first = max(0, len(self) - _SHOWN_ROWS)
        rows = []
        for index in range(first, len(self)):
            row = self[index]
            cells = [str(row["step"])]
            for name in self.names:
                text = ""
                if name in row:
                    text = f"{row[name]:.6g}"
                cells.append(text)
            rows.append(cells)
        return rows

    def _title(self) -> str:
        rows = plural(len(self), "row")
        if len(self) > _SHOWN_ROWS:
            return f"the last {_SHOWN_ROWS} of {rows}"
        return rows

    def __repr__(self) -> str:
        rows = [["step", *self.names], *self._cells()]
        widths = []
        for column in zip(*rows, strict=True):
            widths.append(max(map(len, column)))
        lines = []
        if len(self) > _SHOWN_ROWS:
            lines.append(self._title())
        for row in rows:
            line = ""
            for cell, width in zip(row, widths, strict=True):
                line += f"{cell:{width}}  "
            lines.append(line.rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ["step", *self.names]
        return html_table(self._title(), self._cells(), heads)


@final
class InlineReport:
    """The report of a run: a notebook shows the page in the output of a cell, anything else its path.

    Args:
        directory: that of the run.

    Attributes:
        path: the file, which a fit with a logger writes.

    Example:
        >>> InlineReport("run").path.name
        'report.html'
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / REPORT

    @staticmethod
    def locate(trainer: Session) -> InlineReport:
        """The page of a Trainer's run.

        Args:
            trainer: the Trainer; the page need not exist yet.

        Raises:
            ConfigurationError: the Trainer has no logger, so there is no page.
        """
        _check_logs(trainer, "report", "the page is in the directory of the logs")
        return InlineReport(trainer.run_dir)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        if not self.path.exists():
            return html_table("Report", [("not written yet", self.path)])
        return html_page(self.path.read_text(encoding="utf-8"))


def _check_logs(trainer: Session, name: str, reason: str) -> None:
    if not trainer.files.loggers:
        raise ConfigurationError(
            f"trainer.{name} needs a logger: {reason}",
            found="a Trainer without a logger",
            fix="Trainer(logger=True), the default",
        )


def trainer_table(trainer: Session) -> str:
    """The parts, counts and values of a Trainer, as a small table of HTML."""
    strategy = type(trainer.strategy).__name__
    callbacks = [type(callback).__name__ for callback in trainer.callbacks]
    loggers = [type(logger).__name__ for logger in trainer.loggers]
    facts: dict[str, object] = {
        "strategy": strategy,
        "precision": trainer.precision,
        "processes": trainer.world_size,
        "callbacks": ", ".join(callbacks),
        "loggers": ", ".join(loggers),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
    }
    for name, value in trainer.callback_metrics.items():
        facts[name] = f"{float(value):.6g}"  # sync point
    return html_table("Trainer", facts.items())
