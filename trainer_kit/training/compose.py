"""Composes a `Fit` from settings, a module and loaders, and checks them before the first step.

The order is that of what needs what: an optimizer must see the parameters as the strategy has left them, the loader of
windows needs the runner, and manual optimization needs the loader of windows. Nothing is restored here: a checkpoint is
restored once, into the composed fit, so that no hook in between sees half a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import nn

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.location import Location
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Duration
from trainer_kit.core.protocols import ActsAtIntervals
from trainer_kit.core.signatures import takes
from trainer_kit.core.states import names_validation
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data import (
    MODES,
    Ahead,
    CombinedLoader,
    EpochLength,
    Feed,
    read_together,
    warn_if_inexact,
)
from trainer_kit.state.collect import State, collect
from trainer_kit.state.optimizer_states import configured_flags, note_configured
from trainer_kit.state.runs import keep_checkpoints
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.bus import Bus
from trainer_kit.step.captured_steps import CapturedSteps
from trainer_kit.step.early_exit import exit_agreement
from trainer_kit.step.evaluate import part_weight
from trainer_kit.step.optimize import ManualStepper, Stepper
from trainer_kit.step.optimizer_kernels import set_optimizer_kernel
from trainer_kit.step.optimizers import (
    LRSchedulerConfig,
    Optimizers,
    check_parameters,
    configure_optimizers,
)
from trainer_kit.step.padding_batches import PaddingBatches
from trainer_kit.step.run import Fit, Saver
from trainer_kit.step.schedule import Interval, Schedule, check_tokens
from trainer_kit.step.time_account import TimeAccount
from trainer_kit.step.window import GradientRules, WindowRunner
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.strategies.transforms.blocks import (
    ActivationCheckpointing,
    Compile,
    Policy,
    units,
)
from trainer_kit.training.compose_capture import compose_captured_steps
from trainer_kit.training.compose_evaluation import (
    compose_evaluation,
    find_validation_loaders,
)
from trainer_kit.training.loaders import (
    agreed_length,
    mover,
    training_feed,
)
from trainer_kit.training.repeated_steps import compose_forward_backward
from trainer_kit.training.session import Session
from trainer_kit.training.settings import Settings

__all__ = [
    "batch_movers",
    "compose_fit",
    "load_training",
    "make_schedule",
    "prepare_data",
]

_NO_FLUSH: Final = 2**62
"""``log_every_n_steps=0``, as an interval."""

# What a module's step takes and returns is the user's.
_Step: TypeAlias = Callable[..., Any]
# Moves a batch to the device.
_Move: TypeAlias = Callable[..., Any]
# Samples, weight, and the user's batch.
_Item: TypeAlias = tuple[int, float, Any]
# Wraps the items of a feed: each batch is moved before its micro-batch begins.
_Prefetch: TypeAlias = Callable[[Iterable[_Item]], Iterator[_Item]]


def prepare_data(
    trainer: Session, module: TrainModule, datamodule: DataModuleLike, stage: str
) -> None:
    """Call ``prepare_data`` on one process per node, then ``setup`` on every rank: datamodule, callbacks, module."""
    owners = [owner for owner in (datamodule, module) if owner is not None]
    if trainer.local_rank == 0:
        for owner in owners:
            if is_overridden("prepare_data", owner, DataHooks):
                owner.prepare_data()
    # `setup` reads what `prepare_data` has downloaded.
    trainer.strategy.world.barrier()
    if datamodule is not None and is_overridden("setup", datamodule, DataHooks):
        datamodule.setup(stage)
    for callback in trainer.callbacks:
        callback.setup(trainer, module, stage)
    if is_overridden("setup", module, DataHooks):
        module.setup(stage)
    trainer.strategy.world.barrier()


def compose_fit(
    trainer: Session,
    module: TrainModule,
    datamodule: DataModuleLike,
    loaders: Loaders,
    val_loaders: Loaders | None,
    bus: Bus,
) -> Fit:
    """Compose a fit: feed, wrapped module, optimizers, accumulation windows, schedule, validation."""
    settings = trainer.settings
    # Loaders first: `configure_optimizers` may ask for the number of steps, which follows from their length.
    feed, length = load_training(trainer, loaders)
    # Not each rank 0 of the data, of which tensor parallelism has several.
    if trainer.is_global_zero:
        warn_if_inexact(feed)
    _report_length(trainer, feed, length)
    check_tokens("max_duration", settings.max_duration, module)
    check_tokens("val_check_interval", settings.validate_every, module)
    steps = _compose_steps(trainer, module, datamodule, bus, feed, length)
    validation_loaders = find_validation_loaders(
        trainer, module, datamodule, val_loaders
    )
    validates = bool(validation_loaders.feeds)
    if not validates and not steps.runner.manual:
        _check_monitors(trainer, steps.stepper.configured.schedulers)
    record_id = ""
    if trainer.files.record is not None:
        record_id = trainer.files.record.id
    run = Fit(
        module=module,
        bus=bus,
        metrics=trainer.metrics,
        progress=trainer.progress,
        strategy=trainer.strategy,
        precision=trainer.precision_plugin,
        runner=steps.runner,
        windows=steps.windows,
        stepper=steps.stepper,
        schedule=make_schedule(
            settings, length, validates, trainer.strategy.world.size
        ),
        requests=trainer.requests,
        validation=compose_evaluation(
            trainer, "validate", module, datamodule, validation_loaders, bus
        ),
        publish=trainer.log_metrics,
        collect=partial(_collect_state, trainer),
        directory=partial(_checkpoint_directory, trainer),
        writes_checkpoints=bool(keep_checkpoints(trainer.callbacks))
        and not settings.fast,
        about=partial(_run_metadata, trainer),
        announce=partial(_announce_checkpoint, trainer),
        save_logs=trainer.files.deliveries.save,
        say=trainer.say,
        saver=Saver(trainer.options.async_save),
        account=TimeAccount(trainer.progress, lambda: steps.windows.data_wait),
        id=record_id,
        forward_backward=steps.captured
        or compose_forward_backward(
            trainer, module, steps.stepper, steps.runner, steps.windows
        ),
        captured=steps.captured,
        step=steps.stepper.step,
        frozen=frozenset(
            name for name, trained in configured_flags(module).items() if not trained
        ),
    )
    _connect(trainer, run)
    return run


@final
@dataclass(frozen=True)
class _Steps:
    """What loads and runs the windows of a fit, and steps its optimizers."""

    windows: WindowLoader
    runner: WindowRunner
    stepper: Stepper | ManualStepper
    captured: CapturedSteps | None


def _compose_steps(
    trainer: Session,
    module: TrainModule,
    datamodule: DataModuleLike,
    bus: Bus,
    feed: Feed,
    length: EpochLength,
) -> _Steps:
    """Wrap the module, configure its optimizers, and compose what runs its steps."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    manual = _is_manual(trainer, module)
    # Layers are replaced and blocks are wrapped before the strategy shards or wraps the whole; optimizers come after,
    # for they must get the parameters that are trained.
    precision.convert_module(module)
    _wrap_module(trainer, module, manual, feed)
    optimizers = _configure_optimizers(trainer, module)
    # Names belong to losses, which manual optimization does not return.
    names = None
    if not manual:
        names = optimizers.names
    step = _bind_step(trainer, module, has_names=names is not None)
    _prepare_optimizers(trainer, module, optimizers)
    automatic = None
    if not manual:
        automatic = _compose_stepper(trainer, module, optimizers, bus)
    move, prefetch = batch_movers(trainer, module, datamodule, feed)
    padding = None
    if strategy.data.size > 1 and (manual or strategy.lockstep):
        # Each micro-batch runs collectives on every rank: a sharded forward, or the backward of manual optimization.
        padding = PaddingBatches(module, strategy, move, names)
    # What is prefetched is on the device when its micro-batch begins.
    move_in_step = None
    if prefetch is None:
        move_in_step = move
    captured = None
    if trainer.options.captures_steps:
        captured = compose_captured_steps(trainer, module, automatic, step)
    runner = _compose_runner(
        trainer, module, bus, automatic, step, move_in_step, padding, captured
    )
    windows = _compose_windows(
        trainer, module, feed, runner, length.limit, prefetch, padding
    )
    stepper = automatic or ManualStepper(
        optimizers, module, strategy, precision, bus, windows
    )
    # A mean over batches weights each one as its step does: by the samples that the feed counts, or by `loss_weight`.
    trainer.metrics.use_sizes_of(feed if windows.loss_weight is None else None)
    return _Steps(windows, runner, stepper, captured)


