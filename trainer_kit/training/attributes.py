"""Attributes of a Trainer for Lightning scripts: loop objects, arguments, and errors for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, final

from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = [
    "Argument",
    "Elsewhere",
    "FitLoop",
    "OptimizersOfFit",
    "PredictLoop",
    "missing_attribute",
]


class _Limited(Protocol):
    """The part of a Trainer that the loop objects use."""

    @property
    def max_epochs(self) -> int | None: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def min_epochs(self) -> int: ...
    @property
    def predict_batch_indices(self) -> list[Any] | None: ...
    def set_limit(self, name: str, value: int | None) -> None: ...


class _View:
    """Base of the loop objects; accessing any attribute that they do not define raises `AttributeError`."""

    _trainer: _Limited

    def __init__(self, trainer: _Limited) -> None:
        vars(self)["_trainer"] = trainer  # `__setattr__` takes properties only

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name}: this library has no loop objects; trainer.progress has the counts,"
            " and arguments of the Trainer and hooks change what it does"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        else:
            self.__getattr__(name)


@final
class FitLoop(_View):
    """The limits of a Trainer. After one is set between fits, the next fit continues the last.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer, module, data = Trainer(max_epochs=1, barebones=True), TinyModule(), [torch.randn(4, 32)] * 3
        >>> trainer.fit(module, data)
        >>> trainer.fit_loop.max_epochs = 3
        >>> trainer.fit(module, data)
        >>> trainer.current_epoch, trainer.global_step
        (3, 9)
    """

    @property
    def max_epochs(self) -> int | None:
        """The limit; set it to continue the last fit with new optimizers, or to move the limit of this fit."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int | None) -> None:
        self._trainer.set_limit("max_epochs", epochs)

    @property
    def max_steps(self) -> int:
        """The limit in optimizer steps, set in the same way; -1 for no limit."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._trainer.set_limit("max_steps", steps)

    @property
    def min_epochs(self) -> int:
        """Epochs that must be completed before a stop request is granted."""
        return self._trainer.min_epochs

    @property
    def epoch_loop(self) -> FitLoop:
        """This object, because Lightning has ``max_steps`` at ``fit_loop.epoch_loop``."""
        return self


@final
class PredictLoop(_View):
    """The position of a running prediction."""

    @property
    def current_batch_indices(self) -> list[Any]:
        """Dataset indices of the samples in this rank's batch; empty if the loader does not draw indices."""
        return self._trainer.predict_batch_indices or []


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
