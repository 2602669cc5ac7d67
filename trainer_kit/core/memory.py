"""How much memory a device or this machine has, and what of it is free (a container's limit counts); bytes in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

__all__ = ["device_memory", "free_memory", "in_units"]

_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED: Final = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
_STATISTICS: Final = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_MEMINFO: Final = "/proc/meminfo"


def device_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes for one rank: an accelerator's own, or its share of the host's; None where nobody says.

    Args:
        device: where it computes.
        ranks: on this machine.
    """
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if ask is None else int(ask(device)[1])
    whole = _host_memory()
    return None if whole is None else min([whole, *_numbers(_LIMITS)]) // ranks


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken: of an accelerator, or of the host; None where nobody says."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if ask is None else int(ask(device)[0])
    whole = _host_memory()
    if whole is None:
        return None
    free = _table(_MEMINFO).get("MemAvailable:", whole // 1024) * 1024
    limits, used = _numbers(_LIMITS), _numbers(_USED)
    if not limits or not used:
        return free
    cached = next((_table(name).get("inactive_file", 0) for name in _STATISTICS if os.access(name, os.R_OK)), 0)
    return max(0, min(free, min(limits) - used[0] + cached))  # files that were read are let go of first


def in_units(size: float | None) -> str:
    """A number of bytes for people.

    Example:
        >>> in_units(3), in_units(4180), in_units(120_000_000), in_units(None)
        ('3 B', '4.18 kB', '120 MB', 'an unknown number')
    """
    if size is None:
        return "an unknown number"
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _host_memory() -> int | None:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _numbers(names: tuple[str, ...]) -> list[int]:
    told = [Path(name).read_text().strip() for name in names if os.access(name, os.R_OK)]
    return [int(number) for number in told if number.isdigit()]


def _table(name: str) -> dict[str, int]:
    """Lines of a name and a number."""
    if not os.access(name, os.R_OK):
        return {}
    rows = [line.split() for line in Path(name).read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
