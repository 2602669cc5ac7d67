"""Loggers: destinations of logged values. Any object with ``log_metrics(metrics, step)`` is a logger."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "aim": "AimLogger",
    "clearml": "ClearMLLogger",
    "comet": "CometLogger",
    "csv_logs": "CSVLogger",
    "dvclive": "DVCLiveLogger",
    "journal": "JSONLLogger read_journal",
    "layout": "DummyLogger",
    "mlflow": "MLFlowLogger",
    "swanlab": "SwanLabLogger",
    "tensorboard": "TensorBoardLogger",
    "trackio": "TrackioLogger",
    "wandb": "WandbLogger",
    ".core.protocols": "Logger",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
