"""Sets up and tears down one entry point of the Trainer: fit, validate, test or predict.

`EntryPoint` runs in a process that is a rank; `run_on_processes` starts ranks from any other process. If a step raises,
a note with the layer and the batch is added to the exception.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import Token
from functools import partial
from types import TracebackType
from typing import Any, Final, final

import torch
from lightning_utilities.core.overrides import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from trainer_kit.checkpoint.encoding import encode
from trainer_kit.core.arguments import as_list
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.devices import (
    deterministic_products,
    device_memory,
    memory_peak,
    ran_out_of_memory,
)
from trainer_kit.core.display import in_units
from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import (
    ConfigurationError,
    DataError,
    LaunchError,
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
from trainer_kit.core.states import TrainerStatus
from trainer_kit.core.tensors import move_to_device
from trainer_kit.launch import report_errors
from trainer_kit.metrics.objects import count_once
from trainer_kit.state.collect import collect, plain_hparams, restore
from trainer_kit.state.optimizer_states import reset_flags, watch_groups
from trainer_kit.state.resume import (
    Search,
    compare_hparams,
    holds_weights,
    load_weights,
    read_rest,
    read_start,
)
from trainer_kit.state.runs import (
    KeepsCheckpoints,
    call_optional,
    check_records,
    count_fit,
    keep_checkpoints,
    take_directories,
)
from trainer_kit.state.saving import abandon_save, save_requested
from trainer_kit.step.bus import Bus, sorted_callbacks
from trainer_kit.step.evaluate import Evaluation, evaluate
from trainer_kit.step.requests import requeue_once, terminable
from trainer_kit.step.run import Fit
from trainer_kit.step.teardown import Teardown
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import ActivationCheckpointing
from trainer_kit.training.compose import (
    build_module,
    check_datamodule,
    check_module,
    compose_evaluation,
    compose_fit,
    prepare_data,
    reload_loaders,
    trainable_in_eval,
)
from trainer_kit.training.loaders import find_loaders
from trainer_kit.training.mistakes import note_mistakes
from trainer_kit.training.session import Session, TunesFit, nothing
from trainer_kit.training.settle import settle_end

__all__ = ["EntryPoint", "on_processes", "run_on_processes"]


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
        loaders: Any,
        datamodule: Any,
        is_set_up: bool = False,
    ) -> None:
        if isinstance(loaders, DataModule):
            if datamodule is not None:
                raise ConfigurationError(
                    "the datamodule is given twice", fix="pass it only as datamodule="
                )
            loaders, datamodule = None, loaders
        check_datamodule(datamodule)
        self.trainer, self.stage, self.loaders, self.datamodule = (
            trainer,
            stage,
            loaders,
            datamodule,
        )
        self.is_set_up = is_set_up
        self.fitted = model is None
        self.module = trainer.module if model is None else uncompiled(model)
        if self.module is None:
            raise ConfigurationError(
                f"{stage} needs a module", fix=f"pass it: trainer.{stage}(module, ...)"
            )
        check_module(self.module, stage)
        is_compiled = model is not None and self.module is not model
        trainer.compiler = model.dynamo_ctx if is_compiled else None
        self.unwinding = Teardown()
        self.bus: Bus
        self._before = trainer.callbacks
        self._not_terminable: Callable[[BaseException | None], None]
        self._switch_back: Callable[[BaseException | None], None]
        self._outer_module: Token[Any]

    def __enter__(self) -> EntryPoint:
        if running := self.trainer.state_verb:
            raise ConfigurationError(
                f"{self.stage} inside {running}",
                fix="call it after the running one has returned",
            )
        try:
            self._set_up()
        except BaseException:
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
            self.trainer.status = TrainerStatus.INTERRUPTED
            if ran_out_of_memory(error):
                add_note(error, _note_memory(self.trainer, self.stage))
        try:
            self.unwinding.__exit__(kind, error, traceback)
        except BaseException:  # of a teardown
            self.trainer.status = TrainerStatus.INTERRUPTED
            raise

    def _set_up(self) -> None:
        trainer, module, stage = self.trainer, self.module, self.stage
        if trainer.environment.launched:
            report_errors(where=lambda: f"step {trainer.progress.step}")
        trainer.strategy.start()
        self._not_terminable = terminable(trainer.requests)
        self._switch_back = _switched(trainer.switches)
        rank_zero_only.rank = trainer.strategy.world.rank  # type: ignore[attr-defined]
        trainer.state_verb, trainer.module = stage, module
        trainer.status, trainer.last_verb, trainer.restored_from = (
            TrainerStatus.RUNNING,
            stage,
            None,
        )
        self._outer_module = RUNNING_MODULE.set(module)
        self._attach()
        trainer.metrics.suspend()  # a checkpoint of the last fit has its values, whatever follows
        trainer.metrics.attach(trainer.strategy, module)
        trainer.requests.clear()
        if stage == "fit":
            trainer.begin_fit()
        else:
            trainer.metrics.forget(
                suspended=False
            )  # bar and monitors of a test must not show training values
        keeps_seed = trainer.run is not None and (stage != "fit" or trainer.continues)
        trainer.files.agree(trainer.strategy.world, stage == "fit", keeps_seed)
        trainer.datamodule = self.datamodule
        module.trainer = trainer
        if self.datamodule is not None:
            self.datamodule.trainer = trainer
        self._add_callbacks()
        if stage == "fit":
            trainer.read_accumulation()
            trainer.find_train_loaders = partial(
                find_loaders, "fit", self.loaders, module, self.datamodule
            )
        if not self.is_set_up:
            prepare_data(trainer, module, self.datamodule, stage)
        build_module(trainer, module, stage)
        module.trainer = trainer  # again, for submodules that configure_model built
        count_once(module, trainer.strategy)

    def _add_callbacks(self) -> None:
        """Add the module's own callbacks; each replaces the Trainer's callbacks of its class.

        They stay after a fit, with their state (such as the best checkpoint); after an evaluation the callbacks of the
        fit are restored.
        """
        trainer = self.trainer
        added = as_list(self.module.configure_callbacks(), Callback)
        if not added and trainer.callbacks is trainer._own_callbacks:
            return
        kinds = {type(callback) for callback in added}
        kept = [
            callback
            for callback in trainer._own_callbacks
            if type(callback) not in kinds
        ]
        trainer._callbacks = (
            sorted_callbacks([*kept, *added]) if added else trainer._own_callbacks
        )
        self._attach()

    def _attach(self) -> None:
        """Build the bus, and register its exception hooks and the teardown calls."""
        trainer, module, stage, datamodule = (
            self.trainer,
            self.module,
            self.stage,
            self.datamodule,
        )
        self.bus = Bus(trainer, module, trainer.callbacks, datamodule, trainer.metrics)
        self.unwinding.failed[:] = self.bus.on_exception
        calls: list[Callable[[], Any]] = []
        if datamodule is not None and is_overridden("teardown", datamodule, DataHooks):
            calls.append(partial(datamodule.teardown, stage))
        calls += [
            partial(callback.teardown, trainer, module, stage)
            for callback in trainer.callbacks
        ]
        if is_overridden("teardown", module, DataHooks):
            calls.append(partial(module.teardown, stage))
        if self.is_set_up:
            calls.clear()
        # `_leave` resets the Trainer's state, so it runs after the teardown hooks, which may read it.
        ends = [
            self._close_loaders,
            self._leave,
            self._stop,
            self._finalize,
            self._not_terminable,
            self._switch_back,
        ]
        self.unwinding.cleanup[:] = [*map(_ignoring_error, calls), *ends]

    def _leave(self, error: BaseException | None) -> None:
        trainer = self.trainer
        RUNNING_MODULE.reset(self._outer_module)
        trainer.state_verb, trainer.evaluation = "", None
        trainer.metrics.leave()
        trainer.metrics.hook = ""
        trainer.sanity_checking = False
        trainer.requests.wake = trainer.find_train_loaders = nothing
        if error is None:
            trainer.status = TrainerStatus.FINISHED
        if self.stage != "fit":
            trainer._callbacks = self._before
        self.module.untoggle_optimizer(None)
        for module in self.module.own_modules():
            module.__dict__.pop("log", None)  # see `compose_fit`, under compile
        if error is not None:
            trainer.precision_plugin.abandon_step()
        keeps = (
            self.stage == "fit"
            and trainer.checkpoint_callback is not None
            and not trainer.settings.fast
        )
        answer = (
            requeue_once(trainer.requests) if keeps and trainer.is_global_zero else ""
        )
        if answer:  # no step was running
            trainer.say(answer)

    def _close_loaders(self, error: BaseException | None) -> None:
        run = self.trainer.run
        evaluations = [self.trainer.evaluation, None if run is None else run.validation]
        feeds = [feed for one in evaluations if one is not None for feed in one.feeds]
        for feed in feeds if run is None else [run.windows.feed, *feeds]:
            feed.close()

    def _stop(self, error: BaseException | None) -> None:
        if self.stage == "fit":
            self.trainer.strategy.stop()
            if self.trainer.recomputes is not False:
                ActivationCheckpointing().undo(self.module)
            if self.trainer.run is not None:
                self.trainer.run.micro.release()
                self.trainer.run.windows.release()
                self.trainer.run.saver.buffers.clear()

    def _finalize(self, error: BaseException | None) -> None:
        trainer = self.trainer
        interrupted = isinstance(error, KeyboardInterrupt) or trainer.requests.signal
        status = (
            "success" if error is None else "interrupted" if interrupted else "failed"
        )
        trainer.files.deliveries.close(status, trainer.requests.at_once)

    def compose_fit(self, val_loaders: Any, ckpt_path: Any, weights_only: bool) -> Fit:
        """Compose the fit, restore its checkpoint if any, and call the hooks that precede ``on_train_start``."""
        trainer, module, files = self.trainer, self.module, self.trainer.files
        world, callbacks = trainer.strategy.world, trainer.checkpoint_callbacks
        _check_callbacks(callbacks, world)
        if ckpt_path is None:
            on_rank_zero(world, lambda: check_records(files, callbacks))
        removed = take_directories(
            files,
            callbacks,
            world,
            trainer.requests,
            trainer.progress,
            self.unwinding.cleanup,
        )
        search = Search(files, callbacks, world, fits=True)
        path, weights_only, found = search.start(ckpt_path, weights_only, removed)
        if path is None and trainer.trained_before:
            trainer.say(
                f"this fit starts at step 0 with new optimizers; the last one ended at step {trainer.trained_before}"
                " (to continue it, pass the path of its last checkpoint as ckpt_path= to a Trainer with a larger limit)"
            )
        trainer.restored_from = None if path is None else str(path)
        if path is not None:  # which has its own counts, or starts again
            trainer.progress.load_state_dict(Progress().state_dict())
            trainer.metrics.forget()
        state = (
            None if path is None else read_start(path, weights_only, trainer.strategy)
        )
        if state is not None and not weights_only and "optimizer_states" not in state:
            raise holds_weights(path)
        if state is not None and not weights_only:
            reset_flags(module)
        if state is not None and files.seed is None:
            files.data_seed = state.get("seed", files.data_seed)
        self._tune(state, weights_only)
        every = trainer.reload_dataloaders_every_n_epochs
        if every and state is not None and not weights_only:
            trainer.progress.load_state_dict(
                state["progress"]
            )  # loaders may depend on the epoch
        run = trainer.run = self._compose(val_loaders, every)
        module = self.module  # sync_batchnorm converts it
        self.unwinding.cleanup.append(watch_groups(run))
        run.id = "" if files.record is None else files.record.id
        trainer.num_val_batches = (
            [] if run.validation is None else run.validation.counts
        )
        trainer.continues = False
        run.schedule.mark_checked(
            run.progress
        )  # counts that a continued fit takes over are not due again
        if state is not None and path is not None:
            self._restore(
                run,
                read_rest(state, path, weights_only, trainer.strategy, module),
                found,
            )
        if every:
            run.reload = self._reload(run, val_loaders, every)
        if run.checkpoints:
            _dry_run(trainer, run)
        run.requests.wake = run.wake
        self.unwinding.failed.append(self._save_after)
        in_eval = trainable_in_eval(module)
        if in_eval:
            trainer.say(
                f"trainable modules that are in evaluation mode, unchanged: {', '.join(in_eval[:5])}"
            )
        self._introduce_to_loggers()
        # A resumed run keeps the random state of its checkpoint, whatever these hooks draw.
        with preserved_rng(trainer.strategy.device) if run.resumed else nullcontext():
            for hook in self.bus.on_fit_start:
                hook()
        self._check_sanity(run)
        return run

    def _compose(self, val_loaders: Any, every: int) -> Fit:
        """Get the loaders and compose the fit; with ``every``, loaders of the last epoch that is a multiple of it."""
        trainer = self.trainer
        epoch = trainer.progress.epoch
        if (
            every and epoch
        ):  # this epoch has the loaders of an earlier one, unless it is a multiple
            trainer.progress.epoch -= epoch % every
            trainer.forget_loaders()
        try:
            loaders = trainer.load_train()
            if loaders is None:
                raise DataError(
                    "fit needs training data",
                    fix="pass train_dataloaders=, or define train_dataloader()",
                )
            if trainer.switches["sync_batchnorm"]:
                self.module = _sync_batchnorm(self.module, trainer.strategy)
            return compose_fit(
                trainer, self.module, self.datamodule, loaders, val_loaders, self.bus
            )
        finally:
            trainer.progress.epoch = epoch

    def _reload(self, run: Fit, val_loaders: Any, every: int) -> Callable[[], None]:
        """A function to call before each epoch: it reloads the loaders where its number is a multiple of ``every``.

        Not before the first epoch, which has new ones; but a run that resumes where an epoch begins makes them once
        more, with the generators of its checkpoint.
        """
        progress, datamodule, passed = (
            run.progress,
            self.datamodule,
            self.loaders is not None,
        )
        last = progress.epoch - progress.epoch % every
        if run.resumed and progress.epoch == last and not progress.epoch_batch:
            last -= every

        def reload() -> None:
            nonlocal last
            if progress.epoch >= last + every and not progress.epoch_batch:
                last = progress.epoch
                reload_loaders(self.trainer, run, datamodule, val_loaders, passed)

        return reload

    def _tune(self, state: Mapping[str, Any] | None, weights_only: bool) -> None:
        """Let callbacks tune values of module and data, before loaders and optimizers are created from them.

        A resumed run restores the values that it found before, and does not search.
        """
        trainer = self.trainer
        tuning = [
            callback for callback in trainer.callbacks if isinstance(callback, TunesFit)
        ]
        if tuning and state is not None and weights_only:
            raise ConfigurationError(
                f"{type(tuning[0]).__name__} would search with weights other than those of the checkpoint",
                found="load_weights_only=True",
                fix="load them first: fit(Module.load_from_checkpoint(path), ...)",
            )
        if tuning and trainer.settings.fast:
            trainer.say(
                f"fast_dev_run: {' and '.join(type(callback).__name__ for callback in tuning)} not run"
            )
            return
        for callback in tuning:
            saved = (
                None
                if state is None
                else (state.get("callbacks") or {}).get(callback.state_key, {})
            )
            if saved == {}:
                trainer.say(
                    f"{type(callback).__name__} does not search in a resumed run"
                )
            callback.tune(trainer, self.module, self.loaders, self.datamodule, saved)
            trainer.forget_loaders()  # the search may have loaded them with other values

    def _restore(self, run: Fit, state: dict[str, Any], found: str) -> None:
        trainer, files = self.trainer, self.trainer.files
        strict, size = self.module.strict_loading, trainer.settings.global_batch_size
        restore(
            run,
            state,
            run.stepper.made,
            trainer.callbacks,
            self.datamodule,
            strict,
            size,
        )
        if trainer.is_global_zero:
            files.continue_logging(state.get("loggers", {}))
        trainer.say(found.replace("{step}", str(trainer.progress.step), 1))
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
        old = files.continued
        if (
            old is not None
            and old.status == "finished"
            and trainer.progress.step >= old.step
        ):
            run.requests.stop = (
                old.stopped
            )  # a granted stop request still holds; limits may have changed

    def _save_after(self, error: BaseException) -> None:
        """Save the checkpoints requested in ``on_exception``; with one process only, for other ranks may have died."""
        run = self.trainer.run
        if run is None:
            return
        abandon_save(run)
        run.guard = None
        if not run.requests.named:
            return
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
        save_requested(run, last=True)

    def finish(self) -> None:
        """Call ``on_fit_end``, and save the checkpoints that the last hooks requested."""
        for hook in self.bus.on_fit_end:
            hook()
        if self.trainer.run is not None:
            settle_end(self.trainer.run)

    def compose_evaluation(self, ckpt_path: Any) -> Evaluation:
        """Compose the evaluation, and load the requested weights."""
        trainer, module = self.trainer, self.module
        callbacks = keep_checkpoints(self._before)  # those of the fit
        chosen = (
            ckpt_path is None
            and self.fitted
            and callbacks
            and callbacks[0].best_model_path
        )
        search = Search(trainer.files, callbacks, trainer.strategy.world, fits=False)
        path = search.find("best" if chosen else ckpt_path)
        trainer.restored_from = None if path is None else str(path)
        if path is not None:
            why = (
                f": {_best(callbacks[0])}; pass the module to use its own, or ckpt_path="
                if chosen
                else ""
            )
            trainer.say(f"{self.stage}: weights of {path}{why}")
        trainer.precision_plugin.convert_module(module)
        sharded = (
            trainer.strategy.sharded
        )  # each rank then loads only its shards, so placement comes first
        difference = None
        if path is not None and not sharded:
            difference = load_weights(module, path, self.bus, trainer.strategy)
        trainer.strategy.place_module(module, trainer.precision_plugin)
        if path is not None and sharded:
            difference = load_weights(module, path, self.bus, trainer.strategy)
        if difference is not None:
            trainer.say(difference)
        loaders = find_loaders(self.stage, self.loaders, module, self.datamodule)
        name = {"validate": "val"}.get(self.stage, self.stage)
        if loaders is None:
            raise DataError(
                f"{self.stage} needs data",
                fix=f"pass dataloaders=, or define {name}_dataloader()",
            )
        run = compose_evaluation(
            trainer, self.stage, module, self.datamodule, loaders, self.bus
        )
        setattr(trainer, f"num_{name}_batches", run.counts)
        trainer.evaluation = run
        return run

    def _introduce_to_loggers(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        values: dict[str, Any] = {}
        for owner in (self.datamodule, self.module):
            if (
                trainer.enable_autolog_hparams
                and owner is not None
                and vars(owner).get("_log_hparams")
            ):
                values.update(owner.hparams)
        deliveries = trainer.files.deliveries
        silent = deliveries.start("log_hyperparams", values) if values else []
        for logger in trainer.files.loggers:
            if logger in silent:
                continue
            try:
                call_optional(
                    logger, "log_graph", self.module
                )  # in this thread: it runs the module
            except TrainerKitError:
                raise
            except Exception as error:
                trainer.print(
                    f"{type(logger).__name__} could not log the graph of the module: {type(error).__name__}: {error}"
                )

    def _check_sanity(self, run: Fit) -> None:
        """Run a few validation batches, so that an error in validation shows before hours of training."""
        trainer, steps = self.trainer, self.trainer.settings.sanity_steps
        if run.validation is None or steps == 0 or trainer.progress.step > 0:
            return
        limits, expected = run.validation.limits, run.validation.expected
        if steps > 0:
            run.validation.limits = [
                steps if limit is None else min(limit, steps) for limit in limits
            ]
            run.validation.expected = [
                steps if batches is None else min(batches, steps)
                for batches in expected
            ]
        trainer.num_sanity_val_batches = run.validation.counts
        requests = run.requests
        before = requests.stop, requests.validation, list(requests.checkpoints)
        trainer.sanity_checking = True
        with preserved_rng(trainer.strategy.device):
            for hook in self.bus.on_sanity_check_start:
                hook()
            evaluate(run.validation)
            for hook in self.bus.on_sanity_check_end:
                hook()
        trainer.sanity_checking = False
        run.validation.limits, run.validation.expected = limits, expected
        run.validation.seen.clear()
        trainer.metrics.forget()
        requests.stop, requests.validation, requests.checkpoints[:] = before


def _best(callback: KeepsCheckpoints) -> str:
    """Describe ``best_model_path`` of a checkpoint callback, for a message."""
    if callback.best_model_score is None:
        return "the newest checkpoint of the last fit"
    score = float(callback.best_model_score)  # no sync point: it is on the CPU
    return f"the best checkpoint of the last fit, {callback.monitor} = {score:.6g}"


def _check_callbacks(callbacks: list[KeepsCheckpoints], world: Group) -> None:
    """Raise `RankError` if checkpoint callbacks differ between ranks: every rank takes part in each save."""
    if world.size == 1:
        return
    everyone = world.all_gather_object(
        [type(callback).__name__ for callback in callbacks]
    )
    if any(names != everyone[0] for names in everyone):
        raise RankError(
            "the ranks have different checkpoint callbacks",
            found="; ".join(
                f"rank {rank}: {', '.join(names) or 'none'}"
                for rank, names in enumerate(everyone)
            ),
            fix="pass the same callbacks on every rank: only rank 0 writes",
        )


def _has_state(owner: Any) -> bool:
    try:
        return bool(owner is not None and owner.state_dict())
    except Exception:  # the first save raises it again
        return False


def _ignoring_error(call: Callable[[], Any]) -> Callable[[BaseException | None], Any]:
    return lambda error: call()


def _switched(switches: dict[str, Any]) -> Callable[[BaseException | None], None]:
    """Set torch's global switches for this entry point; returns a function that restores them."""
    deterministic, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    anomaly, benchmark = torch.is_anomaly_enabled(), torch.backends.cudnn.benchmark
    undo = deterministic_products() if switches["deterministic"] else None
    if switches["deterministic"]:
        torch.use_deterministic_algorithms(
            True, warn_only=switches["deterministic"] == "warn"
        )
    if switches["benchmark"] is not None:
        torch.backends.cudnn.benchmark = switches["benchmark"]
    if switches["detect_anomaly"]:
        torch.autograd.set_detect_anomaly(True)

    def back(error: BaseException | None) -> None:
        if undo is not None:
            undo()
        torch.use_deterministic_algorithms(deterministic, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)

    return back


