"""Steps an optimizer on lists of tensors that are gathered once and not in every step.

To find parameters, gradients and states takes longer than the kernels where parameters are small. The kernels are those
that torch's own step calls, and so are the weights, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.types import Function
from trainer_kit.strategies.torch_private import GATHERING_METHOD, parts_of_step
from trainer_kit.strategies.update_kernels import (
    FUSED_KERNELS,
    LIST_KERNELS,
    Group,
    Kernel,
    StateLists,
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
_TORCHS_PARTS: Final = {kind: parts_of_step(kind) for kind in FUSED_KERNELS}
"""The functions of torch's own steps, before any other code may have replaced one."""

# Functions of C, which read an attribute of many tensors without a Python call for each.
_GRADIENT: Final = attrgetter("grad")
_DTYPE: Final = attrgetter("dtype")
_FORMAT: Final = attrgetter("dtype", "layout")
_KIND: Final = attrgetter("dtype", "layout", "device")
_ADDRESS: Final = Tensor.data_ptr
_STORAGE: Final = Tensor.untyped_storage
_STORAGE_ADDRESS: Final = torch.UntypedStorage.data_ptr

_PLAIN_TYPES: Final = frozenset({Tensor, nn.Parameter})
_NUMBER_TYPES: Final = frozenset({float, int})
_OVERRIDES: Final = frozenset({"grad_scale", "found_inf", GATHERING_METHOD})
"""Attributes of an optimizer that change what torch's own step does."""


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
    for group in groups:
        for parameter in group["params"]:
            if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
                return False
            # Functions of lists round factors to a narrow type, and torch's loop does not.
            if parameter.dtype not in _WIDE:
                return False
            if parameter.layout is not torch.strided or parameter.is_nested:
                return False
            elements += parameter.numel()
    return elements <= _MOST_ELEMENTS


@final
@dataclass(frozen=True)
class _OptionNames:
    """Which options of a group one algorithm reads.

    Attributes:
        switch: the option that decides which states there are.
        states: the names of the states without that option, and with it.
        numbers: reads the options that are numbers.
        pairs: the names of those that are several numbers.
    """

    switch: str
    states: tuple[tuple[str, ...], tuple[str, ...]]
    numbers: itemgetter[Any]
    pairs: tuple[str, ...]

    def needed_states(self, group: Group) -> tuple[str, ...]:
        return self.states[bool(group[self.switch])]


