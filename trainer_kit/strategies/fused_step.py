"""torch's fused kernels, called on lists of tensors that are gathered once and not in every step.

An optimizer with ``fused=True`` updates all parameters of a group in one kernel; to find their states takes longer than
the kernel where parameters are small. The kernel is the same, and so are the weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.torch_private import add_to_each
from trainer_kit.strategies.torch_private import fused_adam, fused_adamw, fused_sgd

__all__ = ["FusedUpdate", "has_fused_update"]

_Group: TypeAlias = dict[str, Any]
_State: TypeAlias = dict[str, Tensor]
_MOST_TRIES: Final = 8
"""Steps in which the lists are looked for in vain, until torch's own way is taken for good."""
_ADAM_STATES: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
_AMSGRAD_STATES: Final = _ADAM_STATES | {"max_exp_avg_sq"}
_MOMENTUM_STATES: Final = frozenset({"momentum_buffer"})


def has_fused_update(optimizer: Optimizer) -> bool:
    """Whether this optimizer was created with ``fused=True``, and `FusedUpdate` knows its kernel.

    A subclass may have another kernel than its base.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and type(optimizer) in _KERNELS


@final
@dataclass(frozen=True)
class _Gathered:
    """The parameters of one group and their states, in one order."""

    group: _Group
    source: list[nn.Parameter]
    parameters: list[nn.Parameter]
    states: list[_State | None]
    needs: frozenset[str]

    def is_current(self, group: _Group) -> bool:
        """Whether the group has the parameters that were gathered."""
        same_group = group is self.group and group["params"] is self.source
        same_length = len(self.source) == len(self.parameters)
        return (
            same_group and same_length and all(map(is_, self.source, self.parameters))
        )

    def has_states_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer still has these states; other code may clear or replace them."""
        present = map(optimizer.state.get, self.parameters)
        # An option that is changed may need a state that is not there yet.
        same_needs = _needed_states(self.group) == self.needs
        return same_needs and all(map(is_, present, self.states))


@final
class FusedUpdate:
    """Steps an optimizer by its fused kernels where nothing but the update is to be done.

    Args:
        optimizer: one of which `has_fused_update` is true.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kernel = _KERNELS[type(optimizer)]
        self._state: object = None
        self._gathered: list[_Gathered] | None = None
        self._tries_left = _MOST_TRIES

    def run(self) -> bool:
        """Update the weights; False, and nothing is done, where only torch's own step is right.

        That is the first step, which creates the states; a parameter without a gradient; options that are tensors; and
        a loss scale that the kernel divides by.
        """
        if not self._tries_left:
            return False
        gathered = self._current()
        if gathered is None or "grad_scale" in vars(self._optimizer):
            return False
        calls = []
        for each in gathered:
            gradients = []
            for parameter in each.parameters:
                gradient = parameter.grad
                if gradient is None:
                    return False
                gradients.append(gradient)
            if not _has_plain_options(each.group):
                return False
            calls.append((each, gradients))
        for each, gradients in calls:
            states = [state for state in each.states if state is not None]
            self._kernel(each.group, each.parameters, gradients, states)
        return True

    def _current(self) -> list[_Gathered] | None:
        """What was gathered; gathered again if groups or states were replaced, None if they are not all there."""
        groups = self._optimizer.param_groups
        gathered = self._gathered
        # Loading a state dict replaces the states, and a new group or parameter changes the lists.
        is_current = (
            gathered is not None
            and self._state is self._optimizer.state
            and len(gathered) == len(groups)
            and all(map(_Gathered.is_current, gathered, groups))
            and all(each.has_states_of(self._optimizer) for each in gathered)
        )
        if is_current:
            return gathered
        gathered = _gather_all(self._optimizer)
        self._tries_left = _MOST_TRIES if gathered else self._tries_left - 1
        self._gathered = gathered
        self._state = self._optimizer.state
        return gathered


def _gather_all(optimizer: Optimizer) -> list[_Gathered] | None:
    gathered = []
    for group in optimizer.param_groups:
        parameters = list(group["params"])
        # None where there is none: plain SGD has no state.
        states = [optimizer.state.get(parameter) for parameter in parameters]
        if not group.get("fused") or not _have_one_kernel(parameters):
            return None
        needs = _needed_states(group)
        # The first step makes them.
        if needs and not all(state and _has_all(state, needs) for state in states):
            return None
        gathered.append(_Gathered(group, group["params"], parameters, states, needs))
    return gathered


def _have_one_kernel(parameters: list[nn.Parameter]) -> bool:
    """Whether one call takes all of them: dense and real, of one type, and on one device."""
    kinds = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or type(gradient) is not Tensor or gradient.is_sparse:
            return False
        # A DTensor is stepped by its own rules.
        if type(parameter) is not nn.Parameter or parameter.is_complex():
            return False
        kinds.add((parameter.device, parameter.dtype, gradient.dtype))
    return len(kinds) == 1


def _needed_states(group: _Group) -> frozenset[str]:
    """What the kernel needs of the state of each parameter."""
    if "betas" not in group:
        if group["momentum"]:
            return _MOMENTUM_STATES
        return frozenset()
    if group["amsgrad"]:
        return _AMSGRAD_STATES
    return _ADAM_STATES


def _has_all(state: _State, names: frozenset[str]) -> bool:
    return all(state.get(name) is not None for name in names)


def _has_plain_options(group: _Group) -> bool:
    """Whether the kernel takes the options as they are: numbers, and no graph of the step."""
    if isinstance(group["lr"], Tensor) or group["differentiable"]:
        return False
    if group.get("capturable"):
        return False
    return not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))


def _update_sgd(
    group: _Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[_State],
) -> None:
    buffers: list[Tensor] = []
    if group["momentum"]:
        buffers = [state["momentum_buffer"] for state in states]
    fused_sgd(
        parameters,
        gradients,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )


def _update_adam(
    group: _Group,
    parameters: list[nn.Parameter],
    gradients: list[Tensor],
    states: list[_State],
) -> None:
    # Read from the states in each step: other code may have put other tensors there.
    steps = [state["step"] for state in states]
    maxima: list[Tensor] = []
    if group["amsgrad"]:
        maxima = [state["max_exp_avg_sq"] for state in states]
    beta1, beta2 = group["betas"]
    kernel = fused_adam
    if group["decoupled_weight_decay"]:
        kernel = fused_adamw
    add_to_each(steps, 1)
    kernel(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        maxima,
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


_Kernel: TypeAlias = Callable[
    [_Group, list[nn.Parameter], list[Tensor], list[_State]], None
]
_KERNELS: Final[dict[type[Optimizer], _Kernel]] = {
    torch.optim.SGD: _update_sgd,
    torch.optim.Adam: _update_adam,
    torch.optim.AdamW: _update_adam,
}
