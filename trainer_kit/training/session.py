"""The state of a Trainer (components, progress, metrics, requests), under the names that modules and callbacks use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.arguments import as_list, refuse_replaced
from trainer_kit.core.environment import Environment, list_devices
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.location import Location, absolute
from trainer_kit.core.progress import Duration, Progress
from trainer_kit.core.protocols import (
    CheckpointRequest,
    DrawsProgress,
    Logger,
    SetsAccumulation,
    StopsEarly,
)
from trainer_kit.core.states import RunningStage, TrainerState, TrainerStatus
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.loggers.layout import DummyLogger
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.state.collect import completed_progress
from trainer_kit.state.runs import KeepsCheckpoints, RunFiles
from trainer_kit.state.saving import save_to
from trainer_kit.state.unsaveable import Unsaveable
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.optimizers import LRSchedulerConfig
from trainer_kit.step.requests import Requests
from trainer_kit.step.run import Fit
from trainer_kit.strategies.gathering import gather_tree
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.attributes import (
    Argument,
    Elsewhere,
    Limit,
    check_loggers,
    loggers_of_rank,
    missing_attribute,
)
from trainer_kit.training.build_context import build_context
from trainer_kit.training.callback_list import CallbackList
from trainer_kit.training.composition_options import CompositionOptions
from trainer_kit.training.loaders import (
    NAMES,
    training_feed,
)
from trainer_kit.training.logged_values import LoggedMetrics, LoggedValues
from trainer_kit.training.loops import (
    DistributedFlags,
    EvaluationLoop,
    FitLoop,
    LoggingSteps,
    Position,
    PredictLoop,
)
from trainer_kit.training.optimizers_of_fit import (
    clip_optimizer_gradients,
    list_manual_optimizers,
    list_optimizers,
    manual_stepper,
    replace_optimizers,
)
from trainer_kit.training.running import Running, nothing
from trainer_kit.training.settings import Settings
from trainer_kit.training.settle import Settler
from trainer_kit.training.training_loaders import TrainingLoaders

__all__ = ["Session"]

# Records an event in the report of a run: its kind, and a line of text.
_Note: TypeAlias = Callable[[str, str], object]


class Session:
    """The state of a Trainer during and between its entry points, as hooks see it.

    `Trainer` adds the constructor and the entry points, and sets the attributes that are only declared here.

    Attributes:
        settings: limits and intervals.
        progress: completed epochs, batches and steps of the last fit.
        metrics: where `TrainModule.log` writes.
        requests: requests that are not settled yet.
        strategy: places modules and tensors on devices.
        precision_plugin: sets the dtypes of computations.
        files: the run's directory, loggers and record.
        running: the entry point that runs, or ran last.
        options: how entry points are composed.
        arguments: the Trainer's arguments as plain data, for the run's record.
        origins: the source of each value that a launcher or a file may give.
        callback_list: the callbacks, and those of the running module.
        training_loaders: the training loaders of the fit, and the size of its epoch.
        logged_values: sends logged values to the loggers.
        sharded_alternative: the strategy to use if the model does not fit; None: keep this one.
        unsaveable: what happens to values that checkpoints cannot hold.
        continues: whether the next fit continues the counts of the last one.
        note: records an event for the report of the run: ``note(kind, text)``.
    """

    former_methods: Mapping[str, str] = {}
    """What to call instead of methods that trainers of other libraries have, by name."""
    adapt_callbacks: Callable[[Iterable[Any]], list[Any]] = list
    """Wraps callbacks of other libraries."""

    def __init__(
        self,
        *,
        settings: Settings,
        options: CompositionOptions,
        environment: Environment,
        strategy: Strategy,
        sharded_alternative: Strategy | None,
        precision: Precision,
        loggers: Sequence[Logger],
        root: str,
        seed: int | None,
        start: str | None,
        processes: int,
        resume: str | None,
    ) -> None:
        self.settings = settings
        self.options = options
        self.arguments = options.arguments
        self.origins = options.origins
        self.barebones = options.barebones
        self.fast_dev_run = options.fast_dev_run
        self.environment = environment
        self.strategy = strategy
        self.sharded_alternative = sharded_alternative
        self.precision_plugin = precision
        self.start = start
        self.processes = processes
        self.progress = Progress()
        self.requests = Requests()
        self.metrics = Metrics(self.progress)
        self.running = Running()
        self.training_loaders = TrainingLoaders()
        self.callback_list = CallbackList(self.adapt_callbacks)
        self.unsaveable = Unsaveable(options.drops_unsaveable, self.say)
        self.continues = False
        self.module: Any = None
        self.datamodule: DataModuleLike = None
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.predict_dataloaders: Any = None
        # Without a report nothing is recorded.
        self.note: _Note = nothing
        self.num_val_batches: list[int | float] = []
        self.num_sanity_val_batches: list[int | float] = []
        self.num_test_batches: list[int | float] = []
        self.num_predict_batches: list[int | float] = []
        # Steps of the fit before the running one.
        self.trained_before = 0
        self.accumulation = 1
        # Whether `configure_optimizers` has read `estimated_stepping_batches`.
        self.steps_were_read = False
        # The last ones: the files ask loggers for their names, and say which of them does not answer.
        self.files = RunFiles(
            loggers=loggers,
            root=root,
            seed=seed,
            resume=resume,
            records=not settings.fast and not options.is_silent,
            say=self.say,
        )
        self.logged_values = LoggedValues(self.progress, self.files)

    # -- the entry point -------------------------------------------------------------------------------------------

    @property
    def run(self) -> Fit | None:
        """The running or last fit, or None."""
        return self.running.fit

    def seconds_of_run(self) -> dict[str, float]:
        """Where the time of the running or last fit went: seconds by part, up to now or its end; empty before a fit.

        Rank 0 of a run with a logger counts all its restarts, other ranks and runs this process alone. The parts are
        ``useful`` and ``repeated`` steps, ``startup``, ``checkpoint``, ``data``, ``evaluation``, ``hang`` and ``down``.
        """
        return self.running.seconds_of_run()

    @property
    def evaluation(self) -> Evaluation | None:
        """The running validation, test or prediction, or None."""
        return self.running.evaluation

    @property
    def state_verb(self) -> str:
        """The running entry point (fit, validate, test, predict); empty between entry points."""
        return self.running.stage

    @property
    def sanity_checking(self) -> bool:
        """Whether a few validation batches run before training."""
        return self.running.sanity_checking

    def show_module(self, module: Any) -> None:
        """Show the module of an entry point to hooks."""
        self.module = module

    def show_datamodule(self, datamodule: DataModuleLike) -> None:
        """Show the datamodule of an entry point to hooks."""
        self.datamodule = datamodule

    def begin_fit(self, run: Fit, settler: Settler) -> None:
        """The fit is composed."""
        self.running.run_fit(run, settler)
        # Only the fit after a limit was moved continues the last one.
        self.continues = False
        self.count_batches("val", run.validation.counts)

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """The validation, test or prediction is composed."""
        self.running.run_evaluation(evaluation)
        self.count_batches(NAMES[evaluation.stage], evaluation.counts)

    def count_batches(self, name: str, counts: list[int | float]) -> None:
        """Show the batches of each loader to hooks, as ``num_val_batches`` for example."""
        setattr(self, f"num_{name}_batches", counts)

    def become_rank(
        self, environment: Environment, device: torch.device, processes: int
    ) -> None:
        """Continue in a process that was forked as one of these ranks of its node."""
        # None: this process starts no others. The fork has copied the Trainer as the parent had composed it.
        self.start = None
        self.environment = environment
        self.processes = processes
        self.strategy.use_device(device)

    def use_strategy(
        self, strategy: Strategy, sharded_alternative: Strategy | None = None
    ) -> None:
        """Use another strategy from here on; without an alternative, a module that it shards stays sharded."""
        self.strategy = strategy
        self.sharded_alternative = sharded_alternative

    def use_settings(self, settings: Settings) -> None:
        """Use other limits and intervals from the next entry point on."""
        self.settings = settings

    def report_events(self, note: _Note) -> None:
        """Record the events of a run with ``note``."""
        self.note = note

    def end_continuation(self) -> None:
        """The next fit starts at step 0."""
        self.continues = False

    # -- position: read-only, each from one place ----------------------------------------------------------------

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
        if self.strategy.started:
            return self.strategy.world.rank
        return self.environment.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        # A process that a launcher has started may train alone.
        return self.environment.local_rank if self.world_size > 1 else 0

    @property
    def node_rank(self) -> int:
        """This node's rank."""
        return self.environment.node_rank

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        if self.strategy.started:
            return self.strategy.world.size
        return self.environment.world_size

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
        """The number of nodes."""
        return max(1, self.world_size // max(1, self.processes))

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices; on the CPU, of its processes."""
        return list_devices(self.arguments["devices"], self.strategy.device.type)

    @property
    def state(self) -> TrainerState:
        """What this Trainer is doing, as Lightning's record."""
        return self.running.trainer_state(self.metrics.evaluating)

    @property
    def status(self) -> TrainerStatus:
        """The status of the last entry point."""
        return self.running.status

    @property
    def interrupted(self) -> bool:
        """Whether the last entry point ended by an exception or a signal."""
        return self.running.status == TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether this process got SIGTERM in this entry point; the run ends after the step."""
        return self.requests.signal == signal.SIGTERM

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the running or last entry point loaded, or None."""
        return self.running.restored_from

    @property
    def fit_loop(self) -> FitLoop:
        """The limits of this Trainer, which can be set, and its position, under Lightning's names."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        """The loaders of a validation, under Lightning's names."""
        return EvaluationLoop(self, "validate")

    @property
    def test_loop(self) -> EvaluationLoop:
        """The loaders of a test, under Lightning's names."""
        return EvaluationLoop(self, "test")

    def position(self) -> Position:
        """Where the running or last fit is, for the loop objects."""
        batch_idx = 0 if self.run is None else self.run.windows.window.index
        fits = self.state_verb == "fit"
        return Position(self.progress, self.metrics.hook, batch_idx, fits)

    def set_limit(self, name: str, value: int | None) -> None:
        """Set ``max_epochs`` or ``max_steps`` for the running fit; between fits, the next one continues the last.

        Args:
            name: the limit.
            value: at least -1; -1 and None mean no limit.
        """
        self.settings = self.settings.with_limit(name, value)
        if self.state_verb == "fit" and self.run is not None:
            number = None if value == -1 else value
            self.run.schedule.set_limit(name, number)
            # It may be reached at this very step.
            self.requests.wake()
        # A limit that is moved between two fits is Lightning's way to train on.
        self.continues = not self.state_verb and self.progress.step > 0

    @property
    def predict_loop(self) -> PredictLoop:
        """The position of a running prediction, under Lightning's names."""
        return PredictLoop(self)

    @property
    def training(self) -> bool:
        """Whether `fit` is running, and neither its validation nor its sanity check."""
        return self.state.stage is RunningStage.TRAINING

    @property
    def evaluating(self) -> bool:
        """Whether validation, test or the sanity check is running; prediction is none of these."""
        stage = self.state.stage
        return stage is not None and stage.evaluating

    @property
    def validating(self) -> bool:
        """Whether validation is running, in `validate` or inside `fit`; the sanity check does not count."""
        return self.state.stage is RunningStage.VALIDATING

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
        """Whether this training batch is the last of its epoch by the loader's length; False if that is unknown."""
        if self.run is None:
            return False
        return self.run.windows.window.index + 1 == self.num_training_batches

    @property
    def epoch_is_whole(self) -> bool:
        """In ``on_train_epoch_end``: whether the epoch is complete; False if the run ends inside it."""
        return self.running.epoch_is_whole

    @property
    def min_epochs(self) -> int:
        """Epochs that must be completed before a stop request is granted."""
        return self.settings.min_epochs

    @property
    def min_steps(self) -> int:
        """Optimizer steps that must be completed before a stop request is granted."""
        return self.settings.min_steps

    @property
    def max_epochs(self) -> int | None:
        """The limit in epochs; -1 if it was given as -1, None if another limit ends the run."""
        if self.settings.max_epochs is None and self.settings.endless:
            return -1
        return self.settings.max_epochs

    @property
    def max_steps(self) -> int:
        """The limit in steps, or -1."""
        return -1 if self.settings.max_steps is None else self.settings.max_steps

    limit_train_batches = Limit()
    """Batches of a training epoch, or a fraction of them."""
    limit_val_batches = Limit()
    """Batches of a validation, or a fraction of them."""
    limit_test_batches = Limit()
    """Batches of a test, or a fraction of them."""
    limit_predict_batches = Limit()
    """Batches of a prediction, or a fraction of them."""

    @property
    def overfit_batches(self) -> int | float:
        """The number or fraction of batches that training and validation are limited to; 0 for no limit."""
        return self.settings.overfit

    @property
    def val_check_interval(self) -> int | float | Duration:
        """When validation runs: a fraction of the epoch, a number of batches, or a duration."""
        return self.settings.validate_every

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations; None if ``val_check_interval`` counts across epochs."""
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
        """Steps between flushes of logged values; 0 for none."""
        return self.settings.log_every

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of the next optimizer step."""
        return self.accumulation

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of the whole fit; infinite if no limit is known."""
        self.steps_were_read = True
        return self.settings.steps(
            self.num_training_batches, self.accumulation, self.accumulation_callback
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Request the end of training after this step; the reason is logged.

        A request before ``min_epochs`` and ``min_steps`` is granted when both are reached.

        Args:
            reason: for logs and reports, such as ``"val_loss flat for 5 evaluations"``; the first of several reasons
                stays.
        """
        self.requests.ask_stop(reason)

    def withdraw_stop(self, reason: str) -> None:
        """Withdraw a stop request that is not granted yet; a request for another reason stays.

        Args:
            reason: the text that was passed to `stop`.
        """
        self.requests.withdraw_stop(reason)

    def request_checkpoint(
        self, reason: str, request: CheckpointRequest | None = None
    ) -> None:
        """Request a checkpoint, saved after everything else of this step.

        Args:
            reason: for logs and reports.
            request: brings a path, and its ``saved`` is called later; every rank must make it at the same step. None:
                the run's own directory and name; one rank may ask alone, and is answered at the step at which the ranks
                next agree (at most 50 steps later).
        """
        # `fast_dev_run` writes nothing.
        if not self.settings.fast:
            self.requests.ask_checkpoint(reason, request)

    def request_validation(self, reason: str) -> None:
        """Request validation after this step.

        Args:
            reason: for logs and reports.
        """
        self.requests.ask_validation(reason)

    @property
    def validation_due(self) -> bool:
        """Whether validation runs at this step; requests of other ranks are unknown until the ranks agree."""
        if self.run is None or not self.run.validation.feeds:
            return False
        # With several ranks a request is settled after an agreement, which may be many steps away.
        is_requested = self.requests.validation is not None and self.world_size == 1
        return is_requested or self.run.schedule.validation_is_due(self.progress)

    @property
    def should_stop(self) -> bool:
        """Whether a stop is requested; setting it to True requests one."""
        return self.requests.stop is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop("set by user code")
        else:
            self.requests.drop_stop()

    def set_accumulation(
        self, batches: int, measure: Callable[[float, float], None] | None = None
    ) -> None:
        """Accumulate this many micro-batches per optimizer step, from the next window on.

        Args:
            batches: micro-batches per window.
            measure: called once, with the samples and ``loss_weight`` of the next micro-batch over all ranks, before
                its window is complete; it calls this method again to set the number.
        """
        self.accumulation = batches
        if self.run is None:
            return
        windows = self.run.windows
        windows.measure_with(measure)
        if windows.length != batches:
            windows.set_length(batches)
            self.requests.wake()

    # -- data ------------------------------------------------------------------------------------------------------

    @property
    def predict_batch_indices(self) -> list[Any] | None:
        """In prediction, the dataset indices of the samples in this rank's batch, in batch order.

        None if the loader does not draw indices: for a stream, a list of batches, or several loaders read together.
        """
        return None if self.evaluation is None else self.evaluation.indices

    @property
    def train_dataloader(self) -> Any:
        """The training loaders of the running or last fit, once they are loaded."""
        return self.training_loaders.loaders

    @train_dataloader.setter
    def train_dataloader(self, loaders: Loaders) -> None:
        self.training_loaders.use(loaders)

    def load_train(self) -> Loaders | None:
        """The training loaders of this fit, or None; the first call gets them from the user."""
        return self.training_loaders.load(self.running.find_train_loaders)

    @property
    def train_batch_samples(self) -> int | None:
        """Samples of the first training batch on this rank; None if that is unknown."""
        return self.training_loaders.batch_samples

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on this rank: infinite if the number is unknown, 0 without training data.

        In `setup` and `configure_optimizers` this loads the training loaders, so their data must be ready.
        """
        batches = self.training_loaders.batches
        if batches is not None:
            return batches
        loaders = self.load_train()
        if loaders is None:
            return 0
        # Without an agreement of the ranks: a user may read this on one rank alone. The fit measures it again.
        _, length = training_feed(
            loaders,
            self.settings,
            self.strategy.data,
            self.data_seed,
            self.accumulation,
        )
        return self.training_loaders.count(length)

    def keep_loaders(self, stage: str, loaders: Loaders) -> None:
        """Show the loaders of an evaluation to callbacks, as ``val_dataloaders`` for example."""
        setattr(self, f"{NAMES[stage]}_dataloaders", loaders)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks, in the order in which they are called."""
        return self.callback_list.active

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Callback] | Callback | None) -> None:
        self.set_callbacks(as_list(callbacks, Callback))

    def set_callbacks(self, callbacks: Sequence[object]) -> None:
        """Replace the callbacks, and sort them into their order."""
        if self.state_verb:
            raise ConfigurationError(
                "callbacks cannot change while an entry point runs",
                found=self.state_verb,
            )
        self.callback_list.configure(callbacks)
        # One of them may be a `GradientAccumulation`.
        self.read_accumulation()

    @property
    def checkpoint_callbacks(self) -> list[KeepsCheckpoints]:
        """All callbacks that keep checkpoints, and those of other packages that extend Lightning's ``Checkpoint``."""
        return self.callback_list.checkpoints

    @property
    def checkpoint_callback(self) -> KeepsCheckpoints | None:
        """The first of ``checkpoint_callbacks``, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def accumulation_callback(self) -> SetsAccumulation | None:
        """The first callback that decides how many micro-batches a window has, or None."""
        return self.callback_list.accumulation

    @property
    def early_stopping_callback(self) -> StopsEarly | None:
        """The first `EarlyStopping`, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[StopsEarly]:
        """All `EarlyStopping` callbacks, and those of other packages that extend Lightning's."""
        return self.callback_list.early_stopping

    @property
    def progress_bar_callback(self) -> DrawsProgress | None:
        """The progress bar, or None."""
        return self.callback_list.progress_bar

    @property
    def loggers(self) -> list[Any]:
        """All loggers; on ranks other than 0, a `DummyLogger` in place of each with ``writes_alone``."""
        return loggers_of_rank(self.files.loggers, self.is_global_zero)

    @loggers.setter
    def loggers(self, loggers: Iterable[Logger] | Logger | None) -> None:
        if self.state_verb:
            raise ConfigurationError(
                "loggers cannot change while an entry point runs", found=self.state_verb
            )
        loggers = check_loggers(loggers)
        # `fast_dev_run` writes nothing.
        if self.settings.fast:
            loggers = []
        self.files.replace_loggers(loggers)

    @property
    def logger(self) -> Any:
        """The first logger, or None; with ``fast_dev_run`` a `DummyLogger`, which accepts calls and writes nothing."""
        # Modules call methods of the logger: with None, a quick try would fail where the real run does not.
        return DummyLogger() if self.settings.fast else next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger is None or logger is False else [logger]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the running fit."""
        return list_optimizers(self.run)

    @optimizers.setter
    def optimizers(self, optimizers: Iterable[Optimizer] | Optimizer) -> None:
        replace_optimizers(self.running, as_list(optimizers, Optimizer))

    @property
    def manual_optimizers(self) -> list[Optimizer]:
        """The optimizers that ``module.optimizers()`` returns."""
        return list_manual_optimizers(self.run)

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """The schedulers of the running fit, with their intervals."""
        return [] if self.run is None else self.run.stepper.configured.schedulers

    @property
    def precision(self) -> str:
        """The precision, by name."""
        return str(self.precision_plugin.name)

    @property
    def lightning_module(self) -> Any:
        """The module, under Lightning's names."""
        return self.module

    model = lightning_module

    # -- metrics -------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of every logged name; between flushes, this rank's value. Callbacks may add entries."""
        return self.metrics.callback_metrics()

    def logged_at(self, name: str) -> int:
        """The step whose weights the latest value of ``name`` in ``callback_metrics`` describes.

        Args:
            name: of a logged value; the present step is returned for a name that was never logged.
        """
        return self.metrics.logged_at(name)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values last sent to the loggers, by name, on the CPU."""
        # Copies on the CPU: they stay as they are when the next values are logged.
        return {
            name: torch.tensor(value) for name, value in self.metrics.logged.items()
        }

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values logged with ``prog_bar=True``, as of the last flush; this reads nothing from the device."""
        return dict(self.metrics.progress_bar)

    def log_metrics(self, metrics: LoggedMetrics, step: int | None = None) -> None:
        """Queue values for every logger, on rank 0; this reads tensors, which is a sync point.

        A value named ``step`` sets the step of the other values, as in Lightning. Values of the present training step
        get its ``epoch``; those with another step do not, for that step may belong to another epoch.

        Args:
            metrics: numbers, or tensors of one element, by name.
            step: the x-axis of a chart; None: completed optimizer steps.
        """
        if metrics and self.is_global_zero:
            self.logged_values.log(metrics, step, self.state_verb)

    def reset(self) -> None:
        """Reset counts, values and requests of an earlier fit."""
        self.trained_before = 0
        if not self.continues:
            # A second fit has new optimizers, so its counts begin at 0, too.
            self.trained_before = self.progress.step
            self.progress.load_state_dict(Progress().state_dict())
        elif self.run is not None:
            # An exception may have left the last fit inside a window.
            self.progress.load_state_dict(completed_progress(self.run))
        self.metrics.forget(suspended=not self.continues)
        self.requests.clear()
        self.training_loaders.forget()

    def forget_steps_read(self) -> None:
        """``configure_optimizers`` has not read the number of steps yet."""
        self.steps_were_read = False

    def read_accumulation(self) -> None:
        """Set the length of the first window from the callbacks of this fit."""
        # The callback sets it again when an epoch starts; loaders and optimizers are made before that.
        counting = self.accumulation_callback
        self.accumulation = 1
        if counting is not None:
            self.accumulation = counting.get_accumulate_grad_batches(0)

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = False,
        storage_options: object = None,
    ) -> None:
        """Write a checkpoint directory now; every rank must call it.

        Args:
            filepath: the directory to write, or its URL; an existing one is replaced.
            weights_only: save only weights and hyperparameters.
            storage_options: must be None: fsspec reads credentials from its configuration and variables.

        Raises:
            ConfigurationError: ``storage_options`` are given; or nothing was trained yet.
        """
        method = "Trainer.save_checkpoint"
        refuse_replaced(method, None, (), {"storage_options": storage_options})
        save_to(self.run, absolute(filepath), bool(weights_only))

    # -- in a step -----------------------------------------------------------------------------------------------

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization.

        Args:
            loss: a tensor of one element with its graph.
            args: of the module's ``backward``, after the loss.
            kwargs: of the module's ``backward``, such as ``retain_graph=True``.

        Raises:
            ConfigurationError: no fit runs, or it steps the optimizers itself.
        """
        manual_stepper(self.run).backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: object, value: float | None, algorithm: str | None
    ) -> None:
        """Unscale and clip the gradients of one optimizer.

        Args:
            optimizer: an optimizer, or its proxy, as ``module.optimizers()`` returns it.
            value: the largest total norm, or the largest absolute value of an element; None: the Trainer's, and nothing
                is
                clipped if that is None, too.
            algorithm: ``"norm"`` or ``"value"``; None: the Trainer's.

        Raises:
            ConfigurationError: this is not an optimizer.
        """
        clip, strategy = self.settings.clip, self.strategy
        clip_optimizer_gradients(
            optimizer, value, algorithm, clip, strategy, self.precision_plugin
        )

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Stack every tensor of ``data`` over the data ranks: shape (ranks, *shape); unchanged for one rank.

        Args:
            data: a tensor, a number, or a pytree of them.
            sync_grads: let gradients flow back to the tensors of all ranks, as a contrastive loss needs.

        Raises:
            RankError: on every rank, where shapes, dtypes or structure differ.
        """
        strategy = self.strategy
        return gather_tree(data, strategy.data, strategy.device, sync_grads)

    # -- files ---------------------------------------------------------------------------------------------------

    @property
    def default_root_dir(self) -> str:
        """Where runs are written: a directory or a URL."""
        return self.files.root

    @property
    def seed(self) -> int | None:
        """The argument ``seed``."""
        return self.files.seed

    @property
    def resume(self) -> str | None:
        """The argument ``resume``."""
        return self.files.resume

    @property
    def data_seed(self) -> int:
        """The seed of the data order."""
        return self.files.data_seed

    @property
    def log_dir(self) -> str:
        """Where the first logger writes, or without one `default_root_dir`; the same on every rank."""
        # Not by this rank's loggers: ranks other than 0 may have none that writes.
        return str(self.run_dir) if self.files.loggers else self.files.root

    @property
    def run_dir(self) -> Path:
        """The local directory of this run; the same on every rank."""
        return self.files.directory

    @property
    def checkpoint_dir(self) -> Location:
        """The default directory of checkpoints; a URL if the root directory is a URL."""
        return self.files.checkpoint_dir

    def init_module(
        self, empty_init: bool | None = None
    ) -> AbstractContextManager[None]:
        """A context that builds modules on the device and in the dtype of the run; in host memory if it is sharded.

        Args:
            empty_init: True: layers are not initialized, and no random numbers are drawn, for weights that a checkpoint
                replaces. Where weights are sharded, ranks other than the first create layers without storage, and get
                their parts of the first rank's values.

        Example:
            >>> from trainer_kit import Trainer
            >>> with Trainer(precision="bf16-true", accelerator="cpu", devices=1, logger=False).init_module():
            ...     layer = torch.nn.Linear(2, 1)
            >>> layer.weight.dtype
            torch.bfloat16
        """
        return build_context(
            self.strategy, self.precision_plugin, self.global_rank, empty_init
        )

    def __getstate__(self) -> dict[str, object]:
        # A copy leaves out what belongs to this process: the objects of a fit, and the report's callback.
        return {
            **vars(self),
            "running": self.running.without_objects(),
            "note": nothing,
        }

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, without tearing the progress bar.

        Args:
            values: what to print.
            options: those of the built-in ``print``, such as ``sep`` and ``end``.
        """
        if self.options.is_silent or not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None and bar.is_drawn:
            bar.print(*values, **options)
        else:
            print(*values, **options)

    def say(self, line: str) -> None:
        """Print a message of this library on rank 0, and add it to the report of the run."""
        if self.options.is_silent:
            return
        self.note("note", line)
        # Looked up at each call: a script may replace `trainer.print`.
        self.print(line)

    # -- attributes of Lightning's Trainer that this one lacks --------------------------------------------------

    # A type checker knows all attributes, and would accept any name with this method.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Where the class has the name, a property has raised an AttributeError.
            if name.startswith("__") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise missing_attribute(self, name, self.former_methods)

    profiler = Elsewhere()
    scaler = Elsewhere()
    lr_schedulers = Elsewhere()
    plugins = Elsewhere()
    enable_validation = Elsewhere()
    add_argparse_args = Elsewhere()
    from_argparse_args = Elsewhere()
    distributed_sampler_kwargs = Elsewhere()

    _accelerator_connector = property(DistributedFlags)
    _logger_connector = property(LoggingSteps)

    # -- arguments that nothing above has ------------------------------------------------------------------------

    activation_checkpointing = Argument()
    async_save = Argument()
    benchmark = Argument()
    compile = Argument()
    detect_anomaly = Argument()
    deterministic = Argument()
    devices = Argument()
    enable_autolog_hparams = Argument()
    enable_checkpointing = Argument()
    enable_model_summary = Argument()
    enable_progress_bar = Argument()
    global_batch_size = Argument()
    inference_mode = Argument()
    loss_weighting = Argument()
    max_duration = Argument()
    max_time = Argument()
    reload_dataloaders_every_n_epochs = Argument()
    reproducible_workers = Argument()
    sync_batchnorm = Argument()
    use_distributed_sampler = Argument()
