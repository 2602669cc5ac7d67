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
from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.state_names import state_name
from trainer_kit.state.torch_private import nested_schedulers
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
    "restore_optimizers",
    "restore_scheduler",
    "scheduler_parts",
    "watch_groups",
    "without_wrapper_names",
]

_Options = dict[str, Any]
"""The options of one parameter group."""
_Saved = Mapping[str, Any]
"""What `optimizer_state` returned, or a scheduler's state."""
_ParameterGroups = Sequence[Sequence[nn.Parameter]]
_CONFIGURED: Final = "configured"
_CLASS: Final = "class"
_EXCHANGED: Final = "exchanged"
"""Also an attribute of an optimizer that `exchange_optimizers` set."""
_STEP: Final = "step"
"""The step counter, which torch never casts."""


def optimizer_state(
    strategy: Strategy,
    optimizer: Optimizer,
    names: Mapping[int, str],
) -> _Options:
    """An optimizer's state by parameter name, never by position; every rank must call it."""
    parameters, states = fail_together(
        strategy.world, lambda: strategy.optimizer_state(optimizer)
    )
    groups: list[_Options] = []
    state: dict[str, _Options] = {}
    rows = zip(optimizer.param_groups, parameters, strict=True)
    for group_index, (options, group_parameters) in enumerate(rows):
        group_names = []
        for index, parameter in enumerate(group_parameters):
            name = _parameter_name(parameter, names, group_index, index)
            group_names.append(name)
            if parameter in states:
                state[name] = dict(states[parameter])
        groups.append({**_without_parameters(options), "params": group_names})
    # Collective, so outside of the calls above that may raise on one rank.
    if strategy.sharded:
        _merge_names(strategy, groups)
    saved: _Options = {
        _CLASS: type(optimizer).__name__,
        "state": state,
        "param_groups": groups,
        _CONFIGURED: configured(optimizer),
    }
    if _EXCHANGED in vars(optimizer):
        saved[_EXCHANGED] = True
    return saved


def _without_parameters(group: _Saved) -> _Options:
    return {name: value for name, value in group.items() if name != "params"}


def without_wrapper_names(saved: _Saved) -> _Saved:
    """An `optimizer_state` whose parameters have their names without wrappers, as it is saved today."""
    groups = saved["param_groups"]
    if not any(_has_wrapper_names(group) for group in groups):
        return saved
    renamed_groups = []
    for group in groups:
        names = [state_name(name) for name in group["params"]]
        renamed_groups.append({**group, "params": names})
    state = {state_name(name): values for name, values in saved["state"].items()}
    return {**saved, "state": state, "param_groups": renamed_groups}


def _has_wrapper_names(group: _Saved) -> bool:
    return any("_orig_mod." in str(name) for name in group["params"])


def owned_parameters(
    strategy: Strategy,
    optimizer: Optimizer,
) -> list[list[nn.Parameter]]:
    """The parameters of each group as the module has them; every rank must call it."""
    return fail_together(strategy.world, lambda: strategy.optimizer_state(optimizer)[0])


def parameter_names(strategy: Strategy, module: nn.Module) -> dict[int, str]:
    """The names of a module's parameters in checkpoints, by parameter id."""
    shared_names = strategy.shared_names(module)
    names = {}
    for module_name, parameter in module.named_parameters():
        name = state_name(module_name)
        names[id(parameter)] = shared_names.get(name, name)
    return names


def _merge_names(strategy: Strategy, groups: list[_Options]) -> None:
    """Pipeline stages have different parameters in the same groups: give each group the names of all ranks."""
    local_names = [group["params"] for group in groups]
    # Names are long and equal almost always, so ranks compare a number first.
    digest = zlib.crc32(repr(local_names).encode())
    digests = strategy.world.agree([digest])
    if all(digest == digests[0] for digest in digests):
        return
    names_by_rank = strategy.world.all_gather_object(local_names)
    for index, group in enumerate(groups):
        merged: dict[str, None] = {}  # a set that keeps the order of the ranks
        for rank_names in names_by_rank:
            merged.update(dict.fromkeys(rank_names[index]))
        group["params"] = list(merged)


def _parameter_name(
    parameter: nn.Parameter,
    names: Mapping[int, str],
    group: int,
    index: int,
) -> str:
    # A parameter that is not the module's has only a position.
    return names.get(id(parameter), f"group{group}.{index}")


