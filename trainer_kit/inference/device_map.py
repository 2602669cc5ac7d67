"""Device maps: the size of each part of a model, the memory of each device, and the device of each part."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.files import in_bytes, torch_dtype
from trainer_kit.core.devices import (
    count_accelerators,
    free_memory,
    present_accelerator,
)
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import ConfigurationError, StrategyError, did_you_mean

__all__ = [
    "Device",
    "Dtype",
    "Unit",
    "accelerators",
    "compute_module_sizes",
    "find_units",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "name_of",
    "named_tensors",
    "order_of",
    "resolve_device",
    "resolve_device_map",
    "resolve_dtype",
    "tensor_sizes",
]

Dtype: TypeAlias = "torch.dtype | str"
"""A dtype or its name; ``"int4"``, which torch lacks, counts half a byte per element."""

_BITS: Final = {"int4": 4, "int2": 2, "fp8": 8}


@final
@dataclass(eq=False)
class Unit:
    """A part of a model that goes to one device: a layer, an unsplit block, or a tensor of a split module.

    Attributes:
        names: of modules or tensors; several if they share weights.
        weights: bytes that move when the part is offloaded; shared tensors count once.
        buffers: bytes that stay on the computing device when the part is offloaded.
    """

    names: list[str]
    weights: int = 0
    buffers: int = 0

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.weights + self.buffers

    def add(self, size: int, stays: bool) -> None:
        """Count a tensor."""
        if stays:
            self.buffers += size
        else:
            self.weights += size

    def take(self, other: Unit) -> None:
        """Merge another unit into this one."""
        self.names += other.names
        self.weights += other.weights
        self.buffers += other.buffers


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name such as ``"float16"`` or ``"torch.float16"``.

    Raises:
        ConfigurationError: torch has no dtype of this name.

    Example:
        >>> resolve_dtype("torch.bfloat16")
        torch.bfloat16
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch_dtype(dtype.removeprefix("torch."))
    except TypeError as error:
        known = [
            name for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype)
        ]
        raise ConfigurationError(
            f"unknown dtype {dtype!r}", fix=did_you_mean(dtype, known)
        ) from error


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under each of their names, in the order of modules."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def tensor_sizes(
    module: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> dict[str, int]:
    """Return the bytes of parameters and buffers by name; a shared tensor has its size under each name.

    Args:
        module: it may be on the meta device.
        dtype: the dtype to which floating-point tensors will be converted; None: no conversion.
        special_dtypes: other dtypes for some tensors, by name.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> tensor_sizes(layer), tensor_sizes(layer, "float16", {"bias": torch.float32})
        ({'weight': 48, 'bias': 16}, {'weight': 24, 'bias': 16})
    """
    special = special_dtypes or {}
    sizes = {}
    for name, tensor in named_tensors(module):
        given = (
            special.get(name, dtype if tensor.is_floating_point() else None)
            or tensor.dtype
        )
        sizes[name] = -(-tensor.numel() * _bits(given) // 8)
    return sizes


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor and of every module that contains it, by name; ``""`` is the whole model.

    A tensor that has several names counts once in each module: the whole model needs as much memory as its tensors.

    Args:
        model: it may be on the meta device.
        dtype: the dtype to which floating-point tensors will be converted; None: no conversion.
        special_dtypes: other dtypes for some tensors, by name.
        buffers_only: omit parameters.

    Example:
        >>> compute_module_sizes(nn.Sequential(nn.Linear(3, 4)))
        {'': 64, '0': 64, '0.weight': 48, '0.bias': 16}
    """
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    tensors = dict(named_tensors(model))
    counted: set[tuple[str, int]] = set()
    sizes: dict[str, int] = {}
    for name, size in tensor_sizes(model, dtype, special_dtypes).items():
        if buffers_only and name not in buffers:
            continue
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            holder = ".".join(parts[:depth])
            seen = (holder, id(tensors[name]))
            sizes[holder] = sizes.get(holder, 0) + (0 if seen in counted else size)
            counted.add(seen)
    return sizes


def _bits(dtype: Dtype) -> int:
    return (
        _BITS[dtype]
        if isinstance(dtype, str) and dtype in _BITS
        else resolve_dtype(dtype).itemsize * 8
    )


