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
from trainer_kit.core.torch_private import (
    direct_buffers,
    direct_parameters,
    direct_submodules,
    transient_buffers,
)

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
    "join_names",
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

    # Weights and buffers are counted apart because a device that runs offloaded units needs room for the buffers of
    # all of them at once, but only for the weights of the largest one (see `_assign_devices`).
    names: list[str]
    weights: int = 0
    buffers: int = 0

    @property
    def size(self) -> int:
        """Bytes of weights and buffers."""
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
        dtype_names = [
            name
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype)
        ]
        raise ConfigurationError(
            f"unknown dtype {dtype!r}", fix=did_you_mean(dtype, dtype_names)
        ) from error


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under each of their names, in the order of modules."""
    # Duplicates are not removed: a device map may name a shared tensor by any of its names.
    for path, submodule in module.named_modules(remove_duplicate=False):
        tensors = [
            *direct_parameters(submodule).items(),
            *direct_buffers(submodule).items(),
        ]
        for key, tensor in tensors:
            if tensor is not None:
                yield join_names(path, key), tensor


def join_names(path: str, key: str) -> str:
    """Return the name of a child in the model; ``""`` is the path of the model itself.

    Example:
        >>> join_names("block.0", "weight"), join_names("", "weight")
        ('block.0.weight', 'weight')
    """
    if not path:
        return key
    return f"{path}.{key}"


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
        stored_dtype = special.get(name)
        # Loading converts only floating-point tensors (`pick_dtype`); integers keep the width that they have.
        if stored_dtype is None and tensor.is_floating_point():
            stored_dtype = dtype
        stored_dtype = stored_dtype or tensor.dtype
        # Round up: the last byte of a 4-bit tensor may be half full.
        sizes[name] = -(-tensor.numel() * _count_bits(stored_dtype) // 8)
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
        path = name.split(".")
        for depth in range(len(path) + 1):
            holder = ".".join(path[:depth])
            sizes.setdefault(holder, 0)
            # One tensor counts once in each module that contains it, under whichever name comes first: tied embeddings
            # would otherwise be counted twice in the size of the model.
            entry = (holder, id(tensors[name]))
            if entry not in counted:
                sizes[holder] += size
                counted.add(entry)
    return sizes


def _count_bits(dtype: Dtype) -> int:
    if isinstance(dtype, str) and dtype in _BITS:
        return _BITS[dtype]
    return resolve_dtype(dtype).itemsize * 8


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
    classes = no_split_module_classes or ()
    # A single name is allowed; as a collection it would be a set of letters.
    if isinstance(classes, str):
        classes = [classes]
    unsplit = set(classes)
    resident = _find_resident_buffers(module, buffers_stay)
    units: list[Unit] = []
    # The unit of each tensor, by the tensor's id. Layers that share a tensor must end in one unit: on two devices they
    # would have two copies, which a backward or an update would let drift apart.
    owner: dict[int, Unit] = {}
    for name, tensors in _split("", module, unsplit):
        owners = {
            id(owner[id(tensor)]) for tensor in tensors.values() if id(tensor) in owner
        }
        sharing = [unit for unit in units if id(unit) in owners]
        if sharing:
            home = sharing[0]
        else:
            home = Unit([])
            units.append(home)
        # A layer that shares weights with several units joins them into one.
        for other in sharing[1:]:
            home.take(other)
            units.remove(other)
            owner.update({key: home for key, unit in owner.items() if unit is other})
        home.names.append(name)
        for key, tensor in tensors.items():
            # A shared tensor was counted with the unit that has it already.
            if id(tensor) not in owner:
                owner[id(tensor)] = home
                home.add(sizes[key], stays=id(tensor) in resident)
    return units


def _split(
    name: str, module: nn.Module, unsplit: Collection[str]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield layers, whole blocks, and direct tensors of modules with children, by name, each with its tensors."""
    children = {
        key: child
        for key, child in direct_submodules(module).items()
        if child is not None
    }
    if not children or type(module).__name__ in unsplit:
        yield (
            name,
            {join_names(name, key): value for key, value in named_tensors(module)},
        )
        return
    # A module with children is split, so tensors that it holds itself (a class token, a position table) are units of
    # their own: no child's name in the map covers them.
    for key, tensor in [
        *direct_parameters(module).items(),
        *direct_buffers(module).items(),
    ]:
        if tensor is not None:
            tensor_name = join_names(name, key)
            yield tensor_name, {tensor_name: tensor}
    for key, child in children.items():
        yield from _split(join_names(name, key), child, unsplit)


def _find_resident_buffers(module: nn.Module, buffers_stay: bool) -> set[int]:
    """Return the ids of buffers that stay when their layer is offloaded: always those that are in no state_dict."""
    resident = set()
    for submodule in module.modules():
        # A checkpoint does not contain these buffers, so there is no file from which they could be read again.
        transient = transient_buffers(submodule)
        for key, tensor in direct_buffers(submodule).items():
            if tensor is not None and (buffers_stay or key in transient):
                resident.add(id(tensor))
    return resident


