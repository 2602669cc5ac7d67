"""Optimizers and schedulers: reading what the user configured, and stepping them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.module import TrainModule
from trainer_kit.core.optimizer_proxy import OptimizerProxy
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus
from trainer_kit.step.closures import Closures, calls_once, refusal, requires_closure
from trainer_kit.strategies.strategy import Strategy

__all__ = ["LRSchedulerConfig", "Optimizers", "Stepper", "check_parameters", "configure_optimizers", "parameters_of"]

_SCHEDULER_KEYS: Final = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass
class LRSchedulerConfig:
    """One scheduler and when it advances.

    Attributes:
        scheduler: anything with ``step``.
        interval: ``"epoch"`` or ``"step"`` (optimizer steps).
        frequency: every so many of them, counted over the whole run.
        monitor: the metric handed to ``step``, for schedulers that want one.
        strict: whether a missing metric is an error.
        name: how ``LearningRateMonitor`` calls it.
        reduce_on_plateau: whether ``step`` takes the metric.
        optimizer: whose steps it counts.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    optimizer: Optimizer | None = None


@dataclass
class Optimizers:
    """What ``configure_optimizers`` returned, in one form. ``names`` is None unless the optimizers were named."""

    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    names: list[str] | None = None


def configure_optimizers(module: TrainModule, strategy: Strategy | None = None) -> Optimizers:
    """Call ``module.configure_optimizers`` and read every form it may return.

    Args:
        module: the user's.
        strategy: whose configuration may name what the module does not.
    """
    sections: Any = None if strategy is None else strategy.sections
    named = sections is not None and sections.optimizer is not None
    if is_overridden("configure_optimizers", module, TrainModule):
        given = _call(module)
        if named and given is not None:
            sections.refuse_both("optimizer", given)
    elif not named:
        raise ConfigurationError(
            f"{type(module).__name__} has no optimizer",
            fix="override configure_optimizers (return None to train without)",
        )
    else:
        given = None
    if given is None and named:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        given = sections.make_optimizer(trained)
    made = _read(given, module)
    if strategy is not None and sections is not None and sections.scheduler is not None and len(made.optimizers) == 1:
        if made.schedulers:
            sections.refuse_both("scheduler", made.schedulers[0].scheduler)
        scheduler = sections.make_scheduler(made.optimizers[0], strategy.device)
        made.schedulers.append(LRSchedulerConfig(scheduler, "step", optimizer=made.optimizers[0]))
    return made


def _call(module: TrainModule) -> Any:
    try:
        return module.configure_optimizers()
    except ValueError as error:
        if "empty parameter list" not in str(error):  # torch's words
            raise
        raise _no_parameters("an optimizer", module) from error


def _no_parameters(optimizer: str, module: TrainModule) -> ConfigurationError:
    frozen = sum(not parameter.requires_grad for parameter in module.parameters())
    return ConfigurationError(
        f"{optimizer} of {type(module).__name__}.configure_optimizers has no parameters to train",
        found=f"{type(module).__name__} has {sum(1 for _ in module.parameters())} parameters, {frozen} of them frozen",
        fix="pass it self.parameters(); layers in a plain list or dict belong into nn.ModuleList or nn.ModuleDict",
    )


