"""Composes a `Fit` or an `Evaluation` from settings, a module and loaders, and checks them before the first step.

Also resolves ``strategy="auto"`` on several processes: DDP if a full replica of the model fits on a device, else FSDP.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.devices import device_memory
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import DataHooks, ModuleHooks
from trainer_kit.core.location import Location
from trainer_kit.core.module import TrainModule, build_once
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import (
    ActsAtIntervals,
    Group,
    LeavesOutSteps,
    ReplaysSteps,
    SplitsBatches,
)
from trainer_kit.core.signatures import check_hooks, takes
from trainer_kit.core.states import names_validation
from trainer_kit.data import (
    MODES,
    Ahead,
    CombinedLoader,
    EpochLength,
    Feed,
    read_together,
)
from trainer_kit.metrics.entry import Reduced
from trainer_kit.state.collect import collect, restore
from trainer_kit.state.optimizer_states import configured_flags, note_configured
from trainer_kit.state.rewind import Guard
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.bus import Bus
from trainer_kit.step.evaluate import Evaluation, part_weight
from trainer_kit.step.micro_batch import MicroBatches, exit_agreement
from trainer_kit.step.optimize import ManualStepper, Stepper
from trainer_kit.step.optimizers import (
    LRSchedulerConfig,
    Optimizers,
    check_parameters,
    configure_optimizers,
)
from trainer_kit.step.padding_batches import PaddingBatches
from trainer_kit.step.run import Fit, Saver
from trainer_kit.step.schedule import Interval, Schedule, check_tokens
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.step.split_batches import ReplayedSteps, SplitBatches
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import (
    ActivationCheckpointing,
    Compile,
    Policy,
    units,
)
from trainer_kit.training.loaders import (
    NAMES,
    agreed_length,
    evaluation_feeds,
    find_loaders,
    mover,
    training_feed,
)
from trainer_kit.training.session import Session
from trainer_kit.training.settings import Settings

__all__ = [
    "build_module",
    "check_datamodule",
    "check_module",
    "choose_by_memory",
    "compose_evaluation",
    "compose_fit",
    "prepare_data",
    "reload_loaders",
    "trainable_in_eval",
    "training_bytes",
    "whole_copies_fit",
]

_Steps = Stepper | ManualStepper


def check_datamodule(datamodule: Any) -> None:
    """Raise `ConfigurationError` for something that cannot be a DataModule, and for hooks that it does not have."""
    if isinstance(datamodule, (Iterable, int, float)):
        raise ConfigurationError(
            "datamodule= is not a DataModule",
            found=type(datamodule).__name__,
            fix="fit takes training and validation loaders; trainer.test(module, loader) takes the third",
        )
    if isinstance(datamodule, DataModule):
        check_hooks(type(datamodule), DataHooks)


def check_module(module: Any, stage: str) -> None:
    """Raise `ConfigurationError` for a module that cannot run this stage; the message names what is missing."""
    if isinstance(module, type):
        raise ConfigurationError(
            "this is a class, not a module object",
            found=module.__name__,
            fix=f"create an object: {module.__name__}(...)",
        )
    if not isinstance(module, TrainModule):
        raise ConfigurationError(
            "this is not a TrainModule",
            found=type(module).__name__,
            fix=f"the module comes first: trainer.{stage}(module, loader)"
            if isinstance(module, (DataLoader, Dataset, list, tuple))
            else "subclass trainer_kit.TrainModule (your model may be an attribute of it)",
        )
    if "_modules" not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__}.__init__ does not call super().__init__()",
            fix="call super().__init__() first in __init__",
        )
    check_hooks(type(module), ModuleHooks, DataHooks)
    needed = {
        "fit": "training_step",
        "validate": "validation_step",
        "test": "test_step",
    }.get(stage)
    if needed is not None and not is_overridden(needed, module, TrainModule):
        near = difflib.get_close_matches(
            needed, [name for name in dir(module) if name.endswith("_step")], cutoff=0.5
        )
        own = [
            name
            for name in ("compute_loss", *near)
            if name in dir(module) and name not in dir(TrainModule)
        ]
        raise ConfigurationError(
            f"{type(module).__name__} has no {needed}",
            found=f"{own[0]}, which is not called" if own else None,
            fix=f"define {needed}(self, batch, batch_idx)",
        )
    if stage == "predict" and not any(
        is_overridden(name, module, TrainModule) for name in ("predict_step", "forward")
    ):
        raise ConfigurationError(
            f"{type(module).__name__} has no predict_step",
            fix="define predict_step(self, batch, batch_idx), or forward",
        )


def prepare_data(
    trainer: Session, module: TrainModule, datamodule: Any, stage: str
) -> None:
    """Call ``prepare_data`` on one process per node, then ``setup`` on every rank: datamodule, callbacks, module."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    if trainer.local_rank == 0:
        for owner in owners:
            if is_overridden("prepare_data", owner, DataHooks):
                owner.prepare_data()
    trainer.strategy.world.barrier()
    if datamodule is not None and is_overridden("setup", datamodule, DataHooks):
        datamodule.setup(stage)
    for callback in trainer.callbacks:
        callback.setup(trainer, module, stage)
    if is_overridden("setup", module, DataHooks):
        module.setup(stage)
    trainer.strategy.world.barrier()


