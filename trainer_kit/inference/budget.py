"""How much of a model each device may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

import torch

from trainer_kit.checkpoint.files import in_bytes
from trainer_kit.core.devices import count_accelerators, present_accelerator
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.memory import free_memory

__all__ = ["Device", "accelerators", "get_max_memory", "name_of", "order_of", "resolve_device"]

Device: TypeAlias = "int | str | torch.device"
"""A number means that one of this machine's accelerators; ``"disk"`` is a place, too."""

_SHARE: Final = 0.9
"""Of what is free; the rest is for activations."""
_PLACES: Final = ("cpu", "disk")


def get_max_memory(max_memory: Mapping[Device, int | str] | None = None) -> dict[int | str, int]:
    """Bytes by device, accelerators first, then the host and the disk.

    Args:
        max_memory: by device, bytes or ``"10GB"``, ``"1GiB"``; None: nine tenths of what is free on each accelerator
            and in the host's memory, where the limit of a container counts.

    Raises:
        ConfigurationError: no number, or no device.

    Example:
        >>> get_max_memory({"cpu": "2GiB", 1: "10GB", 0: 500})
        {0: 500, 1: 10000000000, 'cpu': 2147483648}
    """
    if max_memory is None:
        kind = present_accelerator()
        found: dict[int | str, int] = {}
        if kind is not None:
            for index in range(count_accelerators()):
                found[index] = int(_SHARE * (free_memory(torch.device(kind.type, index)) or 0))
        found["cpu"] = int(_SHARE * (free_memory(torch.device("cpu")) or 0))
        return found
    given = {name_of(device): in_bytes(size, f"max_memory[{device!r}]") for device, size in max_memory.items()}
    return {device: given[device] for device in sorted(given, key=order_of)}


def name_of(device: Device) -> int | str:
    """As a key of a device map: a number, ``"cpu"``, ``"disk"``, or what torch calls it.

    Raises:
        StrategyError: it is none of these.
    """
    if isinstance(device, int) or device == "disk":
        return device
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise StrategyError(
            f"{device!r} is no device", found=str(error).splitlines()[0], fix='use 0, 1, ..., "cpu" or "disk"'
        ) from error


def order_of(device: int | str) -> tuple[int, int, str]:
    """For sorting: accelerators by number, then those with names, then the host, then the disk."""
    if isinstance(device, int):
        return 0, device, ""
    return (2 + _PLACES.index(device), 0, "") if device in _PLACES else (1, 0, device)


def accelerators(devices: Iterable[int | str]) -> list[int | str]:
    """Those that are neither the host nor the disk, in order, each once."""
    return sorted({device for device in devices if device not in _PLACES}, key=order_of)


def resolve_device(device: Device) -> torch.device:
    """The device that torch knows, for a key of a device map.

    Raises:
        StrategyError: a number, and this machine has no such accelerator.
    """
    if not isinstance(device, int):
        return torch.device(device)
    kind = present_accelerator()
    count = 0 if kind is None else count_accelerators()
    if kind is None or not 0 <= device < count:
        here = "no accelerator" if kind is None else f"{count} of {kind.type}"
        raise StrategyError(
            f"there is no device {device} on this machine", found=here, fix='use "cpu" and "disk" in the device map'
        )
    return torch.device(kind.type, device)
