"""``Trainer(compile="step")``: composes what captures steps; says why where nothing can be captured."""

from __future__ import annotations

from lightning_utilities.core.overrides import is_overridden

from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import ReplaysSteps, SplitsBatches
from trainer_kit.step.captured_steps import CapturedSteps
from trainer_kit.step.optimize import Stepper
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.training.session import Session

__all__ = ["compose_captured_steps", "reason_against_capture"]


def compose_captured_steps(
    trainer: Session, module: TrainModule, stepper: Stepper | None, step: StepMethod
) -> CapturedSteps | None:
    """What captures the steps of a fit; None, and a line that says why, where no step can be captured.

    Args:
        trainer: the session.
        module: the user's.
        stepper: steps the optimizers; None in manual optimization.
        step: the user's step under the strategy.
    """
    reason = reason_against_capture(trainer, module)
    if stepper is not None and stepper.by_loss is not None:
        reason = "each optimizer has a loss of its own"
    if reason is not None:
        trainer.say(f'compile="step": steps run without a graph: {reason}')
        return None
    return CapturedSteps(trainer.strategy, module, step, trainer.say)


def reason_against_capture(trainer: Session, module: TrainModule) -> str | None:
    """Why no step of a fit can be captured; None if one may be, as far as is known before the first one."""
    strategy = trainer.strategy
    if strategy.why_not_captured is not None:
        return f"under {strategy.name} {strategy.why_not_captured}"
    repeats = any(
        isinstance(callback, (ReplaysSteps, SplitsBatches))
        for callback in trainer.callbacks
    )
    reasons = [
        (not module.automatic_optimization, "the module steps its optimizers itself"),
        (trainer.precision_plugin.scales, "the precision scales the loss"),
        (is_overridden("backward", module, TrainModule), "backward is overridden"),
        (trainer.options.switches.get("detect_anomaly"), "detect_anomaly=True"),
        (trainer.running.compiler is not None, "torch.compile has the module"),
        (repeats, "a callback runs steps again, or in parts"),
    ]
    for applies, reason in reasons:
        if applies:
            return reason
    return None
