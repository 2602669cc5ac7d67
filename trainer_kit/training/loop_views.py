"""What scripts read and set of Lightning's loop objects: `trainer.fit_loop` and `trainer.predict_loop`."""

from __future__ import annotations

from typing import Any, Protocol, final

__all__ = ["FitLoop", "PredictLoop"]


class _Limited(Protocol):
    """A Trainer, as the loop objects use it."""

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
    """Refuses every other attribute of a loop object."""

    _trainer: _Limited

    def __init__(self, trainer: _Limited) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name}: the loop is one function; trainer.progress counts what it completed,"
            " and arguments of the Trainer and hooks change what it does"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        else:
            self.__getattr__(name)


@final
class FitLoop(_View):
    """The limits of a Trainer, which may be set: a fit that ended at one of them is continued by the next fit.

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
        """As of the Trainer; setting it continues the last fit, with new optimizers, or moves the limit of this one."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int | None) -> None:
        self._trainer.set_limit("max_epochs", epochs)

    @property
    def max_steps(self) -> int:
        """The same in optimizer steps; -1 for no limit."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._trainer.set_limit("max_steps", steps)

    @property
    def min_epochs(self) -> int:
        """Completed epochs before which no stop request is granted."""
        return self._trainer.min_epochs

    @property
    def epoch_loop(self) -> FitLoop:
        """This object: Lightning's has ``max_steps`` there."""
        return self


@final
class PredictLoop(_View):
    """Where a prediction is."""

    @property
    def current_batch_indices(self) -> list[Any]:
        """The indices in the dataset of the samples of this rank's batch; empty where the loader does not draw them."""
        return self._trainer.predict_batch_indices or []
