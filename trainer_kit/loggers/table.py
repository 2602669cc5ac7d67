"""The table of loggers: the one place, besides its own module, where a logger of the library is named.

The public names of `trainer_kit.loggers`, the names in ``logger=`` and ``log_with=``, the trackers of
``log_with="all"``, Accelerate's names and the versions of a report are all read from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

__all__ = ["LOGGER_ROWS", "LoggerRow", "find_row", "service_packages"]


@final
@dataclass(frozen=True, kw_only=True)
class LoggerRow:
    """A logger of the library.

    Attributes:
        class_name: its class.
        module: its module in `trainer_kit.loggers`.
        names: for ``Trainer(logger=...)`` and ``Accelerator(log_with=...)``; ``log_with="all"`` uses the first.
        package: the package of its service, which may be missing; empty if it needs none.
        project: the constructor argument that takes the name of an Accelerator's project; empty if there is none.
        in_directory: whether it writes files into the logging directory of an Accelerator.
        holds_one_run: whether those files hold one run, so that each run needs a directory.
        accelerate_name: Accelerate's class for it; empty if there is none.
    """

    class_name: str
    module: str
    names: tuple[str, ...]
    package: str = ""
    project: str = ""
    in_directory: bool = False
    holds_one_run: bool = False
    accelerate_name: str = ""


# In the order in which log_with="all" starts them.
LOGGER_ROWS: Final = (
    LoggerRow(
        class_name="TensorBoardLogger",
        module="tensorboard",
        names=("tensorboard",),
        # Each run writes another file, into the directory of the project.
        in_directory=True,
        accelerate_name="TensorBoardTracker",
    ),
    LoggerRow(
        class_name="CSVLogger",
        module="csv_logs",
        names=("csv",),
        in_directory=True,
        holds_one_run=True,
    ),
    LoggerRow(
        class_name="JSONLLogger",
        module="journal",
        names=("jsonl",),
        in_directory=True,
        holds_one_run=True,
    ),
    # It writes nothing, so that log_with="all" leaves it out.
    LoggerRow(class_name="DummyLogger", module="layout", names=("dummy",)),
    LoggerRow(
        class_name="WandbLogger",
        module="wandb",
        names=("wandb",),
        package="wandb",
        project="project",
        accelerate_name="WandBTracker",
    ),
    LoggerRow(
        class_name="MLFlowLogger",
        module="mlflow",
        names=("mlflow",),
        package="mlflow",
        project="experiment_name",
        accelerate_name="MLflowTracker",
    ),
    LoggerRow(
        class_name="CometLogger",
        module="comet",
        names=("comet_ml", "comet"),
        package="comet_ml",
        project="project",
        accelerate_name="CometMLTracker",
    ),
    LoggerRow(
        class_name="ClearMLLogger",
        module="clearml",
        names=("clearml",),
        package="clearml",
        project="project_name",
        accelerate_name="ClearMLTracker",
    ),
    LoggerRow(
        class_name="AimLogger",
        module="aim",
        names=("aim",),
        package="aim",
        project="experiment",
        accelerate_name="AimTracker",
    ),
    LoggerRow(
        class_name="DVCLiveLogger",
        module="dvclive",
        names=("dvclive",),
        package="dvclive",
        project="run_name",
        accelerate_name="DVCLiveTracker",
    ),
    LoggerRow(
        class_name="SwanLabLogger",
        module="swanlab",
        names=("swanlab",),
        package="swanlab",
        project="project",
        accelerate_name="SwanLabTracker",
    ),
    LoggerRow(
        class_name="TrackioLogger",
        module="trackio",
        names=("trackio",),
        package="trackio",
        project="project",
        accelerate_name="TrackioTracker",
    ),
)


def find_row(name: str) -> LoggerRow | None:
    """The row of the logger that a user names so; None: the library has none.

    Example:
        >>> find_row("comet").class_name
        'CometLogger'
    """
    for row in LOGGER_ROWS:
        if name in row.names:
            return row
    return None


def service_packages() -> Iterator[str]:
    """The packages of tracking services, in the order of the table.

    Example:
        >>> next(service_packages())
        'wandb'
    """
    for row in LOGGER_ROWS:
        if row.package:
            yield row.package
