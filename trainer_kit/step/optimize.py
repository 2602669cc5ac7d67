"""Optimizer steps, automatic and manual: what happens after the last backward of an accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from trainer_kit.step.bus import Bus
from trainer_kit.step.closures import (
    Closures,
    calls_once,
    refusal,
    refusal_of_scaling,
    requires_closure,
)
from trainer_kit.step.micro_batch import MicroBatches
from trainer_kit.step.optimizers import (
    LRSchedulerConfig,
    OptimizerProxy,
    Optimizers,
    parameters_of,
)
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
        made: the optimizers and schedulers.
        module: the module, whose overrides such as ``optimizer_step`` are called.
        strategy: clips gradients, and binds the step of an optimizer.
        precision: unscales gradients, and skips a step if they overflowed.
        bus: calls ``on_before_zero_grad`` and ``on_before_optimizer_step``.
        clip: (value, algorithm), or None.
        metrics: the values that schedulers monitor.

    Attributes:
        several: the parameters of each optimizer, if optimizers are named.
        trained: whether a step has had a gradient; None before the first step with a loss.
        waiting: the schedulers that are due at the last step and monitor a value: they advance after its validation.
        wake: called when a scheduler waits, so that the loop settles this step.
    """

    def __init__(
        self,
        made: Optimizers,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        bus: Bus,
        clip: tuple[float, str] | None,
        metrics: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.made, self.module, self.strategy, self.precision, self.bus = (
            made,
            module,
            strategy,
            precision,
            bus,
        )
        self.clip, self.metrics = clip, metrics
        self._skips = precision.skips
        self.window: Any = None
        self.trained: bool | None = None
        self._own_zero = is_overridden("optimizer_zero_grad", module, TrainModule)
        self._own_clip = is_overridden(
            "configure_gradient_clipping", module, TrainModule
        )
        self._own_step = is_overridden("optimizer_step", module, TrainModule)
        self._own_schedule = is_overridden("lr_scheduler_step", module, TrainModule)
        self.waiting: list[LRSchedulerConfig] = []
        self.wake: Callable[[], None] = _nothing
        self._all: list[nn.Parameter] = []
        self.several: dict[str, list[nn.Parameter]] | None = (
            None if made.names is None else {}
        )
        self.read_groups()

    def read_groups(self) -> None:
        """Read the parameter groups again, into the lists that the loop already uses."""
        optimizers, state = self.made.optimizers, self.strategy.optimizer_state
        # Only the module's parameters: an engine may have replaced some in the groups, whose gradients it drops.
        self._parameters = {
            id(o): [p for group in state(o)[0] for p in group] for o in optimizers
        }
        self._all[:] = [
            p for parameters in self._parameters.values() for p in parameters
        ]
        names: Sequence[str | None] = self.made.names or [None] * len(optimizers)
        self._runs = [
            (o, self._clip(o), self._how(o, name))
            for o, name in zip(optimizers, names, strict=True)
        ]
        if self.several is not None:
            self.several.update(
                {
                    n: parameters_of(o)
                    for n, o in zip(self.made.names or (), optimizers, strict=True)
                }
            )

    def replace(self, optimizers: list[Optimizer]) -> int:
        """Step other optimizers from here on; return the number of schedulers that still change a replaced one.

        Raises:
            ConfigurationError: their number or kind differs from what the run was composed for.
        """
        wrong = next((o for o in optimizers if self._is_given_closure(o)), None)
        reason = (
            "the optimizers have names"
            if self.several is not None
            else f"{len(optimizers)} in the place of {len(self.made.optimizers)}"
            if len(optimizers) != len(self.made.optimizers)
            else f"{self.strategy.name} steps an engine's own optimizer"
            if self.strategy.owns_step
            else f"{type(wrong).__name__} evaluates the loss again"
            if wrong is not None
            else None
        )
        if reason is not None:
            raise ConfigurationError(
                "these optimizers cannot be exchanged in a run",
                found=reason,
                fix="return them from configure_optimizers, or change their param_groups",
            )
        for optimizer in optimizers:
            self.strategy.prepare_optimizer(optimizer)
        before = set(map(id, self._all))
        self.made.optimizers[:] = optimizers
        self.read_groups()
        for parameter in self._all:
            if (
                id(parameter) not in before
            ):  # nothing has dropped its gradients since it was last stepped
                parameter.grad = None
        of = [
            getattr(config.scheduler, "optimizer", config.optimizer)
            for config in self.made.schedulers
        ]
        return sum(all(one is not optimizer for optimizer in optimizers) for one in of)

    def _clip(self, optimizer: Optimizer) -> Callable[[], Any] | None:
        if self._own_clip:
            return partial(
                self.module.configure_gradient_clipping,
                optimizer,
                *(self.clip or (None, None)),
            )
        if self.clip is None:
            return None
        return partial(
            self.strategy.clip_gradients, self._parameters[id(optimizer)], *self.clip
        )

    def _how(self, optimizer: Optimizer, name: str | None) -> Callable[[], Any]:
        step, module = self.strategy.bind_step(optimizer), self.module
        refused = refusal(optimizer, self.strategy, self.precision)
        if requires_closure(optimizer) and refused is not None:
            raise refused
        closures = self._closures(optimizer, name)
        if self._own_step:
            # A strategy may do more than the optimizer's step: average weights, reshard, replay a graph.
            given = (
                optimizer
                if step == optimizer.step
                else _SteppedByStrategy(optimizer, step)
            )
            return lambda: module.optimizer_step(
                module.current_epoch, self.window.index, given, closures.make()
            )
        if self._is_given_closure(optimizer):
            return lambda: step(closure=closures.make())
        return step

    def _is_given_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer gets a closure; never if an engine calls its step."""
        return not (calls_once(optimizer) or self.strategy.keeps_gradients)

    def _closures(self, optimizer: Optimizer, name: str | None) -> Closures[Any]:
        """The closures of one optimizer."""
        # The optimizer may decide by the loss, so every rank must see the same one.
        read = (
            self._loss_over_ranks
            if self._is_given_closure(optimizer)
            else lambda of: self.window.window_loss(of)
        )

        def again() -> Any:
            refused = refusal(optimizer, self.strategy, self.precision)
            if refused is not None:
                raise refused
            self._evaluate(optimizer)
            return read(name)

        return Closures(self._all, self.strategy.world, partial(read, name), again)

    def _loss_over_ranks(self, name: str | None) -> Any:
        """The loss of the window over all ranks."""
        group, loss = self.strategy.losses, self.window.window_loss(name)
        if group.size == 1:
            return loss
        if loss is None:
            loss = torch.zeros((), device=self.strategy.device)
        whole = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return group.all_reduce(whole) / self.strategy.gradient_divisor

    def _evaluate(self, optimizer: Optimizer) -> None:
        """Run the window again, without changing the gradients of other optimizers or counting in metric objects."""
        mine = {id(parameter) for parameter in self._parameters[id(optimizer)]}
        others = [
            (parameter, parameter.grad)
            for parameter in self._all
            if id(parameter) not in mine
        ]
        for parameter, _ in others:
            parameter.grad = None
        clip = next(clip for one, clip, _ in self._runs if one is optimizer)
        undo_metrics = remember_metrics([self.module])
        with self.window.again():
            self.strategy.forward_backward(self.window)
            for hook in self.bus.on_before_optimizer_step:
                hook(optimizer)
            if clip is not None:
                clip()
        undo_metrics()
        for parameter, gradient in others:
            parameter.grad = gradient

    @property
    def evaluates(self) -> bool:
        """Whether any optimizer may run a window again."""
        return self._own_step or self.draws

    @property
    def draws(self) -> bool:
        """Whether an optimizer runs a window again itself, with the random numbers of the first run."""
        return any(map(self._is_given_closure, self.made.optimizers))

    def droppable(self) -> list[nn.Parameter]:
        """The parameters whose gradients the loop drops; none if a hook or the module does that."""
        return [] if self._own_zero or self.bus.on_before_zero_grad else self._all

    def zero(self) -> None:
        """Drop all gradients."""
        for optimizer in self.made.optimizers:
            for hook in self.bus.on_before_zero_grad:
                hook(optimizer)
        if self._own_zero:
            for optimizer in self.made.optimizers:
                self.module.optimizer_zero_grad(
                    self.module.current_epoch, self.window.index, optimizer
                )
        else:
            for parameter in self._all:
                parameter.grad = None

    def step(self) -> None:
        """Step every optimizer, then the schedulers that count steps."""
        window = self.window
        if (
            window.uneven
        ):  # a rank without data does not know whether the other ranks skipped theirs
            window.contributed = any(
                row[0] for row in self.strategy.data.agree([window.contributed])
            )
        if not window.contributed:  # every micro-batch was skipped: nothing to apply
            return
        if not self.trained:
            self.trained = self.strategy.keeps_gradients or any(
                p.grad is not None for p in self._all
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
            if not self._skips:
                run()
            elif not self.precision.optimizer_step(optimizer, run):
                skipped.append(optimizer)
        if scales:
            self.precision.end_step()
        for config in self.made.schedulers:  # callbacks may have replaced them
            due = (
                config.interval == "step"
                and (window.progress.step + 1) % config.frequency == 0
            )
            if not due or (skipped and config.optimizer in skipped):
                continue
            if config.monitor is None:
                self.advance(config)
            else:
                self.waiting.append(config)
                self.wake()

    def wait(self, configs: Iterable[LRSchedulerConfig]) -> None:
        """Set the schedulers that wait for the values of the last step, in a run that resumes behind it."""
        self.waiting = list(configs)

    def advance_waiting(self) -> None:
        """Advance the schedulers that wait for the values of the last step. Every rank must call it."""
        waiting, self.waiting = self.waiting, []
        for config in waiting:
            self.advance(config)

    def end_epoch(self, completed: int) -> None:
        """Advance the schedulers that count epochs; ``completed`` epochs are over."""
        for config in self.made.schedulers:
            if config.interval == "epoch" and completed % config.frequency == 0:
                self.advance(config)

    def advance(self, config: LRSchedulerConfig) -> None:
        """Step one scheduler, with its metric if it wants one."""
        metric = None
        if config.monitor is not None and config.reduce_on_plateau:
            known = self.metrics()
            metric = known.get(config.monitor)
            if self.strategy.world.size > 1:
                # Between flushes values are local to a rank, and tensor-parallel ranks may differ in the last bit.
                metric = self.strategy.world.broadcast(
                    None if metric is None else float(metric)
                )  # sync point: decides
            if metric is None:
                if not config.strict:
                    return
                raise ConfigurationError(
                    f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged",
                    found=f"logged so far: {', '.join(sorted(known)) or 'nothing'}",
                    fix="log it before the scheduler advances, or pass strict=False",
                )
        if self._own_schedule:
            self.module.lr_scheduler_step(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)


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
        if (
            not self.trained
        ):  # looked for before the step, which may drop gradients itself
            self.trained = has_gradients(self.optimizer)
        if closure is not None:
            kwargs["closure"] = closure if self.trained else self._watched(closure)
        returned: list[Any] = []
        self._precision.optimizer_step(
            self.optimizer, lambda: returned.append(self._step(**kwargs))
        )
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
    """Manual optimization: the loop steps nothing; it adapts the loss scale, and weights the backward."""

    evaluates = draws = False
    several = None
    waiting: Sequence[LRSchedulerConfig] = ()

    def __init__(
        self,
        made: Optimizers,
        module: TrainModule,
        strategy: Strategy,
        precision: Precision,
        bus: Bus,
    ) -> None:
        self.made, self.module, self.strategy, self.precision, self.bus = (
            made,
            module,
            strategy,
            precision,
            bus,
        )
        self.window: MicroBatches | None = None
        self._backward = strategy.bind_backward(module.backward) or module.backward
        self.optimizers = [
            ManualOptimizer(o, strategy, precision, bus, module)
            for o in made.optimizers
        ]

    @property
    def trained(self) -> bool | None:
        """Whether a step has had a gradient; None before the first step."""
        return max(
            (one.trained for one in self.optimizers if one.trained is not None),
            default=None,
        )

    def replace(self, optimizers: list[Optimizer]) -> int:
        """Refused: the user's own code steps them."""
        raise ConfigurationError(
            "in manual optimization the loop steps no optimizers, so it cannot exchange them",
            fix="return all optimizers from configure_optimizers, and step one of self.optimizers()",
        )

    def read_groups(self) -> None:
        """Bind the steps again, after parameter groups have changed."""
        for optimizer in self.optimizers:
            optimizer._step = self.strategy.bind_step(optimizer.optimizer)

    def step(self) -> None:
        """End a window: the user has stepped already."""
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

    def wait(self, configs: Iterable[LRSchedulerConfig]) -> None:
        """The user advances schedulers."""

    def advance_waiting(self) -> None:
        """The user advances schedulers."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Weight and scale the loss, and run the module's backward, which averages gradients over the ranks."""
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


def _nothing() -> None:
    """Do nothing: no loop waits."""
