"""`LearningRateFinder`, `BatchSizeFinder`: search a value when a fit begins, before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from trainer_kit.core.hooks import Callback

if TYPE_CHECKING:
    from trainer_kit.training.session import Session
    from trainer_kit.tuner.learning_rate import LearningRates

__all__ = ["BatchSizeFinder", "LearningRateFinder"]


@final
class LearningRateFinder(Callback):
    """`tuner.lr_find` when a fit begins; a fit that resumes takes the learning rate that the run has found.

    Args:
        min_lr: of the first step.
        max_lr: of the last step.
        num_training_steps: optimizer steps.
        mode: ``"exponential"`` or ``"linear"``.
        early_stop_threshold: end where the mean loss is so many times its lowest value; None: do not.
        update_attr: set the suggestion on the module; False only keeps the curve.
        attr_name: the attribute of the module or its ``hparams``; by default ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: the curve and its suggestions; None before a search.

    Raises:
        ConfigurationError: when a fit begins, as `tuner.lr_find`.

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
        self.min_lr, self.max_lr, self.num_training_steps, self.mode = min_lr, max_lr, num_training_steps, mode
        self.early_stop_threshold, self.update_attr, self.attr_name = early_stop_threshold, update_attr, attr_name
        self.optimal_lr: LearningRates | None = None
        self._rate: float | None = None

    def tune(
        self, trainer: Session, module: Any, loaders: Any, datamodule: Any, saved: Mapping[str, Any] | None
    ) -> None:
        """Search, or set what the run has found before; the fit calls this."""
        from trainer_kit.tuner.learning_rate import attribute_of, find_learning_rate, set_learning_rate
        from trainer_kit.tuner.trial import check_call

        if saved is not None:
            self._rate = saved.get("lr")
            if self._rate is None:
                trainer.say("LearningRateFinder: the run continues with the learning rate that it has")
            else:
                set_learning_rate(trainer, module, self._rate, self.attr_name)
            return
        check_call(trainer, module)
        if self.update_attr:
            attribute_of(module, self.attr_name)
        self.optimal_lr = find_learning_rate(
            trainer,
            module,
            loaders,
            datamodule,
            min_lr=self.min_lr,
            max_lr=self.max_lr,
            num_training=self.num_training_steps,
            mode=self.mode,
            early_stop_threshold=self.early_stop_threshold,
            is_set_up=True,
        )
        if self.update_attr:
            self._rate = self.optimal_lr.needed()
            set_learning_rate(trainer, module, self._rate, self.attr_name)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._rate is None else {"lr": self._rate}


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

    Attributes:
        optimal_batch_size: on each rank; None before a search.

    Raises:
        ConfigurationError: when a fit begins, as `tuner.scale_batch_size`.

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
    ) -> None:
        self.mode, self.steps_per_trial, self.init_val = mode, steps_per_trial, init_val
        self.max_trials, self.batch_arg_name = max_trials, batch_arg_name
        self.optimal_batch_size: int | None = None

    def tune(
        self, trainer: Session, module: Any, loaders: Any, datamodule: Any, saved: Mapping[str, Any] | None
    ) -> None:
        """Search, or set what the run has found before; the fit calls this."""
        from trainer_kit.tuner.batch_size import find_batch_size, set_batch_size
        from trainer_kit.tuner.trial import check_call

        why = "found before"
        if saved is not None:
            self.optimal_batch_size = saved.get("batch_size")
            if self.optimal_batch_size is None:
                trainer.say("BatchSizeFinder: the run continues with the batch size that it has")
                return
        else:
            check_call(trainer, module)
            self.optimal_batch_size, why = find_batch_size(
                trainer,
                module,
                loaders,
                datamodule,
                mode=self.mode,
                steps_per_trial=self.steps_per_trial,
                init_val=self.init_val,
                max_trials=self.max_trials,
                name=self.batch_arg_name,
                is_set_up=True,
            )
        set_batch_size(self.batch_arg_name, self.optimal_batch_size, module, loaders, datamodule)
        trainer.say(f"batch size: {self.batch_arg_name} = {self.optimal_batch_size} ({why})")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.optimal_batch_size is None else {"batch_size": self.optimal_batch_size}
