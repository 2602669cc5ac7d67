# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.launch.agent import run_agent, run_ranks
from trainer_kit.launch.bootstrap import report_errors
from trainer_kit.launch.processes import run_forked
from trainer_kit.launch.program import rerun_command

__all__ = [
    "report_errors",
    "rerun_command",
    "run_agent",
    "run_forked",
    "run_ranks",
]

__getattr__: NameLookup