def load_training(trainer: Session, loaders: Loaders) -> tuple[Feed, EpochLength]:
    """This rank's share of the training loaders, and the length of an epoch, on which the ranks agree."""
    data = trainer.strategy.data
    feed, length = training_feed(
        loaders,
        trainer.settings,
        data,
        trainer.data_seed,
        trainer.accumulation,
        data.agree,
    )
    return feed, agreed_length(length, data)


def _connect(trainer: Session, run: Fit) -> None:
    """Connect the callbacks with the composed fit."""
    # The schedule knows their intervals, so they are called at their own steps only, and cost the other steps nothing.
    for callback in trainer.callbacks:
        if isinstance(callback, ActsAtIntervals) and callback.acts_every is not None:
            act = partial(callback.act, trainer, run.module)
            run.schedule.intervals.append(Interval(callback.acts_every, act))


def _check_monitors(trainer: Session, schedulers: Sequence[LRSchedulerConfig]) -> None:
    """Print a line for a scheduler that waits for a validation; a training step may log a value of any name."""
    # A later epoch may bring a validation.
    if trainer.reload_dataloaders_every_n_epochs:
        return
    for config in schedulers:
        if not config.monitor or not config.reduce_on_plateau or not config.strict:
            continue
        if names_validation(config.monitor):
            trainer.say(
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, and this fit has no validation: define"
                " validation_step, and pass a validation loader, or log it in training"
            )


