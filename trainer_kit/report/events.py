"""Write and read ``events.jsonl`` of a run's directory: the events of a run, one per line."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainer_kit.core.display import mask_secrets
from trainer_kit.core.types import JsonObject
from trainer_kit.hang.stacks import boot_id, start_time
from trainer_kit.loggers.layout import plain

__all__ = ["EVENTS", "append_event", "has_ended", "read_events", "this_process"]

EVENTS: Final = "events.jsonl"


def append_event(directory: Path, kind: str, step: int, **facts: object) -> None:
    """Append one event; secrets in it are masked.

    Args:
        directory: the run's directory; it is created if missing.
        kind: start, end, checkpoint, warning or note.
        step: the number of completed optimizer steps.
        facts: further data for the page, as plain data.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     append_event(Path(directory), "note", 3, text="stopped")
        ...     [(event["event"], event["step"], event["text"]) for event in read_events(Path(directory))]
        [('note', 3, 'stopped')]
    """
    event = {"event": kind, "time": time.time(), "step": step, **facts}
    masked: JsonObject = mask_secrets(event)
    record = plain(masked)
    directory.mkdir(parents=True, exist_ok=True)
    # Opened for each event: the watchdog's thread and other ranks append to the same file.
    file = os.open(directory / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # The first newline ends a line that a full disk or a crash left incomplete.
        os.write(file, f"\n{json.dumps(record)}\n".encode())
    finally:
        os.close(file)


def read_events(directory: Path) -> list[JsonObject]:
    """Return the events of a run in written order; none without a file. Incomplete lines are skipped."""
    events: list[JsonObject] = []
    # A page of what can be read is better than none: the directory may be copied while a run writes to it.
    with suppress(OSError):
        for line in (directory / EVENTS).read_bytes().split(b"\n"):
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append(event)
    return events


def this_process() -> list[object]:
    """Return an identifier of this process for `has_ended`."""
    # The system uses process ids again, after a reboot and before: the boot and the start time tell them apart.
    return [socket.gethostname(), boot_id(), os.getpid(), start_time(os.getpid())]


def has_ended(process: object) -> bool:
    """Whether a process identified by `this_process` has ended, as far as this machine can tell.

    Example:
        >>> has_ended(this_process())
        False
    """
    if not isinstance(process, list) or len(process) != 4:
        return False
    host, boot, process_id, started = process
    # Without a start time, or from another machine, nothing is known: the run counts as running.
    if not started or host != socket.gethostname():
        return False
    return bool(boot != boot_id() or start_time(process_id) != started)