def find_units(
    module: nn.Module,
    no_split_module_classes: Collection[str] | str | None,
    sizes: Mapping[str, int],
    buffers_stay: bool,
) -> list[Unit]:
    """Return all parts of a model that a device map has to place, in the order of modules.

    Args:
        module: the model.
        no_split_module_classes: names of classes whose modules stay whole.
        sizes: from `tensor_sizes`.
        buffers_stay: buffers are not offloaded with their layer.
    """
    given = no_split_module_classes or ()
    whole = {given} if isinstance(given, str) else set(given)
    kept = _kept_buffers(module, buffers_stay)
    units: list[Unit] = []
    owner: dict[int, Unit] = {}
    for name, tensors in _pieces("", module, whole):
        sharing = {
            id(unit)
            for unit in (owner.get(id(tensor)) for tensor in tensors.values())
            if unit is not None
        }
        parts = [unit for unit in units if id(unit) in sharing]
        home = parts[0] if parts else Unit([])
        if not parts:
            units.append(home)
        for other in parts[1:]:  # this piece shares weights with several units
            home.take(other)
            units.remove(other)
            owner.update({key: home for key, unit in owner.items() if unit is other})
        home.names.append(name)
        for key, tensor in tensors.items():
            if id(tensor) not in owner:
                owner[id(tensor)] = home
                home.add(sizes[key], stays=id(tensor) in kept)
    return units