def restore_optimizers(
    strategy: Strategy,
    optimizers: Sequence[Optimizer],
    parameter_groups: Sequence[_ParameterGroups],
    saved_states: Sequence[_Saved],
    names: Mapping[int, str],
    say: Callable[[str], None],
    weights: Mapping[str, object] | None,
) -> dict[int, _Options]:
    """Restore each optimizer, as `restore_optimizer`; return the options that keep their new value by its id."""
    reconfigured: dict[int, _Options] = {}
    for optimizer, groups, saved in zip(
        optimizers, parameter_groups, saved_states, strict=True
    ):
        reconfigured[id(optimizer)] = restore_optimizer(
            strategy, optimizer, groups, saved, names, say, weights
        )
    return reconfigured


def restore_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    parameter_groups: _ParameterGroups,
    saved: _Saved,
    names: Mapping[int, str],
    say: Callable[[str], None],
    weights: Mapping[str, object] | None = None,
) -> _Options:
    """Restore `optimizer_state`. An option whose configured value differs from the checkpoint's keeps the new value.

    A value that training wrote into an option (a schedule's learning rate) is not configured: the checkpoint's value is
    restored, also in the process that trained.

    Args:
        strategy: that steps it.
        optimizer: as it is configured.
        parameter_groups: its `owned_parameters`, a collective call: in this function one rank alone may fail.
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
    class_saved, class_now = saved.get(_CLASS), type(optimizer).__name__
    # Before the class is compared: this error says which assignment the resumed run lacks.
    if saved.get(_EXCHANGED) and _EXCHANGED not in vars(optimizer):
        _check_exchanged(optimizer, parameter_groups, saved, names)
    # Moments of another class may have the same names and mean something else.
    if class_saved not in (None, class_now):
        raise CheckpointError(
            "optimizer_states",
            _CLASS,
            f"it holds the state of {class_saved}, but the optimizer of this run is {class_now}",
            fix=f"configure {class_saved}, or start a new run from only the weights",
        )
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise CheckpointError(
            "optimizer_states",
            "param_groups",
            f"{plural(len(saved_groups), 'group was', 'groups were')} saved, the optimizer has "
            f"{len(optimizer.param_groups)}",
        )
    if saved.get(BY_POSITION):
        _check_positions(strategy, parameter_groups, saved_groups)
        # Without names `_parameter_name` returns the positions, under which this state is stored.
        names = {}
    groups, reconfigured = _merge_options(optimizer, saved, say)
    state: dict[nn.Parameter, Any] = {}
    for group_index, group in enumerate(parameter_groups):
        for index, parameter in enumerate(group):
            name = _parameter_name(parameter, names, group_index, index)
            if name not in saved["state"]:
                continue
            parameter_state = saved["state"][name]
            # Otherwise it belongs to a parameter of the engine.
            if not strategy.keeps_gradients:
                # A run may continue in another precision than the one it was saved in.
                weight = (weights or {}).get(name)
                parameter_state = _cast_with_weight(parameter_state, weight, parameter)
            state[parameter] = parameter_state
    strategy.load_optimizer_state(optimizer, groups, state)
    return reconfigured


def _merge_options(
    optimizer: Optimizer,
    saved: _Saved,
    say: Callable[[str], None],
) -> tuple[list[_Options], _Options]:
    """The options of each group, as saved unless the user configures another value than then; and those values.

    ``initial_lr`` follows ``lr`` and is not reported.
    """
    configured_now = configured(optimizer)
    configured_then = saved.get(_CONFIGURED, configured_now)
    groups: list[_Options] = []
    reconfigured: _Options = {}
    for index, present in enumerate(_options(optimizer)):
        options = _without_parameters(saved["param_groups"][index])
        # A file of another library does not say what was configured, and its kernels are no state of the training.
        if _CONFIGURED not in saved:
            options.pop("fused", None)
            options.pop("foreach", None)
        before = configured_then[index]
        for key, value in configured_now[index].items():
            if key not in options or key not in before or _equal(before[key], value):
                continue
            options[key] = value
            # It is set by schedulers from `lr`, so the user would see the same change twice.
            if key != "initial_lr":
                reconfigured[key] = value
                say(
                    f"{key}: {value} as configured now, not {before.get(key)} as in the checkpoint"
                )
        # Options that the checkpoint lacks, for example of a newer torch, keep their present value.
        groups.append({**present, **options})
    return groups, reconfigured


def _check_exchanged(
    optimizer: Optimizer,
    parameter_groups: _ParameterGroups,
    saved: _Saved,
    names: Mapping[int, str],
) -> None:
    """Refuse the state of an optimizer that `exchange_optimizers` set, if the configured one differs from it.

    Raises:
        CheckpointError: the class, the options or the parameters differ.
    """
    if (
        saved[_CLASS] == type(optimizer).__name__
        and _has_parameters(parameter_groups, saved["param_groups"], names)
        and _has_options(optimizer, saved)
    ):
        return
    raise CheckpointError(
        "optimizer_states",
        None,
        f"trainer.optimizers = [...] had replaced this optimizer by {saved[_CLASS]}",
        fix="set trainer.optimizers in on_load_checkpoint too, if trainer.training, and not again before a step",
    )


def _has_parameters(
    parameter_groups: _ParameterGroups,
    saved_groups: Sequence[_Saved],
    names: Mapping[int, str],
) -> bool:
    """Whether the groups have the saved parameters, as far as this rank has them."""
    local_names = set(names.values())
    saved_names = [local_names.intersection(group["params"]) for group in saved_groups]
    group_names = []
    for group in parameter_groups:
        parameters = [names.get(id(parameter), "") for parameter in group]
        group_names.append(local_names.intersection(parameters))
    return saved_names == group_names


def _has_options(optimizer: Optimizer, saved: _Saved) -> bool:
    """Whether the groups are configured as the saved ones were; options that only one side has do not count."""
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        return False
    for before, now in zip(saved[_CONFIGURED], configured(optimizer), strict=False):
        for key in before.keys() & now.keys():
            if not _equal(before[key], now[key]):
                return False
    return True


def _check_positions(
    strategy: Strategy,
    parameter_groups: _ParameterGroups,
    saved_groups: Sequence[_Saved],
) -> None:
    """Refuse state without names where a position may be another parameter's.

    Raises:
        CheckpointError: a rank may have only some parameters, or the groups are of other sizes.
    """
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group) for group in parameter_groups]
    if strategy.sharded:
        raise CheckpointError(
            "optimizer_states",
            None,
            f"an imported file names no parameters, and {strategy.name} shards them over ranks",
            fix='train one step with strategy="ddp" or on one device, save a checkpoint, and resume from that',
        )
    if saved_sizes != sizes:
        raise CheckpointError(
            "optimizer_states",
            "param_groups",
            f"an imported file names no parameters: it has groups of {saved_sizes}, and the optimizer of {sizes}"
            " parameters",
            fix="configure the optimizer over the same parameters, or pass load_weights_only=True",
        )


def _cast_with_weight(
    state: _Saved,
    weight: object,
    parameter: nn.Parameter,
) -> _Options:
    """Cast state that had its weight's dtype to the parameter's present dtype; leave all other state as saved."""
    saved_dtype = weight.dtype if isinstance(weight, Tensor) else parameter.dtype
    cast = dict(state)
    if saved_dtype == parameter.dtype or not saved_dtype.is_floating_point:
        return cast
    for key, value in state.items():
        if key != _STEP and isinstance(value, Tensor) and value.dtype == saved_dtype:
            cast[key] = value.to(parameter.dtype)
    return cast


_AS_CONFIGURED: Final = "_configured_options"
_AFTER_TRAINING: Final = "_options_after_training"
_RESTORED_GROUPS: Final = "_restored_groups"
"""Attributes of an optimizer: options as configured and as the last fit left them; the index of each restored group
that the caller has not added yet, by the ids of its parameters."""
_FLAGS: Final = "_trained_parameters"
"""Attribute of a module: which parameters train, as configured, and as the last fit left them."""


def _options(optimizer: Optimizer) -> list[_Options]:
    """Copies of the present options of each group: schedules write in place into learning rates that are tensors."""
    groups = []
    for group in optimizer.param_groups:
        options = _without_parameters(group)
        for name, value in options.items():
            if isinstance(value, Tensor):
                options[name] = value.clone()
        groups.append(options)
    return groups


def note_configured(optimizer: Optimizer, again: bool = True) -> None:
    """Keep the options of each group as the user configured them, for comparison when a checkpoint is loaded.

    The optimizer may come from an earlier fit of this process. An option that still has its value at the end of that
    fit counts as configured with its value before that fit; any other value is the user's. ``again=False`` keeps the
    options of an earlier call.
    """
    attributes = vars(optimizer)
    if _AS_CONFIGURED in attributes and not again:
        return
    attributes.pop(_EXCHANGED, None)
    before_fit = attributes.get(_AS_CONFIGURED, ())
    after_fit = attributes.get(_AFTER_TRAINING, ())
    groups = _options(optimizer)
    for options, before, after in zip(groups, before_fit, after_fit, strict=False):
        for key, value in options.items():
            # The fit wrote this value, for example by a schedule: the user has not touched it since.
            if key in before and _equal(after.get(key), value):
                options[key] = before[key]
    attributes[_AS_CONFIGURED] = groups


def configured(optimizer: Optimizer) -> list[_Options]:
    """The options that `note_configured` kept for each group; the present options of groups that were added later."""
    noted: list[_Options] = vars(optimizer).get(_AS_CONFIGURED, [])
    return [*noted, *_options(optimizer)[len(noted) :]]


def _equal(a: object, b: object) -> bool:
    """Whether two values of an option are equal."""
    # A checkpoint may return a list for a tuple, and learning rates may be tensors.
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return bool(a == b)


def configured_flags(module: nn.Module) -> dict[str, bool]:
    """By name, whether the user configured a parameter to be trained; an earlier fit may have changed the flag."""
    before_fit, after_fit = vars(module).get(_FLAGS, ({}, {}))
    flags = {}
    for name, parameter in module.named_parameters():
        flag = parameter.requires_grad
        # The last fit left this flag so, for example by unfreezing; the user has not touched it since.
        if after_fit.get(name) == flag:
            flag = before_fit[name]
        flags[name] = flag
    return flags


def reset_flags(module: nn.Module) -> None:
    """Train the parameters that the user configured to be trained."""
    flags = configured_flags(module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags[name])


def changed_flags(run: Fit) -> dict[str, bool]:
    """By name, whether a parameter is trained, for those whose flag changed since the run was composed."""
    flags = {}
    for name, parameter in run.module.named_parameters():
        started_frozen = name in run.frozen
        if parameter.requires_grad == started_frozen:
            flags[state_name(name)] = parameter.requires_grad
    return flags


def restore_flags(run: Fit, flags: Mapping[str, bool]) -> None:
    """Restore `changed_flags` of parameters that start as they did then; the user's new configuration stays."""
    for name, parameter in run.module.named_parameters():
        flag = flags.get(state_name(name))
        started_frozen = name in run.frozen
        if flag is not None and bool(flag) == started_frozen:
            parameter.requires_grad_(bool(flag))


