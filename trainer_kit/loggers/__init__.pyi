# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.core.lazy import NameLookup
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

__getattr__: NameLookup
