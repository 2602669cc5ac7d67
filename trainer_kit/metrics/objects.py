"""torchmetrics objects inside an epoch: their running state is not in the module's ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainer_kit.core.tensors import map_tensors, move_to_device
from trainer_kit.strategies.strategy import Strategy

__all__ = ["count_once", "place_of", "restore_running", "running_states"]


def count_once(module: nn.Module, strategy: Strategy) -> None:
    """Reduce the metrics of ``module`` over the report group, so that ranks with the same batch count once."""
    if strategy.reports.size < strategy.world.size:
        for part in module.modules():
            if hasattr(type(part), "update_count") and part.process_group is None:  # torchmetrics' own default
                part.process_group = strategy.reports.group


def place_of(metric: Any, module: nn.Module | None) -> str | None:
    """The name of a metric in ``module``; None if it is not a submodule."""
    found = () if module is None else module.named_modules()
    return next((name for name, part in found if part is metric), None)


def running_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The state of each metric of ``module`` since its last reset, on the CPU, by the metric's name."""
    collections: list[Any] = [part for part in module.modules() if hasattr(type(part), "compute_groups")]
    for part in collections:
        part.items(copy_state=False)  # in a compute group only the first metric is current until others are read
    states = {}
    parts: dict[str, Any] = dict(module.named_modules())
    for name, part in parts.items():
        if hasattr(type(part), "update_count") and part.update_count:
            state = {"state": part.metric_state, "updates": part.update_count, "latest": part._forward_cache}
            states[name] = map_tensors(state, _on_host)
    return states


def _on_host(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()  # sync point: a checkpoint is being taken


def restore_running(module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore `running_states` into the metrics that still exist."""
    parts: dict[str, Any] = dict(module.named_modules())
    for name, saved in states.items():
        if name not in parts or not hasattr(type(parts[name]), "update_count"):
            continue
        metric = parts[name]
        saved = move_to_device(dict(saved), metric.device)
        for key, value in saved["state"].items():
            setattr(metric, key, value)
        # Only `update` counts; a metric offers no other sign that it was called.
        metric._update_count, metric._computed, metric._forward_cache = saved["updates"], None, saved["latest"]
