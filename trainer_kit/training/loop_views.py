"""`trainer.fit_loop` and `trainer.predict_loop`: the attributes of Lightning's loop objects that scripts use."""

from __future__ import annotations

from typing import Any, Protocol, final

__all__ = ["FitLoop", "PredictLoop"]


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
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name}: there are no loop objects; trainer.progress has the counts,"
            " and arguments of the Trainer and hooks change what it does"
        )

    def __setattr__(self, name: str, value: Any) -> None:
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