Device: TypeAlias = "int | str | torch.device"
"""A number is the index of an accelerator of this machine; ``"disk"`` is allowed too."""

_SHARE: Final = 0.9
"""The share of free memory that weights may use; the rest is for activations."""
_OFFLOAD_DEVICES: Final = ("cpu", "disk")


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
        limits: dict[int | str, int] = {}
        if kind is not None:
            for index in range(count_accelerators()):
                limits[index] = _usable_memory(torch.device(kind.type, index))
        limits["cpu"] = _usable_memory(torch.device("cpu"))
        return limits
    sizes = {
        name_of(device): in_bytes(size, f"max_memory[{device!r}]")
        for device, size in max_memory.items()
    }
    return {device: sizes[device] for device in sorted(sizes, key=order_of)}


def _usable_memory(device: torch.device) -> int:
    return int(_SHARE * (free_memory(device) or 0))


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
    if device in _OFFLOAD_DEVICES:
        return 2 + _OFFLOAD_DEVICES.index(device), 0, ""
    return 1, 0, device


def accelerators(devices: Iterable[int | str]) -> list[int | str]:
    """Return the devices except the host and the disk, sorted, each once."""
    unique = {device for device in devices if device not in _OFFLOAD_DEVICES}
    return sorted(unique, key=order_of)


def resolve_device(device: Device) -> torch.device:
    """Return the torch device for a key of a device map.

    Raises:
        StrategyError: this machine has no accelerator of this number.
    """
    if not isinstance(device, int):
        return torch.device(device)
    kind = present_accelerator()
    present = "no accelerator"
    count = 0
    if kind is not None:
        count = count_accelerators()
        present = f"{count} of {kind.type}"
    if kind is None or not 0 <= device < count:
        raise StrategyError(
            f"this machine has no device {device}",
            found=present,
            fix='use "cpu" and "disk" in the device map',
        )
    return torch.device(kind.type, device)


_STRATEGIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")
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
        A device by name of a module, or of a direct tensor of a split module.

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
    # Before anything is assigned: no device can compute a unit that is larger than it, wherever it is stored.
    _check_largest(units, room)
    devices = _assign_devices(units, room, fallback_allocation)
    device_map: dict[str, int | str] = {}
    for unit, device in zip(units, devices, strict=True):
        device_map |= dict.fromkeys(unit.names, device)
    _warn_of_idle(units, room, set(devices))
    if verbose:
        for unit, device in zip(units, devices, strict=True):
            names = " + ".join(unit.names) or "the model"
            print(f"{names}: {in_units(unit.size)} on {device}")
    return _sort_by_module("", model, device_map, clean_result)


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
        # Find the least limit of the first accelerator with which the model still fits, with the others filled up;
        # below, its limit is fixed and only the others are balanced.
        first = used.pop(0)
        limits = {device: room[device] for device in used}
        room[first] = _find_least(
            room[first], lambda limit: _fits(units, {first: limit, **limits})
        )
    fixed = {
        device: room[device] for device in accelerators(room) if device not in used
    }

    def fits_with_share(share: int) -> bool:
        shares = {device: min(share, room[device]) for device in used}
        return _fits(units, {**fixed, **shares})

    share = _find_least(max(room[device] for device in used), fits_with_share)
    # The last accelerator keeps its whole limit, in case the shares turn out too small: what is left over goes to it,
    # and not to the host.
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
    """Return the device map for one of `_STRATEGIES`, or a copy of a given map.

    Raises:
        StrategyError: ``device_map`` is another word.
    """
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in _STRATEGIES:
        raise StrategyError(
            f"unknown device_map {device_map!r}",
            fix=f"use one of {', '.join(_STRATEGIES)}, or a dict of modules and devices",
        )
    if device_map != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split_module_classes,
            dtype,
            special_dtypes,
            low_zero=device_map == "balanced_low_0",
        )  # type: ignore[assignment]  # Mapping is invariant in its key
    return dict(
        infer_auto_device_map(
            model,
            max_memory,
            no_split_module_classes,
            dtype,
            special_dtypes,
            offload_buffers=offload_buffers,
        )
    )


def _assign_devices(
    units: Sequence[Unit], room: Mapping[int | str, int], fallback: bool
) -> list[int | str]:
    """Return a device for each unit. The reserved room grows until each offloaded unit fits into it."""
    # Bytes reserved for offloaded units on the computing accelerator, and on the host. They begin at 0, so that a model
    # that fits reserves nothing. A reservation may push more units off the device, and a larger one among them needs
    # more room: hence the loop. The reservations only grow, and are bounded by the model, so it ends.
    on_accelerator = 0
    on_host = 0
    while True:
        devices = _fill(units, room, on_accelerator, on_host, fallback)
        offloaded = []
        on_disk = []
        for unit, device in zip(units, devices, strict=True):
            if device in _OFFLOAD_DEVICES:
                offloaded.append(unit)
            if device == "disk":
                on_disk.append(unit)
        accelerator_need = 0
        # A unit on disk passes through host memory on its way, one unit at a time.
        host_need = _largest_weights(on_disk)
        # Weights leave after their layer has run, buffers stay: the device that computes holds all of them.
        if accelerators(devices):
            buffers = sum(unit.buffers for unit in offloaded)
            accelerator_need = _largest_weights(offloaded) + buffers
        else:
            host_need += sum(unit.buffers for unit in on_disk)
        if accelerator_need <= on_accelerator and host_need <= on_host:
            return devices
        on_accelerator = max(on_accelerator, accelerator_need)
        on_host = max(on_host, host_need)


