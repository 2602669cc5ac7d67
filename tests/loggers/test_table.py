"""The table of loggers agrees with the loggers, with what users may write, and with the extras of the package."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from trainer_kit import loggers
from trainer_kit.accelerator import script_names
from trainer_kit.accelerator.trackers import LoggerType
from trainer_kit.compat import accelerate_names
from trainer_kit.core.registry import LOGGERS
from trainer_kit.loggers.layout import DirectoryLogger
from trainer_kit.loggers.run_logger import RunLogger
from trainer_kit.loggers.table import LOGGER_ROWS, LoggerRow, find_row

ROOT = Path(__file__).parents[2]
ROWS = pytest.mark.parametrize("row", LOGGER_ROWS, ids=lambda row: row.class_name)


@ROWS
def test_a_row_says_what_the_logger_is(row: LoggerRow) -> None:
    logger = getattr(loggers, row.class_name)
    assert logger.__module__ == f"trainer_kit.loggers.{row.module}"
    assert row.class_name in loggers.__all__
    for name in row.names:
        assert LOGGERS.get(name) is logger
        assert find_row(name) is row
    assert issubclass(logger, DirectoryLogger) == row.in_directory
    assert row.in_directory or not row.holds_one_run
    parameters = inspect.signature(logger).parameters
    assert not row.project or {row.project, "save_dir"} <= set(parameters)


@ROWS
def test_a_service_has_its_package_and_its_extra(row: LoggerRow) -> None:
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    logger = getattr(loggers, row.class_name)
    if not issubclass(logger, RunLogger):
        # WandbLogger has the methods of Lightning's, so it is none.
        assert row.package in ("", "wandb")
        return
    assert logger.module == row.package
    assert f'\n{logger.extra} = ["{logger.requires}"]\n' in extras


@ROWS
def test_the_names_of_accelerate_are_there(row: LoggerRow) -> None:
    if not row.accelerate_name:
        return
    tracker = getattr(script_names, row.accelerate_name)
    assert (tracker.__name__, tracker.name) == (row.accelerate_name, row.names[0])
    paths = accelerate_names.PATHS["tracking"]
    assert paths[row.accelerate_name].endswith(f"script_names:{row.accelerate_name}")
    # A service has one, as all of Accelerate's classes are in the table.
    assert row.package or row.in_directory


def test_names_are_unique_and_those_of_accelerate_exist() -> None:
    names = [name for row in LOGGER_ROWS for name in row.names]
    assert len(names) == len(set(names))
    assert {kind.value for kind in LoggerType} - {"all"} <= set(names)
    assert find_row("none") is None
