"""The state of a Trainer (components, progress, metrics, requests), under the names that modules and callbacks use."""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.arguments import as_list, refuse_replaced
from trainer_kit.core.collective_errors import same_everywhere
from trainer_kit.core.configuration_sources import Chosen
from trainer_kit.core.empty_init import EmptyInit
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
from trainer_kit.core.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from trainer_kit.core.tensors import map_leaves, map_tensors
from trainer_kit.data import EpochLength, Feed
from trainer_kit.loggers.layout import DummyLogger
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.state.collect import collect, completed_progress
from trainer_kit.state.optimizer_states import exchange_optimizers
from trainer_kit.state.runs import KeepsCheckpoints, RunFiles, keep_checkpoints
from trainer_kit.state.saving import save_to
from trainer_kit.state.unsaveable import Unsaveable
from trainer_kit.step.bus import sorted_callbacks
from trainer_kit.step.evaluate import Evaluation
from trainer_kit.step.optimize import ManualStepper
from trainer_kit.step.optimizers import LRSchedulerConfig, OptimizerProxy, parameters_of
from trainer_kit.step.requests import Requests
from trainer_kit.step.run import Fit
from trainer_kit.strategies.gathering import gather_with_gradients
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import Policy
from trainer_kit.training.attributes import (
    Argument,
    Elsewhere,
    OptimizersOfFit,
    missing_attribute,
)
from trainer_kit.training.loaders import NAMES, training_feed
from trainer_kit.training.loops import (
    DistributedFlags,
    EvaluationLoop,
    FitLoop,
    LoggingSteps,
    Position,
    PredictLoop,
)
from trainer_kit.training.running import Running, nothing
from trainer_kit.training.settings import Settings
from trainer_kit.training.settle import Settler

__all__ = ["Session", "TunesFit"]


