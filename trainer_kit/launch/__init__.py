"""Starting the ranks and supervising them: by an agent for scripts, by forking for notebooks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainer_kit.launch.bootstrap import report_errors

if TYPE_CHECKING:
    from trainer_kit.launch.agent import run_agent, run_ranks
    from trainer_kit.launch.command import rerun_command
    from trainer_kit.launch.notebook import run_forked

__all__ = ["report_errors", "rerun_command", "run_agent", "run_forked", "run_ranks"]

_LAZY = {"rerun_command": "command", "run_agent": "agent", "run_forked": "notebook", "run_ranks": "agent"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"trainer_kit.launch.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
