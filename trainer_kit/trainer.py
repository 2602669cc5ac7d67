"""`Trainer`: composes a strategy, a precision, callbacks and loggers, and runs a module on them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from trainer_kit.build import (
    accelerator_word,
    adapt_callbacks,
    added_callbacks,
    choose_loggers,
    choose_precision,
    choose_strategy,
    refuse_checkpoint_io,
    sharded_alternative,
    with_launchers,
    writes_checkpoints,
)
from trainer_kit.core.arguments import as_list, call_check, known_arguments
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import Svg, Text
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, StrategyError, did_you_mean
from trainer_kit.core.hooks import Callback
from trainer_kit.core.lazy import other_names, replaceable
from trainer_kit.core.location import locate_root
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import DurationLike
from trainer_kit.core.protocols import Logger
from trainer_kit.core.types import (
    DataModuleLike,
    Function,
    Keywords,
    Loaders,
    StepOutput,
)
from trainer_kit.core.wings import LazyTable, has_wing, need_wing
from trainer_kit.hang.hang_timeout import chosen_timeout
from trainer_kit.hang.hang_watchdog import hang_watchdog
from trainer_kit.options.fp8 import launched_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.report import History, InlineReport, TrainerReport, trainer_table
from trainer_kit.step.evaluate import Evaluation, evaluate, predict
from trainer_kit.step.optimizer_kernels import check_optimizer_kernel
from trainer_kit.step.requests import listening
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import Policy
from trainer_kit.training.composition_options import CompositionOptions
from trainer_kit.training.entry_points import EntryPoint
from trainer_kit.training.explain import draw, explain, show_results
from trainer_kit.training.fit import fit
from trainer_kit.training.on_processes import run_on_processes
from trainer_kit.training.session import Session
from trainer_kit.training.settings import check_switches, make_settings, plain_arguments

if TYPE_CHECKING:
    from trainer_kit.callbacks.model_checkpoint import ModelCheckpoint
    from trainer_kit.compat.accelerators import LightningAccelerator
    from trainer_kit.planning.plan import Plan
    from trainer_kit.verify.result import Verification

__all__ = ["Trainer"]

# Lightning has modules below this one: `trainer_kit.trainer.states`.
__path__: list[str] = []
__getattr__ = other_names(__name__)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _replaced_arguments() -> Mapping[str, str]:
    """What to write in place of an argument of another Trainer, or of an earlier version of Lightning's."""
    if not has_wing("compat"):
        return {}
    from trainer_kit.compat.lightning import FORMER_ARGUMENTS

    return {**_training_arguments(), **FORMER_ARGUMENTS}


def _replaced_methods() -> Mapping[str, str]:
    """What to call in place of a method of Transformers' Trainer."""
    if not has_wing("compat"):
        return {}
    from trainer_kit.compat.transformers import TRAINER_METHODS

    return TRAINER_METHODS


def _misplaced_arguments() -> Mapping[str, str]:
    """What to write in place of an argument that an entry point does not have."""
    of_trainer = {
        name: f"Trainer({name}={{value}})"
        for name in inspect.signature(Trainer).parameters
    }
    return {
        **_training_arguments(),
        "module": "model=...",
        "net": "model=...",
        **of_trainer,
    }


def _training_arguments() -> Mapping[str, str]:
    """What to write in place of an argument of Transformers' Trainer."""
    if not has_wing("compat"):
        return {}
    from trainer_kit.compat.transformers import TRAINING_ARGUMENTS

    return TRAINING_ARGUMENTS


_MISPLACED = LazyTable(_misplaced_arguments)


def _entry_point(
    method: Callable[_Parameters, _Result],
) -> Callable[_Parameters, _Result]:
    """Decorate an entry point: a call on the class, and unknown or missing arguments, raise an error with a fix."""
    # At decoration, since it inspects the signature.
    check = call_check(method, _MISPLACED)

    @wraps(method)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        # In Trainer.fit(module, loader), the module is `self`.
        if not args or not isinstance(args[0], Trainer):
            raise _called_on_class(method.__name__, args)
        check(args, kwargs)
        return method(*args, **kwargs)

    return call


