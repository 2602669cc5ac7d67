"""The run report: ``report.html`` in a run's directory, and one page for several runs.

Python collects the data from the directory: the journal of logged values, the events of `events.py`, the checkpoints.
The page, plain HTML and JavaScript under ``page/``, shows them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.report.collect import RunDirectory, find_runs
    from trainer_kit.report.page import REPORT, write_report
    from trainer_kit.report.running import RunReport
    from trainer_kit.report.trainer_report import TrainerReport

__all__ = [
    "REPORT",
    "RunDirectory",
    "RunReport",
    "TrainerReport",
    "find_runs",
    "write_report",
]

_HOME = {
    "REPORT": "page",
    "RunDirectory": "collect",
    "RunReport": "running",
    "TrainerReport": "trainer_report",
    "find_runs": "collect",
    "write_report": "page",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
