# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
from trainer_kit.report.collect import RunDirectory, find_runs
from trainer_kit.report.history import History, InlineReport, trainer_table
from trainer_kit.report.page import REPORT, write_report
from trainer_kit.report.running import RunReport
from trainer_kit.report.trainer_report import TrainerReport

__all__ = [
    "REPORT",
    "History",
    "InlineReport",
    "RunDirectory",
    "RunReport",
    "TrainerReport",
    "find_runs",
    "trainer_table",
    "write_report",
]

__getattr__: NameLookup
