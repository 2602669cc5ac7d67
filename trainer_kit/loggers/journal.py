"""`JSONLLogger`: one line of JSON per call, on disk at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

from trainer_kit.core.errors import LogError
from trainer_kit.core.types import JsonObject, StateDict
from trainer_kit.loggers.layout import (
    DEFAULT_NAME,
    DirectoryLogger,
    LoggedValues,
    numbers,
    params_dict,
    plain,
    with_lock,
)

__all__ = ["JSONLLogger", "journal_record", "read_journal"]

_FIELDS: Final = ("counts", "hparams", "step", "time")
_SPECIAL: Final = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


_INCOMPLETE: Final = b" <incomplete>\n"
"""Ends a line that a crash or a full disk has cut; no JSON object ends so."""
_WRITE_SECONDS: Final = 0.01
"""Seconds after which another process has written the line that it was writing."""


@final
class JSONLLogger(DirectoryLogger):
    """Write ``journal.jsonl``: one JSON object per line, with ``step``, ``time`` and the metrics.

    Every call appends one complete line without buffering, so logged values survive a crash of the process.
    Hyperparameters are a line ``{"time": …, "hparams": {…}}``. NaN and infinities are the texts ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``. A Trainer adds the samples and tokens so far as ``counts``. Several processes of
    one machine can append to one file. A line that a crash or a full disk has cut stays, and is ended by
    ``<incomplete>``.

    Args:
        save_dir: the directory of all experiments.
        name: the experiment; empty for ``save_dir`` itself.
        version: an int, a name, empty for no version directory, or None for the next free number.
        prefix: the start of metric names, followed by ``-``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     logger = JSONLLogger(directory, name="", version="")
        ...     logger.log_metrics({"loss": 0.5}, step=3)
        ...     [record["loss"] for record in read_journal(logger.path)]
        [0.5]
    """

    # A default of the class, for `__del__` of an object whose constructor failed.
    _file: int | None = None

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(save_dir, name, version)
        self._prefix = prefix
        self._step = 0
        self._file: int | None = None
        self._path: str | None = None
        # These two identify the file as this process left it: see `_open`.
        self._inode = 0
        self._size = 0
        self.line = 0
        """The byte offset of the last line."""

    @property
    def path(self) -> Path:
        """The file; it may not exist yet."""
        return Path(self.log_dir) / "journal.jsonl"

    @with_lock
    def log_metrics(
        self,
        metrics: LoggedValues,
        step: int | None = None,
        counts: Mapping[str, int] | None = None,
        at: float | None = None,
    ) -> None:
        """Append the values.

        Args:
            metrics: numbers, or tensors of one element. A metric with a reserved name (``step``, ``time``, ``counts``,
                ``hparams``) is written as ``metric/step`` and so on.
            step: the step of the values; None for that of the previous call.
            counts: samples and tokens trained on so far, by name.
            at: when the values were logged, in seconds since 1970; None for now. A Trainer writes the journal on a
                separate thread, later than the step.

        Raises:
            LogError: a value is not one number.
        """
        values = numbers(metrics, self._prefix)
        if step is not None:
            self._step = step
        if not values:
            return
        if at is None:
            at = time.time()
        record: dict[str, object] = {"step": self._step, "time": at}
        if counts:
            record["counts"] = dict(counts)
        for name, value in values.items():
            # Otherwise a metric called `time` would replace the time of its own record.
            key = f"metric/{name}" if name in _FIELDS else name
            record[key] = value
        self._append(record)

    @with_lock
    def log_hyperparams(
        self, params: object, metrics: LoggedValues | None = None
    ) -> None:
        """Append the hyperparameters unless all of them are already written, then log ``metrics`` at step 0.

        Args:
            params: a mapping, a Namespace or a dataclass.
            metrics: values for comparing runs.
        """
        hparams = plain(params_dict(params))
        changed = any(
            name not in self.hparams or self.hparams[name] != value
            for name, value in hparams.items()
        )
        if changed:
            self._append({"time": time.time(), "hparams": hparams})
            self.hparams.update(hparams)
        if metrics:
            self.log_metrics(metrics, 0)

    @with_lock
    def save(self) -> None:
        """Sync the file to disk, so that it survives a crash of the machine."""
        if self.path.exists():
            with open(self.path, "r+b") as file:
                os.fsync(file.fileno())

    @with_lock
    def finalize(self, status: str) -> None:
        """Sync the file to disk and close it; a later call opens it again.

        Args:
            status: ``"success"``, ``"failed"`` or ``"interrupted"``; no difference here.
        """
        self.save()
        self._close()

    def _append(self, record: Mapping[str, object]) -> None:
        text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False)
        line = f"{text}\n".encode()
        file, end_of_previous = self._open()
        addition = end_of_previous + line
        # One system call for a whole line: a process that is killed leaves all of it or nothing.
        written = os.write(file, addition)
        line_end = os.lseek(file, 0, os.SEEK_CUR)
        if written != len(addition):
            # What the full disk took stays: to cut it could cut a line that another process has appended.
            raise OSError(f"{self.path}: no space left for a line of {len(line)} bytes")
        # Where the line really is: an evaluation beside the run may have appended one meanwhile.
        self.line = line_end - len(line)
        self._size = line_end

    def read_values(self, line: int) -> tuple[JsonObject, int, float]:
        """Read what one call of ``log_metrics`` wrote.

        Args:
            line: the byte offset of its line.

        Returns:
            The metrics, their step, and when they were logged.

        Raises:
            OSError: the file cannot be read.
            LogError: the journal has no line of metrics.
        """
        with open(self.path, "rb") as file:
            file.seek(line)
            text = file.readline()
        try:
            record = journal_record(text)
            step = record.pop("step")
            logged_time = record.pop("time")
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(
                f"{self.path} has no values at byte {line}", found=str(error)
            ) from error
        # What remains are the metrics, under the names that the other loggers get.
        record.pop("counts", None)
        prefix = f"{self._prefix}-" if self._prefix else ""
        metrics = {
            name.removeprefix("metric/").removeprefix(prefix): value
            for name, value in record.items()
        }
        return metrics, step, logged_time

    def _open(self) -> tuple[int, bytes]:
        """Return the open file, and what ends an incomplete last line of it.

        It is opened again if it was moved, or does not end with the last line of this logger.
        """
        path = self._path
        if self._file is not None and path is not None:
            try:
                # A stat for each line: a run that was moved or copied back must not be written to the old file.
                status = os.stat(path)
                if (status.st_ino, status.st_size) == (self._inode, self._size):
                    return self._file, b""
            except FileNotFoundError:
                pass
            self._close()
        self._directory()
        self._path = os.fspath(self.path)
        # A bare descriptor: a logger that is never finalized causes no ResourceWarning.
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._inode = os.fstat(self._file).st_ino
        if _ends_torn(self._file):
            return self._file, _INCOMPLETE
        return self._file, b""

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __getstate__(self) -> StateDict:
        # A descriptor's number means another file in the process of the copy.
        return {**vars(self), "_file": None}

    def __del__(self) -> None:
        if self._file is not None:
            self._close()


def _ends_torn(file: int) -> bool:
    """Whether the last line is incomplete, and no other process is writing it."""
    if _ends_with_newline(file):
        return False
    # The bytes of a line that another process appends are seen before its newline.
    time.sleep(_WRITE_SECONDS)
    return not _ends_with_newline(file)


def _ends_with_newline(file: int) -> bool:
    """Whether a file ends with a newline, or is empty."""
    if os.lseek(file, 0, os.SEEK_END) == 0:
        return True
    os.lseek(file, -1, os.SEEK_END)
    return os.read(file, 1) == b"\n"


def read_journal(path: str | os.PathLike[str]) -> list[JsonObject]:
    """The records of a journal, in the order they were written; lines that a crash has cut are left out.

    Args:
        path: a ``journal.jsonl``.

    Returns:
        Dicts with ``step``, ``time`` (seconds since 1970) and the metrics as numbers, or with ``time`` and ``hparams``.

    Raises:
        LogError: another line that is not the last cannot be read.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> from trainer_kit.loggers import JSONLLogger, read_journal
        >>> logger = JSONLLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"loss": 0.5}, step=3)
        >>> logger.log_metrics({"loss": float("nan")}, step=4)
        >>> [(record["step"], record["loss"]) for record in read_journal(logger.path)]
        [(3, 0.5), (4, nan)]
    """
    records = []
    lines = Path(os.path.expanduser(path)).read_bytes().split(b"\n")
    # The part after the last newline is empty, or an incomplete line: a run may be writing it right now.
    lines.pop()
    for number, line in enumerate(lines, 1):
        if line.endswith(_INCOMPLETE.rstrip()):
            continue
        try:
            records.append(journal_record(line))
        except ValueError as error:
            raise LogError(
                f"{path}:{number}: this line of the journal cannot be read",
                found=str(error),
            ) from error
    return records


def journal_record(line: bytes) -> JsonObject:
    """One line of a journal, with NaN and infinities as numbers.

    Raises:
        ValueError: it is not a JSON object.

    Example:
        >>> journal_record(b'{"step": 3, "loss": "NaN"}')
        {'step': 3, 'loss': nan}
    """
    # Decoded here: json would first detect the encoding of bytes, which takes time for each line.
    record = json.loads(line.decode())
    if not isinstance(record, dict):
        raise ValueError("not an object")
    for name, value in record.items():
        if isinstance(value, str):
            record[name] = _SPECIAL.get(value, value)
    return record
