"""What a checkpoint says about its run: how it was configured, for people and `diff`, and where its loggers write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, ValuesView
from enum import Enum
from typing import Any

import torch

from trainer_kit.core.display import mask_secrets
from trainer_kit.training.session import Session

__all__ = ["about_run", "go_on_logging", "plain_arguments"]


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's arguments as plain data: objects by what identifies them, secrets masked.

    Args:
        arguments: by name; ``self`` is left out.

    Example:
        >>> plain_arguments({"max_epochs": 3, "plugins": object(), "logger": "s3://me:pw@host"})
        {'max_epochs': 3, 'plugins': 'object', 'logger': 's3://me:***@host'}
    """
    plain = {name: _plain(value) for name, value in arguments.items() if name not in ("self", "__class__")}
    masked: dict[str, Any] = mask_secrets(plain)
    return masked


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (Sequence, ValuesView)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, map(_plain, value)))
    # Functions and the default text of an object name their address, and equal states give equal bytes.
    for name in ("__qualname__", "state_key"):
        if hasattr(value, name):
            return str(getattr(value, name))
    text = str(value)
    return type(value).__qualname__ if text == object.__repr__(value) else text


def about_run(trainer: Session) -> dict[str, Any]:
    """Part of every checkpoint of a run. Nothing of it is restored over what the user asks for today."""
    loggers = [
        {"logger": type(logger).__name__, "state": dict(logger.state_dict()) if hasattr(logger, "state_dict") else {}}
        for logger in (trainer.loggers if trainer.is_global_zero else ())
    ]
    return {
        "configuration": {
            "trainer": trainer.arguments,
            "module": type(trainer.module).__qualname__,
            "datamodule": None if trainer.datamodule is None else type(trainer.datamodule).__qualname__,
            "callbacks": [callback.state_key for callback in trainer.callbacks],
            "strategy": trainer.strategy.describe(),
            "precision": trainer.precision,
            "world_size": trainer.world_size,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "loggers": {"run_dir": _run_dir(trainer), "each": loggers},
    }


def go_on_logging(trainer: Session, state: Mapping[str, Any]) -> None:
    """In the directory of the run that ``state`` is of, loggers go on with that run unless they were told otherwise."""
    saved = state.get("loggers", {})
    if not trainer.is_global_zero or saved.get("run_dir") != _run_dir(trainer):
        return
    for logger, before in zip(trainer.loggers, saved["each"], strict=False):
        if type(logger).__name__ == before["logger"] and before["state"] and hasattr(logger, "load_state_dict"):
            logger.load_state_dict(before["state"])


def _run_dir(trainer: Session) -> Any:
    return mask_secrets(os.path.abspath(trainer.run_dir))
