"""Read what the user's ``configure_optimizers`` returns: optimizers, schedulers, and whose parameters they step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.module import TrainModule
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "LRSchedulerConfig",
    "OptimizerProxy",
    "Optimizers",
    "check_parameters",
    "configure_optimizers",
    "parameters_of",
]

_SCHEDULER_KEYS: Final = (
    "scheduler",
    "interval",
    "frequency",
    "monitor",
    "strict",
    "name",
    "reduce_on_plateau",
)


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
    """The result of ``configure_optimizers`` in one form. ``names`` is None unless the optimizers were named."""

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
    if (
        strategy is not None
        and sections is not None
        and sections.scheduler is not None
        and len(made.optimizers) == 1
    ):
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
        f"{optimizer} of {type(module).__name__}.configure_optimizers received no parameters that require a gradient",
        found=f"{type(module).__name__} has {sum(1 for _ in module.parameters())} parameters, {frozen} of them frozen",
        fix="pass it self.parameters(); layers in a plain list or dict must be in nn.ModuleList or nn.ModuleDict",
    )


def check_parameters(
    made: Optimizers, module: TrainModule, strategy: Strategy, say: Callable[[str], None]
) -> None:
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
                f"{name} updates parameters that do not belong to {owner}",
                found=f"{others} parameters, of which {owner} has none",
                fix="create it in configure_optimizers from self.parameters(); a copy of the module, and layers in a"
                " plain list or dict, have other parameters",
            )
        if others:
            say(
                f"{others} of {len(own)} parameters of {name} are not {owner}'s: checkpoints do not hold their values"
            )


def _read(given: Any, module: TrainModule) -> Optimizers:
    if given is None:
        return Optimizers([], [])
    if isinstance(given, Mapping) and "optimizer" not in given:
        parts = {
            str(name): _one(value, f"configure_optimizers()[{name!r}]")
            for name, value in given.items()
        }
        made = Optimizers(
            [o for o, _ in parts.values()], [s for _, ss in parts.values() for s in ss], list(parts)
        )
    elif (
        isinstance(given, tuple)
        and len(given) == 2
        and all(isinstance(part, (list, tuple)) for part in given)
    ):
        made = Optimizers(
            list(given[0]), [_scheduler(s, "configure_optimizers()[1]") for s in given[1]]
        )
    elif isinstance(given, (list, tuple)):
        pairs = [_one(value, f"configure_optimizers()[{i}]") for i, value in enumerate(given)]
        made = Optimizers([o for o, _ in pairs], [s for _, ss in pairs for s in ss])
    else:
        optimizer, schedulers = _one(given, "configure_optimizers()")
        made = Optimizers([optimizer], schedulers)
    for optimizer in made.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                "configure_optimizers returned no optimizer", found=repr(type(optimizer))
            )
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
                f"{where} has an unknown key",
                found=repr(min(unknown)),
                fix=did_you_mean(str(min(unknown)), ["optimizer", "lr_scheduler", "monitor"]),
            )
        optimizer = value["optimizer"]
        if value.get("lr_scheduler") is None:
            return optimizer, []
        config = _scheduler(value["lr_scheduler"], where)
        config.monitor = config.monitor or value.get("monitor")
        return optimizer, [config]
    raise ConfigurationError(
        f"{where} is not an optimizer",
        found=type(value).__name__,
        fix="return [optimizer], [scheduler]"
        if isinstance(value, (LRScheduler, ReduceLROnPlateau))
        else "return an optimizer, a list, or a dict with 'optimizer'",
    )


def _scheduler(value: Any, where: str) -> LRSchedulerConfig:
    if isinstance(value, Mapping):
        for key in value:
            if key not in _SCHEDULER_KEYS:
                raise ConfigurationError(
                    f"{where}: unknown key {key!r} of lr_scheduler",
                    fix=did_you_mean(str(key), _SCHEDULER_KEYS),
                )
        if "scheduler" not in value:
            raise ConfigurationError(f"{where}: lr_scheduler needs a key 'scheduler'")
        config = LRSchedulerConfig(**value)
    else:
        config = LRSchedulerConfig(value)
    if config.interval not in ("epoch", "step"):
        raise ConfigurationError(
            f"{where}: interval is 'epoch' or 'step'", found=repr(config.interval)
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(
            f"{where}: frequency is a whole number from 1", found=repr(config.frequency)
        )
    if not callable(getattr(config.scheduler, "step", None)):
        raise ConfigurationError(
            f"{where}: a scheduler has a step method", found=type(config.scheduler).__name__
        )
    config.reduce_on_plateau = config.reduce_on_plateau or isinstance(
        config.scheduler, ReduceLROnPlateau
    )
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
                    fix="pass each parameter to one optimizer only",
                )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class OptimizerProxy(Optimizer):
    """Base of optimizers that override ``step`` and ``zero_grad`` of another one.

    Groups, state and defaults are those of ``optimizer``, so torch's schedulers take the proxy in its place.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ would make new groups and state.
        self.optimizer = optimizer

    @staticmethod
    def unwrapped(optimizer: Any) -> Any:
        """The user's optimizer below a proxy; anything else is returned as it is."""
        return optimizer.optimizer if isinstance(optimizer, OptimizerProxy) else optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # torch's schedulers replace `step` by a closure, which torch's optimizers do not pickle either.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # torch's own would profile `step` of this class from then on

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def train(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        return self.optimizer.train() if hasattr(self.optimizer, "train") else None

    def eval(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        return self.optimizer.eval() if hasattr(self.optimizer, "eval") else None

    def __repr__(self) -> str:
        return repr(self.optimizer)
