"""Trackers as scripts for Hugging Face Accelerate define and use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, final

from torch import Tensor

from trainer_kit.core.environment import Environment
from trainer_kit.core.registry import LOGGERS

__all__ = ["Absent", "GeneralTracker", "LoggerTracker", "LoggerType", "on_main_process", "register_tracker_class"]

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound=type)


class LoggerType(str, Enum):
    """Trackers by Hugging Face Accelerate's words; plain strings do as well.

    Example:
        >>> LoggerType.TENSORBOARD == "tensorboard"
        True
    """

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    CSV = "csv"
    JSONL = "jsonl"


def on_main_process(function: _F) -> _F:
    """Decorator for a tracker's methods: only the main process calls them, unless its ``main_process_only`` is False.

    Example:
        >>> class Prints(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "prints", False, None
        ...
        ...     @on_main_process
        ...     def log(self, values, step=None):
        ...         print(step, values)
        >>> Prints().log({"loss": 1.0}, step=3)
        3 {'loss': 1.0}
    """

    @functools.wraps(function)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(self, "main_process_only", True) and Environment.detect().rank:
            return None
        return function(self, *arguments, **options)

    return call  # type: ignore[return-value]


class GeneralTracker:
    """A tracker of the user's own: a subclass has a ``name``, a ``tracker``, and its own ``log``.

    Attributes:
        name: by which it is asked for.
        requires_logging_directory: whether ``logging_dir`` must be given; where the class is made by name, it is its
            second argument, behind the project's name.
        main_process_only: False: every process has its own.
        tracker: what it writes through.
    """

    name: str
    requires_logging_directory: bool = False
    main_process_only: bool = True

    def start(self) -> None:
        """Called once, before anything else."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None, **options: Any) -> None:
        """Values of a step."""

    def finish(self) -> None:
        """The run is over."""


def register_tracker_class(tracker: _C) -> _C:
    """Make ``Accelerator(log_with=<its name>)`` find a `GeneralTracker` subclass; also a decorator.

    Example:
        >>> @register_tracker_class
        ... class Mine(GeneralTracker):
        ...     name = "doctest_tracker"
        >>> from trainer_kit.core.registry import LOGGERS
        >>> LOGGERS.get("doctest_tracker").__name__
        'Mine'
    """
    LOGGERS.register(str(tracker.name), tracker, overwrite=True)  # type: ignore[attr-defined]
    return tracker


@final
class LoggerTracker(GeneralTracker):
    """A logger of a Trainer, with a tracker's methods.

    Args:
        name: by which it is asked for.
        logger: takes the values.
    """

    def __init__(self, name: str, logger: Any) -> None:
        self.name, self.logger = name, logger
        self._step = -1

    @property
    def tracker(self) -> Any:
        """What it writes through: W&B's run, TensorBoard's writer; else the logger itself."""
        return getattr(self.logger, "experiment", self.logger)

    writer = run = tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The hyperparameters of the run."""
        if hasattr(self.logger, "log_hyperparams"):
            self.logger.log_hyperparams(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Values of a step; by default one more than the last. Numbers in dicts are named ``outer/inner``.

        Args:
            values: by name. A tensor of one element is read here, which waits for the device. Text goes to TensorBoard
                and W&B, other values to W&B alone.
            step: what they belong to.
            options: accepted.
        """
        self._step = self._step + 1 if step is None else step
        numbers, others = _divided(values)
        if self.name == "wandb":
            self.logger.log_metrics({**numbers, **others}, self._step)
            return
        if numbers:
            self.logger.log_metrics(numbers, self._step)
        if hasattr(self.tracker, "add_text"):
            for name, value in others.items():
                if isinstance(value, str):
                    self.tracker.add_text(name, value, self._step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Pictures: arrays ``(n, height, width, 3)`` for TensorBoard, lists of pictures for W&B."""
        if self.name == "wandb":
            for name, pictures in values.items():
                self.logger.log_image(name, list(pictures), step)
        elif hasattr(self.tracker, "add_images"):
            for name, pictures in values.items():
                self.tracker.add_images(name, pictures, step, **{"dataformats": "NHWC", **options})

    def finish(self) -> None:
        """The run is over."""
        if hasattr(self.logger, "finalize"):
            self.logger.finalize("success")


@final
class Absent(GeneralTracker):
    """A tracker on a process that does not have one: whatever it is asked to do, it does nothing."""

    tracker: Any = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def _divided(values: Mapping[str, Any], outer: str = "") -> tuple[dict[str, float], dict[str, Any]]:
    numbers: dict[str, float] = {}
    others: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{outer}{key}"
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)  # sync point: the user logs
        elif isinstance(value, Mapping):
            inner, rest = _divided(value, f"{name}/")
            numbers.update(inner)
            others.update(rest)
        elif getattr(value, "size", None) == 1 and hasattr(value, "item"):
            numbers[name] = float(value.item())  # sync point: a NumPy scalar, on the host
        else:
            others[name] = value
    return numbers, others
