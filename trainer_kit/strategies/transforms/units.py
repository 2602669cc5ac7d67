"""Which parts of a module are sharded, recomputed or compiled each by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final

from torch import nn

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.core.signatures import takes

__all__ = ["Policy", "outer_modules", "units"]

Policy = int | str | type | Collection[str | type] | Callable[..., bool] | None
"""A number of parameters, classes or their names, a callable, or None; see `units`."""

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: nothing can happen before and after it."""


def units(module: nn.Module, policy: Policy) -> dict[str, nn.Module]:
    """The parts that a policy picks, by name, inner ones first; never ``module`` itself.

    Args:
        module: the whole.
        policy: None: the blocks of each list or sequence that repeats a class, the outermost ones. A number: whatever
            has so many parameters that are in no part of it that was picked. One or several classes, or their names:
            their modules. A callable: it is called with a module, or as torch's own wrapping policies are with
            ``module``, ``recurse`` and ``nonwrapped_numel``, and says whether the module is one.

    Raises:
        StrategyError: no module is of a class that was named.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 9))
        >>> list(units(net, None)), list(units(net, 30)), list(units(net, "Embedding"))
        (['1.1', '1.0'], ['2', '1', '0'], ['0'])
    """
    if policy is None:
        return dict(_inner_first(module, _repeated(module)))
    if isinstance(policy, int):
        return _by_size(module, policy)
    if callable(policy) and not isinstance(policy, type):
        wraps: Callable[..., bool] = policy
        picks = wraps if takes(wraps, 1) else partial(_as_torch_asks, wraps)
        return dict(_inner_first(module, {id(m) for m in module.modules() if _is_part(m) and picks(m)}))
    return _by_class(module, [policy] if isinstance(policy, (str, type)) else list(policy))


def _as_torch_asks(policy: Callable[..., bool], part: nn.Module) -> bool:
    return policy(module=part, recurse=False, nonwrapped_numel=0)


def _is_part(module: nn.Module) -> bool:
    return not isinstance(module, _CONTAINERS) and next(module.parameters(), None) is not None


def _inner_first(module: nn.Module, picked: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, part in reversed(list(module.named_modules())):  # each comes behind what it is a part of
        if part is not module and id(part) in picked:
            yield name, part


def _repeated(module: nn.Module) -> set[int]:
    """The outermost blocks; what is inside of one is gathered with it."""
    found: set[int] = set()
    parts = [part for part in module.children() if _is_part(part)]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counts = Counter(type(part) for part in parts)
        found.update(id(part) for part in parts if counts[type(part)] > 1)
    for child in module.children():
        if id(child) not in found:
            found |= _repeated(child)
    return found


def _by_size(module: nn.Module, least: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    taken: set[int] = set()
    for name, part in reversed(list(module.named_modules())):
        rest = [p for p in part.parameters() if id(p) not in taken]
        if part is not module and _is_part(part) and sum(p.numel() for p in rest) >= least:
            found[name] = part
            taken.update(map(id, rest))
    return found


def _by_class(module: nn.Module, wanted: list[Any]) -> dict[str, nn.Module]:
    parts = [part for part in module.modules() if _is_part(part)]
    picked: set[int] = set()
    for one in wanted:
        mine = {id(p) for p in parts if (type(p).__name__ == one if isinstance(one, str) else isinstance(p, one))}
        if not mine:
            name, names = one if isinstance(one, str) else one.__name__, sorted({type(p).__name__ for p in parts})
            raise StrategyError(
                f"no part of the module is a {name}", found=", ".join(names), fix=did_you_mean(name, names)
            )
        picked |= mine
    return dict(_inner_first(module, picked))


def outer_modules(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that have a forward; parameters outside of them stay whole."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            found += outer_modules(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    owners: dict[int, nn.Module] = {}
    for root in found:
        for parameter in root.parameters():
            other = owners.setdefault(id(parameter), root)
            if other is not root:
                raise StrategyError(
                    "in manual optimization two parts of the module share a parameter, and each is divided by itself",
                    found=f"{type(other).__name__} and {type(root).__name__}",
                    fix="use automatic optimization, or DDPStrategy",
                )
    return found