def add_groups(
    optimizer: Optimizer,
    saved: _Saved,
    parameters: Mapping[str, nn.Parameter],
    sharded: bool,
) -> None:
    """Add the groups that the saved optimizer got after it was configured; none if one does not match.

    If the caller re-adds a group after a resume, `watch_groups` matches it to the restored one.

    Args:
        optimizer: as it is configured.
        saved: its state, by name.
        parameters: of the module.
        sharded: whether a rank may have only some of the parameters.
    """
    group_count = len(optimizer.param_groups)
    saved_groups = saved["param_groups"]
    options = saved.get(_CONFIGURED) or ()
    # An older checkpoint does not say how its groups were configured.
    if len(options) != len(saved_groups):
        return
    present: set[int] = set()
    for group in optimizer.param_groups:
        present.update(map(id, group["params"]))
    added_groups: list[list[nn.Parameter]] = []
    # All are matched before the first is added: an optimizer with some of the groups fits neither state.
    for group in saved_groups[group_count:]:
        names = [name for name in group["params"] if name in parameters]
        if len(names) < len(group["params"]) and not sharded:
            return
        added = [parameters[name] for name in names]
        # The user has configured this group before the fit now.
        if any(id(parameter) in present for parameter in added):
            return
        added_groups.append(added)
    for index, added in enumerate(added_groups, group_count):
        optimizer.add_param_group({**options[index], "params": added})
        restored_groups = vars(optimizer).setdefault(_RESTORED_GROUPS, {})
        # A set: the caller may list the parameters in another order.
        restored_groups[frozenset(map(id, added))] = index