def _pieces(
    name: str, part: nn.Module, whole: Collection[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield layers, whole blocks, and direct tensors of modules with children, by name, each with its tensors."""
    prefix = f"{name}." if name else ""
    children = {key: child for key, child in part._modules.items() if child is not None}
    if not children or type(part).__name__ in whole:
        yield name, {f"{prefix}{key}": tensor for key, tensor in named_tensors(part)}
        return
    for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
        if tensor is not None:
            yield f"{prefix}{key}", {f"{prefix}{key}": tensor}
    for key, child in children.items():
        yield from _pieces(f"{prefix}{key}", child, whole)


def _kept_buffers(module: nn.Module, buffers_stay: bool) -> set[int]:
    """Return the ids of buffers that stay when their layer is offloaded: always those that are in no state_dict."""
    return {
        id(tensor)
        for part in module.modules()
        for key, tensor in part._buffers.items()
        if tensor is not None
        and (buffers_stay or key in part._non_persistent_buffers_set)
    }


Device: TypeAlias = "int | str | torch.device"
"""A number is the index of an accelerator of this machine; ``"disk"`` is allowed too."""

_SHARE: Final = 0.9
"""The share of free memory that weights may use; the rest is for activations."""
_PLACES: Final = ("cpu", "disk")


def get_max_memory(
    max_memory: Mapping[Device, int | str] | None = None,
) -> dict[int | str, int]:
    """Return bytes by device, accelerators first, then the host and the disk.

    Args:
        max_memory: by device, bytes or ``"10GB"``, ``"1GiB"``; None: nine tenths of the free memory of each accelerator
            and of the host, within the limit of a container.

    Raises:
        ConfigurationError: a size is invalid.
        StrategyError: a device is invalid.

    Example:
        >>> get_max_memory({"cpu": "2GiB", 1: "10GB", 0: 500})
        {0: 500, 1: 10000000000, 'cpu': 2147483648}
    """
    if max_memory is None:
        kind = present_accelerator()
        found: dict[int | str, int] = {}
        if kind is not None:
            for index in range(count_accelerators()):
                found[index] = int(
                    _SHARE * (free_memory(torch.device(kind.type, index)) or 0)
                )
        found["cpu"] = int(_SHARE * (free_memory(torch.device("cpu")) or 0))
        return found
    given = {
        name_of(device): in_bytes(size, f"max_memory[{device!r}]")
        for device, size in max_memory.items()
    }
    return {device: given[device] for device in sorted(given, key=order_of)}


def name_of(device: Device) -> int | str:
    """Return a device as the key of a device map: a number, ``"cpu"``, ``"disk"``, or torch's name.

    Raises:
        StrategyError: ``device`` is none of these.
    """
    if isinstance(device, int) or device == "disk":
        return device
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise StrategyError(
            f"{device!r} is not a device",
            found=str(error).splitlines()[0],
            fix='use 0, 1, ..., "cpu" or "disk"',
        ) from error


def order_of(device: int | str) -> tuple[int, int, str]:
    """Return a sort key: accelerators by number, then devices by name, then the host, then the disk."""
    if isinstance(device, int):
        return 0, device, ""
    return (2 + _PLACES.index(device), 0, "") if device in _PLACES else (1, 0, device)


def accelerators(devices: Iterable[int | str]) -> list[int | str]:
    """Return the devices except the host and the disk, sorted, each once."""
    return sorted({device for device in devices if device not in _PLACES}, key=order_of)


def resolve_device(device: Device) -> torch.device:
    """Return the torch device for a key of a device map.

    Raises:
        StrategyError: this machine has no accelerator of this number.
    """
    if not isinstance(device, int):
        return torch.device(device)
    kind = present_accelerator()
    count = 0 if kind is None else count_accelerators()
    if kind is None or not 0 <= device < count:
        here = "no accelerator" if kind is None else f"{count} of {kind.type}"
        raise StrategyError(
            f"this machine has no device {device}",
            found=here,
            fix='use "cpu" and "disk" in the device map',
        )
    return torch.device(kind.type, device)


_WORDS: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways to distribute a model over accelerators."""


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
    """Fill one accelerator after the other, then host memory, then the disk, in the order of modules.

    If layers are offloaded, the accelerator that runs them keeps room for the largest of them, and the host for the
    largest one on disk. Layers that share weights go to the same device.

    Args:
        model: it may be on the meta device.
        max_memory: by device, bytes or ``"10GB"``; None: see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay whole, such as blocks with a residual connection.
        dtype: the dtype in which weights will be loaded; None: that of the model.
        special_dtypes: other dtypes for some weights, by name.
        verbose: print the device of each layer.
        clean_result: name a module instead of its layers if all of them are on one device.
        offload_buffers: offload the buffers of offloaded layers too.
        fallback_allocation: if the next layer is too large for an empty accelerator, try later layers.

    Returns:
        A device by name of a module, or of a direct tensor of a divided module.

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
        model,
        no_split_module_classes,
        tensor_sizes(model, dtype, special_dtypes),
        buffers_stay=not offload_buffers,
    )
    room = {
        device: size
        for device, size in get_max_memory(max_memory).items()
        if device != "disk"
    }
    _check_largest(units, room)
    places = _place(units, room, fallback_allocation)
    found = {
        name: place
        for unit, place in zip(units, places, strict=True)
        for name in unit.names
    }
    _warn_of_idle(units, room, set(places))
    if verbose:
        for unit, place in zip(units, places, strict=True):
            print(
                f"{' + '.join(unit.names) or 'the model'}: {in_units(unit.size)} on {place}"
            )
    return _in_order("", model, found, clean_result)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return the ``max_memory`` with which `infer_auto_device_map` fills accelerators evenly.

    The largest share is as small as possible; the last accelerator keeps its whole limit. If the model does not fit
    into the accelerators, the limits stay unchanged.

    Args:
        model: as for `infer_auto_device_map`, like the other arguments.
        max_memory: the limits.
        no_split_module_classes: names of classes whose modules stay whole.
        dtype: the dtype in which weights will be loaded.
        special_dtypes: other dtypes for some weights.
        low_zero: put on the first accelerator only layers that do not fit on the others.

    Example:
        >>> net = nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10), nn.Linear(9, 10))
        >>> get_balanced_memory(net, {0: 2000, 1: 2000})
        {0: 800, 1: 2000}
    """
    room = get_max_memory(max_memory)
    used = [device for device in accelerators(room) if room[device] > 0]
    units = find_units(
        model,
        no_split_module_classes,
        tensor_sizes(model, dtype, special_dtypes),
        buffers_stay=True,
    )
    if len(used) < 2 or not _fits(units, {device: room[device] for device in used}):
        return room
    if low_zero:
        first = used.pop(0)
        rest = {device: room[device] for device in used}
        room[first] = _least(
            room[first], lambda most: _fits(units, {first: most, **rest})
        )
    before = {
        device: room[device] for device in accelerators(room) if device not in used
    }
    share = _least(
        max(room[device] for device in used),
        lambda most: _fits(
            units, {**before, **{device: min(most, room[device]) for device in used}}
        ),
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
    """Return the device map for one of `_WORDS`, or a copy of a given map.

    Raises:
        StrategyError: ``device_map`` is another word.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in _WORDS:
        raise StrategyError(
            f"unknown device_map {device_map!r}",
            fix=f"use one of {', '.join(_WORDS)}, or a dict of modules and devices",
        )
    whole, spread = no_split_module_classes, device_map != "sequential"
    if spread:
        low = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(
            model, max_memory, whole, dtype, special_dtypes, low_zero=low
        )  # type: ignore[assignment]
    return dict(
        infer_auto_device_map(
            model,
            max_memory,
            whole,
            dtype,
            special_dtypes,
            offload_buffers=offload_buffers,
        )
    )


def _place(
    units: Sequence[Unit], room: Mapping[int | str, int], fallback: bool
) -> list[int | str]:
    """Return a device for each unit. The reserved room grows until each offloaded unit fits into it."""
    on_accelerator = on_host = (
        0  # bytes reserved for offloaded units on the computing accelerator, and on the host
    )
    while True:
        places = _fill(units, room, on_accelerator, on_host, fallback)
        away = [
            unit
            for unit, place in zip(units, places, strict=True)
            if place in ("cpu", "disk")
        ]
        on_disk = [
            unit for unit, place in zip(units, places, strict=True) if place == "disk"
        ]
        computes = bool(accelerators(places))
        needed = _largest(away) + sum(unit.buffers for unit in away) if computes else 0
        through = _largest(on_disk) + (
            0 if computes else sum(unit.buffers for unit in on_disk)
        )
        if needed <= on_accelerator and through <= on_host:
            return places
        on_accelerator = max(on_accelerator, needed)
        on_host = max(on_host, through)


def _largest(units: Sequence[Unit]) -> int:
    return max((unit.weights for unit in units), default=0)


def _fill(
    units: Sequence[Unit],
    room: Mapping[int | str, int],
    on_accelerator: int,
    on_host: int,
    fallback: bool,
) -> list[int | str]:
    places: list[int | str] = ["disk"] * len(units)
    waiting, computes = list(range(len(units))), False
    for device, most in room.items():
        left = most - (
            on_host if device == "cpu" else 0 if computes else on_accelerator
        )
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
    """Return the smallest number that is enough, or ``most`` if no smaller number is."""
    return bisect_left(range(most), True, key=enough)


def _check_largest(units: Sequence[Unit], room: Mapping[int | str, int]) -> None:
    most = max(room.values(), default=0)
    large = max(units, key=lambda unit: unit.size)
    if 0 < most < large.size:
        tied = " together with what shares its weights" if len(large.names) > 1 else ""
        raise StrategyError(
            f"{large.names[0] or 'the model'!r} takes {in_units(large.size)}{tied}, more than any device has",
            found=", ".join(
                f"{device}: {in_units(size)}" for device, size in room.items()
            ),
            fix="raise max_memory of a device, load the model in a narrower dtype or quantised, or allow it to"
            " be split "
            "(no_split_module_classes)",
        )


def _warn_of_idle(
    units: Sequence[Unit], room: Mapping[int | str, int], places: Collection[int | str]
) -> None:
    idle = [device for device in accelerators(room) if room[device] > 0]
    if idle and not accelerators(places) and any(unit.size for unit in units):
        large = max(unit.size for unit in units)
        warnings.warn(
            f"no layer is on {', '.join(map(str, idle))}: none has room for the first layer, which takes "
            f"{in_units(next(unit.size for unit in units if unit.size))}, and for one offloaded layer, at most "
            f"{in_units(large)}; everything runs on the CPU. Give more in max_memory, or pass fallback_allocation=True",
            stacklevel=3,
        )


def _in_order(
    name: str, part: nn.Module, places: Mapping[str, int | str], clean: bool
) -> dict[str, int | str]:
    """Return the devices of a module's parts in the order of modules; only the module's if all are equal."""
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
    return (
        {name: next(iter(found.values()))}
        if clean and len(set(found.values())) == 1
        else found
    )
