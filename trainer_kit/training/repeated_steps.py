"""Composes what runs steps again, for AutoMicroBatch, ReplayCheck and NaNGuard; refuses runs that cannot repeat one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import (
    DoublesParts,
    LeavesOutSteps,
    ReplaysSteps,
    SplitsBatches,
)
from trainer_kit.core.types import DataModuleLike
from trainer_kit.state.collect import State, collect, restore
from trainer_kit.state.rewind import Guard
from trainer_kit.state.runs import keep_checkpoints
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.optimize import ManualStepper, Stepper
from trainer_kit.step.run import Fit
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.step.split_batches import ReplayedSteps, SplitBatches
from trainer_kit.step.window import Window, WindowRunner
from trainer_kit.training.session import Session

__all__ = ["compose_forward_backward", "compose_guard"]


def compose_forward_backward(
    trainer: Session,
    module: TrainModule,
    stepper: Stepper | ManualStepper,
    runner: WindowRunner,
    windows: WindowLoader,
) -> Callable[[Window], None]:
    """The strategy's ``forward_backward``, or what a callback puts in its place to repeat steps."""
    strategy = trainer.strategy
    callbacks = trainer.callbacks
    splitting = next(
        (item for item in callbacks if isinstance(item, SplitsBatches)), None
    )
    replaying = next(
        (item for item in callbacks if isinstance(item, ReplaysSteps)), None
    )
    without_exchange = strategy.without_exchange()
    if replaying is not None:
        # The window that is compared must be one forward and backward, which the loop alone runs.
        if runner.manual or stepper.repeats or splitting is not None:
            raise ConfigurationError(
                "ReplayCheck cannot repeat a step of this run",
                found="manual optimization, an optimizer that evaluates the loss several times, or AutoMicroBatch",
                fix="leave one of them out",
            )
        return ReplayedSteps(
            strategy, without_exchange, module, replaying.replays_every
        )
    if splitting is None:
        return strategy.forward_backward
    if not isinstance(splitting, DoublesParts):
        raise ConfigurationError(
            "a callback that splits batches needs a method double_parts()",
            found=f"{type(splitting).__name__}, which has parts and splits_batches",
            fix="write in it: def double_parts(self): self.parts *= 2",
        )
    obstacle = _obstacle_to_splitting(trainer, module, stepper, runner)
    if obstacle is not None or without_exchange is None:
        raise ConfigurationError(
            "AutoMicroBatch cannot repeat a step of this run",
            found=obstacle,
            fix="use smaller batches with accumulate_grad_batches=; one device and DDP can repeat a step",
        )
    return SplitBatches(
        strategy,
        without_exchange,
        module,
        trainer.callbacks,
        trainer.metrics,
        windows.loss_weight,
        splitting,
        trainer.print,
    )


def _obstacle_to_splitting(
    trainer: Session,
    module: TrainModule,
    stepper: Stepper | ManualStepper,
    runner: WindowRunner,
) -> str | None:
    """Why a step of this run cannot be repeated in smaller parts; None if it can."""
    strategy = trainer.strategy
    # The user's step has called backward, and perhaps stepped, before the ranks could agree that it is repeated.
    if runner.manual:
        return "manual optimization"
    if stepper.repeats or stepper.by_loss is not None:
        return "an optimizer that evaluates the loss several times, or several losses"
    if strategy.without_exchange() is None:
        return strategy.describe()
    if strategy.world.size > 1 and any(
        isinstance(m, nn.SyncBatchNorm) for m in module.modules()
    ):
        return "SyncBatchNorm, whose forward needs every rank"
    return None


def compose_guard(
    trainer: Session, run: Fit, datamodule: DataModuleLike
) -> Guard | None:
    """The guard of the callback that leaves out steps that are not finite, or None."""
    leaving_out = next(
        (item for item in trainer.callbacks if isinstance(item, LeavesOutSteps)), None
    )
    if leaving_out is None:
        return None
    obstacle = _obstacle_to_rewinding(trainer, run)
    if obstacle is not None:
        raise ConfigurationError(
            f"NaNGuard cannot undo a step with {obstacle}",
            fix="leave it out: without it, a loss that is not finite raises an error",
        )
    # A rewind does not reset the checkpoint callbacks (their files stay), nor the guard's list of skipped steps.
    not_reset = {id(leaving_out), *map(id, keep_checkpoints(trainer.callbacks))}
    callbacks = [
        callback for callback in trainer.callbacks if id(callback) not in not_reset
    ]
    policy, steps_back, max_steps, left_out_steps = leaving_out.non_finite

    def collect_state(owes_validation: bool) -> State:
        # With the hooks of a checkpoint, although no file is written: what a user's object adds in `on_save_checkpoint`
        # it takes back in `on_load_checkpoint`, and without it the object would stay at the step that is undone.
        state = collect(
            run,
            callbacks,
            datamodule,
            trainer.data_seed,
            weights_only=False,
            owes_validation=owes_validation,
            everywhere=True,
        )
        return trainer.unsaveable.leave_out(state)

    return Guard(
        collect_state,
        lambda state: restore(
            run, state, run.stepper.configured, callbacks, datamodule, strict=True
        ),
        lambda: remember_effects(run.module, trainer.callbacks),
        raises=policy == "raise",
        back=steps_back,
        max_skips=max_steps,
        left_out=left_out_steps,
    )


def _obstacle_to_rewinding(trainer: Session, run: Fit) -> str | None:
    """Why this run cannot go back to a state that it holds in memory; None if it can."""
    strategy = trainer.strategy
    if run.precision.scales:
        return "loss scaling, which skips such steps by itself"
    if strategy.owns_step or strategy.keeps_gradients or strategy.per_rank_state:
        return f"the engine {strategy.name}"
    if strategy.names_on_all_ranks():
        return f"the engine {strategy.name}"
    # The steps that run again must read the same batches.
    if run.windows.feed.once:
        return "a loader that can be read only once"
    if trainer.reload_dataloaders_every_n_epochs:
        return "loaders that change between epochs"
    return None
