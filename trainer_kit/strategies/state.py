"""The state of modules and optimizers, for every strategy that leaves them as torch has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["load_optimizer_state", "optimizer_state"]


def optimizer_state(
    optimizer: Optimizer,
) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
    """The parameters of each group, and the state of each parameter that has any."""
    states: Mapping[Any, Mapping[str, Any]] = optimizer.state
    return [list(group["params"]) for group in optimizer.param_groups], states


def load_optimizer_state(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], state: Mapping[nn.Parameter, Mapping[str, Any]]
) -> None:
    """Put the options of each group and the state of each parameter back.

    Args:
        optimizer: through its own ``load_state_dict``, which casts and moves.
        groups: the options of each of its groups.
        state: of its parameters; one that is missing has none.
    """
    numbered: dict[int, Any] = {}
    packed, index = [], 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        numbers = range(index, index + len(group["params"]))
        numbered.update({i: state[p] for i, p in zip(numbers, group["params"], strict=True) if p in state})
        packed.append({**options, "params": list(numbers)})
        index = numbers.stop
    optimizer.load_state_dict({"state": numbered, "param_groups": packed})
