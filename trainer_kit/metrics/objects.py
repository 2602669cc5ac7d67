"""torchmetrics objects inside an epoch: their running state is not in the module's ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from trainer_kit.core.tensors import map_tensors, move_to_device
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "LAST_VALUE",
    "MetricObject",
    "count_once",
    "is_metric",
    "name_in_module",
    "on_host",
    "remember_metrics",
    "restore_running",
    "running_states",
]

MetricObject: TypeAlias = Any
"""A metric of torchmetrics, which need not be installed: `is_metric` knows one by an attribute of its class."""
_States: TypeAlias = Mapping[str, Mapping[str, object]]
"""The states of metrics, by their names in the module."""

# Private names of torchmetrics, checked with 1.9. Its `update_count`, `compute` and `reset` are public, but no public
# name restores what they read, and none returns the value of the last batch.
LAST_VALUE: Final = "_forward_cache"
"""The attribute with the value of the last batch; without it a metric has no value per step."""
_UPDATE_COUNT: Final = "_update_count"
"""The attribute by which `compute` and `reset` know that there was an update; without it a resumed value is empty."""
_COMPUTED: Final = "_computed"
"""The attribute with the result of the last `compute`, which a restored state makes stale."""
_PERSISTENT: Final = "_persistent"
"""The attribute that says which states the module's ``state_dict`` has; without it a resume would reset those too."""


def count_once(module: nn.Module, strategy: Strategy) -> None:
    """Reduce the metrics of ``module`` over the report group, so that ranks with the same batch count once."""
    if strategy.reports.size == strategy.world.size:
        return
    for metric in _metrics_among(module.modules()):
        # None is torchmetrics' default: a group that the user has given stays.
        if metric.process_group is None:
            metric.process_group = strategy.reports.group


def name_in_module(metric: MetricObject, module: nn.Module | None) -> str | None:
    """The name of a metric in ``module``; None if it is not a submodule."""
    if module is None:
        return None
    names = (name for name, submodule in module.named_modules() if submodule is metric)
    return next(names, None)


def running_states(module: nn.Module) -> dict[str, StateDict]:
    """A copy of the state of each metric of ``module`` since its last reset, on its device, by the metric's name."""
    # A state that is shared in a group is read from each of its metrics below.
    _update_compute_groups(module.modules())
    states: dict[str, StateDict] = {}
    for name, metric in _named_metrics(module):
        # A metric without an update has the state of a reset, which `restore_running` gives it.
        if metric.update_count:
            states[name] = _copied_state(metric)
    return states


def on_host(states: _States) -> dict[str, StateDict]:
    """The states of `running_states` on the CPU, for a checkpoint."""
    copies: dict[str, StateDict] = map_tensors(dict(states), _to_host)
    return copies


def _to_host(value: Tensor) -> Tensor:
    return value.cpu()  # sync point: a checkpoint is being taken


def restore_running(module: nn.Module, states: _States) -> None:
    """Restore `running_states` into the metrics that still exist; a metric without a state is reset."""
    for name, metric in _named_metrics(module):
        if name in states:
            _restore_state(metric, states[name])
        elif metric.update_count:
            _reset(metric)


def remember_metrics(owners: Iterable[object]) -> Callable[[], None]:
    """Return a function that puts the metrics of ``owners`` back to their present state, as often as it is called.

    Args:
        owners: modules, and callbacks whose attributes are metrics, or lists and dicts of metrics.
    """
    # By id: a callback may hold a metric of the module, which is remembered once.
    modules: dict[int, nn.Module] = {}
    for owner in owners:
        modules.update((id(module), module) for module in _modules_of(owner))
    _update_compute_groups(modules.values())
    metrics = _metrics_among(modules.values())
    states = [_copied_values(vars(metric)) for metric in metrics]

    def restore() -> None:
        for metric, state in zip(metrics, states, strict=True):
            # Copies again, for this function may be called more than once.
            vars(metric).update(_copied_values(state))

    return restore


def _copied_values(attributes: SavedState) -> StateDict:
    """Copies of the numbers, tensors and lists among the attributes of a metric: its states, counts and caches."""
    copies: StateDict = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        elif isinstance(value, list):
            copies[name] = list(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            copies[name] = value
    return copies


def _modules_of(owner: object) -> Iterator[nn.Module]:
    """The modules of ``owner``; those in its attributes and in lists and dicts there, too, which torch does not see."""
    if isinstance(owner, nn.Module):
        yield from owner.modules()
    for value in vars(owner).values():
        for item in _items_of(value):
            if isinstance(item, nn.Module) and _holds_metrics(item):
                yield from item.modules()


def _items_of(value: object) -> Iterable[object]:
    """The values of a dict, the items of a list; of anything else, itself."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return (value,)


def _named_metrics(module: nn.Module) -> list[tuple[str, MetricObject]]:
    named_modules = module.named_modules()
    return [
        (name, submodule) for name, submodule in named_modules if is_metric(submodule)
    ]


def _metrics_among(modules: Iterable[nn.Module]) -> list[MetricObject]:
    return list(filter(is_metric, modules))


def _holds_metrics(module: nn.Module) -> bool:
    return is_metric(module) or _is_collection(module)


def is_metric(module: object) -> bool:
    """Whether this is a metric of torchmetrics, which need not be imported."""
    return hasattr(type(module), "update_count")


def _is_collection(module: object) -> bool:
    """Whether this is torchmetrics' ``MetricCollection``."""
    return hasattr(type(module), "compute_groups")


def _update_compute_groups(modules: Iterable[MetricObject]) -> None:
    """In a compute group only the first metric is current until others are read: read them."""
    for module in list(modules):
        if _is_collection(module):
            module.items(copy_state=False)


def _copied_state(metric: MetricObject) -> StateDict:
    state = {
        "state": metric.metric_state,
        "updates": metric.update_count,
        "latest": getattr(metric, LAST_VALUE),
    }
    copies: StateDict = map_tensors(state, _copied_tensor)
    return copies


def _copied_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _restore_state(metric: MetricObject, saved: SavedState) -> None:
    saved = move_to_device(dict(saved), metric.device)
    for name, value in saved["state"].items():
        setattr(metric, name, value)
    # torchmetrics' own attributes: only `update` counts, and a metric offers no other sign that it was called.
    attributes = {
        _UPDATE_COUNT: saved["updates"],
        _COMPUTED: None,
        LAST_VALUE: saved["latest"],
    }
    metric.__dict__.update(attributes)


def _reset(metric: MetricObject) -> None:
    """Reset a metric, but for the states that the module's ``state_dict`` has, which is restored on its own."""
    states: StateDict = {}
    for name, is_persistent in getattr(metric, _PERSISTENT).items():
        if is_persistent:
            state = getattr(metric, name)
            # `reset` empties the lists that it finds.
            states[name] = list(state) if isinstance(state, list) else state
    metric.reset()
    for name, state in states.items():
        setattr(metric, name, state)
