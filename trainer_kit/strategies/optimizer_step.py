"""The step of an optimizer without what torch wraps around it for listeners, while there are none.

torch wraps ``step`` of every optimizer for its profiler and its hooks, and that of its own optimizers once more to turn
gradients off. With a small model the wrappers take as long as the update itself. What they do is done here where
there is a listener, and skipped where there is none; the update is the same function, so weights are bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, final

import torch
from torch.optim import Optimizer

from trainer_kit.core.torch_private import STEPPED_MARK
from trainer_kit.core.types import Function, SavedState
from trainer_kit.strategies.gathered_step import find_gathered_update
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.torch_private import (
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
    global_step_post_hooks,
    global_step_pre_hooks,
    is_profiling,
    set_grad_mode,
    step_below_grad_mode,
    step_below_hooks,
    step_below_scheduler,
)

__all__ = ["direct_step", "drop_gradients_of"]

_ZERO_GRAD: Final = Optimizer.zero_grad
"""torch's, before any other code may have replaced it."""
_MANY_GROUPS: Final = 8
"""Groups from which on it is worth looking for equal ones in every step."""
_TREATS_PARAMETERS_ALONE: Final = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
    }
)
"""Optimizers that update each parameter by itself, and write nothing into its group. A subclass may do either."""


@final
@dataclass(frozen=True)
class _Update:
    """The function that updates the weights, and what its wrappers would have done.

    Attributes:
        function: takes the optimizer, and the arguments of ``step``.
        needs_no_grad: whether gradients must be off around it: its own wrapper did that.
        notes_step: whether a scheduler notes that the optimizer has stepped.
        may_join_groups: whether parameters of groups with equal options may be updated as those of one group.
    """

    function: Function
    needs_no_grad: bool
    notes_step: bool
    may_join_groups: bool = False


def direct_step(optimizer: Optimizer) -> StepMethod:
    """Return a function that steps an optimizer as ``optimizer.step`` does, with fewer calls.

    Groups with equal options are stepped as one. Step hooks (of this optimizer or of all), torch's profiler, a ``step``
    that other code puts on the optimizer or on its class: each is looked for in every step, and where there is one
    ``optimizer.step`` itself is called.

    Args:
        optimizer: any; one whose step torch has not wrapped is always stepped by its own method.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> step = direct_step(optimizer)
        >>> weight.grad = torch.ones(1)
        >>> step()
        >>> weight.item()
        0.5
    """
    attributes = vars(optimizer)
    # A scheduler replaces the step of one optimizer, and may be made after this function: see below.
    instance_step = attributes.get("step")
    class_step = type(optimizer).step
    update = _find_update(optimizer)
    gathered = find_gathered_update(optimizer)

    def step(*arguments: Any, **options: Any) -> object:
        nonlocal instance_step, class_step, update
        # Compared in each step: a scheduler or a library may replace it at any time.
        same_instance_step = attributes.get("step") is instance_step
        if not same_instance_step or type(optimizer).step is not class_step:
            instance_step = attributes.get("step")
            class_step = type(optimizer).step
            update = _find_update(optimizer)
        # Of an optimizer that has not called torch's constructor there are none to look for.
        if update is None:
            return optimizer.step(*arguments, **options)
        hooks = attributes[STEP_PRE_HOOKS] or attributes[STEP_POST_HOOKS]
        global_hooks = global_step_pre_hooks or global_step_post_hooks
        if hooks or global_hooks or is_profiling():
            return optimizer.step(*arguments, **options)
        if update.notes_step:
            attributes[STEPPED_MARK] = True
        if not update.needs_no_grad:
            return update.function(optimizer, *arguments, **options)
        updated: Optimizer | _WithJoinedGroups = optimizer
        # A closure makes the gradients, and may change options: nothing is settled before it has run.
        has_closure = bool(arguments or options)
        if update.may_join_groups and not has_closure:
            # Below this number, comparing the options takes longer than the kernels that are saved.
            if len(optimizer.param_groups) >= _MANY_GROUPS:
                updated = _WithJoinedGroups(optimizer)
        # Functions of torch's C++ and no context manager: `no_grad` is two Python calls.
        mode = torch.is_grad_enabled()
        set_grad_mode(False)
        try:
            if gathered is not None and not has_closure:
                if gathered.run(update.function):
                    return None
            return update.function(updated, *arguments, **options)
        finally:
            set_grad_mode(mode)

    return step


