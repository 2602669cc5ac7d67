"""The accelerator of this process: whether there is one, and which of its devices is the current one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import torch

__all__ = ["count_accelerators", "deterministic_products", "make_current", "present_accelerator"]

_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"


def present_accelerator() -> torch.device | None:
    """What torch drives here and finds working; None without one. Processes can still be forked afterwards.

    Example:
        >>> found = present_accelerator()
        >>> found is None or found.type != "cpu"
        True
    """
    return torch.accelerator.current_accelerator() if count_accelerators() else None


def count_accelerators() -> int:
    """How many devices of the kind that torch drives here are there. Processes can still be forked afterwards.

    Example:
        >>> (count_accelerators() > 0) == (present_accelerator() is not None)
        True
    """
    found = torch.accelerator.current_accelerator()
    # torch.accelerator would initialise CUDA to count, after which no forked process can use it; its own module asks
    # the driver's library.
    return 0 if found is None else int(torch.get_device_module(found).device_count())


def make_current(device: torch.device) -> None:
    """Let this process's calls that name no device mean this one.

    FSDP divides onto the current device, NCCL sends objects from it, and every library puts its own memory there:
    without this, processes meet on the first one.

    Args:
        device: of this process; nothing happens on a CPU, or where it has no index.

    Example:
        >>> make_current(torch.device("cpu"))
    """
    drives = torch.accelerator.current_accelerator()
    if drives is None or drives.type != device.type or device.index is None:
        return
    if torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


def deterministic_products() -> Callable[[], None]:
    """Give cuBLAS the workspaces without which torch's deterministic mode refuses matrix products on CUDA.

    Returns:
        What takes that back. A setting of the user's stays.

    Example:
        >>> undo = deterministic_products()
        >>> undo()
    """
    built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not built or _WORKSPACE in os.environ:
        return lambda: None
    os.environ[_WORKSPACE] = ":4096:8"

    def undo() -> None:
        os.environ.pop(_WORKSPACE, None)

    return undo