def _called_on_class(name: str, arguments: Sequence[object]) -> ConfigurationError:
    """The error for an entry point that is called without a Trainer."""
    first_argument = ""
    if arguments:
        first_argument = f"a {type(arguments[0]).__name__}"
        if arguments[0] is Trainer:
            first_argument = "Trainer"
    return ConfigurationError(
        f"Trainer.{name} was called on the class, without a Trainer",
        found=f"Trainer.{name}({first_argument}, ...)",
        fix=f"create one first: trainer = Trainer(...), then trainer.{name}(module, ...)",
    )


class Trainer(Session):
    """Trains, validates, tests and predicts with a `TrainModule`.

    Lightning's arguments keep their names and meanings. Intervals take an int in their usual unit or a duration:
    ``"3ep"`` epochs, ``"5000ba"`` batches, ``"500st"`` optimizer steps, ``"1e6sp"`` samples, ``"1e9tok"`` tokens,
    ``"2h"`` time.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, a device type of torch, or an accelerator object of Lightning.
        strategy: ``"auto"``, ``"ddp"``, ``"ddp_notebook"``, ``"ddp_find_unused_parameters_true"``,
            ``"single_device"``, a registered name, or an object.
        devices: how many on each node (on the CPU: processes), ``"auto"``, or a list of indices.
        num_nodes: how many machines.
        precision: ``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"16-true"``, ``"64-true"``,
            Accelerate's ``"no"``, ``"fp16"``, ``"bf16"``, or an object; None: the launcher's value, else ``"32-true"``.
        logger: None or True for TensorBoard, False for none, a word, an object with ``log_metrics``, or several.
        callbacks: one callback, or any iterable of them.
        fast_dev_run: run this many batches (True: 1) of every stage and write nothing.
        max_epochs: by default 1000 if no other limit is set; -1 for no limit.
        min_epochs: an earlier stop request waits until these epochs are completed.
        max_steps: optimizer steps; -1 for no limit.
        min_steps: an earlier stop request waits until these optimizer steps are completed.
        max_time: ``"00:12:00:00"`` (days, hours, minutes, seconds), ``"2h"``, a timedelta or a dict of its arguments;
            None: no limit.
        limit_train_batches: int = batches, float = fraction of the epoch; None: all.
        limit_val_batches: the same.
        limit_test_batches: the same.
        limit_predict_batches: the same.
        overfit_batches: train and validate on this number or fraction of batches, unshuffled; 0: on all.
        val_check_interval: float = fraction of the epoch, int = batches, or a duration; time as in `max_time`. None:
            at the end of the epoch.
        check_val_every_n_epoch: epochs between validations; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches to run before training; -1 for all. None: 2.
        log_every_n_steps: optimizer steps between flushes of logged values (default 50); 0 for none.
        enable_checkpointing: whether to add a `ModelCheckpoint` if no callback is one; None: unless ``barebones`` or
            ``fast_dev_run`` is set.
        enable_progress_bar: whether to show one; None: unless ``barebones`` is set.
        enable_model_summary: whether to print one; None: unless ``barebones`` or ``fast_dev_run`` is set.
        accumulate_grad_batches: micro-batches per optimizer step, or an argument of `GradientAccumulation`; None: the
            launcher's value, else 1.
        gradient_clip_val: the largest total gradient norm, or the largest absolute value of an element; None or 0: no
            clipping.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``; None: ``"norm"``.
        deterministic: True: an operation without a deterministic algorithm is an error
            (``torch.use_deterministic_algorithms``); ``"warn"``: a warning. None: as this process has set it.
        benchmark: cuDNN's autotuner; None: as this process has set it.
        inference_mode: evaluate under ``torch.inference_mode`` (inside ``fit``: always ``no_grad``).
        use_distributed_sampler: shard the data over the ranks; False if the loaders do so themselves.
        profiler: ``"simple"`` (a table of hooks), ``"advanced"`` (cProfile), ``"pytorch"`` (a trace), or a profiler of
            ``tk.callbacks``; None: none.
        detect_anomaly: torch's anomaly detection in autograd; slow.
        barebones: no logger, callback, bar, summary or sanity check.
        enable_autolog_hparams: whether to log what ``save_hyperparameters`` keeps.
        plugins: a precision object.
        sync_batchnorm: convert batch norms to ``SyncBatchNorm``; on accelerators only.
        reload_dataloaders_every_n_epochs: call ``train_dataloader()`` and ``val_dataloader()`` again after this many
            epochs; 0: once per fit. A ``val_dataloader()`` that returns None ends validation until it returns one.
        default_root_dir: the directory of runs (default: the working directory). With a URL that fsspec supports,
            checkpoints go there; loggers need a local directory.
        max_duration: a limit in any unit; None: no limit.
        compile: compile ``training_step``: True, or a dict of arguments of ``torch.compile``. With ``"regional": True``
            in it, compile each block of the model instead, once for all blocks of a class. ``"step"``: run forward and
            backward as one captured graph, with bit-identical results, where that is possible (one process).
        seed: the seed of the data order; by default that of the last `seed_everything` or ``torch.manual_seed`` before
            a fit begins, and the checkpoint's in a resumed fit.
        resume: ``"auto"`` continues the newest unfinished run of this script and root; by default a new run starts.
        global_batch_size: samples per optimizer step over all ranks and micro-batches; replaces the loaders' own. None:
            the loaders' batch size counts.
        loss_weighting: False averages the means of micro-batches and ranks without weights, as other libraries do.
        async_save: write checkpoints in the background; training waits only for a copy of the state in host memory.
            False needs no memory for the copy, but training waits for the storage.
        on_unsaveable: ``"raise"``: a value of a callback, a datamodule or ``on_save_checkpoint`` that no checkpoint can
            hold is an error before the first step; ``"drop"``: it is left out of checkpoints, and a line names it. What
            only a later save sees is left out with a line in both cases (see `tk.checkpoint.codec`).
        reproducible_workers: seed the random numbers that a dataset draws for a sample by seed, epoch and sample, so
            that augmentations are the same with any number of workers, including none.
        hang_timeout: seconds (or a duration such as ``"5min"``) without progress after which a fit ends with exit code
            75 and reports which rank hangs; None: ``TRAINER_KIT_HANG_TIMEOUT``, else ten times the slowest ordinary
            step, at least 60 s, and half an hour in hooks, validation and checkpoints; False: never.
        activation_checkpointing: True: repeated blocks recompute their activations in backward, to save memory, on any
            strategy; or the modules that do: class names, classes, a number of parameters, or a callable.
        optimizer_kernel: which of torch's kernels update the weights: ``"fused"`` (the whole update of many parameters
            in one), ``"foreach"`` (one operation for many), or ``"auto"``: fused where torch has it for an optimizer
            and its parameters. None: as ``configure_optimizers`` created them. Sums may round differently; plain SGD is
            bit-identical.

    Raises:
        ConfigurationError: an argument, or a combination of arguments, cannot work.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> trainer = Trainer(max_epochs=2, barebones=True)
        >>> trainer.fit(TinyModule(), [torch.randn(4, 32)] * 3)
        >>> trainer.global_step
        6
    """

    former_methods = LazyTable(_replaced_methods)
    adapt_callbacks = staticmethod(adapt_callbacks)

    @known_arguments(LazyTable(_replaced_arguments))
    def __init__(
        self,
        *,
        accelerator: str | LightningAccelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: bool | str | Logger | Iterable[str | Logger] | None = None,
        callbacks: Any = None,
        fast_dev_run: bool | int = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: DurationLike | None = None,
        check_val_every_n_epoch: DurationLike | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: DurationLike | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: Any = None,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        enable_autolog_hparams: bool = True,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | os.PathLike[str] | None = None,
        max_duration: DurationLike | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        seed: int | None = None,
        resume: str | None = None,
        global_batch_size: int | None = None,
        loss_weighting: bool = True,
        async_save: bool = True,
        on_unsaveable: str = "raise",
        reproducible_workers: bool = False,
        hang_timeout: DurationLike | bool | None = None,
        activation_checkpointing: bool | Policy = False,
        optimizer_kernel: str | None = None,
    ) -> None:
        # 1. What the user has passed, before any argument gets another value.
        accelerator = accelerator_word(accelerator)
        arguments = plain_arguments(locals())
        # An iterator can be read once.
        plugins = as_list(plugins)
        refuse_checkpoint_io(plugins)
        callbacks = as_list(callbacks, Callback)
        # 2. Everything that can be refused before a process or a device is touched.
        _refuse(resume, reload_dataloaders_every_n_epochs)
        if barebones:
            num_sanity_val_steps = 0
        settings = make_settings(
            fast_dev_run=fast_dev_run,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_duration=max_duration,
            max_time=max_time,
            min_epochs=min_epochs,
            min_steps=min_steps,
            limits={
                "train": limit_train_batches,
                "val": limit_val_batches,
                "test": limit_test_batches,
                "predict": limit_predict_batches,
            },
            val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            clip_val=gradient_clip_val,
            clip_algorithm=gradient_clip_algorithm,
            overfit_batches=overfit_batches,
            inference_mode=inference_mode,
            shard=use_distributed_sampler,
            loss_weighting=loss_weighting,
            global_batch_size=global_batch_size,
            reproducible=reproducible_workers,
        )
        check_switches(deterministic, compile, seed, num_nodes, on_unsaveable)
        check_optimizer_kernel(optimizer_kernel)
        # 3. The launcher's values take the place of arguments that were left out.
        environment = Environment.detect()
        accelerator, precision, accumulation, origins = with_launchers(
            accelerator, precision, accumulate_grad_batches, callbacks
        )
        training_strategy, processes, start = choose_strategy(
            strategy, accelerator, devices, num_nodes, environment
        )
        # Processes outside of the group would take no part in votes and barriers, which are collectives of the world.
        if not training_strategy.spans_world:
            raise StrategyError(
                "a Trainer trains on all processes",
                found=f"{type(training_strategy).__name__}(process_group=...)",
                fix="leave process_group out, or use Fabric(strategy=...) and a custom training loop",
            )
        writes_nothing = bool(barebones or settings.fast)
        root = str(locate_root(default_root_dir))
        precision_plugin = choose_precision(
            launched_precision(precision), plugins, training_strategy
        )
        # After the precision: a refused Trainer leaves no directory of a logger.
        loggers = []
        if not writes_nothing:
            loggers = choose_loggers(logger, root)
        compile_options, compile_regional = _compile_options(compile)
        super().__init__(
            settings=settings,
            options=CompositionOptions(
                arguments=arguments,
                origins=origins,
                switches={
                    "deterministic": deterministic,
                    "benchmark": benchmark,
                    "detect_anomaly": detect_anomaly,
                    "sync_batchnorm": sync_batchnorm,
                },
                compile_options=compile_options,
                compile_regional=compile_regional,
                captures_steps=compile == "step",
                recomputes=activation_checkpointing,
                async_save=async_save,
                drops_unsaveable=on_unsaveable == "drop",
                optimizer_kernel=optimizer_kernel,
                barebones=barebones,
                fast_dev_run=fast_dev_run,
            ),
            environment=environment,
            strategy=training_strategy,
            sharded_alternative=sharded_alternative(strategy, training_strategy),
            precision=precision_plugin,
            loggers=loggers,
            root=root,
            seed=seed,
            start=start,
            processes=processes,
            resume=resume,
        )
        self.hang_timeout = chosen_timeout(hang_timeout)
        self.on_unsaveable = on_unsaveable
        self.optimizer_kernel = optimizer_kernel
        # 4. The callbacks that the arguments stand for. A callback of another library that writes checkpoints itself
        # takes the place of the default one.
        writes_by_default = _is_enabled(
            "enable_checkpointing", enable_checkpointing, writes_nothing
        )
        default_callbacks = added_callbacks(
            callbacks,
            accumulation=accumulation,
            time=max_time,
            bar=_is_enabled("enable_progress_bar", enable_progress_bar, barebones),
            summary=_is_enabled(
                "enable_model_summary", enable_model_summary, writes_nothing
            ),
            checkpoints=writes_by_default and not writes_checkpoints(callbacks),
            profiler=profiler,
        )
        # The user's first: callbacks of the same order are called as they are listed here.
        self.set_callbacks([*callbacks, *default_callbacks])

    @property
    def accelerator(self) -> LightningAccelerator:
        """Lightning's accelerator object for the kind of device of this run."""
        need_wing("compat", "Trainer.accelerator")
        from trainer_kit.compat.accelerators import accelerator_of

        return accelerator_of(self.strategy.device)

    if TYPE_CHECKING:
        # The room of `Session` lies below the callbacks and cannot name their class; here an editor may.
        @property
        def checkpoint_callback(self) -> ModelCheckpoint | None:
            """The first callback that keeps checkpoints, or None."""

    def __copy__(self) -> Trainer:
        # Both would change one list of callbacks, one progress and one strategy.
        raise ConfigurationError(
            "a shallow copy of a Trainer would share its callbacks, progress and strategy with the original",
            found="copy.copy(trainer)",
            fix="copy.deepcopy(trainer), or a new Trainer with the same arguments",
        )

    @_entry_point
    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        load_weights_only: bool = False,
    ) -> None:
        """Train from step 0 or from a checkpoint; this does not continue an earlier fit of this Trainer.

        Args:
            model: the module.
            train_dataloaders: a loader, any pytree of loaders (shorter ones restart until the longest ends), or
                a DataModule; by default the loaders of the datamodule or the module.
            val_dataloaders: a loader, or several in a list or dict, read in sequence.
            datamodule: provides the loaders.
            ckpt_path: the checkpoint to resume from: a path, a URL, ``"last"`` or ``"best"``; None: train from step 0.
            weights_only: accepted for compatibility with Lightning, but True is an error: nothing is unpickled here.
            load_weights_only: load only the weights of the checkpoint: counts, optimizers and data start from 0.

        Raises:
            ConfigurationError: module, data, callbacks and arguments do not fit together; before the first step.
            CheckpointError: ``ckpt_path`` cannot be read.
            NonFiniteError: the loss became NaN or infinite, and no `NaNGuard` handles that.
            RankError: ranks disagree, or one of them failed.
        """
        if weights_only:
            raise ConfigurationError(
                "weights_only= has no effect: checkpoints of this library are never unpickled",
                found=f"weights_only={weights_only!r}",
                fix="load_weights_only=True takes only the weights from ckpt_path; otherwise leave it out",
            )
        # This process is not a rank. It starts them: an agent's ranks run the script and reach this line as ranks;
        # forked ones send rank 0's result back.
        if self.start is not None:
            loaders = (train_dataloaders, val_dataloaders, datamodule)
            run_on_processes(
                self, "fit", model, *loaders, ckpt_path, None, load_weights_only
            )
            return
        with (
            TrainerReport(self, "fit") as report,
            EntryPoint(self, "fit", model, train_dataloaders, datamodule) as entry,
        ):
            run = entry.compose_fit(val_dataloaders, ckpt_path, load_weights_only)
            # The report is a file in the run's directory, which `compose_fit` has chosen by now.
            report.begin(entry.module)
            with listening(self.requests), _watched_fit(self, run, self.hang_timeout):
                fit(run, entry.settler, entry.reload_loaders)
            entry.finish()

    @_entry_point
    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModuleLike = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate; returns the logged values, one dict for each loader.

        Args:
            model: the module; by default the one that was fitted, with the weights of its best checkpoint.
            dataloaders: a loader, a list of loaders, or a DataModule.
            ckpt_path: weights to load: a path, a URL, ``"last"`` or ``"best"``; None: those of ``model``.
            verbose: print the values on rank 0.
            datamodule: provides the loaders.
            weights_only: accepted for compatibility with Lightning; nothing is unpickled here.

        Raises:
            ConfigurationError: there is no module, or module and data do not fit together; before the first batch.
            CheckpointError: ``ckpt_path`` cannot be read.
        """
        return self._evaluate(
            "validate", model, dataloaders, ckpt_path, verbose, datamodule
        )

    @_entry_point
    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModuleLike = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Test; returns the logged values, one dict for each loader.

        Args:
            model: the module; by default the one that was fitted, with the weights of its best checkpoint.
            dataloaders: a loader, a list of loaders, or a DataModule.
            ckpt_path: weights to load, as in `validate`.
            verbose: print the values on rank 0.
            datamodule: provides the loaders.
            weights_only: as in `validate`.

        Raises:
            ConfigurationError: there is no module, or module and data do not fit together; before the first batch.
            CheckpointError: ``ckpt_path`` cannot be read.
        """
        return self._evaluate(
            "test", model, dataloaders, ckpt_path, verbose, datamodule
        )

    @_entry_point
    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        return_predictions: bool = True,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> list[StepOutput] | None:
        """Predict; returns the results of ``predict_step`` in dataset order, with a list for each of several loaders.

        Args:
            model: the module; by default the one that was fitted, with the weights of its best checkpoint.
            dataloaders: a loader, a list of loaders, or a DataModule.
            datamodule: provides the loaders.
            return_predictions: False discards them, for callbacks that write predictions.
            ckpt_path: weights to load, as in `validate`.
            weights_only: as in `validate`.

        Raises:
            ConfigurationError: there is no module, or module and data do not fit together; before the first batch.
            CheckpointError: ``ckpt_path`` cannot be read.
        """
        if self.start is not None:
            predictions: list[StepOutput] | None = run_on_processes(
                self,
                "predict",
                model,
                dataloaders,
                datamodule,
                return_predictions,
                ckpt_path,
            )
            return predictions
        with EntryPoint(self, "predict", model, dataloaders, datamodule) as entry:
            run = entry.compose_evaluation(ckpt_path)
            with _watched_evaluation(self, run, self.hang_timeout):
                outputs = predict(run, return_predictions)
        if not return_predictions:
            # For callbacks that have written the predictions: without this, all outputs would stay in memory.
            return None
        if len(outputs) == 1:
            return outputs[0]
        return outputs

    def _evaluate(
        self,
        stage: str,
        model: TrainModule | None,
        dataloaders: Loaders,
        ckpt_path: str | os.PathLike[str] | None,
        verbose: bool,
        datamodule: DataModuleLike,
    ) -> list[dict[str, float]]:
        results: list[dict[str, float]]
        if self.start is not None:
            results = run_on_processes(
                self, stage, model, dataloaders, ckpt_path, verbose, datamodule
            )
            return results
        with (
            TrainerReport(self, stage) as report,
            EntryPoint(self, stage, model, dataloaders, datamodule) as entry,
        ):
            run = entry.compose_evaluation(ckpt_path)
            report.begin(entry.module)
            with _watched_evaluation(self, run, self.hang_timeout):
                reduced = evaluate(run)
            self.log_metrics(reduced.logger, self.progress.step)
            # Values that belong to no loader, such as those of an epoch's end, are in the result of each.
            shared = reduced.by_loader.get(None, {})
            results = []
            for index in range(len(run.feeds)):
                results.append({**reduced.by_loader.get(index, {}), **shared})
        if verbose:
            show_results(self, stage, results)
        return results

    @replaceable
    def history(self) -> History:
        """The logged values of the last fit as a table: one row for each step at which something was logged.

        Each access reads the journal in `run_dir`: a step costs nothing, and a resumed run has the rows before its
        restart too. Values of the last moments of a running fit may be missing.

        Raises:
            ConfigurationError: this Trainer has no logger, so there is no journal.

        Example:
            >>> import torch
            >>> from trainer_kit.testing import TinyModule
            >>> trainer = Trainer(max_steps=2, log_every_n_steps=1, accelerator="cpu", devices=1,
            ...                   enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
            >>> trainer.fit(TinyModule(), [torch.randn(4, 32)] * 2)
            >>> [row["step"] for row in trainer.history]
            [1, 2]
        """
        return History.read_fit(self)

    @replaceable
    def report(self) -> InlineReport:
        """The page of this run: its path, which a notebook shows as the page itself.

        Raises:
            ConfigurationError: this Trainer has no logger, so there is no page.
        """
        return InlineReport.locate(self)

    _repr_html_ = trainer_table

    @overload
    def explain(
        self,
        model: TrainModule | None = None,
        train_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        *,
        format: Literal["text"] = ...,
    ) -> Text: ...

    @overload
    def explain(
        self,
        model: TrainModule | None = None,
        train_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        *,
        format: Literal["svg"],
    ) -> Svg: ...

    @_entry_point
    def explain(
        self,
        model: TrainModule | None = None,
        train_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        *,
        format: str = "text",
    ) -> Text | Svg:
        """Describe the composed run: parts, batches, steps, and the loop with every hook and its listeners, in order.

        This returns the text: ``print(trainer.explain())``. An interactive session shows it without ``print``.

        Args:
            model: the module; adds its listeners and steps, and memory and communication of a rank
                (this calls ``configure_optimizers``).
            train_dataloaders: adds batches and steps of an epoch.
            datamodule: provides the loaders.
            format: ``"text"``, or ``"svg"``: a picture of the ranks on the axes of their mesh, which a notebook shows.

        Raises:
            ConfigurationError: the format is unknown.

        Example:
            >>> Trainer(barebones=True).explain(format="svg").startswith("<svg")
            True
        """
        if format not in ("text", "svg"):
            raise ConfigurationError(
                'explain returns "text" or "svg"',
                found=f"format={format!r}",
                fix=did_you_mean(str(format), ["text", "svg"]),
            )
        if format == "svg":
            return draw(self, model, train_dataloaders, datamodule)
        return explain(self, model, train_dataloaders, datamodule)

    @_entry_point
    def plan(
        self,
        model: TrainModule,
        train_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        *,
        world: int | Sequence[int],
        device: str | None = None,
        max_memory: int | str | None = None,
        strategies: Sequence[str] = (),
        precisions: Sequence[str] = (),
        global_batch_size: int | None = None,
        price: float | None = None,
    ) -> Plan:
        """Estimate which configurations fit into a device's memory and how fast they are, without the devices.

        Steps of the module run on tensors without storage, under each strategy and an imagined process group. This
        returns the result: ``print(trainer.plan(...))`` shows it as a table.

        Args:
            model: the module, which may be on the meta device.
            train_dataloaders: their first batch gives the shapes; by default those of the datamodule or the module.
            datamodule: provides the loaders.
            world: the number of ranks, or several.
            device: a word such as ``"h200"``; ``"cpu"``: this machine. None: this machine's accelerator, or its CPU.
            max_memory: bytes or ``"60GB"`` that a rank may use; None: nine tenths of the device's memory.
            strategies: words; by default those that make sense for the module and the number of ranks.
            precisions: words; by default this Trainer's, and mixed precision.
            global_batch_size: samples of a step; by default as in this Trainer and its loader.
            price: of a device for an hour; adds the cost of a million samples, or tokens where ``loss_weight`` counts
                them.

        Raises:
            ConfigurationError: an argument is wrong, or training data is missing.

        Example:
            >>> import torch
            >>> from trainer_kit.testing import TinyModule
            >>> plan = Trainer(barebones=True).plan(TinyModule(), [torch.randn(4, 32)], world=2, device="h200",
            ...                                     strategies=["fsdp"], precisions=["32-true"])
            >>> print(plan.trainer_line(plan.best()))
            Trainer(strategy="fsdp", devices=2, precision="32-true", global_batch_size=4)
        """
        need_wing("planning", "Trainer.plan")
        # Imported in the call: the room `planning` may be missing, and `fit` does not need it.
        from trainer_kit.checkpoint.files import in_bytes
        from trainer_kit.planning.estimate import Assumptions
        from trainer_kit.planning.planner import plan_fit

        # `fit` accepts a DataModule in either place, but planning does not pass through its entry point.
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        memory = None
        if max_memory is not None:
            memory = in_bytes(max_memory, "max_memory")
        return plan_fit(
            self,
            model,
            train_dataloaders,
            datamodule,
            world=world,
            device=device,
            max_memory=memory,
            strategies=strategies,
            precisions=precisions,
            global_batch=global_batch_size,
            assumptions=Assumptions(price=price),
            say=self.say,
        )

    @_entry_point
    def verify(
        self,
        model: TrainModule,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: DataModuleLike = None,
        *,
        steps: int = 4,
        local: bool = False,
    ) -> Verification:
        """Compare a few steps of this configuration with a plain PyTorch loop in one process, and name what differs.

        Every run happens in processes that fork from this one, so module, loaders and this Trainer stay as they are;
        with ``local`` it happens here, on copies of them.
        Samples, losses, gradients, weights and logged values are compared within the rounding error that the dtype
        causes on this module; a second run, a resumed run and a run with validation are compared bit for bit. Callbacks
        are left out, but for gradient accumulation. [Verify a configuration](../howto/verify.md) explains the result.

        Args:
            model: the module.
            train_dataloaders: as for `fit`.
            val_dataloaders: adds the check that validation does not change training.
            datamodule: provides the loaders.
            steps: optimizer steps of each run.
            local: every run happens in this process, and ranks are threads that take turns: ``breakpoint()`` works in
                each of them, and no process starts.

        Raises:
            ConfigurationError: this module or process cannot be verified, with the reason.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> import torch
            >>> from trainer_kit.testing import TinyModule
            >>> trainer = Trainer(accelerator="cpu", devices=1, logger=False)
            >>> trainer.verify(TinyModule(), DataLoader(torch.randn(16, 32), batch_size=4), steps=2).ok
            True
        """
        need_wing("verify", "Trainer.verify")
        from trainer_kit.verify.verify import verify

        return verify(
            self,
            model,
            train_dataloaders,
            val_dataloaders,
            datamodule,
            steps=steps,
            local=local,
        )

    def on(
        self, event: str, every: DurationLike | None = None
    ) -> Callable[[Function], Function]:
        """Register a function as a callback's hook.

        Args:
            event: the name of the hook, with or without ``on_``.
            every: call it only at this interval, such as ``"100ba"``; a bare number has the unit of the hook: batches,
                epochs or steps. None: each time.

        Returns:
            A decorator; it returns the function.

        Raises:
            HookError: by the decorator: there is no such hook, or the function does not take its arguments.
            ConfigurationError: by the decorator: an entry point is running.

        Example:
            >>> trainer = Trainer(max_epochs=1, barebones=True)
            >>> @trainer.on("train_epoch_end")
            ... def say(trainer, pl_module):
            ...     print("epoch", trainer.current_epoch)
        """

        from trainer_kit.callbacks.lambda_callback import FunctionCallback

        def register(function: Function) -> Function:
            self.set_callbacks(
                [
                    *self.callback_list.configured,
                    FunctionCallback(event, function, every),
                ]
            )
            return function

        return register


