"""What modules and scripts read and do about the optimizers of a running fit."""

from __future__ import annotations

from typing import NoReturn, final

from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.precision.precision import Precision
from trainer_kit.state.optimizer_states import exchange_optimizers
from trainer_kit.step.optimize import ManualStepper
from trainer_kit.step.optimizers import OptimizerProxy, parameters_of
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.running import Running

__all__ = [
    "clip_optimizer_gradients",
    "list_manual_optimizers",
    "list_optimizers",
    "manual_stepper",
    "replace_optimizers",
]


@final
class _OptimizerList(list[Optimizer]):
    """The optimizers of a fit; to replace one of them, all are set together."""

    def __setitem__(self, *item: object) -> NoReturn:
        raise ConfigurationError(
            "the optimizers of a run must be set together",
            found="trainer.optimizers[...] = ...",
            fix="assign all of them: trainer.optimizers = [...]",
        )


def list_optimizers(run: Fit | None) -> list[Optimizer]:
    """The optimizers of a fit; none without one."""
    if run is None:
        return []
    return _OptimizerList(run.stepper.configured.optimizers)


def list_manual_optimizers(run: Fit | None) -> list[Optimizer]:
    """The optimizers that ``module.optimizers()`` returns: in manual optimization their proxies."""
    if run is not None and isinstance(run.stepper, ManualStepper):
        return list(run.stepper.optimizers)
    return list(list_optimizers(run))


def replace_optimizers(running: Running, optimizers: list[Optimizer]) -> None:
    """Step other optimizers from here on.

    Raises:
        ConfigurationError: no fit runs, or its optimizers cannot be exchanged.
    """
    run, settler = running.fit, running.settler
    if run is None or settler is None or running.stage != "fit":
        raise ConfigurationError(
            "optimizers can be set only while fit runs",
            found="trainer.optimizers = ...",
            fix="return them from configure_optimizers, or set them in a hook of fit: `if trainer.training:`",
        )
    exchange_optimizers(
        run,
        optimizers,
        resumed=settler.resumed,
        has_guard=settler.guard is not None,
    )


def manual_stepper(run: Fit | None) -> ManualStepper:
    """The stepper of a fit with manual optimization.

    Raises:
        ConfigurationError: no fit runs, or it steps the optimizers itself.
    """
    if run is not None and isinstance(run.stepper, ManualStepper):
        return run.stepper
    raise ConfigurationError(
        "manual_backward was called in automatic optimization",
        fix="set self.automatic_optimization = False in __init__",
    )


def clip_optimizer_gradients(
    optimizer: object,
    value: float | None,
    algorithm: str | None,
    clip: tuple[float, str] | None,
    strategy: Strategy,
    precision: Precision,
) -> None:
    """Unscale and clip the gradients of one optimizer.

    Args:
        optimizer: or its proxy, as ``module.optimizers()`` returns it.
        value: the largest norm or value; None: the Trainer's.
        algorithm: ``"norm"`` or ``"value"``; None: the Trainer's.
        clip: the Trainer's value and algorithm; None: it clips nothing.
        strategy: clips over the ranks that share the gradients.
        precision: unscales them, once a step.

    Raises:
        ConfigurationError: this is not an optimizer.
    """
    default_value, default_algorithm = clip or (None, "norm")
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
    # A limit on scaled gradients would depend on the scale; `step` does not unscale them a second time.
    precision.unscale_gradients(optimizer)
    strategy.clip_gradients(
        parameters_of(optimizer), value, algorithm or default_algorithm
    )
