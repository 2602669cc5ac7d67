"""Which part of a model goes to which device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from torch import nn

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.memory import in_units
from trainer_kit.inference.budget import Device, accelerators, get_max_memory
from trainer_kit.inference.sizes import Dtype, Unit, find_units, tensor_sizes

__all__ = ["WORDS", "get_balanced_memory", "infer_auto_device_map", "resolve_device_map"]

WORDS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways to spread a model over accelerators."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Fill one accelerator after the other, then the host's memory, then the disk, in the order of modules.

    Where something has to be offloaded, the accelerator that will run it keeps room for the largest such layer, and the
    host for the largest one on disk. Layers that share weights go to the same device.

    Args:
        model: it may be on the ``meta`` device.
        max_memory: by device, bytes or ``"10GB"``; None: see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay whole, such as blocks with a residual connection.
        dtype: in which weights will be loaded; None: as the model has them.
        special_dtypes: other dtypes for some weights, by name.
        verbose: print where each layer goes.
        clean_result: name a module in place of its layers where all are on one device.
        offload_buffers: buffers of offloaded layers are offloaded, too.
        fallback_allocation: where the next layer is too large for an empty accelerator, begin with a later one.

    Returns:
        By name of a module, or of a tensor that a divided module has itself: a device.

    Raises:
        StrategyError: a layer is larger than every device.

    Example:
        >>> net = nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10), nn.Linear(9, 10))  # 400 bytes each
        >>> infer_auto_device_map(net, {0: 500, 1: 900})
        {'0': 0, '1': 1, '2': 1}
        >>> infer_auto_device_map(net, {0: 900, "cpu": 900})  # room for one that comes and goes
        {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    units = find_units(
        model, no_split_module_classes, tensor_sizes(model, dtype, special_dtypes), buffers_stay=not offload_buffers
    )
    room = {device: size for device, size in get_max_memory(max_memory).items() if device != "disk"}
    _check_largest(units, room)
    places = _place(units, room, fallback_allocation)
    found = {name: place for unit, place in zip(units, places, strict=True) for name in unit.names}
    _warn_of_idle(units, room, set(places))
    if verbose:
        for unit, place in zip(units, places, strict=True):
            print(f"{' + '.join(unit.names) or 'the model'}: {in_units(unit.size)} on {place}")
    return _in_order("", model, found, clean_result)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """The ``max_memory`` with which `infer_auto_device_map` fills accelerators evenly.

    The largest share is as small as can be; the last accelerator keeps all it has. Where the model does not fit into
    the accelerators, everything is used.

    Args:
        model: as for `infer_auto_device_map`, like the other arguments.
        max_memory: the most that may be used.
        no_split_module_classes: names of classes whose modules stay whole.
        dtype: in which weights will be loaded.
        special_dtypes: other dtypes for some weights.
        low_zero: put on the first accelerator only what does not fit on the others.

    Example:
        >>> net = nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10), nn.Linear(9, 10))
        >>> get_balanced_memory(net, {0: 2000, 1: 2000})
        {0: 800, 1: 2000}
    """
    room = get_max_memory(max_memory)
    used = [device for device in accelerators(room) if room[device] > 0]
    units = find_units(model, no_split_module_classes, tensor_sizes(model, dtype, special_dtypes), buffers_stay=True)
    if len(used) < 2 or not _fits(units, {device: room[device] for device in used}):
        return room
    if low_zero:
        first = used.pop(0)
        rest = {device: room[device] for device in used}
        room[first] = _least(room[first], lambda most: _fits(units, {first: most, **rest}))
    before = {device: room[device] for device in accelerators(room) if device not in used}
    share = _least(
        max(room[device] for device in used),
        lambda most: _fits(units, {**before, **{device: min(most, room[device]) for device in used}}),
    )
    return {**room, **{device: min(share, room[device]) for device in used[:-1]}}


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device],
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> dict[str, Device]:
    """A device map from one of `WORDS`, or the one that was given.

    Raises:
        StrategyError: for any other word.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in WORDS:
        raise StrategyError(
            f"unknown device_map {device_map!r}", fix=f"use one of {', '.join(WORDS)}, or a dict of modules and devices"
        )
    whole, spread = no_split_module_classes, device_map != "sequential"
    if spread:
        low = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, whole, dtype, special_dtypes, low_zero=low)  # type: ignore[assignment]
    return dict(infer_auto_device_map(model, max_memory, whole, dtype, special_dtypes, offload_buffers=offload_buffers))


