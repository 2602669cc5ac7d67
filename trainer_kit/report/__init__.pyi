# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
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

__getattr__: NameLookup
