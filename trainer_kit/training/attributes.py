"""Attributes of a Trainer for Lightning scripts: arguments, and errors for missing ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol, final, overload

from trainer_kit.core.arguments import as_list
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import Logger
from trainer_kit.core.types import LoggerLike
from trainer_kit.loggers.layout import DummyLogger
from trainer_kit.training.settings import Settings

__all__ = [
    "Argument",
    "Elsewhere",
    "Limit",
    "check_loggers",
    "loggers_of_rank",
    "missing_attribute",
]


_INSTEAD: Final = {
    "profiler": "it is one of trainer.callbacks; torch.profiler.record_function names a part of your own code",
    "scaler": "trainer.precision_plugin.scaler",
    "lr_schedulers": "trainer.lr_scheduler_configs; config.scheduler is what config['scheduler'] was",
    "plugins": "trainer.precision_plugin is the precision",
    "enable_validation": "trainer.num_val_batches is empty without validation",
    "add_argparse_args": "trainer_kit.cli(Module, DataModule) has an option for every argument",
    "from_argparse_args": "trainer_kit.cli(Module, DataModule) makes it; or Trainer(max_epochs=args.max_epochs)",
    "distributed_sampler_kwargs": "loaders are sharded without samplers; see trainer.world_size and global_rank",
}
"""What to read instead of attributes of Lightning's Trainer, by name."""


@final
class Elsewhere:
    """An attribute of Lightning's Trainer that this Trainer lacks; reading it names the replacement."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"the Trainer has no {self._name}: {_INSTEAD[self._name]}")

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance)


@final
class Argument:
    """Read-only access to a Trainer argument as it was given: a number, a word, or the name of an object."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Read on the class, as documentation tools and `inspect` do.
        if instance is None:
            return self
        return instance.arguments[self._name]

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set: pass it to a new Trainer")


class _HasSettings(Protocol):
    settings: Settings


@final
class Limit:
    """Read-only access to a limit of an entry point: a number of batches, or a fraction of them."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._key = name.removeprefix("limit_").removesuffix("_batches")

    @overload
    def __get__(self, instance: None, owner: type) -> Limit: ...
    @overload
    def __get__(self, instance: _HasSettings, owner: type) -> int | float: ...
    def __get__(
        self, instance: _HasSettings | None, owner: type
    ) -> Limit | int | float:
        if instance is None:
            return self
        return instance.settings.limits[self._key]

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set: pass it to a new Trainer")


def check_loggers(loggers: Iterable[Logger] | Logger | None) -> list[Logger]:
    """The loggers as a list.

    Raises:
        ConfigurationError: one of them is no logger.
    """
    logger_list = as_list(loggers, Logger)
    for logger in logger_list:
        if isinstance(logger, type) or not isinstance(logger, Logger):
            raise ConfigurationError(
                "this is not a logger",
                found=repr(logger),
                fix="assign an object with log_metrics",
            )
    return logger_list


def loggers_of_rank(
    loggers: list[LoggerLike], is_global_zero: bool
) -> list[LoggerLike]:
    """The loggers that modules and callbacks of a rank get."""
    if is_global_zero:
        return loggers
    # What such a logger is asked for has an answer on rank 0 alone.
    return [
        DummyLogger(logger) if getattr(logger, "writes_alone", False) else logger
        for logger in loggers
    ]


def missing_attribute(
    trainer: object, name: str, former_methods: Mapping[str, str]
) -> AttributeError:
    """The error for an attribute that a Trainer lacks; it names the replacement or the nearest name."""
    error = ConfigurationError(
        f"the Trainer has no attribute {name!r}",
        fix=_replacement(trainer, name, former_methods),
    )
    return AttributeError(str(error))


def _replacement(trainer: object, name: str, former_methods: Mapping[str, str]) -> str:
    """What to use instead of an attribute that a Trainer lacks."""
    if name.startswith("_"):
        return "a private attribute of Lightning's; hooks, trainer.progress and callback_metrics are public"
    if name in former_methods:
        return former_methods[name]
    public_names = [
        attribute for attribute in dir(type(trainer)) if not attribute.startswith("_")
    ]
    return did_you_mean(name, public_names, "dir(trainer) lists its attributes")