def _refuse(resume: object, reload_every: object) -> None:
    if resume not in (None, "auto"):
        raise ConfigurationError(
            'resume must be "auto" or None',
            found=f"resume={resume!r}",
            fix=f"{did_you_mean(str(resume), ['auto'])}; pass a checkpoint to fit(ckpt_path=...)",
        )
    # True is an int, and would mean each epoch.
    if type(reload_every) is not int or reload_every < 0:
        raise ConfigurationError(
            "the interval for reloading loaders must be an integer ≥ 0",
            found=f"reload_dataloaders_every_n_epochs={reload_every!r}",
            fix="pass 1 to reload in each epoch, 0 to load once per fit",
        )


def _compile_options(
    argument: bool | str | Mapping[str, Any],
) -> tuple[Keywords | None, bool]:
    """The arguments of ``torch.compile``, or None; and whether repeated blocks are compiled, not the whole step."""
    if isinstance(argument, Mapping):
        options = dict(argument)
        return options, bool(options.pop("regional", False))
    if argument is True:
        return {}, False
    return None, False


def _is_enabled(name: str, value: bool | None, off: bool) -> bool:
    if off and value and name != "enable_progress_bar":
        raise ConfigurationError(
            f"{name}=True contradicts barebones or fast_dev_run",
            fix="leave one of them out",
        )
    if off or value is None:
        return not off
    return value


