"""`Pulse`: the time account of a running fit in its directory, which a process that is killed leaves behind."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, final

from trainer_kit.core.types import JsonObject
from trainer_kit.hang.stacks import start_time
from trainer_kit.report.events import append_event, this_process
from trainer_kit.step.time_account import TimeAccount

__all__ = ["PULSE", "Pulse", "process_start", "record_account", "take_pulse"]

PULSE: Final = "account.json"
_INTERVAL: Final = 1.0
"""Seconds between two records, and so the most that a killed process leaves unknown."""
_LENGTH: Final = 1024
"""Bytes of a record: each one covers the last, and no reader finds parts of two."""


@final
class Pulse:
    """Writes the time account of a fit to ``account.json`` once a second, on a thread.

    A record holds ``begun`` (seconds since 1970), the ``seconds`` of each part until ``time``, the last time at which
    the fit made progress, the ``category`` of what runs since then, and ``until``, when the record was written.

    Args:
        directory: of the run.
        account: of the fit.
        begun: when the process, or this fit of it, began, in seconds since 1970.

    A file that cannot be written is tried again each second: it matters only if the process is killed.
    """

    def __init__(self, directory: Path, account: TimeAccount, begun: float) -> None:
        self._account = account
        self._begun = begun
        self._process = this_process()
        self._path = directory / PULSE
        self._file: BinaryIO | None = None
        self._problem: OSError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="trainer_kit time account", daemon=True
        )
        self._write(self._next_record())
        self._thread.start()

    @property
    def problem(self) -> OSError | None:
        """Why the last record is not in the file; None: it is."""
        return self._problem

    def stop(self) -> JsonObject:
        """End the thread, and return the last record, which stays in the file until `record_account`."""
        self._stop.set()
        self._thread.join()
        record = self._next_record()
        self._write(record)
        if self._file is not None:
            self._file.close()
        return record

    def _write(self, record: JsonObject) -> None:
        line = json.dumps(record).ljust(_LENGTH - 1) + "\n"
        try:
            # Opened once: a thread that opens files would disturb who watches the files of a run.
            if self._file is None:
                self._file = _create(self._path)
            self._file.seek(0)
            self._file.write(line.encode())
            self._problem = None
        except OSError as error:
            self._problem = error

    def _next_record(self) -> JsonObject:
        seconds, category = self._account.last_progress()
        # By the clock that measures the parts, so that they add up to it.
        return {
            "process": self._process,
            "begun": self._begun,
            "time": self._begun + sum(seconds.values()),
            "until": self._begun + sum(self._account.seconds().values()),
            "step": self._account.step,
            "category": category,
            "seconds": seconds,
        }

    def _beat(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._write(self._next_record())


def _create(path: Path) -> BinaryIO:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return os.fdopen(file, "wb", buffering=0)


def take_pulse(directory: Path) -> JsonObject | None:
    """Return the record that a running or killed process has left in a directory; None without one."""
    # A machine that lost its power may leave a part of it.
    with suppress(OSError, ValueError):
        record = json.loads((directory / PULSE).read_bytes())
        if isinstance(record, dict) and isinstance(record.get("seconds"), dict):
            return record
    return None


def record_account(directory: Path, record: JsonObject) -> None:
    """Append a record to the events of the run, and delete the file that it was kept in.

    Raises:
        OSError: it cannot be written; the file stays for the next start.
    """
    facts = dict(record)
    step = facts.pop("step")
    append_event(directory, "account", step, **facts)
    # In this order: a kill between the two leaves the record twice, and a reader counts it once.
    with suppress(OSError):
        (directory / PULSE).unlink()


def process_start() -> float:
    """When this process began, in seconds since 1970; where the system does not tell, now.

    Example:
        >>> process_start() <= time.time()
        True
    """
    now = time.time()
    ticks = start_time(os.getpid())
    if not ticks:
        return now
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)
