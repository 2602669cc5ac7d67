"""Launchers: an agent starts and supervises the ranks of a script; a fork starts those of a notebook."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "agent": "run_agent run_ranks",
    "bootstrap": "report_errors",
    "processes": "run_forked",
    "program": "rerun_command",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
