"""Where logged values go. Any object with ``log_metrics(metrics, step)`` is a logger; these write the usual formats."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_kit.core.protocols import Logger
    from trainer_kit.loggers.csv_logs import CSVLogger
    from trainer_kit.loggers.dummy import DummyLogger
    from trainer_kit.loggers.journal import JSONLLogger, read_journal
    from trainer_kit.loggers.tensorboard import TensorBoardLogger
    from trainer_kit.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "DummyLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger", "read_journal"]

_MODULES = {
    "CSVLogger": "trainer_kit.loggers.csv_logs",
    "DummyLogger": "trainer_kit.loggers.dummy",
    "JSONLLogger": "trainer_kit.loggers.journal",
    "Logger": "trainer_kit.core.protocols",
    "TensorBoardLogger": "trainer_kit.loggers.tensorboard",
    "WandbLogger": "trainer_kit.loggers.wandb",
    "read_journal": "trainer_kit.loggers.journal",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
