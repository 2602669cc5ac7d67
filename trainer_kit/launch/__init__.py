"""Launchers: an agent starts and supervises the ranks of a script; a fork starts those of a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names
from trainer_kit.launch.bootstrap import report_errors

if TYPE_CHECKING:
    from trainer_kit.launch.agent import run_agent, run_ranks
    from trainer_kit.launch.processes import run_forked
    from trainer_kit.launch.program import rerun_command

__all__ = ["report_errors", "rerun_command", "run_agent", "run_forked", "run_ranks"]

_HOME = {
    "rerun_command": "program",
    "run_agent": "agent",
    "run_forked": "processes",
    "run_ranks": "agent",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