def compose_evaluation(
    trainer: Session,
    stage: str,
    module: TrainModule,
    datamodule: Any,
    loaders: Any,
    bus: Bus,
) -> Evaluation:
    """Compose a validation, a test or a prediction."""
    strategy, precision, settings = (
        trainer.strategy,
        trainer.precision_plugin,
        trainer.settings,
    )
    setattr(trainer, f"{NAMES[stage]}_dataloaders", loaders)
    feeds, lengths = evaluation_feeds(
        loaders, stage, settings, strategy.data, trainer.data_seed
    )
    lengths = [agreed_length(length, strategy.data) for length in lengths]
    # Predictions for shards of a sequence cannot be concatenated, so every rank predicts whole batches.
    whole = stage == "predict" and strategy.losses.size > strategy.data.size
    move, _ = mover(module, datamodule, strategy, precision, whole)

    def publish(reduced: Reduced, batch: int) -> None:
        if not trainer.sanity_checking:
            trainer.log_evaluation_batch(reduced.logger, batch)

    return Evaluation(
        stage=stage,
        module=module,
        feeds=feeds,
        limits=[length.limit for length in lengths],
        expected=[length.expected for length in lengths],
        bus=bus,
        metrics=trainer.metrics,
        precision=precision,
        strategy=strategy,
        move=move,
        whole_batches=whole,
        # Inference tensors cannot be used in training, sent by gloo, sharded by FSDP, or traced by XLA.
        inference_mode=settings.inference_mode
        and trainer.state_verb != "fit"
        and strategy.world.size == 1
        and not strategy.sharded
        and strategy.device.type != "xla",
        publish=publish,
    )


def compose_fit(
    trainer: Session,
    module: Any,
    datamodule: Any,
    loaders: Any,
    val_loaders: Any,
    bus: Bus,
) -> Fit:
    """Compose a fit: feed, wrapped module, optimizers, accumulation windows, schedule, validation."""
    strategy, precision, settings = (
        trainer.strategy,
        trainer.precision_plugin,
        trainer.settings,
    )
    feed, length = _training_feed(trainer, loaders)
    _report_length(trainer, feed, length)
    _check_tokens(settings, module)
    manual = _is_manual(trainer, module)
    precision.convert_module(module)
    made, step = _wrap(trainer, module, manual, feed)
    for optimizer in made.optimizers:
        strategy.prepare_optimizer(optimizer)
        note_configured(optimizer)
    check_parameters(made, module, strategy, trainer.print)
    stepper = (
        ManualStepper(made, module, strategy, precision, bus)
        if manual
        else Stepper(
            made,
            module,
            strategy,
            precision,
            bus,
            settings.clip,
            trainer.metrics.callback_metrics,
        )
    )
    move, prefetch = _movement(trainer, module, datamodule, feed)
    micro = _micro(trainer, module, bus, stepper, step, manual)
    micro.move = move if prefetch is None else None
    windows = _windows(trainer, module, feed, micro, length.limit, prefetch)
    trainer.metrics.use_sizes_of(feed if windows.loss_weight is None else None)
    if strategy.data.size > 1 and (
        manual or strategy.lockstep
    ):  # each micro-batch runs collectives on every rank
        padding = PaddingBatches(
            micro, module, strategy, move, None if manual else made.names
        )
        micro.run_padding, windows.provide = padding.run, padding.provide
    validation = _validation(trainer, module, datamodule, val_loaders, bus)
    _check_monitors(trainer, validation, [] if manual else made.schedulers)
    run = Fit(
        module=module,
        bus=bus,
        metrics=trainer.metrics,
        progress=trainer.progress,
        strategy=strategy,
        precision=precision,
        micro=micro,
        windows=windows,
        stepper=stepper,
        schedule=_schedule(settings, length, validation, strategy.world.size),
        requests=trainer.requests,
        validation=validation,
        publish=trainer.log_metrics,
        collect=trainer.collect_state,
        directory=lambda: trainer.files.checkpoint_directories(
            trainer.checkpoint_callbacks
        )[0],
        checkpoints=trainer.checkpoint_callback is not None and not settings.fast,
        about=partial(_run_metadata, trainer),
        announce=partial(_announce_checkpoint, trainer),
        save_logs=trainer.files.deliveries.save,
        say=trainer.say,
        saver=Saver(trainer.async_save),
        forward_backward=_forward_backward(trainer, module, stepper, micro, windows),
        frozen=frozenset(
            name for name, trained in configured_flags(module).items() if not trained
        ),
    )
    for callback in trainer.callbacks:
        if isinstance(callback, ActsAtIntervals) and callback.acts_every is not None:
            run.schedule.intervals.append(
                Interval(callback.acts_every, partial(callback.act, trainer, module))
            )
    _connect_stepper(run)
    run.guard = _guard(trainer, run, datamodule)
    return run