def _sync_batchnorm(module: nn.Module, strategy: Strategy) -> Any:
    if strategy.device.type == "cpu":
        raise ConfigurationError(
            "torch's SyncBatchNorm does not run on the CPU",
            found="sync_batchnorm=True",
            fix="leave it out on the CPU",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]


def _dry_run(trainer: Session, run: Fit) -> None:
    """Encode the state before the first step, so that state that cannot be saved is an error now.

    This does not call ``on_save_checkpoint``, whose source is read, and does not see state that only training creates.
    """
    ready = [callback for callback in trainer.callbacks if _has_state(callback)]
    datamodule = trainer.datamodule if _has_state(trainer.datamodule) else None
    state = collect(
        run, ready, datamodule, trainer.data_seed, weights_only=False, hooks=False
    )

    def encode_state(state: Mapping[str, Any]) -> None:
        if run.strategy.sharded:
            encode(state, {}, copy=False, sharded=True)
        else:  # rank 0 writes; an engine that gathers its state has it only there
            on_rank_zero(
                run.strategy.world, lambda: bool(encode(state, {}, copy=False))
            )

    owners = [
        owner
        for owner in (*trainer.callbacks, trainer.datamodule, trainer.module)
        if owner is not None
    ]
    trainer.unsaveable.check(state, owners, encode_state)
    run.windows.feed.loader_state.check_first(
        lambda first: encode({"loaders": first}, {}, copy=False)
    )
    refused = plain_hparams(trainer.module.hparams)[1]
    if refused:
        trainer.say(
            f"hyperparameters that a checkpoint holds by their repr only: {', '.join(refused)}"
            " (load_from_checkpoint will ask for them)"
        )