def _find_update(optimizer: Optimizer) -> _Update | None:
    """The function below torch's wrappers; None if the step is something else, which only its own call runs."""
    attributes = vars(optimizer)
    if STEP_PRE_HOOKS not in attributes or STEP_POST_HOOKS not in attributes:
        # Its class has not called torch's constructor: a proxy of another optimizer.
        return None
    stepping: object = type(optimizer).step
    notes_step = False
    instance_step = attributes.get("step")
    if instance_step is not None:
        # What a scheduler puts there calls the step of the class, and that is all that may stand there.
        if not isinstance(instance_step, FunctionType):
            return None
        if step_below_scheduler(instance_step) is not stepping:
            return None
        notes_step = True
    if not isinstance(stepping, FunctionType):
        return None
    # torch wraps step with hooks and the profiler, and below that with `no_grad`: both are peeled off.
    below_hooks = step_below_hooks(stepping)
    if below_hooks is None:
        return None
    below_grad_mode = step_below_grad_mode(below_hooks)
    if below_grad_mode is None:
        return _Update(below_hooks, needs_no_grad=False, notes_step=notes_step)
    if optimizer.defaults.get("differentiable"):
        # The step itself is part of the graph, so gradients stay on.
        return None
    return _Update(
        below_grad_mode,
        needs_no_grad=True,
        notes_step=notes_step,
        may_join_groups=type(optimizer) in _TREATS_PARAMETERS_ALONE,
    )


@final
class _WithJoinedGroups:
    """An optimizer for one step, whose groups with equal options are one; everything else is that of ``optimizer``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = _join_equal_groups(optimizer.param_groups)
        # Here too: it is read for every parameter.
        self.state = optimizer.state

    def __getattr__(self, name: str) -> object:
        return getattr(self.optimizer, name)


def _join_equal_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups for one step, in which parameters with equal options share one: torch calls its kernels for each group.

    Recipes that give every weight a group of its own make hundreds. Options are compared in each step, because
    schedulers change them. Parameters that torch's kernels treat differently stay apart: one of another kind in a
    group would make torch update all of them one by one, and round differently.
    """
    joined: dict[tuple[object, ...], dict[str, Any]] = {}
    for group in groups:
        parameters = group["params"]
        key = _options_of(group)
        if key in joined:
            joined[key]["params"].extend(parameters)
            continue
        joined[key] = dict(group)
        joined[key]["params"] = list(parameters)
    return list(joined.values())


def _options_of(group: SavedState) -> tuple[object, ...]:
    """Equal for groups whose parameters may be updated together."""
    options = [_comparable(name, value) for name, value in group.items()]
    # As a set: the order of parameters in a group does not matter.
    kinds = frozenset(map(_kind_of, group["params"]))
    return (*options, kinds)


def _comparable(name: str, value: object) -> object:
    """An option in a form that is equal where options are; the parameters are no option."""
    if name == "params":
        return None
    # Two tensors with one value may differ in the next step, and comparing them would wait for the device.
    if isinstance(value, torch.Tensor):
        return name, id(value)
    # Lists cannot be keys: `betas` may be one.
    if isinstance(value, list):
        value = tuple(value)
    try:
        hash(value)
    except TypeError:
        # An entry of the user's own, such as a dict.
        return name, id(value)
    return name, value


def _kind_of(parameter: torch.Tensor) -> tuple[object, ...]:
    gradient = parameter.grad
    # torch's foreach kernels do not take sparse gradients.
    is_sparse = gradient is not None and gradient.is_sparse
    return type(parameter), parameter.device, is_sparse


def drop_gradients_of(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Call ``optimizer.zero_grad``, or do the same without its wrappers where it is torch's and nothing listens.

    Args:
        optimizer: any.
        set_to_none: False: gradients become zeros, by torch's own method.
    """
    is_torchs = type(optimizer).zero_grad is _ZERO_GRAD
    if not set_to_none or not is_torchs or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none)
        return
    if is_profiling():
        optimizer.zero_grad(set_to_none)
        return
    # torch's own method also enters a profiler range and looks for foreach, which None does not need.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
