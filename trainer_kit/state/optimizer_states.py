"""Optimizers in a checkpoint: by the names of their parameters, whatever rank holds them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import together
from trainer_kit.core.errors import CheckpointError
from trainer_kit.state.parameter_groups import configured, options_of, same
from trainer_kit.strategies.strategy import Strategy

__all__ = ["optimizer_state", "owned_parameters", "parameter_names", "restore_optimizer"]

_CONFIGURED: Final = "configured"
_CLASS: Final = "class"
_STEP: Final = "step"
"""A count, which torch never casts."""


def optimizer_state(strategy: Strategy, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name, never by position; every rank must call it."""
    parameters, states = together(strategy.world, lambda: strategy.optimizer_state(optimizer))
    groups, state = [], {}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, parameters, strict=True)):
        kept = {k: v for k, v in group.items() if k != "params"}
        called = [_name(parameter, names, number, i) for i, parameter in enumerate(own)]
        groups.append({**kept, "params": called})
        state.update({name: dict(states[p]) for name, p in zip(called, own, strict=True) if p in states})
    if strategy.sharded:
        _unite_names(strategy, groups)
    kind = type(optimizer).__name__
    return {_CLASS: kind, "state": state, "param_groups": groups, _CONFIGURED: configured(optimizer)}


def owned_parameters(strategy: Strategy, optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """The parameters of each group as the module has them; every rank must call it."""
    return together(strategy.world, lambda: strategy.optimizer_state(optimizer)[0])


def parameter_names(strategy: Strategy, module: nn.Module) -> dict[int, str]:
    """What checkpoints call a module's parameters, by their ids."""
    others = strategy.shared_names(module)
    return {id(parameter): others.get(name, name) for name, parameter in module.named_parameters()}


def _unite_names(strategy: Strategy, groups: list[dict[str, Any]]) -> None:
    """Stages of a pipeline have parameters of their own in the same groups: a group has those of all ranks."""
    own = [group["params"] for group in groups]
    digest = zlib.crc32(repr(own).encode())
    rows = strategy.world.agree([digest])
    if all(row == rows[0] for row in rows):
        return
    for group, *everyone in zip(groups, *strategy.world.all_gather_object(own), strict=True):
        group["params"] = list(dict.fromkeys(name for names in everyone for name in names))


def _name(parameter: nn.Parameter, names: Mapping[int, str], group: int, index: int) -> str:
    return names.get(id(parameter), f"group{group}.{index}")  # a parameter that is not the module's


def restore_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    own: Sequence[Sequence[nn.Parameter]],
    saved: Mapping[str, Any],
    names: Mapping[int, str],
    say: Callable[[str], None],
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Put `optimizer_state` back. An option that the user configures differently today keeps today's value.

    What training made of an option since it was configured (a schedule's learning rate) is not configured: the
    checkpoint's value is restored, also in the process that has trained on.

    Args:
        strategy: that steps it.
        optimizer: as it is configured.
        own: `owned_parameters` of it: it is asked ahead of this, in which one rank alone may fail.
        saved: what `optimizer_state` returned.
        names: from `parameter_names`.
        say: prints a line.
        weights: that were saved with it, by the same names: state in another dtype than its weight stays in its own.
            Of a parameter that is not among them the dtype is taken to be that of now.

    Returns:
        Options that keep today's value, by name, of any group.

    Raises:
        CheckpointError: it is the state of another class, or of other groups.
    """
    was, kind = saved.get(_CLASS), type(optimizer).__name__
    if was not in (None, kind):  # its moments may have the same names and mean something else
        raise CheckpointError(
            "optimizer_states",
            _CLASS,
            f"it holds the state of {was}, and this run's optimizer is {kind}",
            fix=f"configure {was}, or load the weights alone and start anew",
        )
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            "optimizer_states",
            "param_groups",
            f"{len(saved['param_groups'])} groups were saved, the optimizer has {len(optimizer.param_groups)}",
        )
    today, now = configured(optimizer), options_of(optimizer)
    then = saved.get(_CONFIGURED, today)
    state: dict[nn.Parameter, Any] = {}
    groups, kept_today = [], {}
    for number, (group, old) in enumerate(zip(own, saved["param_groups"], strict=True)):
        for i, parameter in enumerate(group):
            name = _name(parameter, names, number, i)
            if name in saved["state"]:
                old_state = saved["state"][name]
                if not strategy.keeps_gradients:  # else it belongs to a parameter of the engine's own
                    old_state = _following(old_state, (weights or {}).get(name), parameter)
                state[parameter] = old_state
        options = {k: v for k, v in old.items() if k != "params"}
        for key, value in today[number].items():
            if key in options and key in then[number] and not same(then[number][key], value):
                options[key] = value
                if key != "initial_lr":
                    kept_today[key] = value
                    say(f"{key}: {value} as configured now, not {then[number].get(key)} as in the checkpoint")
        groups.append({**now[number], **options})
    strategy.load_optimizer_state(optimizer, groups, state)
    return kept_today


def _following(own: Mapping[str, Any], weight: Any, parameter: nn.Parameter) -> dict[str, Any]:
    """State in its weight's dtype, in that of the parameter of now; all other state as it was saved."""
    then = weight.dtype if isinstance(weight, Tensor) else parameter.dtype
    if then == parameter.dtype or not then.is_floating_point:
        return dict(own)
    return {
        key: value.to(parameter.dtype) if key != _STEP and isinstance(value, Tensor) and value.dtype == then else value
        for key, value in own.items()
    }
