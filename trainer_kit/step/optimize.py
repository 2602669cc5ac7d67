"""Optimizer steps, automatic and manual: what happens after the last backward of an accumulation window.

For each optimizer in turn: unscale its gradients, call ``on_before_optimizer_step``, clip, step. Hooks therefore see
complete, averaged and unscaled gradients, and what they change is clipped. The scale of the precision changes after the
last optimizer. Schedulers come later still:

- ``due_schedulers``: those that count steps. The loop advances them after it has counted the step, so hooks of the
  batch's end see the new learning rate.
- ``waiting``: those that count steps and monitor a value. The step's validation, or that of the epoch, comes first.
- Those that count epochs advance in ``end_epoch``, when the epoch is counted.

The calls of ``advance_due`` and ``end_epoch`` stand in one place each. Those in ``waiting`` advance at the first of:

- the end of their step (`Settler.settle_step`), after its validation, unless that of the epoch may still follow;
- before the next window (`training.fit`), where a step of an epoch of unknown length was not the last one;
- the end of the epoch (`Settler.settle_epoch`), after its validation and its hooks;
- a resume (`Settler.settle_resume`), after the validation that the checkpoint owed.

Gradients stay until the first backward of the next window. Whether there is a step is the same on every rank: a step
may run collectives. A window that exists on all ranks needs no exchange for this, because ``training_step`` returns
None on all of them or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from typing import Any, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.metrics.objects import remember_metrics
from trainer_kit.precision.native import has_gradients
from trainer_kit.precision.precision import Precision
from trainer_kit.step.accumulation_window import WindowLoader
from trainer_kit.step.bus import Bus
from trainer_kit.step.closures import (
    Closures,
    calls_once,
    refusal,
    refusal_of_scaling,
    requires_closure,
)
from trainer_kit.step.optimizers import (
    LRSchedulerConfig,
    OptimizerProxy,
    Optimizers,
    drop_gradients,
    parameters_of,
)
from trainer_kit.step.window import GradientRules, Window
from trainer_kit.strategies.optimizer_step import direct_step
from trainer_kit.strategies.strategy import Strategy

__all__ = ["ManualOptimizer", "ManualStepper", "Stepper"]


@final
class _SteppedByStrategy(OptimizerProxy):
    """The optimizer passed to an overridden ``optimizer_step`` when the strategy performs the step."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        super().__init__(optimizer)
        self._step = step

    def step(self, *arguments: Any, **options: Any) -> Any:
        """The strategy's."""
        return self._step(*arguments, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's own."""
        self.optimizer.zero_grad(set_to_none)


@final
class Stepper:
    """Automatic optimization: everything between the last backward of a window and the next window.

    Args:
        configured: the optimizers and schedulers.
        module: the module, whose overrides such as ``optimizer_step`` are called.
        strategy: clips gradients, and binds the step of an optimizer.
        precision: unscales gradients, and skips a step if they overflowed.
        bus: calls ``on_before_zero_grad`` and ``on_before_optimizer_step``.
        clip: (value, algorithm), or None.
        read_metrics: returns the values that schedulers monitor.
        wake: called when a scheduler waits, so that the loop settles this step.

    Attributes:
        by_loss: the parameters of each optimizer, if optimizers are named.
        trained: whether a step has had a gradient; None before the first step with a loss.
        due_schedulers: those that advance as soon as the last step is counted.
        waiting: those that are due at the last step and monitor a value: they advance after its validation.
    """

    def __init__(
        self,
        configured: Optimizers,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        bus: Bus,
        clip: tuple[float, str] | None,
        read_metrics: Callable[[], Mapping[str, Any]],
        wake: Callable[[], None],
    ) -> None:
        self.configured = configured
        self.module = module
        self.strategy = strategy
        self.precision = precision
        self.bus = bus
        self.clip = clip
        self._read_metrics = read_metrics
        self._skips = precision.skips
        # The window whose gradients are complete.
        self._window: Window | None = None
        self.trained: bool | None = None
        self._overrides_zero_grad = is_overridden(
            "optimizer_zero_grad", module, TrainModule
        )
        self._overrides_clipping = is_overridden(
            "configure_gradient_clipping", module, TrainModule
        )
        self._overrides_step = is_overridden("optimizer_step", module, TrainModule)
        self._overrides_schedule = is_overridden(
            "lr_scheduler_step", module, TrainModule
        )
        # Two lists and not one: what monitors a value must not read that of an earlier validation.
        self.due_schedulers: list[LRSchedulerConfig] = []
        self.waiting: list[LRSchedulerConfig] = []
        self.wake = wake
        # Both are filled again in place when parameter groups change: windows use them.
        self._trained_parameters: list[nn.Parameter] = []
        self.by_loss: dict[str, list[nn.Parameter]] | None = None
        if configured.names is not None:
            self.by_loss = {}
        self.read_groups()

    def read_groups(self) -> None:
        """Read the parameter groups again, into the lists that the loop already uses."""
        optimizers, names = self.configured.optimizers, self.configured.names
        # Only the module's parameters: an engine may have replaced some in the groups, whose gradients it drops.
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for optimizer in optimizers:
            groups, _ = self.strategy.optimizer_state(optimizer)
            self._parameters[id(optimizer)] = list(chain.from_iterable(groups))
        self._trained_parameters[:] = chain.from_iterable(self._parameters.values())
        # Bound once: in a step, what an optimizer needs is a call or nothing.
        self._runs = [
            (optimizer, self._clip(optimizer), self._bind(optimizer, name))
            for optimizer, name in zip(optimizers, names or repeat(None), strict=False)
        ]
        if self.by_loss is not None:
            named_optimizers = zip(names or (), optimizers, strict=True)
            self.by_loss.update(
                (name, parameters_of(each)) for name, each in named_optimizers
            )

    def gradient_rules(self) -> GradientRules:
        """What these optimizers want done with the gradients of a window."""
        # Without a hook or an override the window drops them itself. The list is shared: `read_groups` refills it.
        droppable: list[nn.Parameter] | None = self._trained_parameters
        if self._overrides_zero_grad or self.bus.on_before_zero_grad:
            droppable = None
        return GradientRules(
            by_loss=self.by_loss,
            droppable=droppable,
            drop=self.zero,
            repeats=self.repeats,
            same_random=self.same_random,
        )

    def replace(self, optimizers: list[Optimizer]) -> int:
        """Step other optimizers from here on; return the number of schedulers that still change a replaced one.

        Raises:
            ConfigurationError: their number or kind differs from what the run was composed for.
        """
        reason = self._reason_against(optimizers)
        if reason is not None:
            raise ConfigurationError(
                "these optimizers cannot be replaced during a run",
                found=reason,
                fix="return them from configure_optimizers, or change their param_groups",
            )
        for optimizer in optimizers:
            self.strategy.prepare_optimizer(optimizer)
        parameters_before = set(map(id, self._trained_parameters))
        self.configured.optimizers[:] = optimizers
        self.read_groups()
        # Nothing has dropped the gradient of a new one since it was last stepped.
        drop_gradients(
            parameter
            for parameter in self._trained_parameters
            if id(parameter) not in parameters_before
        )
        present = set(map(id, optimizers))
        scheduled = [
            getattr(config.scheduler, "optimizer", config.optimizer)
            for config in self.configured.schedulers
        ]
        return sum(id(optimizer) not in present for optimizer in scheduled)

    def _reason_against(self, optimizers: list[Optimizer]) -> str | None:
        """Why these optimizers cannot take the place of the present ones."""
        # Names, and whether a window may run again, are fixed in the `GradientRules` of this run's windows.
        if self.by_loss is not None:
            return "the optimizers have names"
        if len(optimizers) != len(self.configured.optimizers):
            return (
                f"{len(optimizers)} in the place of {len(self.configured.optimizers)}"
            )
        if self.strategy.owns_step:
            return f"{self.strategy.name} steps an engine's own optimizer"
        for optimizer in optimizers:
            if self._takes_closure(optimizer):
                return f"{type(optimizer).__name__} evaluates the loss again"
        return None

    def _clip(self, optimizer: Optimizer) -> Callable[[], object] | None:
        """What clips the gradients of one optimizer."""
        if self._overrides_clipping:
            value, algorithm = self.clip or (None, None)
            return partial(
                self.module.configure_gradient_clipping, optimizer, value, algorithm
            )
        if self.clip is None:
            return None
        return partial(
            self.strategy.clip_gradients, self._parameters[id(optimizer)], *self.clip
        )

    def _bind(self, optimizer: Optimizer, name: str | None) -> Callable[[], object]:
        """What steps one optimizer; ``name`` is that of its loss."""
        module = self.module
        strategy_step = self.strategy.bind_step(optimizer)
        is_own_step = strategy_step == optimizer.step
        step = strategy_step
        if is_own_step:
            step = direct_step(optimizer)
        error = refusal(optimizer, self.strategy, self.precision)
        # An optimizer that may do without a closure is only refused when it calls it.
        if requires_closure(optimizer) and error is not None:
            raise error
        closures = self._closures(optimizer, name)
        if self._overrides_step:
            stepped: Optimizer = optimizer
            if not is_own_step:
                # A strategy may do more than the optimizer's step: average weights, reshard, replay a graph.
                stepped = _SteppedByStrategy(optimizer, step)
            return lambda: module.optimizer_step(
                module.current_epoch, self.window.index, stepped, closures.make()
            )
        if self._takes_closure(optimizer):
            return lambda: step(closure=closures.make())
        return step

    def _takes_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer gets a closure; never if an engine calls its step."""
        return not (calls_once(optimizer) or self.strategy.keeps_gradients)

    def release(self) -> None:
        """Drop the window of the last step, which holds its batches."""
        self._window = None

    @property
    def window(self) -> Window:
        """The window that is stepped."""
        assert self._window is not None
        return self._window

    def _closures(
        self, optimizer: Optimizer, name: str | None
    ) -> Closures[Tensor | None]:
        """The closures of one optimizer."""
        # The optimizer may decide by the loss, so every rank must see the same one.
        over_ranks = self._takes_closure(optimizer)

        def read_loss() -> Tensor | None:
            loss = self.window.window_loss(name)
            if not over_ranks:
                return loss
            return self._loss_over_ranks(loss)

        def run_again() -> Tensor | None:
            error = refusal(optimizer, self.strategy, self.precision)
            if error is not None:
                raise error
            self._evaluate(optimizer)
            return read_loss()

        return Closures(
            self._trained_parameters, self.strategy.world, read_loss, run_again
        )

    def _loss_over_ranks(self, loss: Tensor | None) -> Tensor | None:
        """The loss of the window over all ranks; ``loss``: that of this one."""
        group = self.strategy.losses
        if group.size == 1:
            return loss
        # A rank without a loss takes part in the sum.
        if loss is None:
            loss = torch.zeros((), device=self.strategy.device)
        # Each loss has been multiplied by the divisor for the engine's mean of gradients; this is a sum.
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return group.all_reduce(wide) / self.strategy.gradient_divisor

    def _evaluate(self, optimizer: Optimizer) -> None:
        """Run the window again, without changing the gradients of other optimizers or counting in metric objects."""
        stepped = {id(parameter) for parameter in self._parameters[id(optimizer)]}
        remaining = [
            each for each in self._trained_parameters if id(each) not in stepped
        ]
        gradients = [parameter.grad for parameter in remaining]
        # The backward adds to every gradient that is there; those of other optimizers are put back below.
        drop_gradients(remaining)
        clip = next(clip for stepping, clip, _ in self._runs if stepping is optimizer)
        # Metric objects count a batch once, however often it runs.
        undo_metrics = remember_metrics([self.module])
        with self.window.repeated() as repeated:
            self.strategy.forward_backward(repeated)
            # Hooks and clipping as before the step itself: both may change gradients.
            for hook in self.bus.on_before_optimizer_step:
                hook(optimizer)
            if clip is not None:
                clip()
        undo_metrics()
        for parameter, gradient in zip(remaining, gradients, strict=True):
            parameter.grad = gradient

    @property
    def repeats(self) -> bool:
        """Whether any optimizer may run a window again."""
        return self._overrides_step or self.same_random

    @property
    def same_random(self) -> bool:
        """Whether an optimizer runs a window again itself, with the random numbers of the first run."""
        return any(map(self._takes_closure, self.configured.optimizers))

    def zero(self, batch_index: int) -> None:
        """Drop all gradients; ``batch_index`` is that of the batch that runs."""
        optimizers = self.configured.optimizers
        for optimizer in optimizers:
            for hook in self.bus.on_before_zero_grad:
                hook(optimizer)
        # The user's override drops them; else as `Optimizer.zero_grad(set_to_none=True)` does.
        if self._overrides_zero_grad:
            epoch = self.module.current_epoch
            for optimizer in optimizers:
                self.module.optimizer_zero_grad(epoch, batch_index, optimizer)
        else:
            for parameter in self._trained_parameters:
                parameter.grad = None

    def step(self, window: Window) -> None:
        """Step every optimizer, and collect the schedulers that advance with this step."""
        self._window = window
        if window.uneven:
            # Every rank must step, or none: a step may run collectives.
            window.agree_on_contribution(self.strategy.data)
        # Every micro-batch was skipped: nothing to apply, and the schedulers do not advance.
        if not window.contributed:
            return
        # Looked for until one is found, before the step: an optimizer may drop gradients itself.
        if not self.trained:
            self.trained = self.strategy.keeps_gradients or any(
                parameter.grad is not None for parameter in self._trained_parameters
            )
        scales = self.precision.scales
        skipped: list[Optimizer] = []
        for optimizer, clip, run in self._runs:
            if scales:
                self.precision.unscale_gradients(optimizer)
            for hook in self.bus.on_before_optimizer_step:
                hook(optimizer)
            if clip is not None:
                clip()
            # Most precisions never skip: the step is called directly, a Python call less.
            if not self._skips:
                run()
            elif not self.precision.optimizer_step(optimizer, run):
                skipped.append(optimizer)
        # Once for all optimizers: they share a scale, which must not change between two of them.
        if scales:
            self.precision.end_step()
        # The loop counts this step when all optimizers have stepped.
        steps = window.started + 1
        # Read from `configured` in each step: callbacks may have replaced the schedulers.
        for config in self.configured.schedulers:
            if config.interval != "step" or steps % config.frequency:
                continue
            # The optimizer's step overflowed and was skipped.
            if skipped and config.optimizer in skipped:
                continue
            if config.monitor is None:
                self.due_schedulers.append(config)
            else:
                # Nothing else may be due at this step, and the loop settles only where something is.
                self.waiting.append(config)
                self.wake()

    def advance_due(self) -> None:
        """Advance the schedulers that count steps, once this step is counted."""
        configs, self.due_schedulers = self.due_schedulers, []
        for config in configs:
            self.advance(config)

    def set_waiting(self, configs: Iterable[LRSchedulerConfig]) -> None:
        """Set the schedulers that wait for the values of the last step, in a run that resumes behind it."""
        self.waiting = list(configs)

    def advance_waiting(self) -> None:
        """Advance the schedulers that wait for the values of the last step. Every rank must call it."""
        # Taken first, so that a scheduler that fails does not advance again.
        waiting, self.waiting = self.waiting, []
        for config in waiting:
            self.advance(config)

    def end_epoch(self, completed: int) -> None:
        """Advance the schedulers that count epochs; ``completed`` epochs are over."""
        for config in self.configured.schedulers:
            if config.interval == "epoch" and completed % config.frequency == 0:
                self.advance(config)

    def advance(self, config: LRSchedulerConfig) -> None:
        """Step one scheduler, with its metric if it wants one."""
        metric: Any = None
        if config.monitor is not None and config.reduce_on_plateau:
            metric = self._monitored(config, config.monitor)
            if metric is None:
                return
        if self._overrides_schedule:
            self.module.lr_scheduler_step(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)

    def _monitored(self, config: LRSchedulerConfig, name: str) -> Any:
        """The value that a scheduler monitors; None if it was not logged and need not be."""
        values = self._read_metrics()
        value = values.get(name)
        if self.strategy.world.size > 1:
            # Between flushes values are local to a rank, and tensor-parallel ranks may differ in the last bit.
            if value is not None:
                value = float(value)  # sync point: decides
            value = self.strategy.world.broadcast(value)
        if value is None and config.strict:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} monitors {name!r}, which was not logged",
                found=f"logged so far: {', '.join(sorted(values)) or 'nothing'}",
                fix="log it before the scheduler advances, or pass strict=False",
            )
        return value


@final
class ManualOptimizer(OptimizerProxy):
    """An optimizer returned by ``self.optimizers()``: its ``step`` unscales, calls the hooks and skips overflows.

    It is a ``torch.optim.Optimizer``, so torch's schedulers accept it; groups and state are those of the original.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy,
        precision: Precision,
        bus: Bus,
        module: TrainModule,
    ) -> None:
        super().__init__(optimizer)
        self._strategy = strategy
        self._precision = precision
        self._bus = bus
        self._module = module
        self.bind_step()
        self.trained: bool | None = None
        """Whether a step has had a gradient; None before the first step."""

    def bind_step(self) -> None:
        """Bind the strategy's step, again after parameter groups have changed."""
        step = self._strategy.bind_step(self.optimizer)
        if step == self.optimizer.step:
            step = direct_step(self.optimizer)
        self._step = step

    def step(self, closure: Callable[[], object] | None = None, **kwargs: Any) -> Any:
        """Step; returns what the optimizer returns.

        Args:
            closure: computes the loss and its gradients; called first where gradients are scaled.
            kwargs: for the optimizer.
        """
        if self._precision.scales and closure is not None:
            if not calls_once(self.optimizer):
                raise refusal_of_scaling(self.optimizer)
            # The gradients must be unscaled between the closure and the step.
            closure()
            closure = None
        self._precision.unscale_gradients(self.optimizer)
        for hook in self._bus.on_before_optimizer_step:
            hook(self.optimizer)
        if not self.trained:
            # Looked for before the step, which may drop gradients itself.
            self.trained = has_gradients(self.optimizer)
        if closure is not None:
            if not self.trained:
                closure = self._noting_gradients(closure)
            kwargs["closure"] = closure
        # The precision decides whether there is a step, and returns that.
        returned: object = None

        def step() -> None:
            nonlocal returned
            returned = self._step(**kwargs)

        self._precision.optimizer_step(self.optimizer, step)
        return returned

    def _noting_gradients(self, closure: Callable[[], object]) -> Callable[[], object]:
        """The closure, after which a gradient is looked for: it may be what computes the first ones."""

        def run() -> object:
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
    """Manual optimization: the loop steps nothing; it adapts the loss scale, and weights the backward.

    Args:
        configured: the optimizers and schedulers.
        module: whose ``backward`` is called.
        strategy: binds backward and steps.
        precision: scales losses, and skips a step if gradients overflowed.
        bus: calls the hooks around backward and before a step.
        windows: whose open window a backward belongs to.
    """

    # The loop asks these of either stepper. The user's code steps optimizers and schedulers, so all of them are empty.
    repeats = False
    same_random = False
    by_loss = None
    due_schedulers: Sequence[LRSchedulerConfig] = ()
    waiting: Sequence[LRSchedulerConfig] = ()

    def __init__(
        self,
        configured: Optimizers,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        bus: Bus,
        windows: WindowLoader,
    ) -> None:
        self.configured = configured
        self.module = module
        self.strategy = strategy
        self.precision = precision
        self.bus = bus
        self._windows = windows
        self._backward = strategy.bind_backward(module.backward) or module.backward
        self.optimizers = [
            ManualOptimizer(optimizer, strategy, precision, bus, module)
            for optimizer in configured.optimizers
        ]

    @property
    def trained(self) -> bool | None:
        """Whether a step has had a gradient; None before the first step."""
        # One optimizer is enough: the module may step the others later, or never.
        trained = [optimizer.trained for optimizer in self.optimizers]
        return max((each for each in trained if each is not None), default=None)

    def replace(self, optimizers: list[Optimizer]) -> int:
        """Refused: the user's own code steps them."""
        raise ConfigurationError(
            "in manual optimization the loop steps no optimizers, so it cannot replace them",
            fix="return all optimizers from configure_optimizers, and step one of self.optimizers()",
        )

    def read_groups(self) -> None:
        """Bind the steps again, after parameter groups have changed."""
        for optimizer in self.optimizers:
            optimizer.bind_step()

    def step(self, window: Window) -> None:
        """End a window: the user has stepped already."""
        if self.precision.scales:
            self.precision.end_step()

    def end_epoch(self, completed: int) -> None:
        """The user advances schedulers."""

    def advance(self, config: LRSchedulerConfig) -> None:
        """The user advances schedulers."""

    def advance_due(self) -> None:
        """The user advances schedulers."""

    def set_waiting(self, configs: Iterable[LRSchedulerConfig]) -> None:
        """The user advances schedulers."""

    def advance_waiting(self) -> None:
        """The user advances schedulers."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Weight and scale the loss, and run the module's backward, which averages gradients over the ranks."""
        window = self._windows.window
        window.note(loss)
        # A window of manual optimization is one batch, so one factor is all it has.
        if window.factors is not None:
            loss = loss * window.factors[0]
        if self.precision.scales:
            loss = self.precision.scale_loss(loss)
        # DDP prepares its reducer in the forward of a step with one loss; here each backward prepares it.
        self.strategy.arm(loss)
        for hook in self.bus.on_before_backward:
            hook(loss)
        self._backward(loss, *args, **kwargs)
        for hook in self.bus.on_after_backward:
            hook()
