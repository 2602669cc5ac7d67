"""Running averages of the weights of a module, as it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainer_kit.core.display import plural
from trainer_kit.core.state_names import plain_state, state_name
from trainer_kit.core.tensors import local
from trainer_kit.core.torch_private import (
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    copy_to_each,
    direct_buffers,
)
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.state import shard_like

__all__ = ["Averages", "AvgFn", "MultiAvgFn", "reshard_modules"]

AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[Any, Any, Any], None]

_READ_VALUES: Final = methodcaller("values")
_NARROW: Final = (torch.float16, torch.bfloat16)
"""An average moves by less than these can tell apart: it is kept in 32 bits."""


@final
@dataclass
class _Group:
    """Averages that one fused operation updates.

    Attributes:
        since: the count at which they began.
        averages: those on this rank.
        live: the weights, which may be sharded.
    """

    since: int
    averages: list[Tensor] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)


@final
class Averages:
    """Running averages of floating-point parameters and buffers; integer buffers are copied.

    The average of a sharded parameter is sharded in the same way: nothing is gathered, and ranks do not communicate.

    Before each use, the parameters of the module are compared with those that are averaged. If a name has another
    parameter, or one of another shape, its average restarts from that parameter, as for a new name. The average of a
    removed name is dropped. A buffer that the module reassigns keeps its average.

    Args:
        module: the module whose weights are averaged, after it was sharded.
        use_buffers: also average the buffers in its ``state_dict``.
        device: the device of the averages; None for that of the weights.
        avg_fn: computes the new average from (average, weight, number averaged), as in ``torch.optim.swa_utils``.
        multi_avg_fn: the same for lists, in place. Without either, the mean.
        report: is called with a message when averages restart.

    Attributes:
        count: how many weights are averaged; no average exists before the first.
        lent: by name, the weights of the module while the averages are swapped in.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> averages = Averages(layer)
        >>> for weight in (1.0, 3.0):
        ...     layer.weight.data.fill_(weight); averages.update()
        tensor([[1.]])
        tensor([[3.]])
        >>> averages.put_in(); layer.weight.item()
        2.0
        >>> averages.take_out(); layer.weight.item()
        3.0
    """

    def __init__(
        self,
        module: nn.Module,
        use_buffers: bool = True,
        device: torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self.device = device
        self._avg_fn = avg_fn
        self._report = report
        # Functions of users take the count as a tensor, as torch's `AveragedModel` passes it.
        self._count_as_tensor = avg_fn is not None or multi_avg_fn is not None
        self._multi_avg_fn: MultiAvgFn = multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count = 0
        self.lent: dict[str, Tensor] = {}
        self._module = module
        self._use_buffers = use_buffers
        # The averages by name.
        self._tensors: dict[str, Tensor] = {}
        # By name, the count at which an average began that began later than the first.
        self._since: dict[str, int] = {}
        self._groups: list[_Group] = []
        # Pairs of a copy and the live tensor: what is no floating-point number has no average.
        self._copied: list[tuple[Tensor, Tensor]] = []
        # Gathered parameters are other tensors than the shards, which the optimizer steps.
        reshard_modules(module)
        self._find_weights()

    def _find_weights(self) -> None:
        self._owners: dict[str, nn.Module] = {}
        # Tied weights have several names; the first one is the key.
        self._names: dict[str, list[str]] = {}
        self._live: dict[str, Tensor] = {}
        key_names: dict[int, str] = {}
        for name, tensor in self._named_tensors():
            key_name = key_names.get(id(tensor))
            if key_name is not None:
                self._names[key_name].append(name)
            elif _is_averaged(tensor):
                key_names[id(tensor)] = name
                self._names[name] = [name]
                self._live[name] = tensor
        kinds = [CHILDREN, PARAMETERS]
        if self._use_buffers:
            kinds.append(BUFFERS)
        # The dicts of all submodules, and what they held: `follow` compares the two in every step.
        self._registries: list[dict[str, object]] = []
        for submodule in self._module.modules():
            self._registries += [vars(submodule)[kind] for kind in kinds]
        members = map(_READ_VALUES, self._registries)
        # The None at the end: a member that was added or removed makes the two differ in length.
        self._registered = [*chain.from_iterable(members), None]

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and buffers with their names in a checkpoint; note the owners of buffers."""
        module = self._module
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield state_name(name), parameter
        if not self._use_buffers:
            return
        saved_names = plain_state(module)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            saved_name = state_name(name)
            if saved_name in saved_names:
                owner_name, _, _ = name.rpartition(".")
                self._owners[saved_name] = module.get_submodule(owner_name)
                yield saved_name, buffer

    def follow(self) -> None:
        """Find the parameters of the module again, if they have changed."""
        # This runs in every step, so it builds no names while nothing has changed.
        registered = chain.from_iterable(map(_READ_VALUES, self._registries))
        if all(map(is_, chain(registered, (None,)), self._registered)):
            return
        reshard_modules(self._module)
        # `_find_weights` replaces both, and what continues is found by comparing before and after.
        live_before = self._live
        owners_before = self._owners
        self._find_weights()
        unchanged = self._find_unchanged(live_before, owners_before)
        lent = self.lent.items()
        self.lent = {name: tensor for name, tensor in lent if name in unchanged}
        # Nothing is averaged yet: the first update takes all weights as they are then.
        if self.count == 0:
            return
        replaced = [name for name in self._live if name not in unchanged]
        self._restart(replaced)
        if replaced and self._report is not None:
            names = ", ".join(replaced[:3])
            if len(replaced) > 3:
                names += ", ..."
            self._report(
                f"the averages of {plural(len(replaced), 'weight')} restart, because the module "
                f"replaced these weights: {names}"
            )

    def _find_unchanged(
        self, live_before: Mapping[str, Tensor], owners_before: Mapping[str, nn.Module]
    ) -> set[str]:
        """Names of the weights that continue the ones before: the same parameter, or a buffer of the same module."""
        unchanged = set()
        for name, tensor in self._live.items():
            tensor_before = live_before.get(name)
            if tensor_before is None or tensor.shape != tensor_before.shape:
                continue
            is_same = tensor is tensor_before
            if name in self._owners:
                is_same = self._owners[name] is owners_before.get(name)
            if is_same:
                unchanged.add(name)
        return unchanged

    def _restart(self, replaced: list[str]) -> None:
        """Start new averages for ``replaced``, and drop those of weights that no longer exist."""
        tensors = {}
        since = {}
        for name, live in self._live.items():
            if name in replaced:
                tensors[name] = self._clone_for_average(live)
                since[name] = self.count
                continue
            tensors[name] = self._tensors[name]
            if name in self._since:
                since[name] = self._since[name]
        self._tensors = tensors
        self._since = since
        self._group_tensors()

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages, with one fused operation per dtype."""
        self.follow()
        if self.count == 0:
            self._begin()
        # Each step runs this, so the work on a group is written out here instead of in functions.
        for group in self._groups:
            averages = group.averages
            weights = [local(live) for live in group.live]
            device = averages[0].device
            dtype = averages[0].dtype
            if group.live[0].device != device or group.live[0].dtype != dtype:
                weights = [weight.to(device, dtype) for weight in weights]
            # The first value of an average is the weight itself, whatever function the user passed.
            number = self.count - group.since
            if number == 0:
                copy_to_each(averages, weights)
                continue
            count: Tensor | int = number
            if self._count_as_tensor:
                count = torch.tensor(number)
            if self._avg_fn is None:
                self._multi_avg_fn(averages, weights, count)
                continue
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(self._avg_fn(average, weight, count))
        for copy, live in self._copied:
            copy.copy_(local(live))
        # Last: an update that is interrupted before this line is repeated as the same number.
        self.count += 1

    def _begin(self) -> None:
        self._tensors = {}
        for name, live in self._live.items():
            self._tensors[name] = self._clone_for_average(live)
        self._since = {}
        self._group_tensors()

    def _group_tensors(self) -> None:
        """Group the averages that one fused operation can update."""
        groups: dict[tuple[torch.device, torch.dtype, int], _Group] = {}
        self._copied = []
        for name, tensor in self._tensors.items():
            live = self._live[name]
            average = local(tensor)
            if not (tensor.is_floating_point() or tensor.is_complex()):
                self._copied.append((average, live))
                continue
            # Averages with another start have another count, which one fused operation takes once.
            since = self._since.get(name, 0)
            key = live.device, live.dtype, since
            group = groups.setdefault(key, _Group(since))
            group.averages.append(average)
            group.live.append(live)
        self._groups = list(groups.values())

    def _clone_for_average(self, tensor: Tensor) -> Tensor:
        clone = tensor.detach().clone()
        dtype = clone.dtype
        if dtype in _NARROW:
            dtype = torch.float32
        if self.device is None:
            return clone.to(dtype=dtype)
        return clone.to(self.device, dtype)

    @torch.no_grad()
    def put_in(self) -> None:
        """Swap the averages into the module, until `take_out`; does nothing before the first average."""
        # A second swap would put the averages into `lent`, and the weights of the training would be lost.
        if self.lent or self.count == 0:
            return
        self.follow()
        self.lent = {
            name: tensor.detach().clone() for name, tensor in self._live.items()
        }
        # Copied into the same tensors: the optimizer, DDP's buckets and graphs refer to them.
        for name, average in self._tensors.items():
            local(self._live[name]).copy_(local(average))

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore the weights of the module; safe to call again after an interruption."""
        # `lent` is cleared after all copies: a call that was interrupted can be made again from the start.
        for name, tensor in self.lent.items():
            local(self._live_tensor(name)).copy_(local(tensor))
        self.lent = {}

    def _live_tensor(self, name: str) -> Tensor:
        """The live tensor; the module may have reassigned a buffer since the last search."""
        live = self._live[name]
        owner = self._owners.get(name)
        if owner is None:
            return live
        _, _, buffer_name = name.rpartition(".")
        buffer = direct_buffers(owner).get(buffer_name)
        if buffer is None or buffer.shape != live.shape:
            return live
        return buffer

    def lent_weights(self) -> dict[str, Tensor]:
        """`lent`, under every name of each weight."""
        return self._by_every_name(self.lent)

    def averaged(self) -> dict[str, Tensor]:
        """The averages under every name, in the dtype of the weights."""
        averages = {}
        for name, average in self._tensors.items():
            averages[name] = average.to(self._live[name].dtype)
        return self._by_every_name(averages)

    def state(self, beside: bool) -> StateDict:
        """The state for a checkpoint: the count, and the averages that the checkpoint does not hold as weights.

        Args:
            beside: the checkpoint holds the averages as its weights, in the dtype of the weights.
        """
        averages = {}
        for name, average in self._tensors.items():
            # In the dtype of the weights, the weights of the checkpoint are the average.
            is_in_weights = beside and average.dtype == self._live[name].dtype
            if not is_in_weights:
                averages[name] = average
        state: StateDict = {"n_averaged": self.count, "averages": averages}
        if self._since:
            state["since"] = dict(self._since)
        return state

    @torch.no_grad()
    def load(
        self,
        state: SavedState,
        weights: Mapping[str, Tensor],
        shared: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Restore `state`.

        Args:
            state: from `state`, of any layout.
            weights: those of the same checkpoint, by name.
            shared: by name here, the name of the same weight in another layout.

        Returns:
            Names of weights without an average in `state`: their averages start from the current weights.
        """
        self.count = int(state["n_averaged"])
        if self.count == 0:
            return []
        self._begin()
        starts = state.get("since", {})
        missing = []
        for name, average in self._tensors.items():
            names = [name]
            if shared and name in shared:
                names.append(shared[name])
            # Averages first, under any name: the weights are rounded copies of them.
            saved = _first_tensor(state["averages"], names)
            if saved is None:
                saved = _first_tensor(weights, names)
            if saved is None or saved.shape != average.shape:
                missing.append(name)
                self._since[name] = self.count
                continue
            local(average).copy_(local(shard_like(saved, average)))
            for saved_name in starts.keys() & set(names):
                self._since[name] = int(starts[saved_name])
        self._group_tensors()
        return sorted(missing)

    def _by_every_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        by_name = {}
        for name, tensor in tensors.items():
            by_name.update(dict.fromkeys(self._names[name], tensor))
        return by_name


def _first_tensor(tensors: Mapping[str, Tensor], names: list[str]) -> Tensor | None:
    for name in names:
        if name in tensors:
            return tensors[name]
    return None


def _is_averaged(tensor: Tensor) -> bool:
    """Whether to average the tensor; frozen weights in a tensor subclass of a library (packed weights) are left out."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    if isinstance(tensor, nn.Parameter) and not is_number:
        return False
    if tensor.requires_grad or type(tensor.detach()) is Tensor:
        return True
    # A DTensor: a subclass, too, but one of torch.
    return hasattr(tensor, "placements")


def reshard_modules(module: nn.Module) -> None:
    """Reshard FSDP modules, so that their parameters are the shards and not gathered copies."""
    for submodule in module.modules():
        reshard = getattr(submodule, "reshard", None)
        if reshard is not None:
            reshard()
