"""Lets callbacks tune values of the module and the data before loaders and optimizers are created from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.types import Loaders
from trainer_kit.state.collect import SavedState
from trainer_kit.training.session import Session

__all__ = ["TunesFit", "tune_callbacks"]


@runtime_checkable
class TunesFit(Protocol):
    """A callback that tunes values of the module and the data before a fit is composed."""

    @property
    def state_key(self) -> str: ...
    def tune(
        self,
        trainer: Session,
        module: Any,
        loaders: Any,
        datamodule: Any,
        saved: Mapping[str, Any] | None,
    ) -> None:
        """Search for values, on every rank; with ``saved``, its state in a checkpoint, restore those values instead."""


def tune_callbacks(
    trainer: Session,
    module: TrainModule,
    loaders: Loaders | None,
    datamodule: object,
    *,
    saved: SavedState | None,
    weights_only: bool,
) -> None:
    """Call `tune` of every callback that has it. Every rank must call it.

    A resumed run restores the values that it found before, and does not search.

    Args:
        trainer: of the fit.
        module: of the fit.
        loaders: as passed to ``fit``.
        datamodule: of the fit.
        saved: the part of the checkpoint that is read before the fit is composed; None without a checkpoint.
        weights_only: whether only the weights of the checkpoint are loaded.

    Raises:
        ConfigurationError: a search would run with other weights than the fit.
    """
    tuners = [
        callback for callback in trainer.callbacks if isinstance(callback, TunesFit)
    ]
    if not tuners:
        return
    if saved is not None and weights_only:
        raise ConfigurationError(
            f"{type(tuners[0]).__name__} would search with weights other than those of the checkpoint",
            found="load_weights_only=True",
            fix="load them first: fit(Module.load_from_checkpoint(path), ...)",
        )
    if trainer.settings.fast:
        names = " and ".join(type(callback).__name__ for callback in tuners)
        trainer.say(f"fast_dev_run: {names} not run")
        return
    for callback in tuners:
        # Loaders and optimizers are created with these values, so they are restored here, ahead of the rest of the
        # checkpoint; another result of a new search would change the run.
        state: SavedState | None = None
        if saved is not None:
            state = (saved.get("callbacks") or {}).get(callback.state_key, {})
        if state == {}:
            trainer.say(f"{type(callback).__name__} does not search in a resumed run")
        callback.tune(trainer, module, loaders, datamodule, state)
        # The search may have loaded them with other values.
        trainer.training_loaders.forget()
