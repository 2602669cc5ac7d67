"""Optimizers and schedulers for a custom training loop: they step only when gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.optim import Optimizer

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.torch_private import count_call, counts_calls
from trainer_kit.core.types import Function, LRSchedulerLike, SavedState, StateDict
from trainer_kit.precision.precision import Precision
from trainer_kit.step.closures import calls_once, refusal_of_scaling
from trainer_kit.step.optimizers import OptimizerProxy
from trainer_kit.strategies.optimizer_step import drop_gradients_of

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler"]


@final
class AcceleratedOptimizer(OptimizerProxy):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing until the gradients of the window are complete.

    All other attributes (groups, state, defaults) are those of ``optimizer``.

    Args:
        optimizer: the user's optimizer.
        window: decides when gradients are complete, and corrects them.
        precision: steps the optimizer, or skips a step whose gradients overflowed.
        before_first_step: called once, when gradients are complete for the first time.
        step: the strategy's step; None: the optimizer's own.
        after_step: called after each step, or None.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        window: Accumulation,
        precision: Precision,
        before_first_step: Callable[[Optimizer], None] | None = None,
        step: Function | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._window = window
        self._precision = precision
        self._before_first_step = before_first_step
        self._strategy_step = step
        self._after_step = after_step
        self._skipped = False
        # The micro-batch of the last `zero_grad` before a backward.
        self._cleared_at = 0

    def __getstate__(self) -> StateDict:
        # The strategy's step is bound to this optimizer: a copy steps its own.
        state = super().__getstate__()
        return {**state, "_strategy_step": None, "_before_first_step": None}

    def rebind(self, step: Function | None) -> None:
        """Replace the strategy's step."""
        self._strategy_step = step

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` was skipped because gradients overflowed."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step at the end of a window, and do nothing inside it; a closure computes the loss, possibly several times.

        Raises:
            ConfigurationError: the optimizer may call the closure more than once, and gradients are scaled.
        """
        window = self._window
        optimizer = self.optimizer
        if not window.sync:
            return None
        if self._before_first_step is not None:
            self._before_first_step(optimizer)
            self._before_first_step = None
        window.optimizer_steps += 1
        loss = None
        if closure is not None:
            # Without a loss scale the optimizer may call the closure itself, any number of times.
            if not self._precision.scales:
                return self._step_with(closure)
            if not calls_once(optimizer):
                raise refusal_of_scaling(optimizer)
            # Gradients are unscaled and checked before the step.
            loss = closure()
            # The closure's backward has computed new gradients.
            window.corrected.discard(optimizer)
        window.correct(optimizer)
        step = self._strategy_step or optimizer.step
        self._skipped = not self._precision.optimizer_step(optimizer, step)
        # The gradients of the next window need a correction of their own.
        window.corrected.discard(optimizer)
        if self._after_step is not None:
            self._after_step()
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """Step with a closure, which may run several times; correct gradients after each run."""
        window = self._window
        optimizer = self.optimizer
        strategy_step = self._strategy_step or optimizer.step
        # `Precision.optimizer_step` returns whether it has stepped, so the result of the step is stored here.
        losses: list[object] = []

        def correcting_closure() -> Any:
            loss = closure()
            window.corrected.discard(optimizer)
            window.correct(optimizer)
            return loss

        def step() -> None:
            losses.append(strategy_step(correcting_closure))

        self._skipped = not self._precision.optimizer_step(optimizer, step)
        window.corrected.discard(optimizer)
        return losses[-1] if losses else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, except inside a window."""
        window = self._window
        clears = window.sync
        # Before the backward, `sync` is that of the new micro-batch, whose window may be unfinished.
        if window.ahead:
            clears = window.clears_gradients(self._cleared_at)
            self._cleared_at = window.turn
        if clears:
            window.corrected.discard(self.optimizer)
            drop_gradients_of(self.optimizer, set_to_none)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


@final
class AcceleratedScheduler:
    """A scheduler that advances when optimizers step, ``times`` times in each optimizer step.

    Args:
        scheduler: the user's scheduler.
        optimizers: if one of these skips its step, the scheduler skips it too.
        window: decides when optimizers step.
        with_optimizer: False: each call of ``step`` advances the scheduler once.
        times: the number of scheduler steps per optimizer step.
        adjust: count the calls inside a window, for schedulers that warn about a wrong order of calls.
        before_first_step: called once, before the scheduler first advances.

    Attributes:
        times: see above.
    """

    def __init__(
        self,
        scheduler: LRSchedulerLike,
        optimizers: Sequence[AcceleratedOptimizer],
        window: Accumulation,
        *,
        with_optimizer: bool = True,
        times: int = 1,
        adjust: bool = False,
        before_first_step: Callable[[], None] | None = None,
    ) -> None:
        # Any, because attributes beyond the protocol are those of torch's schedulers, where there are any.
        self.scheduler: Any = scheduler
        self.optimizers = list(optimizers)
        self.times = times
        self._window = window
        self._with_optimizer = with_optimizer
        # Chained schedulers count nothing themselves.
        self._adjust = adjust and counts_calls(scheduler)
        self._before_first_step = before_first_step

    def follow(self, optimizers: Sequence[AcceleratedOptimizer]) -> None:
        """Replace the optimizers whose skipped steps the scheduler skips."""
        self.optimizers = list(optimizers)

    def describe(self) -> str:
        """Return one line for ``explain()``."""
        pace = "once an optimizer step"
        if not self._with_optimizer:
            pace = "at each call of step()"
        elif self.times > 1:
            pace = f"{self.times} times an optimizer step, once for each process"
        return f"{type(self.scheduler).__name__} advances {pace}"

    def step(self, *arguments: object, **options: object) -> None:
        """Advance if the optimizers have just stepped."""
        if not self._with_optimizer:
            self.scheduler.step(*arguments, **options)
            return
        if not self._window.sync:
            # torch's schedulers compare their count with that of the optimizer's calls, and warn.
            if self._adjust:
                count_call(self.scheduler)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        if self._before_first_step is not None:
            self._before_first_step()
            self._before_first_step = None
        # Scripts for Accelerate multiply the length of their schedules by the number of processes.
        for _ in range(self.times):
            total_steps = getattr(self.scheduler, "total_steps", None)
            # OneCycleLR raises an error after its last step.
            if total_steps is None or self.scheduler.last_epoch < total_steps:
                self.scheduler.step(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        # While an object is copied or unpickled, it has no attributes yet.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> StateDict:
        """Return the state of the user's scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Load a state into the user's scheduler."""
        self.scheduler.load_state_dict(dict(state_dict))
