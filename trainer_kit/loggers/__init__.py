"""Loggers: destinations of logged values. Any object with ``log_metrics(metrics, step)`` is a logger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.core.protocols import Logger
    from trainer_kit.loggers.aim import AimLogger
    from trainer_kit.loggers.clearml import ClearMLLogger
    from trainer_kit.loggers.comet import CometLogger
    from trainer_kit.loggers.csv_logs import CSVLogger
    from trainer_kit.loggers.dvclive import DVCLiveLogger
    from trainer_kit.loggers.journal import JSONLLogger, read_journal
    from trainer_kit.loggers.layout import DummyLogger
    from trainer_kit.loggers.mlflow import MLFlowLogger
    from trainer_kit.loggers.swanlab import SwanLabLogger
    from trainer_kit.loggers.tensorboard import TensorBoardLogger
    from trainer_kit.loggers.trackio import TrackioLogger
    from trainer_kit.loggers.wandb import WandbLogger

__all__ = [
    "AimLogger",
    "CSVLogger",
    "ClearMLLogger",
    "CometLogger",
    "DVCLiveLogger",
    "DummyLogger",
    "JSONLLogger",
    "Logger",
    "MLFlowLogger",
    "SwanLabLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "read_journal",
]

_HOME = {
    "AimLogger": "aim",
    "CSVLogger": "csv_logs",
    "ClearMLLogger": "clearml",
    "CometLogger": "comet",
    "DVCLiveLogger": "dvclive",
    "DummyLogger": "layout",
    "JSONLLogger": "journal",
    "Logger": ".core.protocols",
    "MLFlowLogger": "mlflow",
    "SwanLabLogger": "swanlab",
    "TensorBoardLogger": "tensorboard",
    "TrackioLogger": "trackio",
    "WandbLogger": "wandb",
    "read_journal": "journal",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