def _training_feed(trainer: Session, loaders: Any) -> tuple[Feed, EpochLength]:
    data = trainer.strategy.data
    seed, window = trainer.data_seed, trainer.accumulation
    feed, length = training_feed(
        loaders, trainer.settings, data, seed, window, data.agree
    )
    return feed, agreed_length(length, data)


def _connect_stepper(run: Fit) -> None:
    """Let the loop settle a step in which schedulers wait, and remember windows that an optimizer evaluates again."""
    if isinstance(run.stepper, Stepper):
        run.stepper.wake = run.wake
    if run.stepper.evaluates:
        run.micro.remember(run.stepper.draws)


def _forward_backward(
    trainer: Session,
    module: TrainModule,
    stepper: _Steps,
    micro: MicroBatches,
    windows: WindowLoader,
) -> Callable[[MicroBatches], None]:
    asked = next(
        (
            callback
            for callback in trainer.callbacks
            if isinstance(callback, SplitsBatches)
        ),
        None,
    )
    replays = next(
        (
            callback
            for callback in trainer.callbacks
            if isinstance(callback, ReplaysSteps)
        ),
        None,
    )
    strategy = trainer.strategy
    inside = strategy.without_exchange()
    if replays is not None and (micro.manual or stepper.evaluates or asked is not None):
        raise ConfigurationError(
            "ReplayCheck cannot repeat a step of this run",
            found="manual optimization, an optimizer that evaluates the loss several times, or AutoMicroBatch",
            fix="leave one of them out",
        )
    if replays is not None:
        return ReplayedSteps(strategy, inside, module, replays.replays_every)
    if asked is None:
        return strategy.forward_backward
    cannot = (
        "manual optimization"
        if micro.manual
        else "an optimizer that evaluates the loss several times, or several losses"
        if stepper.evaluates or stepper.several is not None
        else strategy.describe()
        if inside is None
        else "SyncBatchNorm, whose forward needs every rank"
        if strategy.world.size > 1
        and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        else None
    )
    if cannot is not None or inside is None:
        raise ConfigurationError(
            "AutoMicroBatch cannot repeat a step of this run",
            found=cannot,
            fix="use smaller batches with accumulate_grad_batches=; one device and DDP can repeat a step",
        )
    return SplitBatches(
        strategy,
        inside,
        module,
        trainer.callbacks,
        trainer.metrics,
        windows.loss_weight,
        asked,
        trainer.print,
    )