def _collect_state(trainer: Session, weights_only: bool) -> State:
    """The state of the running fit, or only its weights; every rank must call it."""
    run, settler = trainer.running.fit, trainer.running.settler
    assert run is not None
    assert settler is not None
    state = collect(
        run,
        trainer.callbacks,
        trainer.datamodule,
        trainer.data_seed,
        weights_only,
        owes_validation=settler.owes_validation,
    )
    return trainer.unsaveable.leave_out(state)


def _checkpoint_directory(trainer: Session) -> Location:
    """The default directory of checkpoints."""
    return trainer.files.checkpoint_directories(keep_checkpoints(trainer.callbacks))[0]


def _run_metadata(trainer: Session) -> dict[str, Any]:
    """Configuration and logger state for every checkpoint; a resume reads only the logger state."""
    datamodule_name = None
    if trainer.datamodule is not None:
        datamodule_name = type(trainer.datamodule).__qualname__
    return {
        "configuration": {
            "trainer": trainer.arguments,
            "module": type(trainer.module).__qualname__,
            "datamodule": datamodule_name,
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


def _report_length(trainer: Session, feed: Feed, length: EpochLength) -> None:
    """Set the numbers of a training epoch, and print how loaders are read."""
    settings = trainer.settings
    trainer.training_loaders.measure(feed, length)
    loader = read_together(feed.loader)
    if isinstance(loader, CombinedLoader):
        trainer.say(f"training loaders in {loader.mode}: {MODES[loader.mode]}")
    # The rest is about iterators, which end for good, in runs that count epochs.
    if not feed.once or length.expected is not None:
        return
    if settings.max_steps is not None or settings.max_duration is not None:
        return
    if (settings.max_epochs or 0) - trainer.progress.epoch > 1:
        trainer.say(
            f"a {type(feed.loader).__name__} can be read once: after its end, the next of {settings.max_epochs} epochs"
            " is an error (pass something that can be iterated again, or max_epochs=1)"
        )


def _is_manual(trainer: Session, module: TrainModule) -> bool:
    """Whether the module steps its optimizers; raises for arguments that only the Trainer's own steps use."""
    if module.automatic_optimization:
        return False
    clip = trainer.settings.clip
    if clip is not None or trainer.accumulation != 1:
        raise ConfigurationError(
            "these arguments have no effect in manual optimization",
            found=f"gradient_clip_val={clip and clip[0]}, accumulate={trainer.accumulation}",
            fix="call self.clip_gradients(...) and step every n batches in training_step",
        )
    return True


def _wrap_module(
    trainer: Session, module: TrainModule, manual: bool, feed: Feed
) -> None:
    """Compile and checkpoint blocks, then let the strategy wrap or shard the module."""
    strategy = trainer.strategy
    # It completes an engine's own configuration, and refuses contradictions with it.
    message = strategy.configure(
        batch_size=feed.per_rank_batch_size,
        accumulation=trainer.accumulation,
        clip=trainer.settings.clip,
    )
    if message:
        trainer.say(message)
    options = trainer.options
    # Both wrap blocks of the whole module, so they precede sharding.
    if options.compile_regional:
        Compile(options=options.compile_options).apply(module)
    if options.recomputes is not False:
        _checkpoint_activations(module, options.recomputes, strategy)
    strategy.prepare_module(module, manual, trainer.precision_plugin)


def _configure_optimizers(trainer: Session, module: TrainModule) -> Optimizers:
    """Configure the optimizers on the wrapped module."""
    # To notice a schedule that is computed in steps and advances in epochs.
    trainer.forget_steps_read()
    optimizers = configure_optimizers(module, trainer.strategy)
    intervals = {config.interval for config in optimizers.schedulers}
    if trainer.steps_were_read and intervals == {"epoch"}:
        trainer.say(
            "configure_optimizers read estimated_stepping_batches, but its schedulers advance once an epoch: return"
            ' {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}} for a schedule in steps'
        )
    if not optimizers.optimizers:
        trainer.say(
            "no optimizer: configure_optimizers returned None, so no parameters are updated"
        )
    return optimizers


def _prepare_optimizers(
    trainer: Session, module: TrainModule, optimizers: Optimizers
) -> None:
    # The configured options are noted before anything trains: a resume compares them with those of the checkpoint, to
    # tell an option that the user has changed from one that a schedule has.
    kernel = trainer.options.optimizer_kernel
    for optimizer in optimizers.optimizers:
        if kernel is not None:
            set_optimizer_kernel(optimizer, kernel, trainer.strategy, trainer.say)
        trainer.strategy.prepare_optimizer(optimizer)
        note_configured(optimizer)
    check_parameters(optimizers, module, trainer.strategy, trainer.print)


def _compose_stepper(
    trainer: Session, module: TrainModule, optimizers: Optimizers, bus: Bus
) -> Stepper:
    return Stepper(
        optimizers,
        module,
        trainer.strategy,
        trainer.precision_plugin,
        bus,
        trainer.settings.clip,
        trainer.metrics.callback_metrics,
        trainer.requests.wake,
    )


def _bind_step(trainer: Session, module: TrainModule, has_names: bool) -> _Step:
    """The module's ``training_step``, compiled if requested, as the strategy calls it."""
    step = module.training_step
    if not takes(step, 2):
        step = _without_index(step)
    compiler = trainer.running.compiler
    options = trainer.options
    if options.compile_options is not None:
        compiler = partial(torch.compile, **options.compile_options)
        # The blocks are compiled already.
        if options.compile_regional:
            compiler = None
    if compiler is not None:
        step = compiler(step)
        # `log` cannot be traced into a graph; `EntryPoint` removes this override.
        for submodule in module.nested_train_modules():
            untraced = torch.compiler.disable(submodule.log)  # type: ignore[no-untyped-call]  # torch's
            submodule.__dict__["log"] = untraced
    return trainer.strategy.bind(step, has_names)


def _without_index(step: _Step) -> _Step:
    return lambda batch, index: step(batch)


def _checkpoint_activations(
    module: nn.Module, blocks: bool | Policy, strategy: Strategy
) -> None:
    """Apply activation checkpointing to the selected blocks; `EntryPoint` undoes it."""
    if strategy.why_not_recomputed is not None:
        raise ConfigurationError(
            f"activation_checkpointing= does not work under {strategy.name}",
            found=strategy.why_not_recomputed,
            fix="leave activation_checkpointing= out",
        )
    policy: Policy = None
    if blocks is not True:
        policy = blocks
    if not units(module, policy):
        argument = f"activation_checkpointing={blocks!r}"
        if blocks is True:
            argument += f"; {type(module).__name__} has no ModuleList or Sequential with repeated blocks"
        raise ConfigurationError(
            "activation_checkpointing matches no block",
            found=argument,
            fix='name the classes of the blocks: activation_checkpointing="Block"',
        )
    ActivationCheckpointing(policy).apply(module)


def _compose_runner(
    trainer: Session,
    module: TrainModule,
    bus: Bus,
    automatic: Stepper | None,
    step: _Step,
    move: _Move | None,
    padding: PaddingBatches | None,
    captured: CapturedSteps | None,
) -> WindowRunner:
    """What windows run with.

    Args:
        trainer: the session.
        module: the user's.
        bus: the hooks.
        automatic: steps the optimizers; None in manual optimization.
        step: the user's step under the strategy.
        move: copies a batch to the device when its micro-batch begins; None where it is there.
        padding: runs a batch that this rank lacks.
        captured: runs steps as graphs, or None.
    """
    strategy = trainer.strategy
    # The module's default is not called: the loss's own backward is a Python call less in every step.
    user_backward = None
    if is_overridden("backward", module, TrainModule):
        user_backward = module.backward
    if captured is not None:
        user_backward = captured.backward
    compiles = (
        trainer.options.compile_options is not None
        or trainer.running.compiler is not None
    )
    rules = GradientRules()
    if automatic is not None:
        rules = automatic.gradient_rules()
    run_padding = None
    if padding is not None:
        run_padding = padding.run
    return WindowRunner(
        bus,
        trainer.metrics,
        trainer.progress,
        step,
        trainer.precision_plugin,
        rules,
        backward=strategy.bind_backward(user_backward),
        manual=automatic is None,
        move=move,
        agree_on_exit=exit_agreement(bus, strategy.world),
        run_padding=run_padding,
        # A compiled step may reuse the memory of its last loss.
        checks_every_loss=compiles,
    )


def _compose_windows(
    trainer: Session,
    module: TrainModule,
    feed: Feed,
    runner: WindowRunner,
    limit: int | None,
    prefetch: _Prefetch | None,
    padding: PaddingBatches | None,
) -> WindowLoader:
    strategy = trainer.strategy
    return WindowLoader(
        feed,
        runner,
        strategy.losses,
        strategy.gradient_divisor,
        parts=strategy.losses.size // strategy.data.size,
        loss_weight=part_weight(module, strategy),
        weighting=trainer.settings.loss_weighting,
        limit=limit,
        ahead=prefetch,
        length=trainer.accumulation,
        padding=padding,
    )


def batch_movers(
    trainer: Session, module: TrainModule, datamodule: DataModuleLike, feed: Feed
) -> tuple[_Move | None, _Prefetch | None]:
    """The function that moves a batch to the device, and the one that prefetches; each None if it has nothing to do."""
    device = trainer.strategy.device
    move, may_prefetch = mover(
        module, datamodule, trainer.strategy, trainer.precision_plugin
    )
    # Data that are drawn in this process are read when they are needed: a checkpoint holds the generators as they are
    # after a step, and a batch that was read ahead would be drawn again.
    if move is None or not may_prefetch or feed.draws:
        return move, None
    return move, _prefetching(move, device)


def _prefetching(move: _Move, device: torch.device) -> _Prefetch:
    def move_item(item: _Item) -> _Item:
        size, weight, batch = item
        if batch is not None:
            batch = move(batch)
        return size, weight, batch

    return lambda items: iter(Ahead(iter(items), move_item, device))


def make_schedule(
    settings: Settings, length: EpochLength, validates: bool, world_size: int
) -> Schedule:
    """The limits and intervals of a fit whose epochs have this length."""
    return Schedule(
        length=length,
        max_epochs=settings.max_epochs,
        max_steps=settings.max_steps,
        max_duration=settings.max_duration,
        min_epochs=settings.min_epochs,
        min_steps=settings.min_steps,
        validate_every=_validation_interval(settings, length, validates),
        across_epochs=settings.validate_epochs is None,
        validate_epochs=settings.validate_epochs or 1,
        validates=validates,
        log_every=settings.log_every or _NO_FLUSH,
        # An agreement takes 0.1 to 0.3 ms; at every tenth step it was 12 % of a small data-parallel step.
        agree_every=50 if world_size > 1 else 0,
    )


def _validation_interval(
    settings: Settings, length: EpochLength, validates: bool
) -> Duration | None:
    """The interval of validations inside an epoch; None: at its end."""
    every, batches = settings.validate_every, length.expected
    if isinstance(every, Duration):
        return every
    if isinstance(every, int):
        exceeds_epoch = batches is not None and every > batches
        hint = ", as the data's own len() says"
        if length.certain:
            hint = ""
        if exceeds_epoch and settings.validate_epochs is not None and validates:
            raise ConfigurationError(
                "validation would never run",
                found=f"val_check_interval={every} with {plural(batches or 0, 'batch')} an epoch{hint}",
                fix="use a smaller interval, or check_val_every_n_epoch=None to count over epochs",
            )
        return Duration(every, "ba")
    # 1.0 is the end of the epoch, also of an epoch of unknown length.
    if every >= 1.0:
        return None
    if batches is None:
        raise ConfigurationError(
            "the length of the epoch is unknown, so validation cannot run at a fraction of it",
            found=f"val_check_interval={every}",
            fix="pass val_check_interval as a number of batches",
        )
    return Duration(max(1, int(batches * every)), "ba")
