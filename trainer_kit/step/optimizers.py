"""Read what the user's ``configure_optimizers`` returns: optimizers, schedulers, and whose parameters they step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

from lightning_utilities.core.overrides import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.module import TrainModule
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "LRSchedulerConfig",
    "OptimizerProxy",
    "Optimizers",
    "check_parameters",
    "configure_optimizers",
    "drop_gradients",
    "parameters_of",
]

# What `configure_optimizers` returns, or a part of it: nothing is known of it before it is checked.
_Returned: TypeAlias = Any
# A parameter group, defaults or state of torch's optimizers.
_Group: TypeAlias = dict[str, Any]

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
        frequency: intervals from one advance to the next, counted over the whole run.
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

    def allow_missing_metric(self) -> None:
        """Let the scheduler wait, without an error, while the metric that it monitors has no value."""
        self.strict = False

    def never_advance(self) -> None:
        """Put the scheduler's next step out of reach."""
        self.interval = "epoch"
        self.frequency = sys.maxsize


@dataclass
class Optimizers:
    """The result of ``configure_optimizers`` in one form. ``names`` is None unless the optimizers were named."""

    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    names: list[str] | None = None


def configure_optimizers(
    module: TrainModule, strategy: Strategy | None = None
) -> Optimizers:
    """Call ``module.configure_optimizers`` and read every form it may return.

    Args:
        module: the user's.
        strategy: whose configuration may name what the module does not.
    """
    # The sections "optimizer" and "scheduler" of an engine's configuration: DeepSpeed's file may name both.
    sections = strategy.sections if strategy is not None else None
    has_section = sections is not None and sections.optimizer is not None
    is_configured = is_overridden("configure_optimizers", module, TrainModule)
    if not is_configured and not has_section:
        raise ConfigurationError(
            f"{type(module).__name__} has no optimizer",
            fix="override configure_optimizers (return None to train without)",
        )
    returned = None
    if is_configured:
        returned = _call_configure(module)
    if sections is not None and has_section:
        if returned is not None:
            sections.refuse_both("optimizer", returned)
        trained = [
            parameter for parameter in module.parameters() if parameter.requires_grad
        ]
        returned = sections.make_optimizer(trained)
    configured = _read(returned, module)
    if (
        sections is None
        or sections.scheduler is None
        or len(configured.optimizers) != 1
    ):
        return configured
    if configured.schedulers:
        sections.refuse_both("scheduler", configured.schedulers[0].scheduler)
    (optimizer,) = configured.optimizers
    assert strategy is not None
    scheduler = sections.make_scheduler(optimizer, strategy.device)
    configured.schedulers.append(
        LRSchedulerConfig(scheduler, "step", optimizer=optimizer)
    )
    return configured


def _call_configure(module: TrainModule) -> _Returned:
    try:
        return module.configure_optimizers()
    except ValueError as error:
        # By torch's words: any other ValueError is the user's.
        if "empty parameter list" not in str(error):
            raise
        raise _no_parameters("an optimizer", module) from error


def _no_parameters(optimizer: str, module: TrainModule) -> ConfigurationError:
    name = type(module).__name__
    parameters = list(module.parameters())
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    return ConfigurationError(
        f"{optimizer} of {name}.configure_optimizers received no parameters that require a gradient",
        found=f"{name} has {plural(len(parameters), 'parameter')}, {frozen} of them frozen",
        fix="pass it self.parameters(); layers in a plain list or dict must be in nn.ModuleList or nn.ModuleDict",
    )


