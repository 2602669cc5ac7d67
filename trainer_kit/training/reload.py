"""Gets the loaders from the user again, between two epochs: ``reload_dataloaders_every_n_epochs``."""

from __future__ import annotations

from typing import final

from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.step.run import Fit
from trainer_kit.training.compose import batch_movers, load_training, make_schedule
from trainer_kit.training.compose_evaluation import find_validation_loaders
from trainer_kit.training.session import Session

__all__ = ["LoaderReload"]


@final
class LoaderReload:
    """Reloads the loaders of a fit before each epoch whose number is a multiple of an interval.

    Not before the first epoch, which has new ones; but a run that resumes where an epoch begins makes them once more,
    with the generators of its checkpoint.

    Args:
        trainer: the Trainer that runs the fit.
        run: the fit.
        datamodule: has hooks for loaders, or None.
        val_loaders: the validation loaders passed to ``fit``, or None.
        passed: whether the training loaders were passed to ``fit``: they stay.
        every: epochs between two reloads.
        resumed: whether the fit continues from a checkpoint.
    """

    def __init__(
        self,
        trainer: Session,
        run: Fit,
        datamodule: DataModuleLike,
        *,
        val_loaders: Loaders | None,
        passed: bool,
        every: int,
        resumed: bool,
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._datamodule = datamodule
        self._val_loaders = val_loaders
        self._passed = passed
        self._every = every
        progress = run.progress
        self._loaded_at = progress.epoch - progress.epoch % every
        # Once more where an epoch begins: the uninterrupted run makes them there, with the generators that this
        # checkpoint holds.
        if resumed and progress.epoch == self._loaded_at and not progress.epoch_batch:
            self._loaded_at -= every

    def begin_epoch(self) -> None:
        """Call the hooks that create the loaders, if they are due. Every rank must call it."""
        progress = self._run.progress
        # Inside an epoch the loaders stay: the position counts their batches.
        if progress.epoch < self._loaded_at + self._every or progress.epoch_batch:
            return
        self._loaded_at = progress.epoch
        if not self._passed:
            self._reload_training()
        self._reload_validation()

    def _reload_training(self) -> None:
        trainer, run = self._trainer, self._run
        windows = run.windows
        trainer.training_loaders.forget()
        feed, length = load_training(trainer, trainer.load_train())
        # None where the user's `loss_weight` weights the batches.
        if trainer.metrics.feed is not None:
            trainer.metrics.use_sizes_of(feed)
        move, ahead = batch_movers(trainer, run.module, self._datamodule, feed)
        windows.read_from(feed, length.limit, ahead)
        # Batches that are moved ahead of their micro-batch are on the device when it begins.
        if ahead is not None:
            move = None
        run.runner.move_batches_with(move)
        trainer.training_loaders.measure(feed, length)
        schedule = make_schedule(
            trainer.settings,
            length,
            bool(run.validation.feeds),
            trainer.strategy.world.size,
        )
        run.schedule.use_length(length, schedule.validate_every)

    def _reload_validation(self) -> None:
        """A hook that gives no validation loader, or none with a batch, ends validation until it gives one."""
        trainer, run = self._trainer, self._run
        validation = run.validation
        validated = bool(validation.feeds)
        # Those that were passed to `fit` had no batch, or `validation_step` is missing: both stay so.
        if not validated and self._val_loaders is not None:
            return
        loaders = find_validation_loaders(
            trainer, run.module, self._datamodule, self._val_loaders
        )
        validates = bool(loaders.feeds)
        if validates and not validated:
            trainer.say(
                f"validation from epoch {run.progress.epoch} on: val_dataloader gave a batch"
            )
        if validated and not validates:
            trainer.say(
                f"no validation from epoch {run.progress.epoch} on: val_dataloader gave no batch"
            )
        validation.replace_loaders(loaders.feeds, loaders.limits, loaders.expected)
        if not (validated and validates):
            # Intervals without a loader are not due when there is one.
            run.schedule.mark_validated(run.progress)
        run.schedule.set_validates(validates)
        trainer.count_batches("val", validation.counts)
