"""What gradual unfreezing does while a fit goes on: parameters begin to be trained, and optimizers get groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.engine.run import Fit

__all__ = ["add_groups", "changed_flags", "configured", "restore_flags", "watch_groups"]


def configured(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group as the user configured them; to be called before the first step."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def changed_flags(run: Fit) -> dict[str, bool]:
    """By name, whether a parameter is trained, where that is another answer than when the run was composed."""
    return {n: p.requires_grad for n, p in run.module.named_parameters() if p.requires_grad == (n in run.frozen)}


def restore_flags(run: Fit, flags: Mapping[str, bool]) -> None:
    """Put `changed_flags` back, where a parameter begins as it did then; what the user begins with today stays."""
    for name, parameter in run.module.named_parameters():
        if name in flags and bool(flags[name]) == (name in run.frozen):
            parameter.requires_grad_(bool(flags[name]))


def add_groups(
    optimizer: Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], divided: bool
) -> None:
    """Give an optimizer the groups that it was given after it was configured; none that do not fit.

    Who gave them then, and does so again now, is heard of (see `watch_groups`), and they stay what they are.

    Args:
        optimizer: as it is configured.
        saved: its state, by name.
        parameters: of the module.
        divided: a rank may have some of the parameters only.
    """
    have = len(optimizer.param_groups)
    groups, options = saved["param_groups"], saved.get("configured") or ()
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = [[parameters[name] for name in group["params"] if name in parameters] for group in groups[have:]]
    known = divided or all(name in parameters for group in groups[have:] for name in group["params"])
    if not known or len(options) != len(groups) or any(id(p) in taken for group in added for p in group):
        return
    for index, own in enumerate(added, have):
        optimizer.add_param_group({**options[index], "params": own})
        vars(optimizer).setdefault("_restored_groups", {})[frozenset(map(id, own))] = index


def watch_groups(run: Fit) -> Callable[[Any], None]:
    """From the next backward on, whatever an optimizer is given is trained like what it had.

    Args:
        run: whose optimizers' ``add_param_group`` is heard of; a look at the groups in each step would cost every run.

    Returns:
        What ends it, whatever it is called with.
    """
    optimizers = run.stepper.made.optimizers

    def watch(optimizer: Optimizer) -> None:
        add = optimizer.add_param_group

        def add_param_group(param_group: dict[str, Any]) -> None:
            if _is_there(optimizer, param_group):
                return
            add(param_group)
            started: list[dict[str, Any]] = vars(optimizer)["_configured_options"]
            started += configured(optimizer)[len(started) :]
            run.stepper.read_groups()

        vars(optimizer)["add_param_group"] = add_param_group

    def end(_: Any = None) -> None:
        for optimizer in optimizers:
            vars(optimizer).pop("add_param_group", None)

    for optimizer in optimizers:
        watch(optimizer)
    return end


def _is_there(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether it came with the checkpoint; options that are others today than then are today's."""
    restored: dict[frozenset[int], int] = vars(optimizer).get("_restored_groups", {})
    if not restored:
        return False
    given = group["params"]
    group["params"] = [given] if isinstance(given, Tensor) else list(given)
    key = frozenset(id(p[1] if isinstance(p, tuple) else p) for p in group["params"])
    if key not in restored:
        return False
    index = restored.pop(key)
    then = vars(optimizer)["_configured_options"][index]
    today = {name: value for name, value in group.items() if name != "params" and then.get(name) != value}
    optimizer.param_groups[index].update(today)
    then.update(today)
    return True
