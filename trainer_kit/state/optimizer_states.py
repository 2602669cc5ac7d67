"""Optimizers in a checkpoint: by the names of their parameters, whatever rank holds them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.collective_errors import together
from trainer_kit.core.errors import CheckpointError
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "add_groups",
    "changed_flags",
    "configured",
    "configured_flags",
    "note_configured",
    "optimizer_state",
    "options_of",
    "owned_parameters",
    "parameter_names",
    "reset_flags",
    "restore_flags",
    "restore_optimizer",
    "restore_scheduler",
    "same",
    "watch_groups",
]

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


_AS_CONFIGURED: Final = "_configured_options"
_AFTER_TRAINING: Final = "_options_after_training"
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
    before, left = known.get(_AS_CONFIGURED, ()), known.get(_AFTER_TRAINING, ())
    options = options_of(optimizer)
    for now, was, end in zip(options, before, left, strict=False):
        now.update({key: was[key] for key, value in now.items() if key in was and same(end.get(key), value)})
    known[_AS_CONFIGURED] = options


def configured(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group as `note_configured` found them; those of a later group as they are."""
    known: list[dict[str, Any]] = vars(optimizer).get(_AS_CONFIGURED, [])
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
            started: list[dict[str, Any]] = vars(optimizer)[_AS_CONFIGURED]
            started += options_of(optimizer)[len(started) :]
            run.stepper.read_groups()

        vars(optimizer)["add_param_group"] = add_param_group

    def end(_: Any = None) -> None:
        for optimizer in optimizers:
            vars(optimizer).pop("add_param_group", None)
            vars(optimizer)[_AFTER_TRAINING] = options_of(optimizer)
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
    then = vars(optimizer)[_AS_CONFIGURED][index]
    today = {name: value for name, value in group.items() if name != "params" and then.get(name) != value}
    optimizer.param_groups[index].update(today)
    then.update(today)
    return True


def restore_scheduler(scheduler: Any, saved: Mapping[str, Any], keeps_rates: bool) -> None:
    """Put a scheduler's state back.

    Args:
        scheduler: the user's.
        saved: its state.
        keeps_rates: learning rates that the user configures differently today keep today's value.
    """
    today = [(part, part.base_lrs) for part in _parts(scheduler) if hasattr(part, "base_lrs")]
    scheduler.load_state_dict(dict(saved))
    for part, rates in today if keeps_rates else ():
        part.base_lrs = rates


def _parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it is made of (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
