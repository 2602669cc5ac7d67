"""The directories of an Accelerator's runs: journal, report and tables of each run are in one of its own."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from trainer_kit.loggers.layout import make_version
from trainer_kit.report.collect import JOURNAL
from trainer_kit.report.events import EVENTS

__all__ = [
    "claim_version",
    "free_version",
    "is_version",
    "newest_version",
    "remove_unused",
]

_VERSION: Final = re.compile(r"version_(\d{1,9})")
_FILES: Final = (EVENTS, JOURNAL, "metrics.csv")
"""Files that only one run may write."""
_CONFIGURATION: Final = "hparams.json"


def free_version(root: Path) -> str:
    """Return a directory below ``root`` for a new run: "" for the first run, else ``version_N``, above the highest N.

    Args:
        root: the directory of the project in the logging directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     first = free_version(Path(directory))
        ...     _ = (Path(directory) / "journal.jsonl").write_text("")
        ...     first, free_version(Path(directory))
        ('', 'version_1')
    """
    numbers = _numbers(root)
    if not numbers and not any((root / name).exists() for name in _FILES):
        return ""
    return f"version_{max(numbers, default=0) + 1}"


def claim_version(root: Path) -> str:
    """Make the directory of `free_version`, which no other run takes, and return its name.

    Of two runs that start at one time only one can make a directory, or, in that of the project, the journal.
    """
    version = free_version(root)
    if version:
        return f"version_{make_version(root, int(version.partition('_')[2]))}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / JOURNAL).touch(exist_ok=False)
    except FileExistsError:
        return f"version_{make_version(root, 1)}"
    except OSError:
        # The first write reports it.
        pass
    return ""


def newest_version(root: Path) -> str:
    """Return the directory below ``root`` of the newest run: that with the highest number, else ""."""
    numbers = _numbers(root)
    return f"version_{max(numbers)}" if numbers else ""


def is_version(version: object) -> bool:
    """Whether this is a directory of `free_version`: it may come from a file that was edited."""
    if not isinstance(version, str):
        return False
    return version == "" or _VERSION.fullmatch(version) is not None


def remove_unused(unused: Path, continued: Path) -> None:
    """Remove the directory of a run that continues an earlier one instead; its configuration replaces that one's."""
    with suppress(OSError):
        os.replace(unused / _CONFIGURATION, continued / _CONFIGURATION)
    with suppress(OSError):
        (unused / JOURNAL).unlink(missing_ok=True)
        unused.rmdir()


def _numbers(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    names = [entry.name for entry in root.iterdir() if entry.is_dir()]
    matches = map(_VERSION.fullmatch, names)
    return [int(match[1]) for match in matches if match is not None]