def check_parameters(
    configured: Optimizers,
    module: TrainModule,
    strategy: Strategy,
    say: Callable[[str], None],
) -> None:
    """Refuse an optimizer that steps nothing of the module; every rank must call it.

    Args:
        configured: the optimizers, as the strategy has prepared them.
        module: the user's.
        strategy: knows whose parameters an engine has put others in the place of.
        say: prints a line about parameters that are not the module's.

    Raises:
        ConfigurationError: none of an optimizer's parameters is one of the module.
    """
    parameters_of_module = {id(parameter) for parameter in module.parameters()}
    for optimizer in configured.optimizers:
        groups, _ = strategy.optimizer_state(optimizer)
        parameters = list(chain.from_iterable(groups))
        foreign = sum(
            id(parameter) not in parameters_of_module for parameter in parameters
        )
        name, owner = type(optimizer).__name__, type(module).__name__
        # All foreign is a mistake; some may be parameters of a loss or of a second model that the user keeps.
        if parameters and foreign == len(parameters):
            raise ConfigurationError(
                f"{name} updates parameters that do not belong to {owner}",
                found=f"{plural(foreign, 'parameter')}, of which {owner} has none",
                fix="create it in configure_optimizers from self.parameters(); a copy of the module, and layers in a"
                " plain list or dict, have other parameters",
            )
        if foreign:
            say(
                f"{foreign} of {plural(len(parameters), 'parameter')} of {name} are not {owner}'s:"
                " checkpoints do not hold their values"
            )


def _read(returned: _Returned, module: TrainModule) -> Optimizers:
    """What ``configure_optimizers`` returned, checked."""
    configured = _sort_out(returned)
    for optimizer in configured.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                "configure_optimizers returned no optimizer",
                found=repr(type(optimizer)),
            )
        if not parameters_of(optimizer):
            raise _no_parameters(type(optimizer).__name__, module)
    # In manual optimization the module steps optimizers and schedulers itself, with whatever metric it has.
    if module.automatic_optimization:
        _check_schedulers(configured)
        _check_names(configured)
    return configured


def _sort_out(returned: _Returned) -> Optimizers:
    """Read every form that ``configure_optimizers`` may return."""
    source = "configure_optimizers()"
    if returned is None:
        return Optimizers([], [])
    if isinstance(returned, Mapping) and "optimizer" not in returned:
        values = {f"{source}[{name!r}]": value for name, value in returned.items()}
        return _join(values, names=[str(name) for name in returned])
    # Lightning's form: ([optimizer, ...], [scheduler, ...]).
    if _is_pair_of_lists(returned):
        optimizers, schedulers = returned
        configs = [
            _scheduler_config(scheduler, f"{source}[1]") for scheduler in schedulers
        ]
        return Optimizers(list(optimizers), configs)
    # A list may hold optimizers, or dicts of an optimizer and its scheduler.
    if isinstance(returned, (list, tuple)):
        return _join(
            {f"{source}[{index}]": value for index, value in enumerate(returned)}
        )
    return _join({source: returned})