def _read_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values as numbers."""
    return {
        name: float(value) for name, value in metrics.items()
    }  # sync point: only for tensors


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
        is_silent: whether `print` and `say` print nothing, as in a trial.
        continues: whether the next fit continues the counts of the last one.
        arguments: the Trainer's arguments as plain data, for the run's record.
        origins: the source of each value that a launcher or a file may give.
        sharded_alternative: the strategy to use if the model does not fit; None: keep this one.
        switches: process-wide settings of torch that an entry point sets.
        compile_options: options of ``torch.compile``; None: nothing is compiled.
        compile_regional: whether repeated blocks are compiled, not the whole step.
        recomputes: the blocks with activation checkpointing; True: repeated ones, False: none.
        async_save: whether checkpoints are written in the background.
        unsaveable: what happens to values that checkpoints cannot hold.
        note: records an event for the report of the run: ``note(kind, text)``.
    """

    arguments: dict[str, Any]
    origins: dict[str, Chosen]
    sharded_alternative: Strategy | None
    switches: dict[str, Any]
    compile_options: dict[str, Any] | None
    compile_regional: bool
    recomputes: bool | Policy
    async_save: bool
    unsaveable: Unsaveable
    barebones: bool
    fast_dev_run: bool | int
    former_methods: Mapping[str, str] = {}
    """What to call instead of methods that trainers of other libraries have, by name."""
    adapt_callbacks: Callable[[Iterable[Any]], list[Any]] = list
    """Wraps callbacks of other libraries."""

    def __init__(
        self,
        *,
        settings: Settings,
        environment: Environment,
        strategy: Strategy,
        precision: Precision,
        loggers: Sequence[Any],
        root: str,
        seed: int | None,
        start: str | None,
        processes: int,
        resume: str | None,
    ) -> None:
        self.settings = settings
        self.environment = environment
        self.strategy, self.precision_plugin = strategy, precision
        self.start, self.processes = start, processes
        self.is_silent = False
        self.progress = Progress()
        self.requests = Requests()
        self.metrics = Metrics(self.progress)
        self.running = Running()
        self.continues = False
        self.module: Any = None
        self.datamodule: Any = None
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.predict_dataloaders: Any = None
        self.note: Callable[..., Any] = nothing  # no report
        self._training_batches: int | float | None = None
        self.num_val_batches: list[int | float] = []
        self.num_sanity_val_batches: list[int | float] = []
        self.num_test_batches: list[int | float] = []
        self.num_predict_batches: list[int | float] = []
        self.train_batch_samples: int | None = None
        self.trained_before = 0  # steps of the fit before the running one
        self.accumulation = 1
        # Whether `configure_optimizers` has read `estimated_stepping_batches`.
        self.steps_were_read = False
        self._callbacks: list[Callback] = []
        self._own_callbacks = self._callbacks  # without the module's callbacks
        # The last one: it asks loggers for their names, and says which of them does not answer.
        self.files = RunFiles(
            loggers=loggers,
            root=root,
            seed=seed,
            resume=resume,
            records=not settings.fast,
            say=self.say,
        )

    def for_trial(
        self,
        settings: Settings,
        *,
        strategy: Strategy | None = None,
        precision: Precision | None = None,
    ) -> Session:
        """A silent Session for a fit without side effects, with no loggers, files, callbacks or counts.

        It prints nothing: neither messages of this library nor what user code passes to ``trainer.print``.

        Args:
            settings: its limits and intervals.
            strategy: by default a copy of this one's, which uses the same processes.
            precision: by default a copy of this one's.
        """
        trial = object.__new__(type(self))
        # `copy.copy` would call `__getstate__`, which resets the fit.
        vars(trial).update(vars(self))
        Session.__init__(
            trial,
            settings=settings,
            environment=self.environment,
            strategy=copy.copy(self.strategy) if strategy is None else strategy,
            precision=copy.deepcopy(self.precision_plugin)
            if precision is None
            else precision,
            loggers=[],
            root=self.files.root,
            seed=self.files.seed,
            start=None,
            processes=self.processes,
            resume=None,
        )
        trial.is_silent = True
        return trial

    # -- the entry point -------------------------------------------------------------------------------------------

    @property
    def run(self) -> Fit | None:
        """The running or last fit, or None."""
        return self.running.fit

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

    def show_datamodule(self, datamodule: Any) -> None:
        """Show the datamodule of an entry point to hooks."""
        self.datamodule = datamodule

    def begin_fit(self, run: Fit, settler: Settler) -> None:
        """The fit is composed."""
        self.running.run_fit(run, settler)
        self.continues = False
        self.num_val_batches = run.validation.counts

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """The validation, test or prediction is composed."""
        self.running.run_evaluation(evaluation)
        setattr(self, f"num_{NAMES[evaluation.stage]}_batches", evaluation.counts)

    def become_rank(self, environment: Environment, device: torch.device) -> None:
        """Continue in a process that was forked as a rank."""
        self.start = None
        self.environment = environment
        self.strategy.device = device

    def use_sharded(self, strategy: Strategy) -> None:
        """Use the sharded alternative from here on: a sharded module stays sharded."""
        self.strategy = strategy
        self.sharded_alternative = None

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
        return (
            self.strategy.world.rank if self.strategy.started else self.environment.rank
        )

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
        return (
            self.strategy.world.size
            if self.strategy.started
            else self.environment.world_size
        )

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
        last_stage = self.running.last_stage
        function = TrainerFn(last_stage) if last_stage else None
        return TrainerState(self.running.status, function, self._running_stage())

    def _running_stage(self) -> RunningStage | None:
        if self.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if self.state_verb == "fit":
            return RunningStage.VALIDATING if self.evaluating else RunningStage.TRAINING
        return RunningStage(self.state_verb) if self.state_verb else None

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
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < -1
        ):
            raise ConfigurationError(
                f"{name} must be a whole number of at least -1",
                found=f"fit_loop.{name} = {value!r}",
                fix="pass -1 for no limit",
            )
        number = None if value == -1 else value
        changes: dict[str, Any] = {name: number}
        if name == "max_epochs":
            changes["endless"] = value == -1
        self.settings = replace(self.settings, **changes)
        if self.state_verb == "fit" and self.run is not None:
            self.run.schedule.set_limit(name, number)
            self.requests.wake()  # it may be reached
        self.continues = not self.state_verb and self.progress.step > 0

    @property
    def predict_loop(self) -> PredictLoop:
        """The position of a running prediction, under Lightning's names."""
        return PredictLoop(self)

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
        """Whether validation is running, in `validate` or inside `fit`; the sanity check does not count."""
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
        """Whether this training batch is the last of its epoch by the loader's length; False if that is unknown."""
        return (
            self.run is not None
            and self.run.windows.window.index + 1 == self.num_training_batches
        )

    @property
    def epoch_is_whole(self) -> bool:
        """In ``on_train_epoch_end``: whether the epoch is complete; False if the run ends inside it."""
        settler = self.running.settler
        return settler is not None and settler.epoch_is_whole

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
        """
        self.requests.ask_stop(reason)

    def withdraw_stop(self, reason: str) -> None:
        """Withdraw a stop request that is not granted yet; a request for another reason stays."""
        self.requests.withdraw_stop(reason)

    def request_checkpoint(
        self, reason: str, request: CheckpointRequest | None = None
    ) -> None:
        """Request a checkpoint, saved after everything else of this step."""
        if not self.settings.fast:  # fast_dev_run writes nothing
            self.requests.ask_checkpoint(reason, request)

    def request_validation(self, reason: str) -> None:
        """Request validation after this step."""
        self.requests.ask_validation(reason)

    @property
    def validation_due(self) -> bool:
        """Whether validation runs at this step; requests of other ranks are unknown until the ranks agree."""
        if self.run is None or not self.run.validation.feeds:
            return False
        is_requested = self.requests.validation is not None and self.world_size == 1
        return is_requested or self.run.schedule.owes_validation(self.progress)

    @property
    def should_stop(self) -> bool:
        """Whether a stop is requested; setting it to True requests one."""
        return self.requests.stop is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.stop("set by user code")
        else:
            self.requests.stop = None

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

    def load_train(self) -> Any:
        """The training loaders of this fit, or None; the first call gets them from the user."""
        if self.train_dataloader is None:
            self.train_dataloader = self.running.find_train_loaders()
        return self.train_dataloader

    def read_copies(self, copy_loaders: Callable[[Any], Any]) -> None:
        """Train on copies of the loaders of this fit."""
        self.train_dataloader = copy_loaders(self.load_train())

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on this rank: infinite if the number is unknown, 0 without training data.

        In `setup` and `configure_optimizers` this loads the training loaders, so their data must be ready.
        """
        if self._training_batches is None:
            loaders = self.load_train()
            if loaders is None:
                return 0
            _, length = training_feed(
                loaders,
                self.settings,
                self.strategy.data,
                self.data_seed,
                self.accumulation,
            )
            self._training_batches = (
                math.inf if length.expected is None else length.expected
            )
        return self._training_batches

    @num_training_batches.setter
    def num_training_batches(self, batches: int | float) -> None:
        self._training_batches = batches

    def set_training_length(self, feed: Feed, length: EpochLength) -> None:
        """Set the numbers of a training epoch from its loaders."""
        self._training_batches = (
            math.inf if length.expected is None else length.expected
        )
        self.train_batch_samples = feed.samples(0)

    def keep_loaders(self, stage: str, loaders: Any) -> None:
        """Show the loaders of an evaluation to callbacks, as ``val_dataloaders`` for example."""
        setattr(self, f"{NAMES[stage]}_dataloaders", loaders)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks, in the order in which they are called."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[Callback] | Callback | None) -> None:
        self.set_callbacks(as_list(callbacks, Callback))

    def set_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Replace the callbacks, and sort them into their order."""
        if self.state_verb:
            raise ConfigurationError(
                "callbacks cannot change while an entry point runs",
                found=self.state_verb,
            )
        adapted = self.adapt_callbacks(callbacks)
        self._own_callbacks = self._callbacks = sorted_callbacks(adapted)
        self.read_accumulation()

    def add_module_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Add callbacks of the running module; each replaces the Trainer's callbacks of its class."""
        adapted = self.adapt_callbacks(callbacks)
        classes = {type(callback) for callback in adapted}
        remaining = [
            callback
            for callback in self._own_callbacks
            if type(callback) not in classes
        ]
        self._callbacks = sorted_callbacks([*remaining, *adapted])

    def drop_module_callbacks(self) -> None:
        """Call the Trainer's own callbacks only."""
        self._callbacks = self._own_callbacks

    def restore_callbacks(self, callbacks: list[Callback]) -> None:
        """Call the callbacks that were there before an evaluation."""
        self._callbacks = callbacks

    @property
    def has_module_callbacks(self) -> bool:
        """Whether callbacks of a module are active."""
        return self._callbacks is not self._own_callbacks

    @property
    def checkpoint_callbacks(self) -> list[KeepsCheckpoints]:
        """All callbacks that keep checkpoints."""
        return keep_checkpoints(self._callbacks)

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that keeps checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def accumulation_callback(self) -> SetsAccumulation | None:
        """The first callback that decides how many micro-batches a window has, or None."""
        counting = (
            callback
            for callback in self._callbacks
            if isinstance(callback, SetsAccumulation)
        )
        return next(counting, None)

    @property
    def early_stopping_callback(self) -> StopsEarly | None:
        """The first `EarlyStopping`, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[StopsEarly]:
        """All `EarlyStopping` callbacks."""
        return [
            callback for callback in self._callbacks if isinstance(callback, StopsEarly)
        ]

    @property
    def progress_bar_callback(self) -> DrawsProgress | None:
        """The progress bar, or None."""
        bars = (
            callback
            for callback in self._callbacks
            if isinstance(callback, DrawsProgress)
        )
        return next(bars, None)

    @property
    def loggers(self) -> list[Any]:
        """All loggers; on ranks other than 0, a `DummyLogger` in place of each with ``writes_alone``."""
        if self.is_global_zero:
            return self.files.loggers
        return [
            DummyLogger(logger) if getattr(logger, "writes_alone", False) else logger
            for logger in self.files.loggers
        ]

    @loggers.setter
    def loggers(self, loggers: Iterable[Logger] | Logger | None) -> None:
        if self.state_verb:
            raise ConfigurationError(
                "loggers cannot change while an entry point runs", found=self.state_verb
            )
        loggers = as_list(loggers, Logger)
        for logger in loggers:
            if isinstance(logger, type) or not isinstance(logger, Logger):
                raise ConfigurationError(
                    "this is not a logger",
                    found=repr(logger),
                    fix="assign an object with log_metrics",
                )
        if self.settings.fast:  # fast_dev_run writes nothing
            loggers = []
        self.files.replace_loggers(loggers)

    @property
    def logger(self) -> Any:
        """The first logger, or None; with ``fast_dev_run`` a `DummyLogger`, which accepts calls and writes nothing."""
        return DummyLogger() if self.settings.fast else next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [] if logger is None or logger is False else [logger]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the running fit."""
        return (
            []
            if self.run is None
            else OptimizersOfFit(self.run.stepper.configured.optimizers)
        )

    @optimizers.setter
    def optimizers(self, optimizers: Iterable[Optimizer] | Optimizer) -> None:
        run, settler = self.running.fit, self.running.settler
        if run is None or settler is None or self.state_verb != "fit":
            raise ConfigurationError(
                "optimizers can be set only while fit runs",
                found="trainer.optimizers = ...",
                fix="return them from configure_optimizers, or set them in a hook of fit: `if trainer.training:`",
            )
        exchange_optimizers(
            run,
            as_list(optimizers, Optimizer),
            resumed=settler.resumed,
            has_guard=settler.guard is not None,
        )

    @property
    def manual_optimizers(self) -> list[Any]:
        """The optimizers that ``module.optimizers()`` returns."""
        stepper = None if self.run is None else self.run.stepper
        return list(
            stepper.optimizers
            if isinstance(stepper, ManualStepper)
            else self.optimizers
        )

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
        """The step whose weights the latest value of ``name`` in ``callback_metrics`` describes."""
        return self.metrics.logged_at(name)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values last sent to the loggers, by name, on the CPU."""
        return {
            name: torch.tensor(value) for name, value in self.metrics.logged.items()
        }

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values logged with ``prog_bar=True``, as of the last flush; this reads nothing from the device."""
        return dict(self.metrics.progress_bar)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Queue values for every logger, on rank 0; this reads tensors, which is a sync point.

        A value named ``step`` sets the step of the other values, as in Lightning. Values of the present training step
        get its ``epoch``; those with another step do not, for that step may belong to another epoch.
        """
        if not metrics or not self.is_global_zero:
            return
        values = _read_values(metrics)
        progress = self.progress
        if "step" not in values and step in (None, progress.step):
            values.setdefault("epoch", self._epoch_of_step)
        logged_step = int(values.pop("step", progress.step if step is None else step))
        counts = {"samples": progress.samples, "tokens": progress.tokens}
        counts = {name: count for name, count in counts.items() if count}
        self._deliver(values, logged_step, counts)

    def log_evaluation_batch(self, metrics: Mapping[str, Any], number: int) -> None:
        """Queue the values of an evaluation batch; its number is their axis, on which no count of training belongs."""
        if not metrics or not self.is_global_zero:
            return
        values = _read_values(metrics)
        batch = int(values.pop("step", number))
        self._deliver(values, batch, {})

    def _deliver(
        self, values: Mapping[str, float], step: int, counts: Mapping[str, int]
    ) -> None:
        self.files.deliveries.log(values, step, counts)
        if not self.state_verb:  # no entry point ends after this
            self.files.deliveries.close(None)

    @property
    def _epoch_of_step(self) -> int:
        """In a fit, the epoch in which the last step was taken, also after that epoch was counted."""
        progress = self.progress
        is_counted = (
            progress.step > 0 and progress.epoch > 0 and not progress.epoch_batch
        )
        return progress.epoch - (self.state_verb == "fit" and is_counted)

    def reset(self) -> None:
        """Reset counts, values and requests of an earlier fit."""
        self.trained_before = 0 if self.continues else self.progress.step
        if not self.continues:
            self.progress.load_state_dict(Progress().state_dict())
        elif self.run is not None:  # an exception may have left it inside a window
            self.progress.load_state_dict(completed_progress(self.run))
        self.metrics.forget(suspended=not self.continues)
        self.requests.clear()
        self.forget_loaders()

    def forget_loaders(self) -> None:
        """Discard the training loaders; the next access gets them from the user again."""
        self.train_dataloader = self._training_batches = None

    def forget_steps_read(self) -> None:
        """``configure_optimizers`` has not read the number of steps yet."""
        self.steps_were_read = False

    def read_accumulation(self) -> None:
        """Set the length of the first window from the callbacks of this fit."""
        counting = self.accumulation_callback
        self.accumulation = (
            1 if counting is None else counting.get_accumulate_grad_batches(0)
        )

    def collect_state(self, weights_only: bool) -> dict[str, Any]:
        """The state of the running fit, or only its weights; every rank must call it."""
        run, settler = self.running.fit, self.running.settler
        assert run is not None
        assert settler is not None
        state = collect(
            run,
            self._callbacks,
            self.datamodule,
            self.data_seed,
            weights_only,
            owes_validation=settler.owes_validation,
        )
        return self.unsaveable.leave_out(state)

    def save_checkpoint(
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = False,
        storage_options: Any = None,
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
        if self.run is None:
            raise ConfigurationError(
                "the Trainer has nothing to save yet",
                fix="call save_checkpoint during or after fit()",
            )
        save_to(self.run, absolute(filepath), bool(weights_only))

    # -- in a step -----------------------------------------------------------------------------------------------

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization."""
        stepper = None if self.run is None else self.run.stepper
        if not isinstance(stepper, ManualStepper):
            raise ConfigurationError(
                "manual_backward was called in automatic optimization",
                fix="set self.automatic_optimization = False in __init__",
            )
        stepper.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, value: float | None, algorithm: str | None
    ) -> None:
        """Unscale and clip the gradients of one optimizer; None: use the Trainer's value or algorithm."""
        default_value, default_algorithm = self.settings.clip or (None, "norm")
        if value is None:
            value = default_value
        if value is None:
            return
        optimizer = OptimizerProxy.unwrapped(optimizer)
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                "clip_gradients takes the optimizer whose gradients it clips",
                found=f"a {type(optimizer).__name__}",
                fix="call self.clip_gradients(self.optimizers(), 1.0), or pass one of them",
            )
        self.precision_plugin.unscale_gradients(optimizer)
        parameters = parameters_of(optimizer)
        self.strategy.clip_gradients(parameters, value, algorithm or default_algorithm)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Stack every tensor of ``data`` over the data ranks: shape (ranks, *shape); unchanged for one rank.

        Args:
            data: a tensor, a number, or a pytree of them.
            sync_grads: let gradients flow back to the tensors of all ranks, as a contrastive loss needs.

        Raises:
            RankError: on every rank, where shapes, dtypes or structure differ.
        """
        group, device = self.strategy.data, self.strategy.device
        data = map_leaves(
            data, lambda value: torch.tensor(value, device=device), (int, float)
        )
        same_everywhere(group, "all_gather", data)
        if group.size == 1:
            return data
        gather = (
            partial(gather_with_gradients, group=group)
            if sync_grads
            else group.all_gather
        )
        return map_tensors(data, gather)

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
        return str(self.run_dir) if self.files.loggers else self.files.root

    @property
    def run_dir(self) -> Path:
        """The local directory of this run; the same on every rank."""
        return self.files.directory

    @property
    def checkpoint_dir(self) -> Location:
        """The default directory of checkpoints; a URL if the root directory is a URL."""
        return self.files.checkpoint_dir

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context that builds modules on the device and in the dtype of the run; in host memory if it is sharded.

        Args:
            empty_init: True: layers are not initialized, and no random numbers are drawn, for weights that a checkpoint
                replaces. Where weights are sharded, ranks other than the first make layers without storage, and get
                their parts of the first rank's values.

        Example:
            >>> from trainer_kit import Trainer
            >>> with Trainer(precision="bf16-true", accelerator="cpu", devices=1, logger=False).init_module():
            ...     layer = torch.nn.Linear(2, 1)
            >>> layer.weight.dtype
            torch.bfloat16
        """
        strategy = self.strategy
        device: AbstractContextManager[Any] = (
            nullcontext() if strategy.sharded else strategy.device
        )
        initialization: AbstractContextManager[Any] = nullcontext()
        if empty_init and not strategy.sharded:
            initialization = EmptyInit()
        elif empty_init and strategy.values_on_rank_zero and self.global_rank > 0:
            device = torch.device("meta")
        with self.precision_plugin.init_context(), device, initialization:
            yield

    def __getstate__(self) -> dict[str, Any]:
        # A copy leaves out what belongs to this process: the objects of a fit, and the report's callback.
        return {
            **vars(self),
            "running": self.running.without_objects(),
            "note": nothing,
        }

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0, without tearing the progress bar."""
        if self.is_silent or not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None and bar.is_drawn:
            bar.print(*values, **options)
        else:
            print(*values, **options)

    def say(self, line: str) -> None:
        """Print a message of this library on rank 0, and add it to the report of the run."""
        if self.is_silent:
            return
        self.note("note", line)
        self.print(line)  # looked up at each call: a script may replace `trainer.print`

    # -- attributes of Lightning's Trainer that this one lacks --------------------------------------------------

    if not TYPE_CHECKING:  # a checker knows all attributes

        def __getattr__(self, name: str) -> Any:
            # Where the class has the name, a property has raised an AttributeError.
            if name.startswith("__") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise missing_attribute(self, name, self.former_methods)

    profiler = Elsewhere(
        "it is one of trainer.callbacks; torch.profiler.record_function names a part of your own code"
    )
    scaler = Elsewhere("trainer.precision_plugin.scaler")
    lr_schedulers = Elsewhere(
        "trainer.lr_scheduler_configs; config.scheduler is what config['scheduler'] was"
    )
    plugins = Elsewhere("trainer.precision_plugin is the precision")
    enable_validation = Elsewhere("trainer.num_val_batches is empty without validation")
    add_argparse_args = Elsewhere(
        "trainer_kit.cli(Module, DataModule) has an option for every argument"
    )
    from_argparse_args = Elsewhere(
        "trainer_kit.cli(Module, DataModule) makes it; or Trainer(max_epochs=args.max_epochs)"
    )
    distributed_sampler_kwargs = Elsewhere(
        "loaders are divided without samplers; trainer.world_size and global_rank say how"
    )

    _accelerator_connector = property(DistributedFlags)
    _logger_connector = property(LoggingSteps)

    # -- arguments that nothing above has ------------------------------------------------------------------------

    activation_checkpointing = Argument()
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
