"""``events.jsonl`` of a run's directory: what happens in a run beside its logged values, a line each."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from trainer_kit.core.display import mask_secrets
from trainer_kit.loggers.layout import plain

__all__ = ["EVENTS", "append_event", "read_events"]

EVENTS: Final = "events.jsonl"


def append_event(directory: Path, kind: str, step: int, **facts: Any) -> None:
    """Append one event; secrets in it are masked.

    Args:
        directory: of the run; it is made where it is missing.
        kind: start, end, checkpoint, warning or note.
        step: completed optimizer steps.
        facts: whatever else the page shows, as plain data.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     append_event(Path(directory), "note", 3, text="stopped")
        ...     [(event["event"], event["step"], event["text"]) for event in read_events(Path(directory))]
        [('note', 3, 'stopped')]
    """
    record = plain(mask_secrets({"event": kind, "time": time.time(), "step": step, **facts}))
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # The first newline ends a line that a full disk or a lost machine has torn.
        os.write(file, f"\n{json.dumps(record)}\n".encode())
    finally:
        os.close(file)


def read_events(directory: Path) -> list[dict[str, Any]]:
    """The events of a run in the order they were written; none where there is no file. Torn lines are left out."""
    events: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (directory / EVENTS).read_bytes().split(b"\n"):
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    events.append(event)
    return events