def _is_pair_of_lists(returned: _Returned) -> bool:
    """Whether these are optimizers and schedulers."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        return False
    return all(isinstance(objects, (list, tuple)) for objects in returned)


def _join(
    values: Mapping[str, _Returned], names: list[str] | None = None
) -> Optimizers:
    """The optimizers, each with its schedulers; keys say where a value stands in what was returned."""
    joined = Optimizers([], [], names)  # schedulers keep the order of their optimizers
    for source, value in values.items():
        optimizer, configs = _optimizer_and_schedulers(value, source)
        joined.optimizers.append(optimizer)
        joined.schedulers.extend(configs)
    return joined


def _optimizer_and_schedulers(
    value: _Returned, source: str
) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    if isinstance(value, Optimizer):
        return value, []
    if not isinstance(value, Mapping) or "optimizer" not in value:
        fix = "return an optimizer, a list, or a dict with 'optimizer'"
        # A list is an optimizer's and a scheduler's, in two lists; one list of both is the usual mistake.
        if isinstance(value, (LRScheduler, ReduceLROnPlateau)):
            fix = "return [optimizer], [scheduler]"
        raise ConfigurationError(
            f"{source} is not an optimizer", found=type(value).__name__, fix=fix
        )
    unknown = set(value) - {"optimizer", "lr_scheduler", "monitor", "frequency"}
    if unknown:
        raise ConfigurationError(
            f"{source} has an unknown key",
            found=repr(min(unknown)),
            fix=did_you_mean(
                str(min(unknown)), ["optimizer", "lr_scheduler", "monitor"]
            ),
        )
    optimizer = value["optimizer"]
    if value.get("lr_scheduler") is None:
        return optimizer, []
    config = _scheduler_config(value["lr_scheduler"], source, value.get("monitor"))
    return optimizer, [config]


def _scheduler_config(
    value: _Returned, source: str, monitor: str | None = None
) -> LRSchedulerConfig:
    """A scheduler or the dict of its options, checked; ``monitor`` is used where the dict has none."""
    options: _Group = {"scheduler": value}
    if isinstance(value, Mapping):
        options = dict(value)
    for key in options:
        if key not in _SCHEDULER_KEYS:
            raise ConfigurationError(
                f"{source}: unknown key {key!r} of lr_scheduler",
                fix=did_you_mean(str(key), _SCHEDULER_KEYS),
            )
    if "scheduler" not in options:
        raise ConfigurationError(f"{source}: lr_scheduler needs a key 'scheduler'")
    scheduler = options["scheduler"]
    options["monitor"] = options.get("monitor") or monitor
    options["optimizer"] = getattr(scheduler, "optimizer", None)
    if not options.get("reduce_on_plateau"):
        options["reduce_on_plateau"] = isinstance(scheduler, ReduceLROnPlateau)
    config = LRSchedulerConfig(**options)
    # Users give these as strings and numbers, which the dataclass does not check.
    if config.interval not in ("epoch", "step"):
        raise ConfigurationError(
            f"{source}: interval must be 'epoch' or 'step'", found=repr(config.interval)
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(
            f"{source}: frequency must be an integer ≥ 1",
            found=repr(config.frequency),
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigurationError(
            f"{source}: a scheduler has a step method", found=type(scheduler).__name__
        )
    return config


def _check_schedulers(configured: Optimizers) -> None:
    for config in configured.schedulers:
        if config.reduce_on_plateau and config.monitor is None:
            raise ConfigurationError(
                f"{type(config.scheduler).__name__} needs a metric",
                fix='return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}',
            )


def _check_names(configured: Optimizers) -> None:
    """Refuse several optimizers without names, and a parameter that two of them step."""
    if len(configured.optimizers) > 1 and configured.names is None:
        raise ConfigurationError(
            "several optimizers in automatic optimization need names",
            found=f"{plural(len(configured.optimizers), 'optimizer')} in a list",
            fix='return {"generator": opt_g, "discriminator": opt_d} and from training_step one loss for each name, '
            "or set automatic_optimization = False",
        )
    # Each named loss has a backward of its own, into the parameters of its optimizer alone.
    owners: dict[int, str] = {}
    for name, optimizer in zip(
        configured.names or [], configured.optimizers, strict=False
    ):
        for parameter in parameters_of(optimizer):
            if owners.setdefault(id(parameter), name) != name:
                raise ConfigurationError(
                    "two named optimizers share a parameter",
                    found=f"{owners[id(parameter)]!r} and {name!r}",
                    fix="pass each parameter to one optimizer only",
                )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, in order."""
    groups = (group["params"] for group in optimizer.param_groups)
    return list(chain.from_iterable(groups))


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients of these parameters."""
    # None and not zero: an optimizer skips what has no gradient, and zeros would move its averages.
    for parameter in parameters:
        parameter.grad = None


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
        if isinstance(optimizer, OptimizerProxy):
            return optimizer.optimizer
        return optimizer

    @property
    def param_groups(self) -> list[_Group]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[_Group]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> _Group:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: _Group) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        # While it is being copied or unpickled there is no `optimizer` yet: looking it up would not end.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> _Group:
        # torch's schedulers replace `step` by a closure, which torch's optimizers do not pickle either.
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __setstate__(self, state: _Group) -> None:
        # torch's own `__setstate__` would profile `step` of this class from then on.
        vars(self).update(state)

    def add_param_group(self, param_group: _Group) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> _Group:
        """The state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))

    def train(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        if hasattr(self.optimizer, "train"):
            return self.optimizer.train()
        return None

    def eval(self) -> Any:
        """For optimizers that have modes (schedule-free ones)."""
        if hasattr(self.optimizer, "eval"):
            return self.optimizer.eval()
        return None

    def __repr__(self) -> str:
        return repr(self.optimizer)
