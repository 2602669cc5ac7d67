"""`CSVLogger`: a table of metrics with one row per step and one column per metric."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from trainer_kit.core.atomic_files import discard_torn, replace_file
from trainer_kit.core.errors import ConfigurationError, LogError
from trainer_kit.core.types import HyperParameters
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    DirectoryLogger,
    LoggedValues,
    numbers,
    with_lock,
)

__all__ = ["CSVExperiment", "CSVLogger"]

_Row: TypeAlias = dict[str, Any]
"""Values by column: numbers of this process, text of the file."""


@final
class CSVLogger(DirectoryLogger):
    """Write ``metrics.csv`` and ``hparams.json``.

    The table has one row per step, in order of steps; values of the same step are merged, even with those of an earlier
    run of the same version. Values of ``validate`` or ``test`` after a fit get a separate row if they would overwrite
    values of the fit. A metric that appears later becomes a new column.

    Args:
        save_dir: the directory of all experiments.
        name: the experiment; empty for ``save_dir`` itself.
        version: an int, a name, empty for no version directory, or None for the next free number.
        prefix: the start of metric names, followed by ``-``.
        flush_logs_every_n_steps: the most steps to buffer in memory.

    Raises:
        ConfigurationError: ``flush_logs_every_n_steps`` is less than 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     logger = CSVLogger(directory)
        ...     logger.log_metrics({"loss": 0.5}, step=0)
        ...     logger.log_metrics({"loss": 0.25, "acc": 0.75}, step=1)
        ...     logger.save()
        ...     print(logger.path.read_text(), end="")
        step,loss,acc
        0,0.5,
        1,0.25,0.75
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version)
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                "flush_logs_every_n_steps is at least 1",
                found=f"flush_logs_every_n_steps={flush_logs_every_n_steps}",
            )
        self._prefix = prefix
        self._flush_every = flush_logs_every_n_steps
        # by step, the values that are not in the file yet
        self._waiting: dict[int, _Row] = {}
        self._table: _Table | None = None
        self._step: int | None = None
        # the last row of an entry point that has returned
        self._ended: tuple[Path, int] | None = None

    @property
    def path(self) -> Path:
        """The file; it may not exist yet."""
        return Path(self.log_dir) / "metrics.csv"

    @property
    def experiment(self) -> CSVExperiment:
        """The files of this logger, with the attributes of Lightning's writer."""
        return CSVExperiment(self)

    def waiting_rows(self) -> list[_Row]:
        """The rows that are not written yet, in order of steps."""
        return [{**row, "step": step} for step, row in sorted(self._waiting.items())]

    @with_lock
    def log_metrics(self, metrics: LoggedValues, step: int | None = None) -> None:
        """Add the values to the row of ``step``.

        Args:
            metrics: numbers, or tensors of one element.
            step: the step of the values; None for the value called ``step``, else for a new row after the last one.
                The column ``step`` holds this step, so it replaces a value of that name, as in Lightning.

        Raises:
            LogError: a value is not one number.
        """
        values = numbers(metrics, self._prefix)
        logged_step = values.pop("step", None)
        if step is None and logged_step is not None:
            step = int(logged_step)
        if not values:
            return
        self._opened = True
        if step is None:
            step = self._next_step()
        self._step = int(step)
        self._waiting.setdefault(self._step, {}).update(values)
        # The span of steps, not the number of rows: the argument counts steps, as in Lightning.
        steps = max(self._waiting) - min(self._waiting) + 1
        if steps >= self._flush_every:
            self.save()

    def _next_step(self) -> int:
        """The step after that of the last call, or of the last row of an earlier run of this version."""
        if self._step is None:
            self._step = _Table(self.path).last_step
        if self._step is None:
            return 0
        return self._step + 1

    @with_lock
    def log_hyperparams(
        self, params: object, metrics: LoggedValues | None = None
    ) -> None:
        """Write the hyperparameters to ``hparams.json``, and log ``metrics`` at step 0.

        Args:
            params: a mapping, a Namespace or a dataclass.
            metrics: values for comparing runs.
        """
        self._record_hparams(params)
        if metrics:
            self.log_metrics(metrics, 0)

    @with_lock
    def save(self) -> None:
        """Write the buffered values."""
        if not self._waiting:
            return
        self._directory()
        table = self._table or _Table(self.path)
        # After a failed write, the file is read again.
        self._table = None
        separate_step = None
        if self._ended is not None:
            path, step = self._ended
            if path == self.path:
                separate_step = step
        table.merge(self._waiting, separate_step)
        self._table = table
        self._waiting = {}
        self._ended = None

    @with_lock
    def finalize(self, status: str) -> None:
        """Write the buffered values.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``: after ``"success"``, later values of the last step
                get a row of their own.
        """
        self.save()
        if status == "success" and self._table is not None:
            last_step = self._table.last_step
            if last_step is not None:
                self._ended = (self.path, last_step)
        self._table = None
        if self._version is not None:
            discard_torn(self.path)


