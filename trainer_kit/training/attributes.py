"""Attributes of a Trainer for Lightning scripts: arguments, and errors for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, final

from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = [
    "Argument",
    "Elsewhere",
    "OptimizersOfFit",
    "missing_attribute",
]


@final
class Elsewhere:
    """An attribute of Lightning's Trainer that this Trainer lacks; reading it names the replacement."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"the Trainer has no {self._name}: {self._instead}")

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance)


@final
class Argument:
    """Read-only access to a Trainer argument as it was given: a number, a word, or the name of an object."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.arguments[self._name]

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(f"{self._name} cannot be set: pass it to a new Trainer")


@final
class OptimizersOfFit(list[Optimizer]):
    """The optimizers of a fit; to replace one of them, all are set together."""

    def __setitem__(self, *item: object) -> NoReturn:
        raise ConfigurationError(
            "the optimizers of a run must be set together",
            found="trainer.optimizers[...] = ...",
            fix="assign all of them: trainer.optimizers = [...]",
        )


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