def _watched_fit(
    trainer: Session, run: Fit, timeout: float | None
) -> AbstractContextManager[None]:
    """A context in which a thread ends this process if the fit hangs.

    Args:
        trainer: has the run's directory.
        run: the fit whose progress is watched.
        timeout: see `trainer_kit.hang.hang_timeout.chosen_timeout`.
    """
    progress = run.progress
    world = run.strategy.world

    def position() -> tuple[int, object]:
        return progress.step, (progress.batch, progress.epoch)

    return hang_watchdog(
        world.rank,
        world.size,
        timeout,
        position,
        lambda: _directory(trainer),
        note=partial(trainer.note, "hang"),
    )


def _watched_evaluation(
    trainer: Session, run: Evaluation, timeout: float | None
) -> AbstractContextManager[None]:
    """`_watched_fit` for ``validate``, ``test`` and ``predict``."""
    world = run.strategy.world

    def position() -> tuple[int, object]:
        return run.batches, None

    return hang_watchdog(
        world.rank,
        world.size,
        timeout,
        position,
        lambda: _directory(trainer),
        unit="batch",
        note=partial(trainer.note, "hang"),
    )


def _directory(trainer: Session) -> Path | None:
    # It writes nothing.
    if trainer.settings.fast:
        return None
    return trainer.run_dir
