"""What the stand-ins of trackers have in common: every call becomes a line of ``tracker_calls.jsonl``."""

import json
import os
from pathlib import Path


def record(kind, **fields):
    """Append one event, in one call: a run writes from two threads."""
    file = os.open("tracker_calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps({"kind": kind, **fields}) + "\n").encode())
    os.close(file)


def content(path):
    """A file's text, or those of a directory by name; None for what is not text."""
    path = Path(path)
    if path.is_dir():
        return {
            file.relative_to(path).as_posix(): content(file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None
