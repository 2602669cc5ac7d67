"""`Pulse`: the time account of a running fit in its directory, which a process that is killed leaves behind."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, final

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

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path, account: TimeAccount, begun: float) -> None:
        self._account = account
        self._begun = begun
        self._process = this_process()
        self._position: object = None
        self._record: JsonObject = {}
        self._path = directory / PULSE
        # Opened once: a thread that opens files would disturb who watches the files of a run.
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(file, "wb", buffering=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="trainer_kit time account", daemon=True
        )
        self.write()
        self._thread.start()

    def stop(self) -> JsonObject:
        """End the thread, and return the last record; the file is deleted."""
        self._stop.set()
        self._thread.join()
        record = self._next_record()
        self._file.close()
        with suppress(OSError):
            self._path.unlink()
        return record

    def write(self) -> None:
        """Write the record of now."""
        line = json.dumps(self._next_record()).ljust(_LENGTH - 1) + "\n"
        self._file.seek(0)
        self._file.write(line.encode())

    def _next_record(self) -> JsonObject:
        seconds = self._account.seconds()
        total = sum(seconds.values())
        # By the clock that measures the parts, so that they add up to it.
        until = self._begun + total
        position = self._account.position
        if position != self._position:
            self._position = position
            self._record = {
                "process": self._process,
                "begun": self._begun,
                "time": until,
                "step": self._account.step,
                "category": self._account.category,
                "seconds": seconds,
            }
        return {**self._record, "until": until}

    def _beat(self) -> None:
        while not self._stop.wait(_INTERVAL):
            # A full disk now costs the times of a kill that comes before there is space.
            with suppress(OSError):
                self.write()


def take_pulse(directory: Path) -> JsonObject | None:
    """Return the record that a running or killed process has left in a directory; None without one."""
    # A machine that lost its power may leave a part of it.
    with suppress(OSError, ValueError):
        record = json.loads((directory / PULSE).read_bytes())
        if isinstance(record, dict) and isinstance(record.get("seconds"), dict):
            return record
    return None


def record_account(directory: Path, record: JsonObject) -> None:
    """Append a record to the events of the run.

    Raises:
        OSError: it cannot be written.
    """
    facts = dict(record)
    step = facts.pop("step")
    append_event(directory, "account", step, **facts)


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
