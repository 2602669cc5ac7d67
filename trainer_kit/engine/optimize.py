"""Optimizers and schedulers: reading what the user configured, and stepping them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.module import TrainModule
from trainer_kit.engine.bus import Bus
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = ["LRSchedulerConfig", "Optimizers", "Stepper", "configure_optimizers", "parameters_of"]

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
        given = module.configure_optimizers()
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
    for config in made.schedulers:
        if config.reduce_on_plateau and config.monitor is None:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} needs a metric",
                fix='return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}',
            )
    if not module.automatic_optimization:
        return
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
        self.replay: Callable[[], Any] | None = None
        self.window: Any = None
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
        self._runs = [(o, self._how(o)) for o in optimizers]
        if self.several is not None:
            self.several.update({n: parameters_of(o) for n, o in zip(self.made.names or (), optimizers, strict=True)})

    def _how(self, optimizer: Optimizer) -> Callable[[], Any]:
        step = self.strategy.bind_step(optimizer)
        evaluates_again = _needs_closure(optimizer)
        if evaluates_again and self.strategy.world.size > 1:
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates the loss again and again, which needs one process",
                fix="use devices=1, or another optimizer",
            )
        if evaluates_again and self.precision.scales:
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot run with scaled gradients", fix='use precision="32-true"'
            )
        if self._own_step:
            module = self.module
            return lambda: module.optimizer_step(
                module.current_epoch, self.window.index, optimizer, self._closure(evaluates_again)
            )
        if evaluates_again:
            return lambda: step(self._closure(True))
        return step

    def _closure(self, evaluates_again: bool) -> Callable[[], Any]:
        """The loss that is already computed; for optimizers that ask again, the window run again."""
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and evaluates_again and self.replay is not None:
                self.replay()
            return self.window.window_loss

        return closure

    @property
    def evaluates_again(self) -> bool:
        """Whether any optimizer re-runs the window."""
        return any(_needs_closure(o) for o in self.made.optimizers)

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
        scales = self.precision.scales
        skipped: list[Optimizer] = []
        for optimizer, run in self._runs:
            if scales:
                self.precision.unscale_gradients(optimizer)
            for hook in self.bus.on_before_optimizer_step:
                hook(optimizer)
            if self._own_clip:
                self.module.configure_gradient_clipping(optimizer, *(self.clip or (None, None)))
            elif self.clip is not None:
                self.strategy.clip_gradients(self._parameters[id(optimizer)], *self.clip)
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


def _needs_closure(optimizer: Optimizer) -> bool:
    import inspect

    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
