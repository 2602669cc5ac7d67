"""Where a run is, by the names that modules and callbacks of this field ask for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NoReturn, final

from trainer_kit.core.duration import Duration
from trainer_kit.core.environment import Environment
from trainer_kit.core.progress import Progress
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.settings import Settings

__all__ = ["Position"]


@final
class _Elsewhere:
    """An attribute of Lightning's Trainer that this one does not have: reading it says what to use instead."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        raise AttributeError(f"the Trainer has no {self._name}: {self._instead}")

    def __set__(self, instance: Any, value: Any) -> NoReturn:
        self.__get__(instance)


class Position(ABC):
    """Read-only answers, each from one place: progress, settings, strategy."""

    settings: Settings
    progress: Progress
    strategy: Strategy
    environment: Environment
    metrics: Metrics
    run: Any
    state_verb: str
    sanity_checking: bool
    processes: int
    accumulation: int

    @abstractmethod
    def first_callback(self, attribute: str) -> Any:
        """The first callback that has ``attribute``, or None."""

    @property
    @abstractmethod
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on this rank."""

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Completed optimizer steps."""
        return self.progress.step

    @property
    def global_rank(self) -> int:
        """This process's rank over all nodes."""
        return self.strategy.world.rank if self.strategy.started else self.environment.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.environment.local_rank if self.world_size > 1 else 0

    @property
    def node_rank(self) -> int:
        """This node's rank."""
        return self.environment.node_rank

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.strategy.world.size if self.strategy.started else self.environment.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def num_devices(self) -> int:
        """Devices on this node."""
        return self.processes

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return max(1, self.world_size // max(1, self.processes))

    @property
    def training(self) -> bool:
        """Whether a training step is running."""
        return self.state_verb == "fit" and not self.evaluating

    @property
    def evaluating(self) -> bool:
        """Whether validation, test or prediction is running."""
        return self.metrics.evaluating

    @property
    def validating(self) -> bool:
        """Whether validation is running, by itself or inside `fit`; the sanity check is none."""
        return self.state_verb == "validate" or (
            self.state_verb == "fit" and self.evaluating and not self.sanity_checking
        )

    @property
    def testing(self) -> bool:
        """Whether `test` is running."""
        return self.state_verb == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` is running."""
        return self.state_verb == "predict"

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that is trained on is the last of its epoch, as far as its length is known."""
        return self.run is not None and self.run.micro.index + 1 >= self.num_training_batches

    @property
    def epoch_is_whole(self) -> bool:
        """In ``on_train_epoch_end``: whether the epoch is over; a run that ends inside of it goes on there."""
        return self.run is not None and self.run.whole

    @property
    def min_epochs(self) -> int:
        """Completed epochs before which no stop request is granted."""
        return self.settings.min_epochs

    @property
    def min_steps(self) -> int:
        """Completed steps before which no stop request is granted."""
        return self.settings.min_steps

    @property
    def max_epochs(self) -> int | None:
        """The limit in epochs; -1 where it was given as -1, None where another limit ends the run."""
        return -1 if self.settings.max_epochs is None and self.settings.endless else self.settings.max_epochs

    @property
    def max_steps(self) -> int:
        """The limit in steps, or -1."""
        return -1 if self.settings.max_steps is None else self.settings.max_steps

    @property
    def limit_train_batches(self) -> int | float:
        """Batches of a training epoch, or a fraction of them."""
        return self.settings.limits["train"]

    @property
    def limit_val_batches(self) -> int | float:
        """Batches of a validation, or a fraction of them."""
        return self.settings.limits["val"]

    @property
    def limit_test_batches(self) -> int | float:
        """Batches of a test, or a fraction of them."""
        return self.settings.limits["test"]

    @property
    def limit_predict_batches(self) -> int | float:
        """Batches of a prediction, or a fraction of them."""
        return self.settings.limits["predict"]

    @property
    def overfit_batches(self) -> int | float:
        """Batches, or a fraction of them, that training and validation are restricted to; 0 for no restriction."""
        return self.settings.overfit

    @property
    def val_check_interval(self) -> int | float | Duration:
        """When validation runs: a fraction of the epoch, a number of batches, or a duration."""
        return self.settings.validate_every

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations; None where ``val_check_interval`` counts over epochs."""
        return self.settings.validate_epochs

    @property
    def num_sanity_val_steps(self) -> int:
        """Validation batches before training; -1 for all."""
        return self.settings.sanity_steps

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest gradient norm or value; None for no clipping."""
        return None if self.settings.clip is None else self.settings.clip[0]

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """``"norm"`` or ``"value"``; None for no clipping."""
        return None if self.settings.clip is None else self.settings.clip[1]

    @property
    def log_every_n_steps(self) -> int:
        """Steps between flushes of logged values."""
        return self.settings.log_every

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of the next optimizer step."""
        return self.accumulation

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit, as far as anybody knows; infinite without a limit."""
        limits: list[float] = [] if self.settings.max_steps is None else [self.settings.max_steps]
        duration = self.settings.max_duration
        batches = self.num_training_batches
        if duration is not None and duration.unit == "st":
            limits.append(duration.value)
        elif duration is not None and duration.unit == "ba":
            whole, rest = divmod(duration.value, batches) if 0 < batches < math.inf else (0, duration.value)
            limits.append(self._steps(rest) + (int(whole) * self._steps(batches) if whole else 0))
        epochs = self.settings.max_epochs
        if epochs is not None:
            counting = self.first_callback("get_accumulate_grad_batches")
            if counting is None or batches in (0, math.inf):
                limits.append(self._steps(batches) * epochs if epochs else 0)
            else:
                lengths = map(counting.get_accumulate_grad_batches, range(epochs))
                limits.append(sum(math.ceil(batches / length) for length in lengths))
        return min(limits, default=math.inf)

    def _steps(self, batches: float) -> float:
        return batches if batches == math.inf else math.ceil(batches / self.accumulation)

    # -- what Lightning's Trainer has besides ----------------------------------------------------------------------

    fit_loop = _Elsewhere(
        "limits are arguments of the Trainer; to train further, fit(ckpt_path=...) with a Trainer of larger ones"
    )
    validate_loop = _Elsewhere(
        "trainer.validate returns the values; trainer.validating and callback_metrics are there in a hook"
    )
    test_loop = _Elsewhere("trainer.test returns the values; trainer.testing and callback_metrics are there in a hook")
    predict_loop = _Elsewhere("trainer.predict returns the predictions")
    state = _Elsewhere("trainer.state_verb is the running one of fit, validate, test and predict")
    interrupted = _Elsewhere("an interrupt reaches the caller of fit as KeyboardInterrupt")
    received_sigterm = _Elsewhere("SIGTERM saves a checkpoint and ends the process with exit code 143")
    profiler = _Elsewhere(
        "open torch.profiler.profile(...) in a callback's on_fit_start and step it in on_train_step_end"
    )
    scaler = _Elsewhere("trainer.precision_plugin.scaler")
    accelerator = _Elsewhere("trainer.strategy.device")
    device_ids = _Elsewhere("trainer.strategy.device is the device of this process")
    ckpt_path = _Elsewhere("the path of a fit or an evaluation is printed when it is loaded")
    init_module = _Elsewhere(
        "build layers in configure_model, which is called on the device and in the dtype of the run"
    )
    early_stopping_callbacks = _Elsewhere("trainer.early_stopping_callback is the first; trainer.callbacks has all")
    enable_validation = _Elsewhere("trainer.num_val_batches is empty without validation")
    distributed_sampler_kwargs = _Elsewhere(
        "loaders are divided without samplers; trainer.world_size and global_rank say how"
    )
    reload_dataloaders_every_n_epochs = _Elsewhere("loaders are built once a fit")