_SGD: Final = _OptionNames(
    switch="momentum",
    states=((), ("momentum_buffer",)),
    numbers=itemgetter("lr", "weight_decay", "momentum", "dampening"),
    pairs=(),
)
_ADAM: Final = _OptionNames(
    switch="amsgrad",
    states=(
        ("step", "exp_avg", "exp_avg_sq"),
        ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    numbers=itemgetter("lr", "weight_decay", "eps"),
    pairs=("betas",),
)
# By the class and not by the entries of a group, which may be the user's own.
_OPTION_NAMES: Final[dict[type[Optimizer], _OptionNames]] = {
    torch.optim.SGD: _SGD,
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
}


@final
@dataclass(frozen=True)
class _Gathered:
    """The parameters of one group and their states, in one order.

    Attributes:
        source: the list of the group, whose content other code may replace.
        switch: the option that decides which states there are.
        is_switched: whether that option was set.
        sources: where the states are, one dict for each parameter; empty where the kernel needs none.
        states: what was found there.
        addresses: of the parameters and the states.
        formats: type and layout that gradients must have, which are those of the parameters.
        storages: what gradients must not share memory with; empty if the kernel does as torch's own step even then.
    """

    group: Group
    source: list[nn.Parameter]
    parameters: list[nn.Parameter]
    switch: str
    is_switched: bool
    sources: list[dict[str, Tensor]]
    states: StateLists
    addresses: list[int]
    formats: set[tuple[torch.dtype, torch.layout]]
    storages: set[int]

    def is_current(self, group: Group) -> bool:
        """Whether the group has the tensors that were gathered, and needs the states that were."""
        if group is not self.group or group["params"] is not self.source:
            return False
        if len(self.source) != len(self.parameters):
            return False
        if not all(map(is_, self.source, self.parameters)):
            return False
        # An option that is changed may need a state that is not there yet.
        if bool(group[self.switch]) is not self.is_switched:
            return False
        for name, tensors in self.states.items():
            if not all(map(is_, map(methodcaller("get", name), self.sources), tensors)):
                return False
        # Other code may set `.data`, which changes type, device and memory of the same tensor.
        if not self.formats.issuperset(map(_FORMAT, self.parameters)):
            return False
        written = chain(self.parameters, *self.states.values())
        return list(map(_ADDRESS, written)) == self.addresses

    def find_gradients(self) -> list[Tensor] | None:
        """The gradients; None where one is missing, or only torch's own step is right with them."""
        gradients = list(map(_GRADIENT, self.parameters))
        if not _PLAIN_TYPES.issuperset(map(type, gradients)):
            return None
        if not self.formats.issuperset(map(_FORMAT, gradients)):
            return None
        if self.storages:
            addresses = map(_STORAGE_ADDRESS, map(_STORAGE, gradients))
            if not self.storages.isdisjoint(addresses):
                return None
        return gradients


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
        self._type = type(optimizer)
        self._kernel = kernel
        self._is_fused = is_fused
        self._options = _OPTION_NAMES[self._type]
        self._state: object = None
        # Parameters that have a state, and the states, in the order of the optimizer's.
        self._owners: list[Tensor] = []
        self._states: list[dict[str, Tensor]] = []
        self._gathered: list[_Gathered] | None = None
        self._tries_left = _MOST_TRIES

    def run(self, function: Function) -> bool:
        """Update the weights; False, and nothing is done, where only torch's own step is right.

        That is the first step, which creates the states; a parameter without a gradient; options that are tensors; and
        a loss scale that the kernel divides by.

        Args:
            function: what would update the weights instead.
        """
        if not self._tries_left:
            return False
        # Other code may have changed the class, or the step of the class.
        if type(self._optimizer) is not self._type:
            return False
        if function not in _TORCHS_PARTS[self._type]:
            return False
        gathered = self._current()
        if gathered is None or not _OVERRIDES.isdisjoint(vars(self._optimizer)):
            return False
        calls = []
        for each in gathered:
            gradients = each.find_gradients()
            if gradients is None or not self._has_plain_options(each.group):
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
            gathered = self._gather_all()
        self._tries_left = _MOST_TRIES if gathered else self._tries_left - 1
        self._gathered = gathered
        self._state = state
        self._owners = list(state)
        self._states = list(state.values())
        return gathered

    def _gather_all(self) -> list[_Gathered] | None:
        """The lists of all groups; None where torch's own step, or other code in its place, must run."""
        if parts_of_step(self._type) != _TORCHS_PARTS[self._type]:
            return None
        gathered = []
        for group in self._optimizer.param_groups:
            lists = self._gather(group)
            if lists is None:
                return None
            gathered.append(lists)
        return gathered

    def _gather(self, group: Group) -> _Gathered | None:
        parameters = list(group["params"])
        names = self._options.needed_states(group)
        sources: list[dict[str, Tensor]] = []
        if names:
            sources = [
                self._optimizer.state.get(parameter, {}) for parameter in parameters
            ]
        states: StateLists = {}
        for name in names:
            states[name] = [source.get(name) for source in sources]  # type: ignore[misc]  # looked at below
        written = [*parameters, *chain.from_iterable(states.values())]
        # A DTensor is stepped by its own rules, and the first step makes the states.
        if not _PLAIN_TYPES.issuperset(map(type, written)):
            return None
        formats = self._common_format(parameters, states)
        storages: set[int] | None = set()
        if not self._is_fused:
            storages = _separate_storages(written)
        if not formats or storages is None:
            return None
        lists = _Gathered(
            group=group,
            source=group["params"],
            parameters=parameters,
            switch=self._options.switch,
            is_switched=bool(group[self._options.switch]),
            sources=sources,
            states=states,
            addresses=list(map(_ADDRESS, written)),
            formats=formats,
            storages=storages,
        )
        return None if lists.find_gradients() is None else lists

    def _common_format(
        self, parameters: list[nn.Parameter], states: StateLists
    ) -> set[tuple[torch.dtype, torch.layout]]:
        """Type and layout, if one call of the kernel takes all of these; an empty set otherwise."""
        tensors: list[Tensor] = list(parameters)
        for name, of_name in states.items():
            # Counts have a type of their own, and may be on the CPU.
            if name != "step":
                tensors += of_name
        kinds = set(map(_KIND, tensors))
        if len(kinds) != 1:
            return set()
        dtype, layout, _ = kinds.pop()
        if layout is not torch.strided or not dtype.is_floating_point:
            return set()
        return {(dtype, layout)}

    def _has_plain_options(self, group: Group) -> bool:
        """Whether the kernel takes the options as they are: numbers, and no graph of the step."""
        numbers = self._options.numbers(group)
        for name in self._options.pairs:
            numbers += tuple(group[name])
        if not _NUMBER_TYPES.issuperset(map(type, numbers)):
            return False
        if group["differentiable"] or group.get("capturable"):
            return False
        # torch's own kernels of many tensors, which it prefers to the fused one as well.
        if group.get("foreach") or bool(group.get("fused")) is not self._is_fused:
            return False
        # Only the fused kernel keeps the maximum as torch's loop does.
        return self._is_fused or not group.get("amsgrad")


def _separate_storages(tensors: list[Tensor]) -> set[int] | None:
    """The addresses of the memory of these tensors; None if two share some: torch updates one after the other."""
    addresses = list(map(_STORAGE_ADDRESS, map(_STORAGE, tensors)))
    # Empty tensors have none.
    storages = set(addresses) - {0}
    if len(storages) != len(addresses) - addresses.count(0):
        return None
    return storages
