"""Lightning's loop objects, as views of a Trainer: limits that can be set, and counts at each hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, final

from trainer_kit.core.hooks import hooks_where
from trainer_kit.core.progress import Progress

__all__ = [
    "BatchProgress",
    "Counts",
    "DistributedFlags",
    "EpochLoop",
    "EpochProgress",
    "EvaluationLoop",
    "FitLoop",
    "LoggingSteps",
    "Position",
    "PredictLoop",
]

_IN_A_BATCH: Final = hooks_where(inside="batch") | {"training_step"}
"""Hooks between ``on_train_batch_start`` and ``on_train_batch_end``."""
_IN_AN_EPOCH: Final = _IN_A_BATCH | hooks_where(inside="epoch")
_COUNTS_CHANGE: Final = (
    "trainer.fit(..., ckpt_path=...) continues at the position of a checkpoint"
)
_RUNS: Final = (
    "trainer.validate and trainer.fit run it; trainer.request_validation validates now"
)
_INSTEAD: Final[Mapping[str, str]] = {
    "_combined_loader": "trainer.train_dataloader",
    "_data_fetcher": "the loader moves batches; override transfer_batch_to_device",
    "_logged_outputs": "trainer.callback_metrics",
    "_results": "trainer.callback_metrics and trainer.logged_metrics",
    "_should_accumulate": "on_before_optimizer_step is called in the batches that step",
    "batch_progress": "on_validation_batch_start and the other hooks get batch_idx",
    "automatic_optimization": "trainer.global_step counts optimizer steps",
    "connect": _RUNS,
    "epoch_batch_indices": "write_on_epoch_end of a BasePredictionWriter gets them",
    "inference_mode": "Trainer(inference_mode=...)",
    "load_state_dict": _COUNTS_CHANGE,
    "manual_optimization": "trainer.global_step counts optimizer steps",
    "predictions": "trainer.predict returns them",
    "run": _RUNS,
    "setup_data": "trainer.num_val_batches has the sizes once the loop runs",
    "state_dict": "trainer.progress.state_dict()",
}
"""What to use in place of attributes of Lightning's loops."""


class Position(NamedTuple):
    """Where a Trainer is.

    Attributes:
        progress: the counts of the fit.
        hook: the hook or step that is being called, or was last.
        batch_idx: the index of the running or last training batch in its epoch.
        fits: whether a fit is running.
    """

    progress: Progress
    hook: str
    batch_idx: int
    fits: bool


class _Looped(Protocol):
    """The part of a Trainer that the loop objects use."""

    num_val_batches: list[int | float]
    num_test_batches: list[int | float]
    num_predict_batches: list[int | float]

    @property
    def global_step(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def log_every_n_steps(self) -> int: ...
    @property
    def should_stop(self) -> bool: ...
    @property
    def is_last_batch(self) -> bool: ...
    @property
    def max_epochs(self) -> int | None: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def min_epochs(self) -> int: ...
    @property
    def min_steps(self) -> int: ...
    @property
    def num_training_batches(self) -> int | float: ...
    @property
    def predict_batch_indices(self) -> list[Any] | None: ...
    def load_train(self) -> Any: ...
    def position(self) -> Position: ...
    def set_limit(self, name: str, value: int | None) -> None: ...


class _View:
    """Base of the loop objects; accessing any attribute that they do not define raises `AttributeError`."""

    # Views without state: Lightning's programs keep a loop object and read it later.
    _trainer: _Looped

    def __init__(self, trainer: _Looped) -> None:
        # `__setattr__` takes properties only: a misspelled limit must not be stored without an effect.
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> NoReturn:
        instead = _INSTEAD.get(
            name,
            "this library has no loop objects; trainer.progress has the counts, and arguments of the Trainer and hooks"
            " change what it does",
        )
        raise AttributeError(f"{type(self).__name__} has no {name}: {instead}")

    def __setattr__(self, name: str, value: object) -> None:
        attribute = getattr(type(self), name, None)
        if not isinstance(attribute, property):
            self.__getattr__(name)
        if attribute.fset is None:
            instead = _INSTEAD.get(name, _COUNTS_CHANGE)
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be set: {instead}"
            )
        super().__setattr__(name, value)


