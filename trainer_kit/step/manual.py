"""Manual optimization: the user steps, through the same strategy and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.optimizer_proxy import OptimizerProxy
from trainer_kit.precision.native import has_gradients
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus
from trainer_kit.step.closures import calls_once, refusal_of_scaling
from trainer_kit.step.micro_batch import MicroBatches
from trainer_kit.step.optimize import LRSchedulerConfig, Optimizers
from trainer_kit.strategies.strategy import Strategy

__all__ = ["ManualOptimizer", "ManualStepper"]


@final
class ManualOptimizer(OptimizerProxy):
    """An optimizer as ``self.optimizers()`` hands it out: ``step`` unscales, calls the hooks and skips overflows.

    It is a ``torch.optim.Optimizer``, which torch's schedulers take; groups and state are the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, precision: Precision, bus: Bus, module: Any) -> None:
        super().__init__(optimizer)
        self._step = strategy.bind_step(optimizer)
        self._precision, self._bus, self._module = precision, bus, module
        self.trained: bool | None = None
        """Whether a step has had a gradient; None before the first step."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step; returns what the optimizer returns.

        Args:
            closure: computes the loss and its gradients; called first where gradients are scaled.
            kwargs: for the optimizer.
        """
        if self._precision.scales and closure is not None:
            if not calls_once(self.optimizer):
                raise refusal_of_scaling(self.optimizer)
            closure()
            closure = None
        self._precision.unscale_gradients(self.optimizer)
        for hook in self._bus.on_before_optimizer_step:
            hook(self.optimizer)
        if not self.trained:  # looked for before the step, which may drop gradients itself
            self.trained = has_gradients(self.optimizer)
        if closure is not None:
            kwargs["closure"] = closure if self.trained else self._watched(closure)
        returned: list[Any] = []
        self._precision.optimizer_step(self.optimizer, lambda: returned.append(self._step(**kwargs)))
        return returned[0] if returned else None

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self.trained = self.trained or has_gradients(self.optimizer)
            return loss

        return run

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this optimizer's gradients."""
        for hook in self._bus.on_before_zero_grad:
            hook(self.optimizer)
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Only this optimizer's parameters require gradients."""
        with self._module.toggled_optimizer(self):
            yield


@final
class ManualStepper:
    """The loop's side of manual optimization: nothing to step, one scale to adapt, and the weighted backward."""

    evaluates = draws = False
    several = None

    def __init__(self, made: Optimizers, module: Any, strategy: Strategy, precision: Precision, bus: Bus) -> None:
        self.made, self.module, self.strategy, self.precision, self.bus = made, module, strategy, precision, bus
        self.window: MicroBatches | None = None
        self._backward = strategy.bind_backward(module.backward) or module.backward
        self.optimizers = [ManualOptimizer(o, strategy, precision, bus, module) for o in made.optimizers]

    @property
    def trained(self) -> bool | None:
        """Whether a step has had a gradient; None before the first step."""
        return max((one.trained for one in self.optimizers if one.trained is not None), default=None)

    def read_groups(self) -> None:
        """Optimizers are stepped with what they have by now."""
        for optimizer in self.optimizers:
            optimizer._step = self.strategy.bind_step(optimizer.optimizer)

    def step(self) -> None:
        """A turn is over."""
        if self.precision.scales:
            self.precision.end_step()

    def droppable(self) -> list[Any]:
        """The user drops gradients."""
        return []

    def zero(self) -> None:
        """The user drops gradients."""

    def end_epoch(self, completed: int) -> None:
        """The user advances schedulers."""

    def advance(self, config: LRSchedulerConfig) -> None:
        """The user advances schedulers."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Weigh, scale, and run the module's backward; gradients of all ranks are averaged by it."""
        micro = self.window
        if micro is not None:
            micro.note(loss)
            if micro.factors is not None:
                loss = loss * micro.factors[0]
        if self.precision.scales:
            loss = self.precision.scale_loss(loss)
        self.strategy.arm(loss)
        for hook in self.bus.on_before_backward:
            hook(loss)
        self._backward(loss, *args, **kwargs)
        for hook in self.bus.on_after_backward:
            hook()