@final
class CSVExperiment:
    """The files of a `CSVLogger`, under the names of Lightning's writer.

    Args:
        logger: the logger.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     experiment = CSVLogger(directory).experiment
        ...     experiment.log_metrics({"loss": 0.5}, step=3)
        ...     print(experiment.metrics)
        [{'loss': 0.5, 'step': 3}]
    """

    NAME_METRICS_FILE: Final = "metrics.csv"

    def __init__(self, logger: CSVLogger) -> None:
        self._logger = logger

    @property
    def log_dir(self) -> str:
        """The directory of the files."""
        return self._logger.log_dir

    @property
    def metrics_file_path(self) -> str:
        """The table."""
        return str(self._logger.path)

    @property
    def metrics(self) -> list[_Row]:
        """The rows that `save` writes next."""
        return self._logger.waiting_rows()

    @property
    def hparams(self) -> HyperParameters:
        """The hyperparameters."""
        return self._logger.hparams

    def log_hparams(self, params: HyperParameters) -> None:
        """Add hyperparameters."""
        self._logger.log_hyperparams(params)

    def log_metrics(self, metrics_dict: LoggedValues, step: int | None = None) -> None:
        """Add the values to the row of ``step``."""
        self._logger.log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Write the rows."""
        self._logger.save()


class _Table:
    """``metrics.csv``: its columns, and its last row, so that later values of that step can be added to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = ["step"]
        self._last: _Row | None = None
        # where the last row begins, in bytes
        self._start = 0
        data = b""
        if path.exists():
            data = path.read_bytes()
        length = data.rfind(b"\n") + 1
        # Drop a row that a machine crash cut short: it would become one row with the next.
        if length != len(data):
            os.truncate(path, length)
        rows = self._read()
        if rows:
            self._last = rows[-1]
            self._start = data.rfind(b"\n", 0, length - 1) + 1

    @property
    def last_step(self) -> int | None:
        """The step of the last row."""
        if self._last is None:
            return None
        return int(self._last["step"])

    def merge(self, rows: dict[int, _Row], separate_step: int | None) -> None:
        """Write ``rows``, each merged with the row of its step in the file.

        Values of step ``separate_step`` get a separate row if they would overwrite others.
        """
        last = self.last_step
        if separate_step is not None and not self._overwrites(rows, separate_step):
            separate_step = None
        # A dict as an ordered set: columns of the file first, then new ones in the order they were logged.
        columns = dict.fromkeys(self._columns)
        for row in rows.values():
            columns.update(dict.fromkeys(row))
        # A new column changes the header, and an earlier step the order of rows; otherwise rows are only appended.
        if last is None or list(columns) != self._columns or min(rows) < last:
            self._rewrite(rows, list(columns), separate_step)
            return
        merges = last in rows and last != separate_step
        if merges:
            # The merged values stay in the buffer too, in case this write fails.
            rows[last] = {**_cells(self._last), **rows[last]}
        lines = [self._line({"step": step, **rows[step]}) for step in sorted(rows)]
        with open(self._path, "r+b") as file:
            if merges:
                file.seek(self._start)
            else:
                file.seek(0, os.SEEK_END)
            file.write(b"".join(lines))
            length = file.tell()
            # The row that was written over may have been longer.
            file.truncate()
        newest_step = max(rows)
        self._last = {"step": newest_step, **rows[newest_step]}
        self._start = length - len(lines[-1])

    def _overwrites(self, rows: Mapping[int, _Row], step: int) -> bool:
        """Whether the values of ``step`` differ from values of the last row."""
        # As text: the cells of a row that was read from the file are text.
        cells = _cells(self._last)
        values = rows.get(step, {})
        return any(
            name in cells and str(cells[name]) != str(value)
            for name, value in values.items()
        )

    def _rewrite(
        self,
        rows: dict[int, _Row],
        columns: list[str],
        separate_step: int | None,
    ) -> None:
        # A step may have two rows already, of a fit and of a validate after it: values go to the newer one.
        merged = [(int(row["step"]), _cells(row)) for row in self._read()]
        newest = {step: values for step, values in merged if step != separate_step}
        for step, values in rows.items():
            if step in newest:
                newest[step].update(values)
            else:
                merged.append((step, values))
        # The sort is stable, so the rows of one step keep their order.
        merged.sort(key=itemgetter(0))
        self._columns = columns
        lines = [self._line({name: name for name in columns})]
        for step, values in merged:
            lines.append(self._line({"step": step, **values}))
        replace_file(self._path, b"".join(lines))
        last_step, values = merged[-1]
        self._last = {"step": last_step, **values}
        self._start = sum(map(len, lines[:-1]))

    def _read(self) -> list[_Row]:
        if not self._path.exists():
            return []
        with open(self._path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            try:
                rows = list(reader)
                steps_are_whole = all(row["step"].isdigit() for row in rows)
            # No column of steps, a row that ends before it (None has no isdigit), or no CSV at all.
            except (KeyError, AttributeError, csv.Error):
                steps_are_whole = False
            names = list(reader.fieldnames or ["step"])
        problem = None
        if "step" not in names:
            problem = f"its columns are {', '.join(names)}"
        elif not steps_are_whole:
            problem = "a row without a whole step"
        if problem is not None:
            raise LogError(
                f"{self._path} is not a table of metrics",
                found=problem,
                fix="choose another version, or move the file",
            )
        self._columns = names
        return rows

    def _line(self, row: Mapping[str, object]) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([row.get(name, "") for name in self._columns])
        return text.getvalue().encode()


def _cells(row: _Row | None) -> _Row:
    """The values of a row, without its step and without empty cells."""
    return {
        name: value
        for name, value in (row or {}).items()
        if name != "step" and value not in ("", None)
    }
