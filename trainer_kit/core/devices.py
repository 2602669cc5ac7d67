"""The accelerators and the memory of this machine: which exist, how much is free, and which device is current."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

__all__ = [
    "count_accelerators",
    "deterministic_products",
    "device_memory",
    "free_memory",
    "make_current",
    "memory_peak",
    "present_accelerator",
    "ran_out_of_memory",
]

_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"


def present_accelerator() -> torch.device | None:
    """The accelerator that torch can use here, or None. The process can still be forked afterwards.

    Example:
        >>> found = present_accelerator()
        >>> found is None or found.type != "cpu"
        True
    """
    if not count_accelerators():
        return None
    return torch.accelerator.current_accelerator()


def count_accelerators() -> int:
    """The number of accelerators that torch can use here. The process can still be forked afterwards.

    Example:
        >>> (count_accelerators() > 0) == (present_accelerator() is not None)
        True
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return 0
    # torch.accelerator.device_count would initialize CUDA, which forked processes then could not use; the device
    # module counts through the driver's library.
    return int(torch.get_device_module(accelerator).device_count())


def make_current(device: torch.device) -> None:
    """Make ``device`` the current device of this process.

    FSDP shards onto the current device, NCCL sends objects from it, and libraries allocate there: without this call,
    all processes would use the first device.

    Args:
        device: the device of this process; a CPU, or a device without an index, changes nothing.

    Example:
        >>> make_current(torch.device("cpu"))
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return
    if device.index is None:
        return
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


def deterministic_products() -> Callable[[], None]:
    """Set the cuBLAS workspaces that torch's deterministic mode requires for matmuls on CUDA.

    Returns:
        A function that undoes this. A setting of the user is not changed.

    Example:
        >>> undo = deterministic_products()
        >>> undo()
    """
    # torch declares no types for it.
    built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not built or _WORKSPACE in os.environ:
        return lambda: None
    os.environ[_WORKSPACE] = ":4096:8"

    def undo() -> None:
        os.environ.pop(_WORKSPACE, None)

    return undo


# Of control groups: the paths of version 2, then those of version 1.
_LIMITS: Final = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_USED: Final = (
    "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes",
)
_STATISTICS: Final = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_MEMINFO: Final = "/proc/meminfo"


def device_memory(device: torch.device, ranks: int) -> int | None:
    """Bytes of memory for one rank: its accelerator's, or its share of the host's; None if unknown.

    Args:
        device: the device of the rank.
        ranks: the number of ranks on this machine.
    """
    if device.type != "cpu":
        info = _accelerator_memory(device)
        if info is None:
            return None
        return info[1]
    host = _host_memory()
    if host is None:
        return None
    # In a container, the limit of its control group is what the kernel enforces.
    return min([host, *_numbers(_LIMITS)]) // ranks


def free_memory(device: torch.device) -> int | None:
    """Free bytes of an accelerator, or of the host; None if unknown."""
    if device.type != "cpu":
        info = _accelerator_memory(device)
        if info is None:
            return None
        return info[0]
    host = _host_memory()
    if host is None:
        return None
    # Without /proc, the whole memory counts as available.
    available = _table(_MEMINFO).get("MemAvailable:", host // 1024) * 1024
    limits = _numbers(_LIMITS)
    used = _numbers(_USED)
    if not limits or not used:
        return available
    statistics = [name for name in _STATISTICS if os.access(name, os.R_OK)]
    cached = 0
    if statistics:
        cached = _table(statistics[0]).get("inactive_file", 0)
    # The kernel can reclaim the page cache.
    allowed = min(limits) - used[0] + cached
    return max(0, min(available, allowed))


def _accelerator_memory(device: torch.device) -> tuple[int, int] | None:
    """Free and total bytes of an accelerator; None if its module does not tell."""
    read = getattr(torch.get_device_module(device), "mem_get_info", None)
    if read is None:
        return None
    free, total = read(device)
    return int(free), int(total)


def _host_memory() -> int | None:
    # Windows has none.
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _numbers(names: tuple[str, ...]) -> list[int]:
    """The numbers in those files that can be read; a limit may be the word ``max``."""
    numbers = []
    for name in names:
        if os.access(name, os.R_OK):
            text = Path(name).read_text().strip()
            if text.isdigit():
                numbers.append(int(text))
    return numbers


def _table(name: str) -> dict[str, int]:
    """Parse a file whose lines hold a name and a number."""
    if not os.access(name, os.R_OK):
        return {}
    rows = [line.split() for line in Path(name).read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def memory_peak(device: torch.device) -> int | None:
    """Peak memory of this process in bytes: allocated by torch on an accelerator, or on the host; None if unknown."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        read = getattr(module, "max_memory_allocated", None)
        if read is None:
            return None
        return int(read(device))
    try:
        import resource
    except ImportError:
        # Windows.
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In bytes on macOS, in KiB elsewhere.
    if sys.platform == "darwin":
        return peak
    return peak * 1024


# cuBLAS and cuDNN may report exhausted memory as an operation that is not supported.
_FULL: Final = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_NOT_SUPPORTED",
)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that memory is exhausted.

    Example:
        >>> ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), ran_out_of_memory(ValueError())
        (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(text.lower() in message for text in _FULL)
