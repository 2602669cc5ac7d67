"""Averages of a module's weights: kept beside it, on each rank of what it holds, and put into it for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainer_kit.strategies.state import part_of

__all__ = ["Averages", "AvgFn", "MultiAvgFn", "divide_again"]

AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[Any, Any, Any], None]

_VALUES: Final = methodcaller("values")
_NARROW: Final = (torch.float16, torch.bfloat16)
"""An average moves by less than these can tell apart: it is kept in 32 bits."""


@final
class Averages:
    """Running averages of floating-point parameters and buffers; integer buffers are copied.

    Divided parameters have averages that are divided alike: nothing is gathered, and ranks do not talk.

    Whether the module still has what is averaged is looked at ahead of each use. Where a name has another parameter by
    now, or one of another shape, its average begins anew with that one, as it does for a new name; a name that is gone
    has none. A buffer that a module assigns anew is the same one with another value.

    Args:
        module: whose weights, after it was divided.
        use_buffers: average what its ``state_dict`` holds of buffers, too.
        device: where the averages are; None: where the weights are.
        avg_fn: (average, weight, number averaged) to the new average, as ``torch.optim.swa_utils`` has them.
        multi_avg_fn: the same for lists, in place. Without either the mean.
        say: told of averages that begin anew.

    Attributes:
        count: how many weights are averaged; no average exists before the first.
        lent: by name, the module's own weights while it has the averages in their place.

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
        say: Callable[[str], Any] | None = None,
    ) -> None:
        self.device, self._avg_fn, self._say = device, avg_fn, say
        self._given = multi_avg_fn is not None
        self._multi_avg_fn: MultiAvgFn = multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self.count = 0
        self.lent: dict[str, Tensor] = {}
        self._module, self._use_buffers = module, use_buffers
        self._kept: dict[str, Tensor] = {}
        self._since: dict[str, int] = {}  # what was averaged before it began, of those that began later
        self._moved: list[tuple[int, list[Tensor], list[Tensor]]] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        divide_again(module)
        self._find()

    def _find(self) -> None:
        module = self._module
        named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
        owners: dict[str, nn.Module] = {}
        if self._use_buffers:
            saved = module.state_dict()
            buffers = [(n, b) for n, b in module.named_buffers(remove_duplicate=False) if n in saved]
            owners = {name: module.get_submodule(name.rpartition(".")[0]) for name, _ in buffers}
            named += buffers
        first: dict[int, str] = {}
        self._names: dict[str, list[str]] = {}  # tied weights have several
        self._live: dict[str, Tensor] = {}
        for name, tensor in named:
            if id(tensor) in first:
                self._names[first[id(tensor)]].append(name)
            elif _counts(tensor):
                first[id(tensor)] = name
                self._names[name], self._live[name] = [name], tensor
        self._owners = owners
        kinds = ["_modules", "_parameters", *(["_buffers"] if self._use_buffers else [])]
        self._places = [vars(part)[kind] for part in module.modules() for kind in kinds]
        self._found = [*chain.from_iterable(map(_VALUES, self._places)), None]

    def follow(self) -> None:
        """Find what the module has by now, where that is not what it had."""
        # No name is built where nothing has changed: this is asked in every step.
        now = chain(chain.from_iterable(map(_VALUES, self._places)), (None,))
        if all(map(is_, now, self._found)):
            return
        divide_again(self._module)
        before, owners = self._live, self._owners
        self._find()
        same = {
            name
            for name, tensor in self._live.items()
            if name in before
            and tensor.shape == before[name].shape
            and (self._owners[name] is owners.get(name) if name in self._owners else tensor is before[name])
        }
        self.lent = {name: tensor for name, tensor in self.lent.items() if name in same}
        if self.count == 0:
            return
        self._kept = {n: self._kept[n] if n in same else self._like(t) for n, t in self._live.items()}
        new = [name for name in self._live if name not in same]
        self._since = {**{n: begun for n, begun in self._since.items() if n in same}, **dict.fromkeys(new, self.count)}
        self._sort()
        if new and self._say is not None:
            names = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
            self._say(f"the average of {len(new)} weights begins anew, the module has others in their place: {names}")

    @torch.no_grad()
    def update(self) -> None:
        """Average today's weights in: one fused operation for each dtype."""
        self.follow()
        if self.count == 0:
            self._begin()
        for since, kept, live in self._moved:
            number = self.count - since
            same = live[0].device == kept[0].device and live[0].dtype == kept[0].dtype
            now = [_local(t) if same else _local(t).to(kept[0].device, kept[0].dtype) for t in live]
            if number == 0:
                torch._foreach_copy_(kept, now)
                continue
            count = torch.tensor(number) if self._given or self._avg_fn is not None else number
            if self._avg_fn is None:
                self._multi_avg_fn(kept, now, count)
            else:
                for average, weight in zip(kept, now, strict=True):
                    average.copy_(self._avg_fn(average, weight, count))
        for copy, live_one in self._copied:
            copy.copy_(_local(live_one))
        self.count += 1

    def _begin(self) -> None:
        self._kept, self._since = {name: self._like(tensor) for name, tensor in self._live.items()}, {}
        self._sort()

    def _sort(self) -> None:
        alike: dict[tuple[Any, ...], tuple[int, list[Tensor], list[Tensor]]] = {}
        self._copied = []
        for name, kept in self._kept.items():
            live, since = self._live[name], self._since.get(name, 0)
            if kept.is_floating_point() or kept.is_complex():
                lists = alike.setdefault((live.device, live.dtype, since), (since, [], []))
                lists[1].append(_local(kept))
                lists[2].append(live)
            else:
                self._copied.append((_local(kept), live))
        self._moved = list(alike.values())

    def _like(self, tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        wide = torch.float32 if made.dtype in _NARROW else made.dtype
        return made.to(dtype=wide) if self.device is None else made.to(self.device, wide)

    @torch.no_grad()
    def put_in(self) -> None:
        """Give the module the averages, until `take_out`; nothing where there are none yet."""
        if self.lent or self.count == 0:
            return
        self.follow()
        self.lent = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        for name, average in self._kept.items():
            _local(self._live[name]).copy_(_local(average))

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the module its own weights back; it may be called again after an interruption."""
        for name, tensor in self.lent.items():
            _local(self._place(name)).copy_(_local(tensor))
        self.lent = {}

    def _place(self, name: str) -> Tensor:
        """Where the module has it; a buffer may have been assigned since it was found."""
        owner, live = self._owners.get(name), self._live[name]
        now = None if owner is None else owner._buffers.get(name.rpartition(".")[2])
        return live if now is None or now.shape != live.shape else now

    def own_weights(self) -> dict[str, Tensor]:
        """`lent`, by every name that a weight has."""
        return self._by_every_name(self.lent)

    def averaged(self) -> dict[str, Tensor]:
        """The averages by every name, in the dtype of the weights."""
        return self._by_every_name({n: average.to(self._live[n].dtype) for n, average in self._kept.items()})

    def state(self, beside: bool) -> dict[str, Any]:
        """For a checkpoint: how many, and the averages that it does not have yet.

        Args:
            beside: whether its weights are the averages, in their own dtype.
        """
        kept = {n: a for n, a in self._kept.items() if not beside or a.dtype != self._live[n].dtype}
        state: dict[str, Any] = {"n_averaged": self.count, "averages": kept}
        return {**state, "since": dict(self._since)} if self._since else state

    @torch.no_grad()
    def load(
        self, state: Mapping[str, Any], weights: Mapping[str, Tensor], shared: Mapping[str, str] | None = None
    ) -> list[str]:
        """Put `state` back.

        Args:
            state: of any layout.
            weights: of its checkpoint, by name.
            shared: of names that the module has here, those under which another layout has the same weight.

        Returns:
            Names of weights that it has no average of: these begin with what they are.
        """
        self.count = int(state["n_averaged"])
        if self.count == 0:
            return []
        self._begin()
        begun, new = state.get("since", {}), []
        for name, average in self._kept.items():
            names = [name, *([shared[name]] if shared and name in shared else [])]
            # Averages first, under any name: weights of fewer bits are what was made of them.
            found = next((part[n] for part in (state["averages"], weights) for n in names if n in part), None)
            if found is None or found.shape != average.shape:
                new.append(name)
                self._since[name] = self.count
                continue
            _local(average).copy_(_local(part_of(found, average)))
            for other in begun.keys() & set(names):
                self._since[name] = int(begun[other])
        self._sort()
        return sorted(new)

    def _by_every_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {alias: tensor for name, tensor in tensors.items() for alias in self._names[name]}


def _counts(tensor: Tensor) -> bool:
    """Whether training may move it; frozen weights that a library packed into a type of its own stay what they are."""
    if isinstance(tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return tensor.requires_grad or type(tensor.detach()) is Tensor or hasattr(tensor, "placements")


def _local(tensor: Any) -> Tensor:
    """This rank's part. Without gradients it is the very storage."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return part


def divide_again(module: Any) -> None:
    """Let FSDP put away what a step has gathered and only read: those are copies, and not for long."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()
