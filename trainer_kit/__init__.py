"""A PyTorch trainer: structure where you want it, your own loop where you do not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_kit import callbacks, checkpoint, loggers, precision, strategies
    from trainer_kit.checkpoint.read import verify_checkpoint
    from trainer_kit.checkpoint.store import checkpoints
    from trainer_kit.core.datamodule import DataModule
    from trainer_kit.core.datamodule import DataModule as LightningDataModule
    from trainer_kit.core.duration import Duration
    from trainer_kit.core.hooks import Callback
    from trainer_kit.core.module import TrainModule
    from trainer_kit.core.module import TrainModule as LightningModule
    from trainer_kit.core.progress import Progress
    from trainer_kit.core.seed import seed_everything
    from trainer_kit.data import CombinedLoader
    from trainer_kit.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "CombinedLoader",
    "DataModule",
    "Duration",
    "LightningDataModule",
    "LightningModule",
    "Progress",
    "TrainModule",
    "Trainer",
    "callbacks",
    "checkpoint",
    "checkpoints",
    "loggers",
    "precision",
    "seed_everything",
    "strategies",
    "verify_checkpoint",
]

_HOME = {
    "Callback": "core.hooks:Callback",
    "CombinedLoader": "data:CombinedLoader",
    "DataModule": "core.datamodule:DataModule",
    "Duration": "core.duration:Duration",
    "LightningDataModule": "core.datamodule:DataModule",
    "LightningModule": "core.module:TrainModule",
    "Progress": "core.progress:Progress",
    "TrainModule": "core.module:TrainModule",
    "Trainer": "trainer:Trainer",
    "checkpoints": "checkpoint.store:checkpoints",
    "seed_everything": "core.seed:seed_everything",
    "verify_checkpoint": "checkpoint.read:verify_checkpoint",
}
_ROOMS = ("callbacks", "checkpoint", "loggers", "precision", "strategies")


def __getattr__(name: str) -> Any:
    # Everything is found when it is first asked for: importing the package costs next to nothing.
    if name in _HOME:
        module, attribute = _HOME[name].split(":")
        found = getattr(importlib.import_module(f"trainer_kit.{module}"), attribute)
    elif name in _ROOMS:
        found = importlib.import_module(f"trainer_kit.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
