"""Saves and restores optimizers and schedulers by parameter name, on any rank that holds the parameters.

Gradual unfreezing changes which parameters are trained, and adds groups to optimizers; a resumed run restores both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.checkpoint.lightning import BY_POSITION
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.state_names import state_name
from trainer_kit.step.optimizers import OptimizerProxy, check_parameters
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "add_groups",
    "changed_flags",
    "configured",
    "configured_flags",
    "exchange_optimizers",
    "note_configured",
    "optimizer_state",
    "owned_parameters",
    "parameter_names",
    "reset_flags",
    "restore_flags",
    "restore_optimizer",
    "restore_scheduler",
    "scheduler_parts",
    "watch_groups",
    "without_wrapper_names",
]

_CONFIGURED: Final = "configured"
_CLASS: Final = "class"
_EXCHANGED: Final = "exchanged"
"""Also an attribute of an optimizer that `exchange_optimizers` set."""
_STEP: Final = "step"
"""The step counter, which torch never casts."""


def optimizer_state(
    strategy: Strategy, optimizer: Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """An optimizer's state by parameter name, never by position; every rank must call it."""
    parameters, states = fail_together(
        strategy.world, lambda: strategy.optimizer_state(optimizer)
    )
    groups, state = [], {}
    for number, (group, own) in enumerate(
        zip(optimizer.param_groups, parameters, strict=True)
    ):
        kept = {k: v for k, v in group.items() if k != "params"}
        called = [_name(parameter, names, number, i) for i, parameter in enumerate(own)]
        groups.append({**kept, "params": called})
        state.update(
            {
                name: dict(states[p])
                for name, p in zip(called, own, strict=True)
                if p in states
            }
        )
    if strategy.sharded:
        _unite_names(strategy, groups)
    kind = type(optimizer).__name__
    exchanged = {_EXCHANGED: True} if _EXCHANGED in vars(optimizer) else {}
    return {
        _CLASS: kind,
        "state": state,
        "param_groups": groups,
        _CONFIGURED: configured(optimizer),
        **exchanged,
    }


