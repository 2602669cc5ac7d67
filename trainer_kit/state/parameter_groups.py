"""What gradual unfreezing does while a fit goes on: parameters begin to be trained, and optimizers get groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.step.run import Fit

__all__ = [
    "add_groups",
    "changed_flags",
    "configured",
    "configured_flags",
    "note_configured",
    "options_of",
    "reset_flags",
    "restore_flags",
    "same",
    "watch_groups",
]

_CONFIGURED: Final = "_configured_options"
_LEFT: Final = "_options_after_training"
_FLAGS: Final = "_trained_parameters"
"""Of a module: which parameters are trained as configured, and as the fit before left them."""


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the options of each group as they are now: schedules write into learning rates that are tensors."""
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def note_configured(optimizer: Optimizer) -> None:
    """Keep the options of each group as the user configured them, to be compared when a checkpoint is loaded.

    An optimizer may have been trained with in this process. An option that is what training left is configured as it
    was before; any other value is the user's.
    """
    known = vars(optimizer)
    before, left = known.get(_CONFIGURED, ()), known.get(_LEFT, ())
    options = options_of(optimizer)
    for now, was, end in zip(options, before, left, strict=False):
        now.update({key: was[key] for key, value in now.items() if key in was and same(end.get(key), value)})
    known[_CONFIGURED] = options


def configured(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group as `note_configured` found them; those of a later group as they are."""
    known: list[dict[str, Any]] = vars(optimizer).get(_CONFIGURED, [])
    return [*known, *options_of(optimizer)[len(known) :]]


def same(a: Any, b: Any) -> bool:
    """Whether two values of an option are equal."""
    # A checkpoint may hand back a list for a tuple, and learning rates may be tensors.
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b)


def configured_flags(module: nn.Module) -> dict[str, bool]:
    """By name, whether a parameter is trained, as the user configured it; a fit before may have changed that."""
    before, left = vars(module).get(_FLAGS, ({}, {}))
    now = {name: p.requires_grad for name, p in module.named_parameters()}
    return {name: before[name] if left.get(name) == flag else flag for name, flag in now.items()}


def reset_flags(module: nn.Module) -> None:
    """Begin with the parameters that the user configured to be trained."""
    flags = configured_flags(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags[name])


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
            started: list[dict[str, Any]] = vars(optimizer)[_CONFIGURED]
            started += options_of(optimizer)[len(started) :]
            run.stepper.read_groups()

        vars(optimizer)["add_param_group"] = add_param_group

    def end(_: Any = None) -> None:
        for optimizer in optimizers:
            vars(optimizer).pop("add_param_group", None)
            vars(optimizer)[_LEFT] = options_of(optimizer)
        left = {name: p.requires_grad for name, p in run.module.named_parameters()}
        vars(run.module)[_FLAGS] = ({name: name not in run.frozen for name in left}, left)

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
    then = vars(optimizer)[_CONFIGURED][index]
    today = {name: value for name, value in group.items() if name != "params" and then.get(name) != value}
    optimizer.param_groups[index].update(today)
    then.update(today)
    return True
