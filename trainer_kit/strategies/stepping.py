"""How an optimizer is stepped whose parameters are of several kinds: whole ones, and parts over different meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["step_by_kind"]


def step_by_kind(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, for each kind of parameter by itself where all at once would be refused.

    An optimizer with ``foreach`` or ``fused`` handles many parameters in one call, which torch has for those of one
    mesh only. Such optimizers treat each parameter by itself, so that several calls of them are one.

    Args:
        optimizer: with its parameters as they are by now.
        step: how it is stepped.
    """
    # None stands for torch's choice, which is foreach on an accelerator.
    if all(group.get(way, False) is False for group in optimizer.param_groups for way in ("foreach", "fused")):
        return step
    if len(_kinds(optimizer)) < 2:
        return step

    def each(*arguments: Any, **options: Any) -> Any:
        whole = [group["params"] for group in optimizer.param_groups]
        result = None
        try:
            for kind in _kinds(optimizer).values():  # anew: groups may be added
                for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                    group["params"] = [p for p in parameters if p in kind]
                result = step(*arguments, **options)
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters
        return result

    return each


def _kinds(optimizer: Optimizer) -> dict[Any, set[nn.Parameter]]:
    kinds: dict[Any, set[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), set()).add(parameter)
    return kinds
