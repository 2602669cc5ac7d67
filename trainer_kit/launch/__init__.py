"""Starting the ranks and supervising them: by an agent for scripts, by forking for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names
from trainer_kit.launch.bootstrap import report_errors

if TYPE_CHECKING:
    from trainer_kit.launch.agent import run_agent, run_ranks
    from trainer_kit.launch.command import rerun_command
    from trainer_kit.launch.notebook import run_forked

__all__ = ["report_errors", "rerun_command", "run_agent", "run_forked", "run_ranks"]

_HOME = {"rerun_command": "command", "run_agent": "agent", "run_forked": "notebook", "run_ranks": "agent"}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