@final
class Counts:
    """How many epochs or batches are ready, started, processed and completed.

    Args:
        ready: those that have begun.
        started: those whose hook of the start has been called.
        processed: those that are trained.
        completed: those whose hook of the end has been called.
    """

    def __init__(
        self, ready: int, started: int, processed: int, completed: int
    ) -> None:
        # Past `__setattr__`, which refuses every assignment.
        vars(self).update(
            ready=ready, started=started, processed=processed, completed=completed
        )

    ready: int
    started: int
    processed: int
    completed: int

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: {_COUNTS_CHANGE}")


@final
class BatchProgress(_View):
    """The training batches of this epoch and of the fit."""

    @property
    def current(self) -> Counts:
        """Batches of this epoch; after the fit, of its last epoch."""
        # Progress counts a batch when it is complete. What it does not know is how far the running batch is: the hook
        # that is being called says so.
        progress, hook, index, _ = self._trainer.position()
        # Lightning's order: ready before the hook of the start, started after it, processed before the hook of the end.
        if hook == "on_train_batch_start":
            return Counts(index + 1, index, index, index)
        if hook in _IN_A_BATCH:
            return Counts(index + 1, index + 1, index, index)
        if hook == "on_train_batch_end":
            return Counts(index + 1, index + 1, index + 1, index)
        last = index + 1 if progress.batch else 0
        count = progress.epoch_batch or last
        return Counts(count, count, count, count)

    @property
    def total(self) -> Counts:
        """Batches of the fit."""
        progress, hook, _, _ = self._trainer.position()
        current = self.current
        # Completed batches of earlier epochs, to which the running one is added.
        earlier = progress.batch - progress.epoch_batch
        # The last epoch is over, and `current` still shows its batches.
        if hook not in _IN_AN_EPOCH and not progress.epoch_batch:
            earlier = progress.batch - current.completed
        return Counts(*(count + earlier for count in vars(current).values()))

    @property
    def is_last_batch(self) -> bool:
        """Whether the running batch is the last of its epoch by the length of the loader."""
        return self._trainer.is_last_batch


@final
class EpochProgress(_View):
    """The epochs of a fit."""

    @property
    def current(self) -> Counts:
        """Epochs so far."""
        progress, hook, _, fits = self._trainer.position()
        epoch = progress.epoch
        if not fits or not (progress.epoch_batch or hook in _IN_AN_EPOCH):
            return Counts(epoch, epoch, epoch, epoch)
        # The hook of the start is called while the epoch is only ready.
        started = epoch + (hook != "on_train_epoch_start")
        processed = epoch + (hook == "on_train_epoch_end")
        return Counts(epoch + 1, started, processed, epoch)

    total = current


@final
class _DataSource(_View):
    """The training loaders of a fit."""

    def dataloader(self) -> Any:
        """The loaders, from the module or data module where none was passed to ``fit``."""
        return self._trainer.load_train()

    @property
    def instance(self) -> Any:
        """The same loaders."""
        return self._trainer.load_train()

    def is_defined(self) -> bool:
        """Whether there are any."""
        return self._trainer.load_train() is not None


class _StepLimits:
    """The limits in steps, which Lightning shows on two loops."""

    _trainer: _Looped

    @property
    def max_steps(self) -> int:
        """The limit in optimizer steps, set as ``fit_loop.max_epochs``; -1 for no limit."""
        return self._trainer.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._trainer.set_limit("max_steps", steps)

    @property
    def min_steps(self) -> int:
        """Optimizer steps that must be taken before a stop request is granted."""
        return self._trainer.min_steps