def _place(units: Sequence[Unit], room: Mapping[int | str, int], fallback: bool) -> list[int | str]:
    """A device for each unit. What is kept free grows until everything that is offloaded fits into it."""
    visitor = guest = 0  # bytes kept for what comes to the accelerator that computes, and through the host
    while True:
        places = _fill(units, room, visitor, guest, fallback)
        away = [unit for unit, place in zip(units, places, strict=True) if place in ("cpu", "disk")]
        on_disk = [unit for unit, place in zip(units, places, strict=True) if place == "disk"]
        computes = bool(accelerators(places))
        needed = _largest(away) + sum(unit.buffers for unit in away) if computes else 0
        through = _largest(on_disk) + (0 if computes else sum(unit.buffers for unit in on_disk))
        if needed <= visitor and through <= guest:
            return places
        visitor, guest = max(visitor, needed), max(guest, through)


def _largest(units: Sequence[Unit]) -> int:
    return max((unit.weights for unit in units), default=0)


def _fill(
    units: Sequence[Unit], room: Mapping[int | str, int], visitor: int, guest: int, fallback: bool
) -> list[int | str]:
    places: list[int | str] = ["disk"] * len(units)
    waiting, computes = list(range(len(units))), False
    for device, most in room.items():
        left = most - (guest if device == "cpu" else 0 if computes else visitor)
        used, taken = 0, []
        for index in waiting if left > 0 else ():
            if used + units[index].size <= left:
                taken.append(index)
                used += units[index].size
            elif used or not fallback:
                break
        if used or not any(units[index].size for index in waiting):
            computes = computes or device != "cpu"
            for index in taken:
                places[index] = device
            waiting = [index for index in waiting if index not in set(taken)]
    return places


def _fits(units: Sequence[Unit], room: Mapping[int | str, int]) -> bool:
    return "disk" not in _fill(units, room, 0, 0, fallback=False)


def _least(most: int, enough: Callable[[int], bool]) -> int:
    """The smallest number up to ``most`` that is enough."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _check_largest(units: Sequence[Unit], room: Mapping[int | str, int]) -> None:
    most = max(room.values(), default=0)
    large = max(units, key=lambda unit: unit.size)
    if 0 < most < large.size:
        tied = " together with what shares its weights" if len(large.names) > 1 else ""
        raise StrategyError(
            f"{large.names[0] or 'the model'!r} takes {in_units(large.size)}{tied}, more than every device",
            found=", ".join(f"{device}: {in_units(size)}" for device, size in room.items()),
            fix="give a device more in max_memory, load it in a narrower dtype or quantised, or let it be split "
            "(no_split_module_classes)",
        )


def _warn_of_idle(units: Sequence[Unit], room: Mapping[int | str, int], places: Collection[int | str]) -> None:
    idle = [device for device in accelerators(room) if room[device] > 0]
    if idle and not accelerators(places) and any(unit.size for unit in units):
        large = max(unit.size for unit in units)
        warnings.warn(
            f"no layer is on {', '.join(map(str, idle))}: none has room for the first layer, which takes "
            f"{in_units(next(unit.size for unit in units if unit.size))}, and for one that comes and goes, at most "
            f"{in_units(large)}; everything runs on the CPU. Give more in max_memory, or pass fallback_allocation=True",
            stacklevel=3,
        )


def _in_order(name: str, part: nn.Module, places: Mapping[str, int | str], clean: bool) -> dict[str, int | str]:
    """The places of a module's parts in the order of modules; the module itself where that says the same."""
    if name in places:
        return {name: places[name]}
    prefix = f"{name}." if name else ""
    found: dict[str, int | str] = {}
    for key in [*part._parameters, *part._buffers]:
        if f"{prefix}{key}" in places:
            found[f"{prefix}{key}"] = places[f"{prefix}{key}"]
    for key, child in part._modules.items():
        if child is not None:
            found |= _in_order(f"{prefix}{key}", child, places, clean)
    return {name: next(iter(found.values()))} if clean and len(set(found.values())) == 1 else found