def watch_groups(run: Fit) -> Callable[[object], None]:
    """Train parameters that are added to an optimizer during the fit, from the next backward on.

    This wraps ``add_param_group`` of each optimizer: comparing the groups in each step would cost every run.

    Returns:
        A function that removes the wrappers.
    """
    optimizers = run.stepper.configured.optimizers

    def unwrap(_: object = None) -> None:
        for optimizer in optimizers:
            _unwrap_add_group(optimizer)
        # By these the next fit recognizes what the user has changed in between, see `configured_flags`.
        after_fit = {
            name: parameter.requires_grad
            for name, parameter in run.module.named_parameters()
        }
        before_fit = {name: name not in run.frozen for name in after_fit}
        vars(run.module)[_FLAGS] = (before_fit, after_fit)

    for optimizer in optimizers:
        _wrap_add_group(run, optimizer)
    return unwrap


def _wrap_add_group(run: Fit, optimizer: Optimizer) -> None:
    add = optimizer.add_param_group

    def add_param_group(param_group: _Options) -> None:
        if _match_restored_group(optimizer, param_group):
            return
        add(param_group)
        # torch has checked the group and filled in its defaults by now.
        noted: list[_Options] = vars(optimizer)[_AS_CONFIGURED]
        # The new group counts as configured by the user, as those before the fit do.
        noted += _options(optimizer)[len(noted) :]
        run.stepper.read_groups()

    vars(optimizer)["add_param_group"] = add_param_group