def _guard(trainer: Session, run: Fit, datamodule: Any) -> Guard | None:
    asked = next(
        (
            callback
            for callback in trainer.callbacks
            if isinstance(callback, LeavesOutSteps)
        ),
        None,
    )
    strategy = trainer.strategy
    if asked is None:
        return None
    cannot = (
        "loss scaling, which skips such steps by itself"
        if run.precision.scales
        else f"the engine {strategy.name}"
        if strategy.owns_step
        or strategy.keeps_gradients
        or strategy.per_rank_state
        or strategy.names_on_all_ranks()
        else "a loader that can be read only once"
        if run.windows.feed.once
        else "loaders that change between epochs"
        if trainer.reload_dataloaders_every_n_epochs
        else None
    )
    if cannot is not None:
        raise ConfigurationError(
            f"NaNGuard cannot undo a step with {cannot}",
            fix="leave it out: without it, a loss that is not finite raises an error",
        )
    # A rewind does not reset the checkpoint callbacks (their files stay), nor the guard's list of skipped steps.
    kept = {id(asked), *map(id, trainer.checkpoint_callbacks)}
    callbacks = [callback for callback in trainer.callbacks if id(callback) not in kept]
    policy, back, most, left_out = asked.non_finite
    return Guard(
        lambda: trainer.unsaveable.leave_out(
            collect(run, callbacks, datamodule, trainer.data_seed, weights_only=False)
        ),
        lambda state: restore(
            run, state, run.stepper.made, callbacks, datamodule, strict=True
        ),
        lambda: remember_effects(run.module, trainer.callbacks),
        raises=policy == "raise",
        back=back,
        most=most,
        left_out=left_out,
    )


def _check_monitors(
    trainer: Session,
    validation: Evaluation | None,
    schedulers: Sequence[LRSchedulerConfig],
) -> None:
    """Print a line for a scheduler that waits for a validation; a training step may log a value of any name."""
    if validation is not None or trainer.reload_dataloaders_every_n_epochs:
        return
    for config in schedulers:
        if (
            config.reduce_on_plateau
            and config.strict
            and config.monitor
            and names_validation(config.monitor)
        ):
            trainer.say(
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, and this fit has no validation: define"
                " validation_step, and pass a validation loader, or log it in training"
            )


