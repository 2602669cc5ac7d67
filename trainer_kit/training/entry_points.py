"""Sets up and tears down one entry point of the Trainer: fit, validate, test or predict.

`EntryPoint` runs in a process that is a rank; `trainer_kit.training.on_processes` starts ranks from any other process.
If a step raises, a note with the layer and the batch is added to the exception.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, final

from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from trainer_kit.core.arguments import as_list
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    RankError,
    TrainerKitError,
    add_note,
)
from trainer_kit.core.hooks import RUNNING_MODULE, Callback, DataHooks
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data import Feed
from trainer_kit.launch import report_errors
from trainer_kit.metrics.objects import count_once
from trainer_kit.state.collect import State, restore
from trainer_kit.state.optimizer_states import reset_flags, watch_groups
from trainer_kit.state.resume import (
    Search,
    Source,
    StartingPoint,
    compare_hparams,
    holds_weights,
    load_weights,
    read_remaining,
    read_start,
)
from trainer_kit.state.runs import (
    KeepsCheckpoints,
    check_records,
    keep_checkpoints,
    take_directories,
)
from trainer_kit.state.saving import abandon_save
from trainer_kit.step.bus import Bus
from trainer_kit.step.evaluate import Evaluation, evaluate
from trainer_kit.step.optimize import Stepper
from trainer_kit.step.requests import requeue_once, terminable
from trainer_kit.step.run import Fit
from trainer_kit.step.teardown import Teardown
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import ActivationCheckpointing, Compile
from trainer_kit.training.auto_strategy import build_module
from trainer_kit.training.check_module import (
    check_datamodule,
    check_module,
    trainable_in_eval,
)
from trainer_kit.training.compose import compose_fit, prepare_data
from trainer_kit.training.compose_evaluation import compose_evaluation, load_evaluation
from trainer_kit.training.dry_run import check_saveable
from trainer_kit.training.loaders import (
    NAMES,
    find_loaders,
)
from trainer_kit.training.mistakes import note_mistakes
from trainer_kit.training.out_of_memory import describe_memory
from trainer_kit.training.reload import LoaderReload
from trainer_kit.training.repeated_steps import compose_guard
from trainer_kit.training.session import Session
from trainer_kit.training.settle import Settler
from trainer_kit.training.torch_switches import set_switches
from trainer_kit.training.tuning import tune_callbacks

__all__ = ["CheckpointPath", "EntryPoint"]

# A path or a URL, "last" or "best"; None: no checkpoint.
CheckpointPath: TypeAlias = str | os.PathLike[str] | None


@final
@dataclass(frozen=True)
class _Start:
    """Where a fit starts.

    Attributes:
        point: the checkpoint, and how much of it counts.
        state: the part of the checkpoint that is read before the fit is composed; empty without one.
    """

    point: StartingPoint
    state: State


@final
class EntryPoint:
    """Sets up one entry point on entry; on exit notifies callbacks and loggers, and tears down.

    Args:
        trainer: the Trainer that runs this entry point.
        stage: fit, validate, test or predict.
        model: the module, or None for the last fitted module.
        loaders: the user's argument; a DataModule is used as ``datamodule``.
        datamodule: the user's argument.
        is_set_up: whether the caller has run the setup hooks of module and datamodule, and will run their teardown.
    """

    def __init__(
        self,
        trainer: Session,
        stage: str,
        model: Any,
        loaders: Loaders | None,
        datamodule: DataModuleLike,
        is_set_up: bool = False,
    ) -> None:
        if isinstance(loaders, DataModule):
            if datamodule is not None:
                raise ConfigurationError(
                    "the datamodule is set twice", fix="pass it only as datamodule="
                )
            loaders, datamodule = None, loaders
        check_datamodule(datamodule)
        self.trainer = trainer
        self.stage = stage
        self.loaders = loaders
        self.datamodule = datamodule
        self.is_set_up = is_set_up
        self.uses_fitted = model is None
        self.module = trainer.module
        if model is not None:
            self.module = uncompiled(model)
        if self.module is None:
            raise ConfigurationError(
                f"{stage} needs a module", fix=f"pass it: trainer.{stage}(module, ...)"
            )
        check_module(self.module, stage)
        # The user's `torch.compile(module)` compiles `forward`; the step is compiled in the same way instead.
        is_compiled = model is not None and self.module is not model
        trainer.running.compile_with(model.dynamo_ctx if is_compiled else None)
        self.teardown = Teardown()
        # Called before each epoch.
        self.reload_loaders: Callable[[], None] | None = None
        self.bus: Bus
        self._callbacks_before = trainer.callbacks
        self._not_terminable: Callable[[BaseException | None], None]
        self._restore_switches: Callable[[BaseException | None], None]
        self._outer_module: Token[Any]

    def __enter__(self) -> EntryPoint:
        running_stage = self.trainer.state_verb
        if running_stage:
            raise ConfigurationError(
                f"{self.stage} inside {running_stage}",
                fix="call it after the running one has returned",
            )
        try:
            self._set_up()
        except BaseException:
            # Python calls no `__exit__` where `__enter__` raises, and a part of the set-up must be undone.
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            note_mistakes(error, self.module)
            self.trainer.running.interrupt()
            if ran_out_of_memory(error):
                add_note(error, describe_memory(self.trainer, self.stage))
        try:
            self.teardown.__exit__(kind, error, traceback)
        # Of the teardown.
        except BaseException:
            self.trainer.running.interrupt()
            raise

    def _set_up(self) -> None:
        trainer, stage = self.trainer, self.stage
        module = self.module
        if trainer.environment.launched:
            report_errors(where=lambda: f"step {trainer.progress.step}")
        # First of all: everything below may ask for the rank, or exchange something.
        trainer.strategy.start()
        self._not_terminable = terminable(trainer.requests)
        self._restore_switches = set_switches(trainer.options.switches)
        # Lightning's helpers read the rank there.
        rank_zero_only.rank = trainer.strategy.world.rank  # type: ignore[attr-defined]
        trainer.running.begin(stage)
        trainer.show_module(module)
        self._outer_module = RUNNING_MODULE.set(module)
        # Already here, so that `on_exception` is called for what fails below; again when the module adds callbacks.
        self._attach()
        # `save_checkpoint` after this entry point still saves the last fit, with its values.
        trainer.metrics.suspend()
        trainer.metrics.attach(trainer.strategy, module)
        trainer.requests.clear()
        # Bar and monitors of a test must not show training values.
        if stage == "fit":
            trainer.reset()
        else:
            trainer.metrics.forget(suspended=False)
        # The seed is read when a fit begins; an evaluation reads one only before the first fit.
        keeps_seed = trainer.run is not None and (stage != "fit" or trainer.continues)
        trainer.files.agree_on_run(trainer.strategy.world, stage == "fit", keeps_seed)
        trainer.show_datamodule(self.datamodule)
        module.trainer = trainer
        if self.datamodule is not None:
            self.datamodule.trainer = trainer
        self._add_callbacks()
        # Before the hooks of the set-up, which may ask for the loaders and for the number of steps.
        if stage == "fit":
            trainer.read_accumulation()
            trainer.running.load_train_with(
                partial(find_loaders, "fit", self.loaders, module, self.datamodule)
            )
        if not self.is_set_up:
            prepare_data(trainer, module, self.datamodule, stage)
        build_module(trainer, module, stage)
        # Again, for the submodules that `configure_model` has built.
        module.trainer = trainer
        count_once(module, trainer.strategy)

    def _add_callbacks(self) -> None:
        """Add the module's own callbacks; each replaces the Trainer's callbacks of its class.

        They stay after a fit, with their state (such as the best checkpoint); after an evaluation the callbacks of the
        fit are restored.
        """
        trainer = self.trainer
        module_callbacks = as_list(self.module.configure_callbacks(), Callback)
        if module_callbacks:
            trainer.callback_list.add_of_module(module_callbacks)
        elif trainer.callback_list.has_module_callbacks:
            # They are those of an earlier fit.
            trainer.callback_list.drop_of_module()
        else:
            return
        self._attach()

    def _attach(self) -> None:
        """Build the bus, and register its exception hooks and the teardown calls."""
        trainer, stage = self.trainer, self.stage
        module, datamodule = self.module, self.datamodule
        self.bus = Bus(trainer, module, trainer.callbacks, datamodule, trainer.metrics)
        # In place: this is called again when the module has added callbacks, and nothing may be called twice.
        self.teardown.failed[:] = self.bus.on_exception
        hooks: list[Callable[[], object]] = []
        if datamodule is not None and is_overridden("teardown", datamodule, DataHooks):
            hooks.append(partial(datamodule.teardown, stage))
        hooks += [
            partial(callback.teardown, trainer, module, stage)
            for callback in trainer.callbacks
        ]
        if is_overridden("teardown", module, DataHooks):
            hooks.append(partial(module.teardown, stage))
        if self.is_set_up:
            hooks.clear()
        # `_end` resets the Trainer's state, so it runs after the teardown hooks, which may read it.
        self.teardown.cleanup[:] = [
            *map(_without_error, hooks),
            self._close_loaders,
            self._end,
            self._stop,
            self._finalize,
            self._not_terminable,
            self._restore_switches,
        ]

    def _end(self, error: BaseException | None) -> None:
        trainer = self.trainer
        RUNNING_MODULE.reset(self._outer_module)
        trainer.running.end(error)
        trainer.requests.end_loop()
        trainer.metrics.leave()
        trainer.metrics.hook = ""
        if error is not None:
            # A loss scaler refuses the first step of the next fit if one was left between unscaling and stepping.
            trainer.precision_plugin.abandon_step()
        if self.stage != "fit":
            trainer.callback_list.restore(self._callbacks_before)
        self.module.untoggle_optimizer(None)
        # `compose_fit` has overridden it there, under compile.
        for module in self.module.nested_train_modules():
            module.__dict__.pop("log", None)
        # Rank 0 alone asks SLURM: every rank would put the job into the queue once more.
        if not trainer.is_global_zero or trainer.settings.fast:
            return
        if self.stage == "fit" and keep_checkpoints(trainer.callbacks):
            # There is an answer only where no step was running: else the settler has asked.
            answer = requeue_once(trainer.requests)
            if answer:
                trainer.say(answer)

    def _close_loaders(self, error: BaseException | None) -> None:
        run = self.trainer.run
        feeds: list[Feed] = []
        if run is not None:
            feeds += [run.windows.feed, *run.validation.feeds]
        if self.trainer.evaluation is not None:
            feeds += self.trainer.evaluation.feeds
        # Workers of a loader that is not closed live until the process ends.
        for feed in feeds:
            feed.close()

    def _stop(self, error: BaseException | None) -> None:
        if self.stage != "fit":
            return
        self.trainer.strategy.stop()
        if self.trainer.options.recomputes is not False:
            ActivationCheckpointing().undo(self.module)
        if self.trainer.options.compile_regional:
            Compile().undo(self.module)
        run = self.trainer.run
        # The fit stays readable after its end, and must not hold batches, process groups and buffers of that time.
        if run is not None:
            run.runner.release()
            if isinstance(run.stepper, Stepper):
                run.stepper.release()
            run.windows.release()
            run.saver.buffers.clear()

    def _finalize(self, error: BaseException | None) -> None:
        trainer = self.trainer
        status = "success"
        if isinstance(error, KeyboardInterrupt) or (
            error is not None and trainer.requests.signal
        ):
            status = "interrupted"
        elif error is not None:
            status = "failed"
        trainer.files.deliveries.close(status, trainer.requests.at_once)

    def compose_fit(
        self, val_loaders: Loaders | None, ckpt_path: CheckpointPath, weights_only: bool
    ) -> Fit:
        """Compose the fit, restore its checkpoint if any, and call the hooks that precede ``on_train_start``."""
        trainer = self.trainer
        # The checkpoint is read in two parts. The first one holds what composing depends on (seed, position, what
        # callbacks have tuned); the rest goes into the composed fit.
        start = self._find_start(ckpt_path, weights_only)
        self._tune(start)
        every = trainer.reload_dataloaders_every_n_epochs
        if every and start.point.resumes:
            # Loaders may depend on the epoch, which is otherwise restored only once the fit is composed.
            trainer.progress.load_state_dict(start.state["progress"])
        run = self._compose(val_loaders, every)
        settler = Settler(run, compose_guard(trainer, run, self.datamodule))
        trainer.begin_fit(run, settler)
        self.teardown.cleanup.append(watch_groups(run))
        # Counts that a continued fit takes over are not due again.
        run.schedule.mark_validated(run.progress)
        if start.point.source is not None:
            state = read_remaining(
                start.state,
                start.point.source,
                start.point.weights_only,
                trainer.strategy,
                self.module,
            )
            self._restore(run, state, start.point)
            settler.continue_from(state)
        if every:
            self.reload_loaders = LoaderReload(
                trainer,
                run,
                self.datamodule,
                val_loaders=val_loaders,
                passed=self.loaders is not None,
                every=every,
                resumed=settler.resumed,
            ).begin_epoch
        # Now, and not hours later at the first save.
        if run.writes_checkpoints:
            check_saveable(trainer, run)
        # Requests of earlier hooks are looked at before the first step; from here on each one wakes the loop.
        run.requests.begin_loop(settler.wake)
        self.teardown.failed.append(lambda error: run.account.fail_training())
        # After `on_exception` of the callbacks, which may request a checkpoint.
        self.teardown.failed.append(self._save_after)
        in_eval = trainable_in_eval(self.module)
        if in_eval:
            trainer.say(
                f"trainable modules that are in evaluation mode, unchanged: {', '.join(in_eval[:5])}"
            )
        self._introduce_to_loggers()
        # A resumed run keeps the random state of its checkpoint, whatever these hooks draw.
        with (
            preserved_rng(trainer.strategy.device) if settler.resumed else nullcontext()
        ):
            for hook in self.bus.on_fit_start:
                hook()
        self._check_sanity(run)
        return run

    def _find_start(self, ckpt_path: CheckpointPath, weights_only: bool) -> _Start:
        """Take the directories of the run, and read the part of its checkpoint that is needed before composing."""
        trainer, files = self.trainer, self.trainer.files
        world, callbacks = trainer.strategy.world, keep_checkpoints(trainer.callbacks)
        _check_callbacks(callbacks, world)
        if ckpt_path is None:
            on_rank_zero(world, lambda: check_records(files, callbacks))
        # The directories are locked before the search: their files belong to this run from here on.
        removed = take_directories(
            files,
            callbacks,
            world,
            trainer.requests,
            trainer.progress,
            self.teardown.cleanup,
        )
        search = Search(files, callbacks, world, fits=True)
        point = search.start(ckpt_path, weights_only, removed)
        source = point.source
        trainer.running.restore_from(source)
        if source is None:
            if trainer.trained_before:
                trainer.say(
                    "this fit starts at step 0 with new optimizers; the last one ended at step"
                    f" {trainer.trained_before} (to continue it, pass the path of its last checkpoint as ckpt_path= to"
                    " a Trainer with a larger limit)"
                )
            return _Start(point, {})
        # The checkpoint has its own counts, or the fit starts again.
        trainer.progress.load_state_dict(Progress().state_dict())
        trainer.metrics.forget()
        state = read_start(source, point.weights_only, trainer.strategy)
        if point.resumes:
            if "optimizer_states" not in state:
                raise holds_weights(source.path)
            reset_flags(self.module)
        files.continue_seed(state)
        return _Start(point, state)

    def _compose(self, val_loaders: Loaders | None, every: int) -> Fit:
        """Get the loaders and compose the fit; with ``every``, loaders of the last epoch that is a multiple of it."""
        trainer = self.trainer
        epoch = trainer.progress.epoch
        # This epoch has the loaders of an earlier one, unless it is a multiple.
        if every and epoch:
            trainer.progress.epoch -= epoch % every
            trainer.training_loaders.forget()
        try:
            loaders = trainer.load_train()
            if loaders is None:
                raise DataError(
                    "fit needs training data",
                    fix="pass train_dataloaders=, or define train_dataloader()",
                )
            if trainer.options.switches["sync_batchnorm"]:
                self.module = _sync_batchnorm(self.module, trainer.strategy)
            return compose_fit(
                trainer, self.module, self.datamodule, loaders, val_loaders, self.bus
            )
        finally:
            trainer.progress.epoch = epoch

    def _tune(self, start: _Start) -> None:
        saved = None
        if start.point.source is not None:
            saved = start.state
        tune_callbacks(
            self.trainer,
            self.module,
            self.loaders,
            self.datamodule,
            saved=saved,
            weights_only=start.point.weights_only,
        )

    def _restore(self, run: Fit, state: State, point: StartingPoint) -> None:
        """Restore the state, and print where it begins."""
        trainer, files = self.trainer, self.trainer.files
        restore(
            run,
            state,
            run.stepper.configured,
            trainer.callbacks,
            self.datamodule,
            self.module.strict_loading,
            trainer.settings.global_batch_size,
        )
        # Rank 0 alone logs, and continues the runs of its trackers.
        if trainer.is_global_zero:
            files.continue_logging(state.get("loggers", {}))
        # The step is known only now, when the counts are restored.
        trainer.say(point.line_at(trainer.progress.step))
        difference = compare_hparams(self.module.hparams, state)
        if difference is not None:
            trainer.say(difference)
        if (
            trainer.progress.epoch_batch
            and state.get("seed", files.data_seed) != files.data_seed
        ):
            trainer.say(
                f"Trainer(seed={files.seed}) changes the order of the data inside an epoch: samples that the"
                " epoch has read may come again; leave seed= out to keep the checkpoint's order"
            )
        former = files.continued
        if former is None or former.status != "finished":
            return
        if trainer.progress.step >= former.step:
            # A granted request holds, although limits may have changed.
            run.requests.restore_stop(former.stopped)

    @property
    def settler(self) -> Settler:
        """The settler of the composed fit."""
        assert self.trainer.running.settler is not None
        return self.trainer.running.settler

    def _save_after(self, error: BaseException) -> None:
        """Save the checkpoints requested in ``on_exception``; with one process only, for other ranks may have died."""
        run, settler = self.trainer.running.fit, self.trainer.running.settler
        if run is None or settler is None:
            return
        abandon_save(run)
        settler.release_guard()
        if not run.requests.named:
            return
        # Weights that are not finite are worth nothing, other ranks may be gone, and a second signal does not wait.
        if (
            isinstance(error, NonFiniteError)
            or self.trainer.world_size > 1
            or run.requests.at_once
        ):
            run.requests.checkpoints.clear()
            if self.trainer.world_size > 1:
                self.trainer.say(
                    "no checkpoint is saved for this exception: other ranks may have ended; the last one is kept"
                )
            return
        settler.save_requested(last=True)

    def finish(self) -> None:
        """Call ``on_fit_end``, and save the checkpoints that the last hooks requested."""
        # No step follows at which the loop would settle them.
        for hook in self.bus.on_fit_end:
            hook()
        if self.trainer.running.settler is not None:
            self.trainer.running.settler.settle_end()

    def compose_evaluation(self, ckpt_path: CheckpointPath) -> Evaluation:
        """Compose the evaluation, and load the requested weights."""
        trainer, module = self.trainer, self.module
        source = self._find_weights(ckpt_path)
        trainer.precision_plugin.convert_module(module)
        # A rank of a sharded module loads only its shards, so placement comes first.
        if not trainer.strategy.sharded:
            self._load_weights(source)
        trainer.strategy.place_module(module, trainer.precision_plugin)
        if trainer.strategy.sharded:
            self._load_weights(source)
        loaders = find_loaders(self.stage, self.loaders, module, self.datamodule)
        if loaders is None:
            raise DataError(
                f"{self.stage} needs data",
                fix=f"pass dataloaders=, or define {NAMES[self.stage]}_dataloader()",
            )
        split_loaders = load_evaluation(trainer, self.stage, loaders)
        evaluation = compose_evaluation(
            trainer, self.stage, module, self.datamodule, split_loaders, self.bus
        )
        trainer.begin_evaluation(evaluation)
        return evaluation

    def _find_weights(self, ckpt_path: CheckpointPath) -> Source | None:
        """The checkpoint whose weights an evaluation loads: of a fitted module the best one; None: its own weights."""
        trainer = self.trainer
        # The callbacks of the fit: the module of this evaluation may have replaced some.
        callbacks = keep_checkpoints(self._callbacks_before)
        reason = ""
        if (
            ckpt_path is None
            and self.uses_fitted
            and callbacks
            and callbacks[0].best_model_path
        ):
            ckpt_path = "best"
            best = _describe_best(callbacks[0])
            reason = f": {best}; pass the module to use its own, or ckpt_path="
        search = Search(trainer.files, callbacks, trainer.strategy.world, fits=False)
        source = search.find(ckpt_path)
        trainer.running.restore_from(source)
        if source is not None:
            trainer.say(f"{self.stage}: weights of {source.path}{reason}")
        return source

    def _load_weights(self, source: Source | None) -> None:
        if source is None:
            return
        difference = load_weights(self.module, source, self.bus, self.trainer.strategy)
        if difference is not None:
            self.trainer.say(difference)

    def _introduce_to_loggers(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        hparams: dict[str, Any] = {}
        if trainer.enable_autolog_hparams:
            for owner in (self.datamodule, self.module):
                if owner is not None and vars(owner).get("_log_hparams"):
                    hparams.update(owner.hparams)
        failed_loggers = []
        if hparams:
            failed_loggers = trainer.files.deliveries.start("log_hyperparams", hparams)
        for logger in trainer.files.loggers:
            if logger in failed_loggers:
                continue
            # Not on the logger's thread: it may run the module, so training waits for it.
            try:
                trainer.files.log_graph(logger, self.module, trainer.strategy.device)
            except TrainerKitError:
                raise
            except Exception as error:
                trainer.print(
                    f"{type(logger).__name__} could not log the graph of the module: {type(error).__name__}: {error}"
                )

    def _check_sanity(self, run: Fit) -> None:
        """Run a few validation batches, so that an error in validation shows before hours of training."""
        trainer, steps = self.trainer, self.trainer.settings.sanity_steps
        if not run.validation.feeds or steps == 0 or trainer.progress.step > 0:
            return
        limit: int | None = steps
        if steps < 0:
            limit = None
        # The check leaves no trace: neither random numbers, nor requests, nor logged values.
        with run.validation.limited_to(limit), run.requests.unchanged():
            trainer.count_batches("sanity_val", run.validation.counts)
            with (
                run.account.during("evaluation"),
                trainer.running.checking_sanity(),
                preserved_rng(trainer.strategy.device),
            ):
                for hook in self.bus.on_sanity_check_start:
                    hook()
                evaluate(run.validation)
                for hook in self.bus.on_sanity_check_end:
                    hook()
            trainer.metrics.forget()


def _describe_best(callback: KeepsCheckpoints) -> str:
    """Describe ``best_model_path`` of a checkpoint callback, for a message."""
    if callback.best_model_score is None:
        return "the newest checkpoint of the last fit"
    score = float(callback.best_model_score)  # no sync point: it is on the CPU
    return f"the best checkpoint of the last fit, {callback.monitor} = {score:.6g}"


def _check_callbacks(callbacks: list[KeepsCheckpoints], world: Group) -> None:
    """Raise `RankError` if checkpoint callbacks differ between ranks: every rank takes part in each save."""
    if world.size == 1:
        return
    local_names = [type(callback).__name__ for callback in callbacks]
    # A number first: the names are exchanged only if they differ.
    digest = zlib.crc32(repr(local_names).encode())
    if len({row[0] for row in world.agree([digest])}) == 1:
        return
    names_by_rank = world.all_gather_object(local_names)
    raise RankError(
        "the ranks have different checkpoint callbacks",
        found="; ".join(
            f"rank {rank}: {', '.join(names) or 'none'}"
            for rank, names in enumerate(names_by_rank)
        ),
        fix="pass the same callbacks on every rank: only rank 0 writes",
    )


def _without_error(
    call: Callable[[], object],
) -> Callable[[BaseException | None], object]:
    return lambda error: call()


def _sync_batchnorm(module: nn.Module, strategy: Strategy) -> nn.Module:
    if strategy.device.type == "cpu":
        raise ConfigurationError(
            "torch's SyncBatchNorm does not run on the CPU",
            found="sync_batchnorm=True",
            fix="leave it out on the CPU",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]  # torch's
    return converted