def _unwrap_add_group(optimizer: Optimizer) -> None:
    vars(optimizer).pop("add_param_group", None)
    vars(optimizer)[_AFTER_TRAINING] = _options(optimizer)


def exchange_optimizers(
    run: Fit,
    optimizers: list[Optimizer],
    *,
    resumed: bool,
    has_guard: bool,
) -> None:
    """Step other optimizers from here on; see docs/decisions/accelerator.md#0121.

    Args:
        run: the fit.
        optimizers: the new ones.
        resumed: whether the run continues from a checkpoint.
        has_guard: whether the run may go back to states of the present optimizers.

    Raises:
        ConfigurationError: an element is not an optimizer, or the run cannot exchange its optimizers for these.
    """
    optimizers = [OptimizerProxy.unwrapped(optimizer) for optimizer in optimizers]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                "this is not an optimizer",
                found=repr(optimizer),
                fix="assign a list: trainer.optimizers = [optimizer]",
            )
    if has_guard:
        raise ConfigurationError(
            "these optimizers cannot be exchanged in a run",
            found="NaNGuard, which rolls back to earlier optimizer states",
            fix="leave NaNGuard out, or change their param_groups",
        )
    replaced = list(run.stepper.configured.optimizers)
    # Read before the exchange: no step has used what the checkpoint restored.
    drops_restored_state = (
        resumed
        and run.stepper.trained is None
        and any(optimizer.state for optimizer in replaced)
    )
    stale_schedulers = run.stepper.replace(optimizers)
    for optimizer in replaced:
        _unwrap_add_group(optimizer)
    for optimizer in optimizers:
        note_configured(optimizer)
        vars(optimizer)[_EXCHANGED] = True
        _wrap_add_group(run, optimizer)
    check_parameters(run.stepper.configured, run.module, run.strategy, run.say)
    if drops_restored_state:
        run.say(
            "trainer.optimizers = ... drops the state of the optimizers that the checkpoint restored"
        )
    if stale_schedulers:
        run.say(
            f"{stale_schedulers} schedulers change optimizers that trainer.optimizers = ... has replaced"
        )


def _match_restored_group(optimizer: Optimizer, group: _Options) -> bool:
    """Whether the checkpoint restored this group; an option that the caller passes with a new value keeps it."""
    restored: dict[frozenset[int], int] = vars(optimizer).get(_RESTORED_GROUPS, {})
    if not restored:
        return False
    parameters = group["params"]
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    # An iterator can be read once, and torch's add_param_group reads it again.
    group["params"] = parameters = list(parameters)
    ids: set[int] = set()
    for entry in parameters:
        # torch also takes (name, parameter) pairs.
        if isinstance(entry, tuple):
            entry = entry[1]
        ids.add(id(entry))
    key = frozenset(ids)
    if key not in restored:
        return False
    # Once: a second call with these parameters is an error of the caller, which torch reports.
    index = restored.pop(key)
    noted = vars(optimizer)[_AS_CONFIGURED][index]
    changed = {
        name: value
        for name, value in _without_parameters(group).items()
        if noted.get(name) != value
    }
    optimizer.param_groups[index].update(changed)
    noted.update(changed)
    return True


def restore_scheduler(scheduler: Any, saved: _Saved, keeps_rates: bool) -> None:
    """Restore a scheduler's state.

    Args:
        scheduler: the user's.
        saved: its state.
        keeps_rates: whether base learning rates keep the values that the user configures now.
    """
    # Read before the state is loaded, which replaces the attribute.
    base_rates = [
        (nested, nested.base_lrs)
        for nested in scheduler_parts(scheduler)
        if hasattr(nested, "base_lrs")
    ]
    scheduler.load_state_dict(dict(saved))
    if keeps_rates:
        for nested, rates in base_rates:
            # The state that was loaded holds the former rates.
            nested.base_lrs = rates


def scheduler_parts(scheduler: Any) -> Iterator[Any]:
    """A scheduler and, recursively, its parts (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for nested in nested_schedulers(scheduler):
        yield from scheduler_parts(nested)