@final
class EpochLoop(_StepLimits, _View):
    """The position of a fit in its epoch."""

    @property
    def batch_idx(self) -> int:
        """The index of the running or last batch in its epoch; -1 before the first one."""
        return BatchProgress(self._trainer).current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        """The same, counted over all epochs of the fit."""
        return BatchProgress(self._trainer).total.ready - 1

    @property
    def batch_progress(self) -> BatchProgress:
        """The counts of batches."""
        return BatchProgress(self._trainer)

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.global_step

    # Private in Lightning, but read by its loggers' examples and by packages.
    _batches_that_stepped = global_step

    @property
    def val_loop(self) -> EvaluationLoop:
        """The validation inside the fit."""
        return EvaluationLoop(self._trainer, "validate")


@final
class FitLoop(_StepLimits, _View):
    """The limits of a Trainer, and where its fit is. After a limit is set between fits, the next fit continues.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer, module, data = Trainer(max_epochs=1, barebones=True), TinyModule(), [torch.randn(4, 32)] * 3
        >>> trainer.fit(module, data)
        >>> trainer.fit_loop.max_epochs = 3
        >>> trainer.fit(module, data)
        >>> trainer.current_epoch, trainer.global_step, trainer.fit_loop.total_batch_idx
        (3, 9, 8)
    """

    @property
    def max_epochs(self) -> int | None:
        """The limit; set it to continue the last fit with new optimizers, or to move the limit of this fit."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int | None) -> None:
        self._trainer.set_limit("max_epochs", epochs)

    @property
    def min_epochs(self) -> int:
        """Epochs that must be completed before a stop request is granted."""
        return self._trainer.min_epochs

    @property
    def batch_idx(self) -> int:
        """The index of the running or last batch in its epoch; -1 before the first one."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The same, counted over all epochs of the fit."""
        return self.epoch_loop.total_batch_idx

    @property
    def max_batches(self) -> int | float:
        """Batches of an epoch on this rank; infinite if the number is unknown."""
        return self._trainer.num_training_batches

    @property
    def epoch_loop(self) -> EpochLoop:
        """The position in the epoch."""
        return EpochLoop(self._trainer)

    @property
    def epoch_progress(self) -> EpochProgress:
        """The counts of epochs."""
        return EpochProgress(self._trainer)

    @property
    def _data_source(self) -> _DataSource:
        return _DataSource(self._trainer)

    def setup_data(self) -> None:
        """Get the training loaders now, for their length in ``configure_optimizers``."""
        self._trainer.load_train()


@final
class EvaluationLoop(_View):
    """The loaders of a validation or a test.

    Args:
        trainer: the Trainer.
        verb: the entry point.
    """

    _verb: Literal["validate", "test"]

    def __init__(self, trainer: _Looped, verb: Literal["validate", "test"]) -> None:
        super().__init__(trainer)
        vars(self)["_verb"] = verb

    @property
    def max_batches(self) -> Sequence[int | float]:
        """Batches of each loader on this rank, once the loop has run or runs."""
        if self._verb == "validate":
            return self._trainer.num_val_batches
        return self._trainer.num_test_batches

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)


@final
class PredictLoop(_View):
    """The loaders and the position of a prediction."""

    @property
    def max_batches(self) -> Sequence[int | float]:
        """Batches of each loader on this rank, once the loop has run or runs."""
        return self._trainer.num_predict_batches

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    @property
    def current_batch_indices(self) -> list[Any]:
        """Dataset indices of the samples in this rank's batch; empty if the loader does not draw indices."""
        return self._trainer.predict_batch_indices or []


@final
class DistributedFlags(_View):
    """The part of Lightning's private object that callbacks of other packages read, such as Optuna's."""

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train."""
        return self._trainer.world_size > 1


@final
class LoggingSteps(_View):
    """The part of Lightning's private object that subclasses of Lightning's monitors read."""

    @property
    def should_update_logs(self) -> bool:
        """Whether the values of the step that runs now are logged."""
        interval = self._trainer.log_every_n_steps
        if interval == 0:
            return False
        is_due = (self._trainer.global_step + 1) % interval == 0
        return is_due or self._trainer.should_stop