def _largest_weights(units: Sequence[Unit]) -> int:
    return max((unit.weights for unit in units), default=0)


def _fill(
    units: Sequence[Unit],
    room: Mapping[int | str, int],
    on_accelerator: int,
    on_host: int,
    fallback: bool,
) -> list[int | str]:
    """Return a device for each unit: each device in turn takes the next units while they fit, the disk the rest.

    Args:
        units: in the order in which layers run.
        room: bytes by device, in the order of filling.
        on_accelerator: bytes reserved on the first accelerator in use.
        on_host: bytes reserved in host memory.
        fallback: skip units that are too large for an empty device.
    """
    devices: list[int | str] = ["disk"] * len(units)
    waiting = list(range(len(units)))
    accelerator_used = False
    for device, limit in room.items():
        capacity = limit
        if device == "cpu":
            capacity -= on_host
        # The first accelerator in use runs the offloaded units (`Places.main`).
        elif not accelerator_used:
            capacity -= on_accelerator
        used = 0
        fitting = []
        for index in waiting:
            if capacity <= 0:
                break
            if used + units[index].size <= capacity:
                fitting.append(index)
                used += units[index].size
            # Stop at the first unit that does not fit: a smaller later one would cost a transfer there and back.
            elif used or not fallback:
                break
        # Units without bytes (activations, containers) do not make a device "used": they follow the next unit with
        # weights, or take the device only when nothing else is left.
        if used or not any(units[index].size for index in waiting):
            accelerator_used = accelerator_used or device != "cpu"
            for index in fitting:
                devices[index] = device
            waiting = [index for index in waiting if index not in set(fitting)]
    return devices


def _fits(units: Sequence[Unit], room: Mapping[int | str, int]) -> bool:
    """Whether the devices hold all units, without any reserved room."""
    return "disk" not in _fill(units, room, 0, 0, fallback=False)


def _find_least(limit: int, suffices: Callable[[int], bool]) -> int:
    """Return the smallest number that suffices, or ``limit`` if no smaller number does."""
    return bisect_left(range(limit), True, key=suffices)


def _check_largest(units: Sequence[Unit], room: Mapping[int | str, int]) -> None:
    capacity = max(room.values(), default=0)
    largest = max(units, key=lambda unit: unit.size)
    if 0 < capacity < largest.size:
        tied = ""
        if len(largest.names) > 1:
            tied = " together with what shares its weights"
        raise StrategyError(
            f"{largest.names[0] or 'the model'!r} takes {in_units(largest.size)}{tied}, more than any device has",
            found=", ".join(
                f"{device}: {in_units(size)}" for device, size in room.items()
            ),
            fix="raise max_memory of a device, load the model in a narrower dtype or quantized, or allow it to"
            " be split "
            "(no_split_module_classes)",
        )


def _warn_of_idle(
    units: Sequence[Unit], room: Mapping[int | str, int], used: Collection[int | str]
) -> None:
    # A limit of 0 is the caller's way of excluding an accelerator; only those with room are unexpectedly idle.
    idle = [device for device in accelerators(room) if room[device] > 0]
    sizes = [unit.size for unit in units if unit.size]
    if idle and sizes and not accelerators(used):
        warnings.warn(
            f"no layer is on {', '.join(map(str, idle))}: none has room for the first layer, which takes "
            f"{in_units(sizes[0])}, and for one offloaded layer, at most {in_units(max(sizes))}; "
            "everything runs on the CPU. Give more in max_memory, or pass fallback_allocation=True",
            stacklevel=3,
        )


def _sort_by_module(
    name: str, module: nn.Module, device_map: Mapping[str, int | str], clean: bool
) -> dict[str, int | str]:
    """Return the devices inside a module in the order of modules; only the module's if all are equal."""
    if name in device_map:
        return {name: device_map[name]}
    devices: dict[str, int | str] = {}
    for key in [*direct_parameters(module), *direct_buffers(module)]:
        tensor_name = join_names(name, key)
        if tensor_name in device_map:
            devices[tensor_name] = device_map[tensor_name]
    for key, child in direct_submodules(module).items():
        if child is not None:
            devices |= _sort_by_module(join_names(name, key), child, device_map, clean)
    # The children were merged first, so that one device for all of them collapses level by level up to the model.
    if clean and len(set(devices.values())) == 1:
        return {name: next(iter(devices.values()))}
    return devices
