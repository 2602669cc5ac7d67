"""Steps an optimizer on lists of tensors that are gathered once and not in every step.

To find parameters, gradients and states takes longer than the kernels where parameters are small. The kernels are those
that torch's own step calls, and so are the weights, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.torch_private import storage_key
from trainer_kit.strategies.update_kernels import (
    FUSED_KERNELS,
    LIST_KERNELS,
    Group,
    Kernel,
    State,
)

__all__ = ["GatheredUpdate", "find_gathered_update"]

_MOST_TRIES: Final = 8
"""Steps in which the lists are looked for in vain, until torch's own way is taken for good."""
_MOST_ELEMENTS: Final = 2**18
"""Elements of an optimizer's parameters up to which finding them takes longer than updating them, one after the other.

Updated all at once, larger ones leave the cache between two kernels, and need memory for a temporary of each.
"""
_WIDE: Final = (torch.float32, torch.float64)
_MOST_GROUPS: Final = 7
"""Groups up to which it is worth updating each by itself; more are joined where their options are equal."""
_ADAM_STATES: Final = frozenset({"step", "exp_avg", "exp_avg_sq"})
_AMSGRAD_STATES: Final = _ADAM_STATES | {"max_exp_avg_sq"}
_MOMENTUM_STATES: Final = frozenset({"momentum_buffer"})


def find_gathered_update(optimizer: Optimizer) -> GatheredUpdate | None:
    """What updates the parameters of this optimizer; None where only its own step can.

    That is one created with ``fused=True``, or a small one on the CPU. A subclass may have another kernel than its
    base.
    """
    groups = optimizer.param_groups
    fused_kernel = FUSED_KERNELS.get(type(optimizer))
    if fused_kernel is not None and all(group.get("fused") for group in groups):
        return GatheredUpdate(optimizer, fused_kernel, is_fused=True)
    list_kernel = LIST_KERNELS.get(type(optimizer))
    if list_kernel is not None and _is_small(groups):
        return GatheredUpdate(optimizer, list_kernel, is_fused=False)
    return None


def _is_small(groups: list[Group]) -> bool:
    """Whether the parameters are on the CPU, and few and small enough to be updated all at once."""
    if len(groups) > _MOST_GROUPS:
        return False
    elements = 0
    storages = set()
    for group in groups:
        for parameter in group["params"]:
            if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
                return False
            # Functions of lists round factors to a narrow type, and torch's loop does not.
            if parameter.dtype not in _WIDE:
                return False
            storage = storage_key(parameter.untyped_storage())
            # Of two that share memory, torch updates one after the other.
            if storage in storages:
                return False
            storages.add(storage)
            elements += parameter.numel()
    return elements <= _MOST_ELEMENTS


@final
@dataclass(frozen=True)
class _Gathered:
    """The parameters of one group and their states, in one order.

    Attributes:
        source: the list of the group, whose content other code may replace.
        states: of each parameter; empty where the kernel needs none.
        needs: the names in a state that the kernel needs.
    """

    group: Group
    source: list[nn.Parameter]
    parameters: list[nn.Parameter]
    states: list[State]
    needs: frozenset[str]

    def is_current(self, group: Group) -> bool:
        """Whether the group has the parameters that were gathered, and needs the states that were."""
        if group is not self.group or group["params"] is not self.source:
            return False
        if len(self.source) != len(self.parameters):
            return False
        if not all(map(is_, self.source, self.parameters)):
            return False
        # An option that is changed may need a state that is not there yet.
        return _needed_states(group) == self.needs


@final
class GatheredUpdate:
    """Steps an optimizer where nothing but the update is to be done.

    Args:
        optimizer: of torch.
        kernel: updates the parameters of one group.
        is_fused: whether that is the kernel of a group with ``fused=True``.
    """

    def __init__(self, optimizer: Optimizer, kernel: Kernel, *, is_fused: bool) -> None:
        self._optimizer = optimizer
        self._kernel = kernel
        self._is_fused = is_fused
        self._state: object = None
        # Parameters that have a state, and the states, in the order of the optimizer's.
        self._owners: list[Tensor] = []
        self._states: list[State] = []
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
            if not _has_plain_options(each.group, self._is_fused):
                return False
            calls.append((each, gradients))
        for each, gradients in calls:
            self._kernel(each.group, each.parameters, gradients, each.states)
        return True

    def _current(self) -> list[_Gathered] | None:
        """What was gathered; gathered again if groups or states were replaced, None if they are not all there."""
        groups = self._optimizer.param_groups
        gathered = self._gathered
        state = self._optimizer.state
        # Loading a state dict replaces the states, and a new group or parameter changes the lists. Compared in order:
        # to look each parameter up would be a Python call for each.
        is_current = (
            gathered is not None
            and self._state is state
            and len(state) == len(self._owners)
            and all(map(is_, state, self._owners))
            and all(map(is_, state.values(), self._states))
            and len(gathered) == len(groups)
            and all(map(_Gathered.is_current, gathered, groups))
        )
        if is_current:
            return gathered
        gathered = None
        if self._is_fused or _is_small(groups):
            gathered = _gather_all(self._optimizer)
        self._tries_left = _MOST_TRIES if gathered else self._tries_left - 1
        self._gathered = gathered
        self._state = state
        self._owners = list(state)
        self._states = list(state.values())
        return gathered


def _gather_all(optimizer: Optimizer) -> list[_Gathered] | None:
    gathered = []
    for group in optimizer.param_groups:
        parameters = list(group["params"])
        if not _have_one_kernel(parameters):
            return None
        needs = _needed_states(group)
        states: list[State] = []
        if needs:
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        # The first step makes them.
        if not all(_has_all(state, needs) for state in states):
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


def _needed_states(group: Group) -> frozenset[str]:
    """What the kernel needs of the state of each parameter."""
    if "betas" not in group:
        if group["momentum"]:
            return _MOMENTUM_STATES
        return frozenset()
    if group["amsgrad"]:
        return _AMSGRAD_STATES
    return _ADAM_STATES


def _has_all(state: State, names: frozenset[str]) -> bool:
    return all(state.get(name) is not None for name in names)


def _has_plain_options(group: Group, is_fused: bool) -> bool:
    """Whether the kernel takes the options as they are: numbers, and no graph of the step."""
    # Not by a generator, which would be a call in every step.
    for number in (group["lr"], group["weight_decay"], *group.get("betas", ())):
        if isinstance(number, Tensor):
            return False
    if group["differentiable"] or group.get("capturable"):
        return False
    if bool(group.get("fused")) is not is_fused:
        return False
    # Only the fused kernel keeps the maximum as torch's loop does.
    return is_fused or not group.get("amsgrad")
