"""`LearningRateFinder`, `BatchSizeFinder`: search a value when a fit begins, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from trainer_kit.core.hooks import Callback
from trainer_kit.core.types import DataModuleLike, Loaders, SavedState, StateDict

if TYPE_CHECKING:
    from trainer_kit.training.session import Session
    from trainer_kit.tuner.learning_rate import LearningRates

__all__ = ["BatchSizeFinder", "LearningRateFinder"]


@final
class LearningRateFinder(Callback):
    """`tuner.lr_find` when a fit begins; a fit that resumes takes the learning rate that the run has found.

    Args:
        min_lr: the learning rate of the first step.
        max_lr: the learning rate of the last step.
        num_training_steps: the number of optimizer steps, at least 3.
        mode: how the learning rate grows, ``"exponential"`` or ``"linear"``.
        early_stop_threshold: end when the mean loss exceeds this multiple of its lowest value; None: never.
        update_attr: set the suggestion on the module; False only keeps the curve.
        attr_name: the attribute of the module or its ``hparams``; by default ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: the curve and its suggestions; None before a search.

    Raises:
        ConfigurationError: for values that cannot work; when a fit begins, as `tuner.lr_find`.

    Example:
        >>> from trainer_kit import Trainer
        >>> trainer = Trainer(max_epochs=1, callbacks=[LearningRateFinder(num_training_steps=50)], barebones=True)
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        # Imported here: most programs that import callbacks never search.
        from trainer_kit.tuner.learning_rate import RangeTest

        self.test = RangeTest(
            min_lr, max_lr, num_training_steps, mode, early_stop_threshold
        )
        self.update_attr = update_attr
        self.attr_name = attr_name
        self.optimal_lr: LearningRates | None = None
        self._rate: float | None = None

    def tune(
        self,
        trainer: Session,
        module: Any,
        loaders: Loaders,
        datamodule: DataModuleLike,
        saved: SavedState | None,
    ) -> None:
        """Search, or set the learning rate that the run found before; ``fit`` calls this on every rank.

        Args:
            trainer: the Trainer, inside ``fit`` and before the first step.
            module: the module of the fit.
            loaders: what was passed to ``fit``; None if the module or the datamodule has the loaders.
            datamodule: the datamodule of the fit, or None.
            saved: this callback's state in the checkpoint that the fit resumes from; None for a new run, which
                searches.

        Raises:
            ConfigurationError: as `tuner.lr_find`.
        """
        from trainer_kit.tuner.learning_rate import attribute_of, set_learning_rate

        # A resumed fit continues with its rate: a search on half-trained weights would find another one.
        if saved is not None:
            self._rate = saved.get("lr")
        else:
            if self.update_attr:
                # A module without the attribute is an error before the search, which may take minutes.
                attribute_of(module, self.attr_name)
            self.optimal_lr = self.test.run(
                trainer, module, loaders, datamodule, is_set_up=True
            )
            self._rate = None
            if self.update_attr:
                self._rate = self.optimal_lr.needed()
        if self._rate is not None:
            set_learning_rate(trainer, module, self._rate, self.attr_name)

    def state_dict(self) -> StateDict:
        if self._rate is None:
            return {}
        return {"lr": self._rate}


@final
class BatchSizeFinder(Callback):
    """`tuner.scale_batch_size` when a fit begins; a fit that resumes takes the size that the run has found.

    Put it before a `LearningRateFinder`, whose result depends on the batch size.

    Args:
        mode: ``"power"``, or ``"binsearch"`` to search on between the last size that works and the first that does not.
        steps_per_trial: optimizer steps of each trial.
        init_val: the first size.
        max_trials: sizes to try, at most.
        batch_arg_name: the attribute of the module, the datamodule, or their ``hparams``.
        margin: with ``"binsearch"``, reduce the size that was found by this fraction, as a reserve of memory.
        max_val: no larger size is tried.

    Attributes:
        optimal_batch_size: on each rank; None before a search.

    Raises:
        ConfigurationError: for values that cannot work; when a fit begins, as `tuner.scale_batch_size`.

    Example:
        >>> from trainer_kit import Trainer
        >>> trainer = Trainer(max_epochs=1, callbacks=[BatchSizeFinder(mode="binsearch")], barebones=True)
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        from trainer_kit.tuner.batch_size import SizeSearch

        self.search = SizeSearch(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
        )
        self.optimal_batch_size: int | None = None

    def tune(
        self,
        trainer: Session,
        module: Any,
        loaders: Loaders,
        datamodule: DataModuleLike,
        saved: SavedState | None,
    ) -> None:
        """Search, or set the size that the run found before; ``fit`` calls this on every rank.

        Args:
            trainer: the Trainer, inside ``fit`` and before the first step.
            module: the module of the fit.
            loaders: what was passed to ``fit``; None if the module or the datamodule has the loaders.
            datamodule: the datamodule of the fit, or None.
            saved: this callback's state in the checkpoint that the fit resumes from; None for a new run, which
                searches.

        Raises:
            ConfigurationError: as `tuner.scale_batch_size`.
        """
        from trainer_kit.tuner.batch_size import set_batch_size

        data = module, loaders, datamodule
        # The number of steps of an epoch depends on the size, so a resumed fit must have the same one.
        if saved is not None:
            size = saved.get("batch_size")
            reason = "found before"
        else:
            size, reason = self.search.run(trainer, *data, is_set_up=True)
        self.optimal_batch_size = size
        if size is not None:
            set_batch_size(self.search.name, size, *data)
            trainer.say(f"batch size: {self.search.name} = {size} ({reason})")

    def state_dict(self) -> StateDict:
        if self.optimal_batch_size is None:
            return {}
        return {"batch_size": self.optimal_batch_size}