_MAX_RESTARTS: Final = "TRAINER_KIT_MAX_RESTARTS"


def on_processes(trainer: Session, call: Callable[[int], Any]) -> Any:
    """Call ``call(rank)`` on each rank that this process starts, or in this process if it is a rank.

    Returns rank 0's result. In the agent this never returns: its ranks run the script and reach the same call.
    """
    if trainer.start is None:  # this process is a rank
        return call(trainer.global_rank)
    if trainer.start == "agent":
        from trainer_kit.launch import run_agent

        run_agent(
            trainer.processes,
            extra_env=trainer.files.hand_over(),
            max_restarts=_max_restarts(),
        )
    from trainer_kit.launch import run_forked

    def on_rank(rank: int) -> Any:
        trainer.start = None
        trainer.environment = Environment.detect()
        trainer.strategy.device = pick_device(trainer.strategy.device.type, rank)
        return call(rank)

    return run_forked(on_rank, trainer.processes)


def run_on_processes(trainer: Session, stage: str, model: Any, *arguments: Any) -> Any:
    """Run an entry point with `on_processes`.

    After forked processes (in notebooks), copy rank 0's weights, counts, metrics and callback state to this process.
    """

    def on_rank(rank: int) -> Any:
        result = getattr(trainer, stage)(model, *arguments)
        if rank != 0:
            return None
        module = trainer.module
        return {
            "result": result,
            "weights": move_to_device(
                dict(module.state_dict()), "cpu"
            ),  # sync point: at the end
            "progress": trainer.progress.state_dict(),
            "restored_from": trainer.restored_from,
            "metrics": (
                trainer.metrics.callback,
                trainer.metrics.logged,
                trainer.metrics.progress_bar,
            ),
            "callbacks": [
                dict(callback.state_dict()) for callback in trainer.callbacks
            ],
        }

    trainer.status, trainer.last_verb = (
        TrainerStatus.INTERRUPTED,
        stage,
    )  # unless the next line returns
    made = on_processes(trainer, on_rank)
    trainer.status, trainer.restored_from = (
        TrainerStatus.FINISHED,
        made["restored_from"],
    )
    if stage == "fit":
        count_fit()
        trainer.continues = False
    module = trainer.module if model is None else uncompiled(model)
    module.load_state_dict(made["weights"])
    trainer.module = module
    trainer.progress.load_state_dict(made["progress"])
    trainer.metrics.forget()  # the same as in `EntryPoint`
    for here, there in zip(
        (
            trainer.metrics.callback,
            trainer.metrics.logged,
            trainer.metrics.progress_bar,
        ),
        made["metrics"],
        strict=True,
    ):
        here.update(there)
    for callback, state in zip(trainer.callbacks, made["callbacks"], strict=True):
        if state:
            callback.load_state_dict(state)
    return made["result"]


def _max_restarts() -> int:
    """How often an agent that was not started by the command line restarts a run after a rank failed."""
    value = os.environ.get(_MAX_RESTARTS, "0")
    if not value.isdigit():
        raise LaunchError(
            f"{_MAX_RESTARTS} is not a whole number", found=f"{_MAX_RESTARTS}={value}"
        )
    return int(value)


def _note_memory(trainer: Session, stage: str) -> str:
    device = trainer.strategy.device
    local = max(1, trainer.environment.local_world_size)
    held = f"peak {in_units(memory_peak(device))} of {in_units(device_memory(device, local))} on {device}"
    if stage != "fit":
        return (
            f"out of memory in {stage}: {held}\n  fix:   a smaller batch in the loader"
        )
    return (
        f"out of memory at step {trainer.progress.step + 1}: {held}\n"
        "  fix:   callbacks=[AutoMicroBatch()] repeats such a step with smaller micro-batches (one device and DDP); or"
        " half the batch size with accumulate_grad_batches=2, precision='bf16-mixed', strategy='fsdp'"
    )