def _run_metadata(trainer: Session) -> dict[str, Any]:
    """Configuration and logger state for every checkpoint; a resume reads only the logger state."""
    return {
        "configuration": {
            "trainer": trainer.arguments,
            "module": type(trainer.module).__qualname__,
            "datamodule": None
            if trainer.datamodule is None
            else type(trainer.datamodule).__qualname__,
            "callbacks": [callback.state_key for callback in trainer.callbacks],
            "strategy": trainer.strategy.describe(),
            "precision": trainer.precision,
            "world_size": trainer.world_size,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "loggers": trainer.files.logging_state(trainer.is_global_zero),
    }


def _announce_checkpoint(trainer: Session, path: Location) -> None:
    trainer.note("checkpoint", str(path))
    trainer.files.deliveries.call("after_save_checkpoint", path)


def _windows(
    trainer: Session,
    module: TrainModule,
    feed: Feed,
    micro: MicroBatches,
    limit: int | None,
    prefetch: Callable[[Iterable[Any]], Iterator[Any]] | None,
) -> WindowLoader:
    strategy = trainer.strategy
    windows = WindowLoader(
        feed,
        micro,
        strategy.losses,
        strategy.gradient_divisor,
        parts=strategy.losses.size // strategy.data.size,
        loss_weight=part_weight(module, strategy),
        weighting=trainer.settings.loss_weighting,
        limit=limit,
        ahead=prefetch,
    )
    windows.length = trainer.accumulation
    return windows


def reload_loaders(
    trainer: Session, run: Fit, datamodule: Any, val_loaders: Any, passed: bool
) -> None:
    """Between two epochs, call the hooks that make the loaders again; training loaders that were passed stay.

    A hook that gives no validation loader, or none with a batch, ends validation until it gives one.
    """
    if not passed:
        _reload_training(trainer, run, datamodule)
    now = run.validation
    if (
        now is None and val_loaders is not None
    ):  # they had no batch, or validation_step is missing
        return
    made = _validation(trainer, run.module, datamodule, val_loaders, run.bus)
    if (now is None) != (made is None):
        change = "no validation" if made is None else "validation"
        trainer.say(
            f"{change} from epoch {run.progress.epoch} on: val_dataloader gave {'no' if made is None else 'a'} batch"
        )
    if now is not None and made is not None:
        now.replace_loaders(made)
    else:
        run.validation = made
        run.schedule.mark_checked(
            run.progress
        )  # intervals without a loader are not due when there is one
    run.schedule.validates = made is not None
    trainer.num_val_batches = [] if made is None else made.counts


def _reload_training(trainer: Session, run: Fit, datamodule: Any) -> None:
    settings, strategy, windows = trainer.settings, trainer.strategy, run.windows
    trainer.forget_loaders()
    feed, length = _training_feed(trainer, trainer.load_train())
    if trainer.metrics.feed is not None:
        trainer.metrics.use_sizes_of(feed)
    windows.feed.close()
    windows.feed, windows.limit = feed, length.limit
    move, windows.ahead = _movement(trainer, run.module, datamodule, feed)
    run.micro.move = move if windows.ahead is None else None
    trainer.num_training_batches = (
        float("inf") if length.expected is None else length.expected
    )
    trainer.train_batch_samples = feed.samples(0)
    run.schedule.length = length
    run.schedule.validate_every = _schedule(
        settings, length, run.validation, strategy.world.size
    ).validate_every


def _report_length(trainer: Session, feed: Feed, length: EpochLength) -> None:
    settings = trainer.settings
    trainer.num_training_batches = (
        float("inf") if length.expected is None else length.expected
    )
    trainer.train_batch_samples = feed.samples(0)
    together = read_together(feed.loader)
    if isinstance(together, CombinedLoader):
        trainer.say(f"training loaders in {together.mode}: {MODES[together.mode]}")
    epochs = (settings.max_epochs or 0) - trainer.progress.epoch
    if (
        feed.once
        and epochs > 1
        and length.expected is None
        and settings.max_steps is None
        and settings.max_duration is None
    ):
        trainer.say(
            f"a {type(feed.loader).__name__} can be read once: after its end, the next of {settings.max_epochs} epochs"
            " is an error (pass something that can be iterated again, or max_epochs=1)"
        )


def _is_manual(trainer: Session, module: TrainModule) -> bool:
    clip, manual = trainer.settings.clip, not module.automatic_optimization
    if manual and (clip is not None or trainer.accumulation != 1):
        raise ConfigurationError(
            "these arguments have no effect in manual optimization",
            found=f"gradient_clip_val={clip and clip[0]}, accumulate={trainer.accumulation}",
            fix="call self.clip_gradients(...) and step every n batches in training_step",
        )
    return manual


def _wrap(
    trainer: Session, module: TrainModule, manual: bool, feed: Feed
) -> tuple[Optimizers, Callable[..., Any]]:
    """Wrap the module, configure its optimizers on the wrapped module, and bind its step."""
    strategy = trainer.strategy
    facts = {"accumulation": trainer.accumulation, "clip": trainer.settings.clip}
    message = strategy.configure(batch_size=feed.per_rank_batch_size, **facts)
    if message:
        trainer.say(message)
    if trainer.compile_regional:  # must precede sharding
        Compile(options=trainer.compile_options).apply(module)
    if trainer.recomputes is not False:  # must precede sharding, too
        _recompute(module, trainer.recomputes, strategy)
    strategy.prepare_module(module, manual, trainer.precision_plugin)
    trainer.steps_were_read = False
    made = configure_optimizers(module, strategy)
    if (
        trainer.steps_were_read
        and made.schedulers
        and all(one.interval == "epoch" for one in made.schedulers)
    ):
        trainer.say(
            "configure_optimizers read estimated_stepping_batches, but its schedulers advance once an epoch: return"
            ' {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}} for a schedule in steps'
        )
    if not made.optimizers:
        trainer.say(
            "no optimizer: configure_optimizers returned None, so no parameters are updated"
        )
    method = module.training_step
    if not takes(method, 2):
        method = _first_argument(method)
    compiler = trainer.compiler
    if trainer.compile_options is not None:
        compiler = (
            None
            if trainer.compile_regional
            else partial(torch.compile, **trainer.compile_options)
        )
    if compiler is not None:
        method = compiler(method)
        # `log` cannot be traced into a graph; `EntryPoint` removes this override.
        for part in module.own_modules():
            part.__dict__["log"] = torch.compiler.disable(part.log)  # type: ignore[no-untyped-call]
    return made, strategy.bind(method, made.names is not None and not manual)


def _recompute(module: nn.Module, policy: bool | Policy, strategy: Strategy) -> None:
    """Apply activation checkpointing to the selected blocks; `EntryPoint` undoes it."""
    if strategy.why_not_recomputed is not None:
        raise ConfigurationError(
            f"activation_checkpointing= does not work under {strategy.name}",
            found=strategy.why_not_recomputed,
            fix="leave activation_checkpointing= out",
        )
    chosen: Policy = None if policy is True else policy
    if not units(module, chosen):
        raise ConfigurationError(
            "activation_checkpointing matches no block",
            found=f"activation_checkpointing={policy!r}; {type(module).__name__} has no list or sequence that repeats a"
            " class with parameters"
            if policy is True
            else f"activation_checkpointing={policy!r}",
            fix='name the classes of the blocks: activation_checkpointing="Block"',
        )
    ActivationCheckpointing(chosen).apply(module)


def _first_argument(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda batch, index: method(batch)


def _micro(
    trainer: Session,
    module: TrainModule,
    bus: Bus,
    stepper: _Steps,
    step: Callable[..., Any],
    manual: bool,
) -> MicroBatches:
    backward = trainer.strategy.bind_backward(
        module.backward if is_overridden("backward", module, TrainModule) else None
    )
    several, precision = stepper.several, trainer.precision_plugin
    micro = MicroBatches(
        bus,
        trainer.metrics,
        trainer.progress,
        step,
        precision,
        backward,
        several,
        manual,
    )
    compiles = trainer.compile_options is not None or trainer.compiler is not None
    micro.zero, micro.drops = stepper.zero, stepper.droppable()
    if compiles:  # a compiled step may reuse the memory of its last loss
        micro.always_unusual = True
    micro.agree_on_exit = exit_agreement(bus, trainer.strategy.world)
    stepper.window = micro
    return micro


def _movement(
    trainer: Session, module: TrainModule, datamodule: Any, feed: Feed
) -> tuple[Callable[..., Any] | None, Callable[[Iterable[Any]], Iterator[Any]] | None]:
    """The function that moves a batch to the device, and the one that prefetches; each None if it has nothing to do."""
    strategy = trainer.strategy
    move, may_prefetch = mover(module, datamodule, strategy, trainer.precision_plugin)
    return move, None if move is None or feed.draws or not may_prefetch else _prefetch(
        move, strategy.device
    )


def _prefetch(
    move: Callable[[Any], Any], device: torch.device
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """A wrapper for the items of a feed: it moves each batch to the device before its micro-batch begins."""

    def moved(item: tuple[int, float, Any]) -> tuple[int, float, Any]:
        size, weight, batch = item
        return size, weight, None if batch is None else move(batch)

    return lambda items: iter(Ahead(iter(items), moved, device))


def _validation(
    trainer: Session, module: TrainModule, datamodule: Any, val_loaders: Any, bus: Bus
) -> Evaluation | None:
    if trainer.settings.limits["val"] == 0:
        return None
    if not is_overridden("validation_step", module, TrainModule):
        if val_loaders is not None:
            trainer.say(
                f"no validation: {type(module).__name__} has no validation_step for val_dataloaders"
            )
        return None
    loaders = find_loaders("validate", val_loaders, module, datamodule)
    if loaders is None:
        return None
    run = compose_evaluation(trainer, "validate", module, datamodule, loaders, bus)
    return run if any(batches != 0 for batches in run.expected) else None


def _check_tokens(settings: Settings, module: TrainModule) -> None:
    check_tokens("max_duration", settings.max_duration, module)
    check_tokens("val_check_interval", settings.validate_every, module)


def _schedule(
    settings: Settings, length: EpochLength, validation: Evaluation | None, world: int
) -> Schedule:
    every, batches = settings.validate_every, length.expected
    interval: Duration | None = None
    if isinstance(every, Duration):
        interval = every
    elif isinstance(every, int):
        interval = Duration(every, "ba")
        never = batches is not None and every > batches
        hint = "" if length.certain else ", as the data's own len() says"
        if never and settings.validate_epochs is not None and validation is not None:
            raise ConfigurationError(
                "validation would never run",
                found=f"val_check_interval={every} with {batches} batches an epoch{hint}",
                fix="use a smaller interval, or check_val_every_n_epoch=None to count over epochs",
            )
    elif every < 1.0:
        if batches is None:
            raise ConfigurationError(
                "the length of the epoch is unknown, so validation cannot run at a fraction of it",
                found=f"val_check_interval={every}",
                fix="pass val_check_interval as a number of batches",
            )
        interval = Duration(max(1, int(batches * every)), "ba")
    return Schedule(
        length=length,
        max_epochs=settings.max_epochs,
        max_steps=settings.max_steps,
        max_duration=settings.max_duration,
        min_epochs=settings.min_epochs,
        min_steps=settings.min_steps,
        validate_every=interval,
        across_epochs=settings.validate_epochs is None,
        validate_epochs=settings.validate_epochs or 1,
        validates=validation is not None,
        log_every=settings.log_every or 2**62,  # 0: no flush
        agree_every=50 if world > 1 else 0,
    )


def trainable_in_eval(module: nn.Module) -> list[str]:
    """Names of the submodules that have trainable parameters but are in evaluation mode."""
    return [
        name or type(module).__name__
        for name, part in module.named_modules()
        if not part.training
        and any(p.requires_grad for p in part.parameters(recurse=False))
    ]


_SHARE: Final = 0.8
"""Fraction of device memory for the training state; the rest is left for activations."""
_MOMENTS: Final = 2
"""Moments per parameter, as in Adam: the optimizer is created only after the strategy is chosen."""
_WIDTHS: Final = {"16-true": 2, "bf16-true": 2, "64-true": 8}


def build_module(trainer: Session, module: Any, stage: str) -> None:
    """Call ``configure_model``; with ``"auto"``, switch to the sharded strategy if the model does not fit."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    strategy.configure(precision=precision.name)
    final = trainer.sharded_alternative is None
    # Build in host memory if the model may have to be sharded.
    with (
        precision.init_context(),
        strategy.building(module) if final else torch.device("cpu"),
    ):
        build_once(module)
    if final:
        return
    chosen, why = choose_by_memory(trainer, module, stage, strategy.world)
    if chosen is strategy:
        return
    chosen.check_precision(precision)
    chosen.start()
    trainer.strategy = chosen
    trainer.sharded_alternative = None  # permanent: a sharded module stays sharded
    trainer.metrics.attach(chosen, module)
    trainer.say(f'strategy="auto": {why}')


def choose_by_memory(
    trainer: Session, module: nn.Module, stage: str, world: Group | None = None
) -> tuple[Strategy, str]:
    """Resolve ``"auto"`` for this module; returns the strategy and the reason.

    Args:
        trainer: has the strategy and its sharded alternative.
        module: the module, with its layers built.
        stage: fit, or an evaluation, which needs memory for weights only.
        world: the group of all ranks, which agree on the smallest memory; None before they are started.
    """
    strategy, other = trainer.strategy, trainer.sharded_alternative
    local = max(
        1,
        trainer.environment.local_world_size
        if world is not None
        else trainer.processes,
    )
    memory = device_memory(strategy.device, local) or 0
    if world is not None:
        memory = int(min(row[0] for row in world.agree([memory])))
    needed = training_bytes(module, trainer.precision_plugin.name, stage == "fit")
    what = "training state (as with Adam)" if stage == "fit" else "weights"
    numbers = f"{in_units(needed)} of {what}, and a rank has {in_units(memory or None)} of memory"
    if other is None or not memory or whole_copies_fit(needed, memory):
        return strategy, f"{strategy.name}: whole copies fit, {numbers}"
    other.device = strategy.device
    return (
        other,
        f"{other.name}: whole copies do not fit, {numbers} ({1 - _SHARE:.0%} of it for activations)",
    )


def whole_copies_fit(needed: int, memory: int) -> bool:
    """Whether weights, gradients and optimizer state leave enough of a rank's memory for activations.

    Example:
        >>> whole_copies_fit(800, 1000), whole_copies_fit(801, 1000)
        (True, False)
    """
    return needed <= _SHARE * memory


def training_bytes(module: nn.Module, precision: str, trains: bool) -> int:
    """Bytes of all weights and buffers, plus gradients and two moments of each trainable parameter.

    Example:
        >>> training_bytes(nn.Linear(9, 10), "32-true", True), training_bytes(nn.Linear(9, 10), "bf16-true", False)
        (1600, 200)
    """
    known = [p for p in module.parameters() if not is_lazy(p)]
    copies = 1 + _MOMENTS if trains else 0
    width = _WIDTHS.get(precision, 0)
    weights = sum(
        p.numel() * (width or p.element_size()) * (1 + copies * p.requires_grad)
        for p in known
    )
    return weights + sum(
        b.numel() * b.element_size() for b in module.buffers() if not is_lazy(b)
    )