def without_wrapper_names(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """An `optimizer_state` whose parameters have their names without wrappers, as it is saved today."""
    if not any(
        "_orig_mod." in str(name)
        for group in saved["param_groups"]
        for name in group["params"]
    ):
        return saved
    groups = [
        {**group, "params": [state_name(name) for name in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {state_name(name): values for name, values in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def owned_parameters(
    strategy: Strategy, optimizer: Optimizer
) -> list[list[nn.Parameter]]:
    """The parameters of each group as the module has them; every rank must call it."""
    return fail_together(strategy.world, lambda: strategy.optimizer_state(optimizer)[0])


def parameter_names(strategy: Strategy, module: nn.Module) -> dict[int, str]:
    """The names of a module's parameters in checkpoints, by parameter id."""
    others = strategy.shared_names(module)
    named = (
        (state_name(name), parameter) for name, parameter in module.named_parameters()
    )
    return {id(parameter): others.get(name, name) for name, parameter in named}


def _unite_names(strategy: Strategy, groups: list[dict[str, Any]]) -> None:
    """Pipeline stages have different parameters in the same groups: give each group the names of all ranks."""
    own = [group["params"] for group in groups]
    digest = zlib.crc32(repr(own).encode())
    rows = strategy.world.agree([digest])
    if all(row == rows[0] for row in rows):
        return
    for group, *everyone in zip(
        groups, *strategy.world.all_gather_object(own), strict=True
    ):
        group["params"] = list(
            dict.fromkeys(name for names in everyone for name in names)
        )


def _name(
    parameter: nn.Parameter, names: Mapping[int, str], group: int, index: int
) -> str:
    return names.get(
        id(parameter), f"group{group}.{index}"
    )  # a parameter that is not the module's


def restore_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    own: Sequence[Sequence[nn.Parameter]],
    saved: Mapping[str, Any],
    names: Mapping[int, str],
    say: Callable[[str], None],
    weights: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Restore `optimizer_state`. An option whose configured value differs from the checkpoint's keeps the new value.

    A value that training wrote into an option (a schedule's learning rate) is not configured: the checkpoint's value is
    restored, also in the process that trained.

    Args:
        strategy: that steps it.
        optimizer: as it is configured.
        own: its `owned_parameters`, a collective call: in this function one rank alone may fail.
        saved: what `optimizer_state` returned.
        names: from `parameter_names`.
        say: prints a line.
        weights: saved with it, under the same names: state whose dtype differs from its weight's keeps its dtype. A
            parameter without a saved weight counts as saved in its present dtype.

    Returns:
        The options that keep the new value in any group, by name.

    Raises:
        CheckpointError: it is the state of another class, or of other groups.
    """
    was, kind = saved.get(_CLASS), type(optimizer).__name__
    if saved.get(_EXCHANGED) and _EXCHANGED not in vars(optimizer):
        _check_exchanged(optimizer, own, saved, names)
    if was not in (
        None,
        kind,
    ):  # its moments may have the same names and mean something else
        raise CheckpointError(
            "optimizer_states",
            _CLASS,
            f"it holds the state of {was}, but the optimizer of this run is {kind}",
            fix=f"configure {was}, or start a new run from the weights alone",
        )
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            "optimizer_states",
            "param_groups",
            f"{len(saved['param_groups'])} groups were saved, the optimizer has {len(optimizer.param_groups)}",
        )
    today, now = configured(optimizer), _options(optimizer)
    then = saved.get(_CONFIGURED, today)
    if saved.get(BY_POSITION):
        _check_positions(strategy, own, saved["param_groups"])
        names = {}
    state: dict[nn.Parameter, Any] = {}
    groups, kept_today = [], {}
    for number, (group, old) in enumerate(zip(own, saved["param_groups"], strict=True)):
        for i, parameter in enumerate(group):
            name = _name(parameter, names, number, i)
            if name in saved["state"]:
                old_state = saved["state"][name]
                if (
                    not strategy.keeps_gradients
                ):  # otherwise the state belongs to a parameter of the engine
                    old_state = _following(
                        old_state, (weights or {}).get(name), parameter
                    )
                state[parameter] = old_state
        options = {k: v for k, v in old.items() if k != "params"}
        for key, value in today[number].items():
            if (
                key in options
                and key in then[number]
                and not _same(then[number][key], value)
            ):
                options[key] = value
                if key != "initial_lr":
                    kept_today[key] = value
                    say(
                        f"{key}: {value} as configured now, not {then[number].get(key)} as in the checkpoint"
                    )
        groups.append({**now[number], **options})
    strategy.load_optimizer_state(optimizer, groups, state)
    return kept_today


def _check_exchanged(
    optimizer: Optimizer,
    own: Sequence[Sequence[nn.Parameter]],
    saved: Mapping[str, Any],
    names: Mapping[int, str],
) -> None:
    """Refuse the state of an optimizer that `exchange_optimizers` set, if the configured one differs from it.

    Raises:
        CheckpointError: the class, the options or the parameters differ.
    """
    known, groups = set(names.values()), saved["param_groups"]
    then = [
        known.intersection(group["params"]) for group in groups
    ]  # of those that this rank has
    now = [known.intersection(names.get(id(p), "") for p in group) for group in own]
    same = len(groups) == len(optimizer.param_groups) and all(
        all(_same(a[key], b[key]) for key in a.keys() & b.keys())
        for a, b in zip(saved[_CONFIGURED], configured(optimizer), strict=False)
    )
    if not same or then != now or saved[_CLASS] != type(optimizer).__name__:
        raise CheckpointError(
            "optimizer_states",
            None,
            f"trainer.optimizers = [...] had replaced this optimizer by {saved[_CLASS]}",
            fix="set trainer.optimizers in on_load_checkpoint too, if trainer.training, and not again before a step",
        )


def _check_positions(
    strategy: Strategy, own: Sequence[Sequence[nn.Parameter]], groups: Sequence[Any]
) -> None:
    """Refuse state without names where a position may be another parameter's.

    Raises:
        CheckpointError: a rank may have only some parameters, or the groups are of other sizes.
    """
    then, now = (
        [len(group["params"]) for group in groups],
        [len(group) for group in own],
    )
    if strategy.sharded:
        raise CheckpointError(
            "optimizer_states",
            None,
            f"an imported file names no parameters, and {strategy.name} divides them among ranks",
            fix='train one step with strategy="ddp" or on one device, save a checkpoint, and resume from that',
        )
    if then != now:
        raise CheckpointError(
            "optimizer_states",
            "param_groups",
            f"an imported file names no parameters: it has groups of {then}, and the optimizer of {now} parameters",
            fix="configure the optimizer over the same parameters, or pass load_weights_only=True",
        )


def _following(
    own: Mapping[str, Any], weight: object, parameter: nn.Parameter
) -> dict[str, Any]:
    """Cast state that had its weight's dtype to the parameter's present dtype; leave all other state as saved."""
    then = weight.dtype if isinstance(weight, Tensor) else parameter.dtype
    if then == parameter.dtype or not then.is_floating_point:
        return dict(own)
    return {
        key: value.to(parameter.dtype)
        if key != _STEP and isinstance(value, Tensor) and value.dtype == then
        else value
        for key, value in own.items()
    }


_AS_CONFIGURED: Final = "_configured_options"
_AFTER_TRAINING: Final = "_options_after_training"
_FLAGS: Final = "_trained_parameters"
"""Attribute of a module: which parameters train, as configured, and as the last fit left them."""


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of the present options of each group: schedules write in place into learning rates that are tensors."""
    return [
        {
            k: v.clone() if isinstance(v, Tensor) else v
            for k, v in group.items()
            if k != "params"
        }
        for group in optimizer.param_groups
    ]


def note_configured(optimizer: Optimizer, again: bool = True) -> None:
    """Keep the options of each group as the user configured them, for comparison when a checkpoint is loaded.

    The optimizer may come from an earlier fit of this process. An option that still has its value at the end of that
    fit counts as configured with its value before that fit; any other value is the user's. ``again=False`` keeps the
    options of an earlier call.
    """
    known = vars(optimizer)
    if _AS_CONFIGURED in known and not again:
        return
    known.pop(_EXCHANGED, None)
    before, left = known.get(_AS_CONFIGURED, ()), known.get(_AFTER_TRAINING, ())
    options = _options(optimizer)
    for now, was, end in zip(options, before, left, strict=False):
        now.update(
            {
                key: was[key]
                for key, value in now.items()
                if key in was and _same(end.get(key), value)
            }
        )
    known[_AS_CONFIGURED] = options


def configured(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options that `note_configured` kept for each group; the present options of groups that were added later."""
    known: list[dict[str, Any]] = vars(optimizer).get(_AS_CONFIGURED, [])
    return [*known, *_options(optimizer)[len(known) :]]


def _same(a: object, b: object) -> bool:
    """Whether two values of an option are equal."""
    # A checkpoint may return a list for a tuple, and learning rates may be tensors.
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b)


def configured_flags(module: nn.Module) -> dict[str, bool]:
    """By name, whether the user configured a parameter to be trained; an earlier fit may have changed the flag."""
    before, left = vars(module).get(_FLAGS, ({}, {}))
    now = {name: p.requires_grad for name, p in module.named_parameters()}
    return {
        name: before[name] if left.get(name) == flag else flag
        for name, flag in now.items()
    }


def reset_flags(module: nn.Module) -> None:
    """Train the parameters that the user configured to be trained."""
    flags = configured_flags(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags[name])


def changed_flags(run: Fit) -> dict[str, bool]:
    """By name, whether a parameter is trained, for those whose flag changed since the run was composed."""
    named = run.module.named_parameters()
    return {
        state_name(name): p.requires_grad
        for name, p in named
        if p.requires_grad == (name in run.frozen)
    }


def restore_flags(run: Fit, flags: Mapping[str, bool]) -> None:
    """Restore `changed_flags` of parameters that start as they did then; the user's new configuration stays."""
    for name, parameter in run.module.named_parameters():
        flag = flags.get(state_name(name))
        if flag is not None and bool(flag) == (name in run.frozen):
            parameter.requires_grad_(bool(flag))


def add_groups(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    divided: bool,
) -> None:
    """Add the groups that the saved optimizer got after it was configured; none if one does not match.

    If the caller re-adds a group after a resume, `watch_groups` matches it to the restored one.

    Args:
        optimizer: as it is configured.
        saved: its state, by name.
        parameters: of the module.
        divided: whether a rank may have only some of the parameters.
    """
    have = len(optimizer.param_groups)
    groups, options = saved["param_groups"], saved.get("configured") or ()
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = [
        [parameters[name] for name in group["params"] if name in parameters]
        for group in groups[have:]
    ]
    known = divided or all(
        name in parameters for group in groups[have:] for name in group["params"]
    )
    if (
        not known
        or len(options) != len(groups)
        or any(id(p) in taken for group in added for p in group)
    ):
        return
    for index, own in enumerate(added, have):
        optimizer.add_param_group({**options[index], "params": own})
        vars(optimizer).setdefault("_restored_groups", {})[frozenset(map(id, own))] = (
            index
        )


def watch_groups(run: Fit) -> Callable[[Any], None]:
    """Train parameters that are added to an optimizer during the fit, from the next backward on.

    This wraps ``add_param_group`` of each optimizer: comparing the groups in each step would cost every run.

    Returns:
        A function that removes the wrappers.
    """
    optimizers = run.stepper.made.optimizers

    def end(_: Any = None) -> None:
        for optimizer in optimizers:
            _end_watch(optimizer)
        left = {name: p.requires_grad for name, p in run.module.named_parameters()}
        vars(run.module)[_FLAGS] = (
            {name: name not in run.frozen for name in left},
            left,
        )

    for optimizer in optimizers:
        _watch(run, optimizer)
    return end


def _watch(run: Fit, optimizer: Optimizer) -> None:
    add = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        if _is_there(optimizer, param_group):
            return
        add(param_group)
        started: list[dict[str, Any]] = vars(optimizer)[_AS_CONFIGURED]
        started += _options(optimizer)[len(started) :]
        run.stepper.read_groups()

    vars(optimizer)["add_param_group"] = add_param_group


def _end_watch(optimizer: Optimizer) -> None:
    vars(optimizer).pop("add_param_group", None)
    vars(optimizer)[_AFTER_TRAINING] = _options(optimizer)


def exchange_optimizers(
    run: Fit, optimizers: list[Optimizer], *, resumed: bool, has_guard: bool
) -> None:
    """Step other optimizers from here on; see docs/decisions/0121-prepared-modules-of-fabric.md.

    Args:
        run: the fit.
        optimizers: the new ones.
        resumed: whether the run continues from a checkpoint.
        has_guard: whether the run may go back to states of the present optimizers.

    Raises:
        ConfigurationError: an element is not an optimizer, or the run cannot exchange its optimizers for these.
    """
    optimizers = [OptimizerProxy.unwrapped(one) for one in optimizers]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise ConfigurationError(
                "this is not an optimizer",
                found=repr(one),
                fix="assign a list: trainer.optimizers = [optimizer]",
            )
    if has_guard:
        raise ConfigurationError(
            "these optimizers cannot be exchanged in a run",
            found="NaNGuard, which goes back to states of the optimizers before",
            fix="leave NaNGuard out, or change their param_groups",
        )
    before = list(run.stepper.made.optimizers)
    restored = (
        resumed
        and run.stepper.trained is None
        and any(optimizer.state for optimizer in before)
    )
    schedulers = run.stepper.replace(optimizers)
    for optimizer in before:
        _end_watch(optimizer)
    for optimizer in optimizers:
        note_configured(optimizer)
        vars(optimizer)[_EXCHANGED] = True
        _watch(run, optimizer)
    check_parameters(run.stepper.made, run.module, run.strategy, run.say)
    if restored:
        run.say(
            "trainer.optimizers = ... drops the state of the optimizers that the checkpoint restored"
        )
    if schedulers:
        run.say(
            f"{schedulers} schedulers change optimizers that trainer.optimizers = ... has replaced"
        )


def _is_there(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the checkpoint restored this group; an option that the caller passes with a new value keeps it."""
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
    today = {
        name: value
        for name, value in group.items()
        if name != "params" and then.get(name) != value
    }
    optimizer.param_groups[index].update(today)
    then.update(today)
    return True


def restore_scheduler(
    scheduler: Any, saved: Mapping[str, Any], keeps_rates: bool
) -> None:
    """Restore a scheduler's state.

    Args:
        scheduler: the user's.
        saved: its state.
        keeps_rates: whether base learning rates keep the values that the user configures now.
    """
    today = [
        (part, part.base_lrs)
        for part in scheduler_parts(scheduler)
        if hasattr(part, "base_lrs")
    ]
    scheduler.load_state_dict(dict(saved))
    for part, rates in today if keeps_rates else ():
        part.base_lrs = rates


def scheduler_parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and, recursively, its parts (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from scheduler_parts(part)
