"""Loggers: destinations of logged values. Any object with ``log_metrics(metrics, step)`` is a logger."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names
from trainer_kit.loggers.table import LOGGER_ROWS

_HOMES: Final = {
    **{row.module: row.class_name for row in LOGGER_ROWS},
    "journal": "JSONLLogger read_journal",
    ".core.protocols": "Logger",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
