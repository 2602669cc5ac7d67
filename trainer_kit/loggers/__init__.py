"""Loggers: destinations of logged values. Any object with ``log_metrics(metrics, step)`` is a logger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.core.protocols import Logger
    from trainer_kit.loggers.csv_logs import CSVLogger
    from trainer_kit.loggers.journal import JSONLLogger, read_journal
    from trainer_kit.loggers.layout import DummyLogger
    from trainer_kit.loggers.tensorboard import TensorBoardLogger
    from trainer_kit.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "DummyLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger", "read_journal"]

_HOME = {
    "CSVLogger": "csv_logs",
    "DummyLogger": "layout",
    "JSONLLogger": "journal",
    "Logger": ".core.protocols",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "read_journal": "journal",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
