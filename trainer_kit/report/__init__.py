"""The run report: ``report.html`` in a run's directory, and one page for several runs.

Python collects the data from the directory: the journal of logged values, the events of `events.py`, the checkpoints.
The page, plain HTML and JavaScript under ``page/``, shows them.
"""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "collect": "RunDirectory find_runs",
    "history": "History InlineReport trainer_table",
    "page": "REPORT write_report",
    "running": "RunReport",
    "trainer_report": "TrainerReport",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