def check_parameters(made: Optimizers, module: TrainModule, strategy: Strategy, say: Callable[[str], None]) -> None:
    """Refuse an optimizer that steps nothing of the module; every rank must call it.

    Args:
        made: the optimizers, as the strategy has prepared them.
        module: the user's.
        strategy: knows whose parameters an engine has put others in the place of.
        say: prints a line about parameters that are not the module's.

    Raises:
        ConfigurationError: none of an optimizer's parameters is one of the module.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in made.optimizers:
        own = [parameter for group in strategy.optimizer_state(optimizer)[0] for parameter in group]
        others = sum(id(parameter) not in known for parameter in own)
        name, owner = type(optimizer).__name__, type(module).__name__
        if own and others == len(own):
            raise ConfigurationError(
                f"{name} steps parameters that are not {owner}'s",
                found=f"{others} parameters, of which {owner} has none",
                fix="make it in configure_optimizers from self.parameters(); a copy of the module, and layers in a"
                " plain list or dict, have other parameters",
            )
        if others:
            say(f"{others} of {len(own)} parameters of {name} are not {owner}'s: no checkpoint holds their values")


def _read(given: Any, module: TrainModule) -> Optimizers:
    if given is None:
        return Optimizers([], [])
    if isinstance(given, Mapping) and "optimizer" not in given:
        parts = {str(name): _one(value, f"configure_optimizers()[{name!r}]") for name, value in given.items()}
        made = Optimizers([o for o, _ in parts.values()], [s for _, ss in parts.values() for s in ss], list(parts))
    elif isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, (list, tuple)) for part in given):
        made = Optimizers(list(given[0]), [_scheduler(s, "configure_optimizers()[1]") for s in given[1]])
    elif isinstance(given, (list, tuple)):
        pairs = [_one(value, f"configure_optimizers()[{i}]") for i, value in enumerate(given)]
        made = Optimizers([o for o, _ in pairs], [s for _, ss in pairs for s in ss])
    else:
        optimizer, schedulers = _one(given, "configure_optimizers()")
        made = Optimizers([optimizer], schedulers)
    for optimizer in made.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError("configure_optimizers returned no optimizer", found=repr(type(optimizer)))
        if not parameters_of(optimizer):
            raise _no_parameters(type(optimizer).__name__, module)
    _check(made, module)
    return made


def _one(value: Any, where: str) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    if isinstance(value, Optimizer):
        return value, []
    if isinstance(value, Mapping) and "optimizer" in value:
        unknown = set(value) - {"optimizer", "lr_scheduler", "monitor", "frequency"}
        if unknown:
            raise ConfigurationError(
                f"{where} has an unknown key", found=repr(min(unknown)), fix="use optimizer, lr_scheduler, monitor"
            )
        optimizer = value["optimizer"]
        if value.get("lr_scheduler") is None:
            return optimizer, []
        config = _scheduler(value["lr_scheduler"], where)
        config.monitor = config.monitor or value.get("monitor")
        return optimizer, [config]
    raise ConfigurationError(
        f"{where} is no optimizer",
        found=type(value).__name__,
        fix="return an optimizer, a list, or a dict with 'optimizer'",
    )


def _scheduler(value: Any, where: str) -> LRSchedulerConfig:
    if isinstance(value, Mapping):
        for key in value:
            if key not in _SCHEDULER_KEYS:
                raise ConfigurationError(
                    f"{where}: unknown key {key!r} of lr_scheduler", fix=did_you_mean(str(key), _SCHEDULER_KEYS)
                )
        if "scheduler" not in value:
            raise ConfigurationError(f"{where}: lr_scheduler needs a key 'scheduler'")
        config = LRSchedulerConfig(**value)
    else:
        config = LRSchedulerConfig(value)
    if config.interval not in ("epoch", "step"):
        raise ConfigurationError(f"{where}: interval is 'epoch' or 'step'", found=repr(config.interval))
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(f"{where}: frequency is a whole number from 1", found=repr(config.frequency))
    if not callable(getattr(config.scheduler, "step", None)):
        raise ConfigurationError(f"{where}: a scheduler has a step method", found=type(config.scheduler).__name__)
    config.reduce_on_plateau = config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau)
    config.optimizer = getattr(config.scheduler, "optimizer", None)
    return config


def _check(made: Optimizers, module: TrainModule) -> None:
    if not module.automatic_optimization:
        return  # the module steps its schedulers itself
    for config in made.schedulers:
        if config.reduce_on_plateau and config.monitor is None:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} needs a metric",
                fix='return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}',
            )
    if len(made.optimizers) > 1 and made.names is None:
        raise ConfigurationError(
            "several optimizers in automatic optimization need names",
            found=f"{len(made.optimizers)} optimizers in a list",
            fix='return {"generator": opt_g, "discriminator": opt_d} and from training_step one loss for each name, '
            "or set automatic_optimization = False",
        )
    owners: dict[int, str] = {}
    for name, optimizer in zip(made.names or [], made.optimizers, strict=False):
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), name) != name:
                raise ConfigurationError(
                    "two named optimizers share a parameter",
                    found=f"{owners[id(parameter)]!r} and {name!r}",
                    fix="give each parameter to one optimizer",
                )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@final
class _SteppedByStrategy(OptimizerProxy):
    """What an overridden ``optimizer_step`` is given where the strategy steps an optimizer in a way of its own."""

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
    """What happens between the last backward of a window and the next window, in automatic optimization.

    Args:
        made: the optimizers and schedulers.
        module: its overridden ``optimizer_step`` and the like are called.
        strategy: clips, and says how an optimizer is stepped.
        precision: unscales, and skips a step whose gradients overflowed.
        bus: ``on_before_zero_grad``, ``on_before_optimizer_step``.
        clip: (value, algorithm), or None.
        metrics: what schedulers monitor.

    Attributes:
        several: the parameters of each optimizer, where they are named.
        trained: whether a step has had a gradient; None before the first step with a loss.
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
        self.made, self.module, self.strategy, self.precision, self.bus = made, module, strategy, precision, bus
        self.clip, self.metrics = clip, metrics
        self._skips = precision.skips
        self.window: Any = None
        self.trained: bool | None = None
        self._own_zero = is_overridden("optimizer_zero_grad", module, TrainModule)
        self._own_clip = is_overridden("configure_gradient_clipping", module, TrainModule)
        self._own_step = is_overridden("optimizer_step", module, TrainModule)
        self._own_schedule = is_overridden("lr_scheduler_step", module, TrainModule)
        self._all: list[nn.Parameter] = []
        self.several: dict[str, list[nn.Parameter]] | None = None if made.names is None else {}
        self.read_groups()

    def read_groups(self) -> None:
        """What the optimizers have by now is dropped, clipped and stepped; in the lists that the loop holds already."""
        optimizers, state = self.made.optimizers, self.strategy.optimizer_state
        # The module's own: an engine may have put others into the groups, whose gradients are its business.
        self._parameters = {id(o): [p for group in state(o)[0] for p in group] for o in optimizers}
        self._all[:] = [p for parameters in self._parameters.values() for p in parameters]
        names: Sequence[str | None] = self.made.names or [None] * len(optimizers)
        self._runs = [(o, self._clip(o), self._how(o, name)) for o, name in zip(optimizers, names, strict=True)]
        if self.several is not None:
            self.several.update({n: parameters_of(o) for n, o in zip(self.made.names or (), optimizers, strict=True)})

    def _clip(self, optimizer: Optimizer) -> Callable[[], Any] | None:
        if self._own_clip:
            return partial(self.module.configure_gradient_clipping, optimizer, *(self.clip or (None, None)))
        if self.clip is None:
            return None
        return partial(self.strategy.clip_gradients, self._parameters[id(optimizer)], *self.clip)

    def _how(self, optimizer: Optimizer, name: str | None) -> Callable[[], Any]:
        step, module = self.strategy.bind_step(optimizer), self.module
        refused = refusal(optimizer, self.strategy, self.precision)
        if requires_closure(optimizer) and refused is not None:
            raise refused
        closures = self._closures(optimizer, name)
        if self._own_step:
            # A strategy may do more than the optimizer's own step: average weights, reshard, run a graph.
            given = optimizer if step == optimizer.step else _SteppedByStrategy(optimizer, step)
            return lambda: module.optimizer_step(module.current_epoch, self.window.index, given, closures.make())
        if self._is_given_closure(optimizer):
            return lambda: step(closure=closures.make())
        return step

    def _is_given_closure(self, optimizer: Optimizer) -> bool:
        """Whether it may compute the loss by itself; not where an engine calls its step."""
        return not (calls_once(optimizer) or self.strategy.keeps_gradients)

    def _closures(self, optimizer: Optimizer, name: str | None) -> Closures:
        """What makes the closures of one optimizer."""
        # It may decide by the loss, which must then be the same on every rank.
        read = self._loss_over_ranks if self._is_given_closure(optimizer) else lambda of: self.window.window_loss(of)

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
        """Run the window again; gradients of other optimizers stay as they are."""
        mine = {id(parameter) for parameter in self._parameters[id(optimizer)]}
        others = [(parameter, parameter.grad) for parameter in self._all if id(parameter) not in mine]
        for parameter, _ in others:
            parameter.grad = None
        clip = next(clip for one, clip, _ in self._runs if one is optimizer)
        with self.window.again():
            self.strategy.forward_backward(self.window)
            for hook in self.bus.on_before_optimizer_step:
                hook(optimizer)
            if clip is not None:
                clip()
        for parameter, gradient in others:
            parameter.grad = gradient

    @property
    def evaluates(self) -> bool:
        """Whether any optimizer may run a window again."""
        return self._own_step or self.draws

    @property
    def draws(self) -> bool:
        """Whether one does so by itself, with the random numbers of the first run."""
        return any(map(self._is_given_closure, self.made.optimizers))

    def droppable(self) -> list[nn.Parameter]:
        """Whose gradients are dropped, where nobody wants to hear of it or to do it himself."""
        return [] if self._own_zero or self.bus.on_before_zero_grad else self._all

    def zero(self) -> None:
        """Drop all gradients."""
        for optimizer in self.made.optimizers:
            for hook in self.bus.on_before_zero_grad:
                hook(optimizer)
        if self._own_zero:
            for optimizer in self.made.optimizers:
                self.module.optimizer_zero_grad(self.module.current_epoch, self.window.index, optimizer)
        else:
            for parameter in self._all:
                parameter.grad = None

    def step(self) -> None:
        """Step every optimizer, then the schedulers that count steps."""
        window = self.window
        if window.uneven:  # a rank without data of its own does not know whether the others skipped theirs
            window.contributed = any(row[0] for row in self.strategy.data.agree([window.contributed]))
        if not window.contributed:  # every micro-batch was skipped: nothing to apply
            return
        if not self.trained:
            self.trained = self.strategy.keeps_gradients or any(p.grad is not None for p in self._all)
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
        for config in self.made.schedulers:  # callbacks may put others in their place
            due = config.interval == "step" and (window.progress.step + 1) % config.frequency == 0
            if due and not (skipped and config.optimizer in skipped):
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
                # Between flushes values are each rank's own, and those of tensor ranks may differ in their last bit.
                metric = self.strategy.world.broadcast(None if metric is None else float(metric))  # sync point: decides
            if metric is None:
                if not config.strict:
                    return
                raise ConfigurationError(
                    f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which nobody logged",
                    found=f"logged so far: {', '.join(sorted(known)) or 'nothing'}",
                    fix="log it before the scheduler advances, or pass strict=False",
                )
        if self._own_schedule:
            self.module.lr_scheduler_step(config.scheduler, metric)
        elif metric is None:
            config.scheduler.step()
        else:
            config.scheduler.step(metric)
