"""The step of an optimizer without what torch wraps around it for listeners, while there are none.

torch wraps ``step`` of every optimizer for its profiler and its hooks, and that of its own optimizers once more to turn
gradients off. With a small model the wrappers take as long as the update itself. What they do is done here where
somebody listens, and skipped where nobody does; the update is the same function, so weights are bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer

from trainer_kit.core.types import Function
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.torch_private import (
    STEP_POST_HOOKS,
    STEP_PRE_HOOKS,
    STEPPED_MARK,
    global_step_post_hooks,
    global_step_pre_hooks,
    is_profiling,
    is_scheduler_wrapper,
    set_grad_mode,
    step_below_grad_mode,
    step_below_hooks,
)

__all__ = ["direct_step", "drop_gradients_of"]


@final
@dataclass(frozen=True)
class _Update:
    """The function that updates the weights, and what its wrappers would have done.

    Attributes:
        function: takes the optimizer, and the arguments of ``step``.
        needs_no_grad: whether gradients must be off around it: its own wrapper did that.
        notes_step: whether a scheduler has asked to be told that the optimizer has stepped.
    """

    function: Function
    needs_no_grad: bool
    notes_step: bool


def direct_step(optimizer: Optimizer) -> StepMethod:
    """Return a function that steps an optimizer as ``optimizer.step`` does, with fewer calls.

    Step hooks (of this optimizer or of all), torch's profiler, a ``step`` that other code puts on the optimizer or on
    its class: each is looked for in every step, and then ``optimizer.step`` itself is called.

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
    kind = type(optimizer)
    attributes = vars(optimizer)
    # A scheduler replaces the step of one optimizer, and may be made after this function: see below.
    instance_step = attributes.get("step")
    class_step = kind.step
    update = _find_update(optimizer)

    def step(*arguments: Any, **options: Any) -> Any:
        nonlocal instance_step, class_step, update
        if attributes.get("step") is not instance_step or kind.step is not class_step:
            instance_step = attributes.get("step")
            class_step = kind.step
            update = _find_update(optimizer)
        if (
            update is None
            or attributes[STEP_PRE_HOOKS]
            or attributes[STEP_POST_HOOKS]
            or global_step_pre_hooks
            or global_step_post_hooks
            or is_profiling()
        ):
            return optimizer.step(*arguments, **options)
        if update.notes_step:
            attributes[STEPPED_MARK] = True
        if not update.needs_no_grad:
            return update.function(optimizer, *arguments, **options)
        mode = torch.is_grad_enabled()
        set_grad_mode(False)
        try:
            return update.function(optimizer, *arguments, **options)
        finally:
            set_grad_mode(mode)

    return step


def _find_update(optimizer: Optimizer) -> _Update | None:
    """The function below torch's wrappers; None if the step is something else, which only its own call runs."""
    attributes = vars(optimizer)
    if STEP_PRE_HOOKS not in attributes or STEP_POST_HOOKS not in attributes:
        # Its class has not called torch's constructor: a proxy of another optimizer.
        return None
    # Compared as functions: each look at a method makes a new object.
    stepping: Any = getattr(optimizer.step, "__func__", optimizer.step)
    notes_step = is_scheduler_wrapper(stepping)
    if notes_step:
        stepping = stepping.__wrapped__
    if stepping is not type(optimizer).step:
        return None
    below_hooks = step_below_hooks(stepping)
    if below_hooks is None:
        return None
    below_grad_mode = step_below_grad_mode(below_hooks)
    if below_grad_mode is None:
        return _Update(below_hooks, needs_no_grad=False, notes_step=notes_step)
    if optimizer.defaults.get("differentiable"):
        # The step itself is part of the graph, so gradients stay on.
        return None
    return _Update(below_grad_mode, needs_no_grad=True, notes_step=notes_step)


def drop_gradients_of(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Call ``optimizer.zero_grad``, or do the same without its wrappers where it is torch's and nothing listens.

    Args:
        optimizer: any.
        set_to_none: False: gradients become zeros, by torch's own method.
    """
    is_torchs = type(optimizer).zero_grad is Optimizer.zero_grad
    if not set_to_none or not is_torchs or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none)
        return
    if is_profiling():
        optimizer.zero_grad(set_to_none)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
