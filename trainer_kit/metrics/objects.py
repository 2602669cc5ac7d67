"""torchmetrics objects inside an epoch: their running state is not in the module's ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from trainer_kit.core.tensors import map_tensors, move_to_device
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "count_once",
    "is_metric",
    "on_host",
    "place_of",
    "remember_metrics",
    "restore_running",
    "running_states",
]


def count_once(module: nn.Module, strategy: Strategy) -> None:
    """Reduce the metrics of ``module`` over the report group, so that ranks with the same batch count once."""
    if strategy.reports.size < strategy.world.size:
        for part in module.modules():
            if (
                is_metric(part) and part.process_group is None
            ):  # torchmetrics' own default
                part.process_group = strategy.reports.group


def place_of(metric: Any, module: nn.Module | None) -> str | None:
    """The name of a metric in ``module``; None if it is not a submodule."""
    found = () if module is None else module.named_modules()
    return next((name for name, part in found if part is metric), None)


def running_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """A copy of the state of each metric of ``module`` since its last reset, on its device, by the metric's name."""
    _share_groups(module.modules())
    return {
        name: _copied_state(part)
        for name, part in module.named_modules()
        if is_metric(part) and part.update_count
    }


def on_host(states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The states of `running_states` on the CPU, for a checkpoint."""
    copied: dict[str, dict[str, Any]] = map_tensors(dict(states), _to_host)
    return copied


def _to_host(value: Tensor) -> Tensor:
    return value.cpu()  # sync point: a checkpoint is being taken


def restore_running(module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore `running_states` into the metrics that still exist; a metric without a state is reset."""
    for name, part in module.named_modules():
        if not is_metric(part):
            continue
        if name in states:
            _restore_state(part, states[name])
        elif part.update_count:
            _reset(part)


def remember_metrics(owners: Iterable[Any]) -> Callable[[], None]:
    """Return a function that puts the metrics of ``owners`` back to their present state, as often as it is called.

    Args:
        owners: modules, and callbacks whose attributes are metrics, or lists and dicts of metrics.
    """
    parts = list(
        {id(part): part for owner in owners for part in _modules_of(owner)}.values()
    )
    _share_groups(parts)
    states = [(part, _copied_values(vars(part))) for part in parts if is_metric(part)]

    def restore() -> None:
        for metric, values in states:
            vars(metric).update(_copied_values(values))

    return restore


def _copied_values(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the numbers, tensors and lists among the attributes of a metric: its states, counts and caches."""
    copied: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            copied[name] = value.detach().clone()
        elif isinstance(value, list):
            copied[name] = list(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            copied[name] = value
    return copied


def _modules_of(owner: Any) -> Iterator[Any]:
    """The modules of ``owner``; those in its attributes and in lists and dicts there, too, which torch does not see."""
    if isinstance(owner, nn.Module):
        yield from owner.modules()
    for value in vars(owner).values():
        items = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else (value,)
        )
        for item in items:
            if isinstance(item, nn.Module) and _holds_metrics(item):
                yield from item.modules()


def _holds_metrics(part: Any) -> bool:
    return is_metric(part) or _is_collection(part)


def is_metric(part: Any) -> bool:
    """Whether this is a metric of torchmetrics, which need not be imported."""
    return hasattr(type(part), "update_count")


def _is_collection(part: Any) -> bool:
    return hasattr(type(part), "compute_groups")


def _share_groups(parts: Iterable[Any]) -> None:
    """In a compute group only the first metric is current until others are read: read them."""
    for part in list(parts):
        if _is_collection(part):
            part.items(copy_state=False)


def _copied_state(metric: Any) -> dict[str, Any]:
    state = {
        "state": metric.metric_state,
        "updates": metric.update_count,
        "latest": metric._forward_cache,
    }
    copied: dict[str, Any] = map_tensors(state, lambda value: value.detach().clone())
    return copied


def _restore_state(metric: Any, saved: Mapping[str, Any]) -> None:
    saved = move_to_device(dict(saved), metric.device)
    for key, value in saved["state"].items():
        setattr(metric, key, value)
    # Only `update` counts; a metric offers no other sign that it was called.
    metric._update_count, metric._computed, metric._forward_cache = (
        saved["updates"],
        None,
        saved["latest"],
    )


def _reset(metric: Any) -> None:
    """Reset a metric, but for the states that the module's ``state_dict`` has, which is restored on its own."""
    persistent = {
        name: getattr(metric, name)
        for name, persists in metric._persistent.items()
        if persists
    }
    copied = {
        name: list(value) if isinstance(value, list) else value
        for name, value in persistent.items()
    }
    metric.reset()
    for name, value in copied.items():
        setattr(metric, name, value)
