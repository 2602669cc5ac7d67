"""The private names of torch that the verification of a run uses, checked with torch 2.13 and 2.14.

No other module here names one. `core.torch_private` has the names that other rooms use too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

import torch.distributed as dist

from trainer_kit.core.torch_private import COMPILER, find_private, needs_private
from trainer_kit.hang.torch_private import WORLD

__all__ = [
    "BARRIER",
    "FSDP_MODULE",
    "NEW_GROUP",
    "OPERATIONS_ALIKE",
    "WORLD",
    "compiled_frames",
    "debug_mode",
    "isolate_threads",
    "new_group_function",
    "worlds_of_threads",
]

_USE: Final = "Trainer.verify with ranks as threads"

# -- ranks as threads: what stands in `torch.distributed.distributed_c10d` ----------------------------------------

NEW_GROUP: Final = "_new_process_group_helper"
"""Makes a process group. Without it no thread can be a rank."""
BARRIER: Final = "_store_based_barrier"
"""Polls the store until all ranks have come, while no other thread could take its turn."""
OPERATIONS_ALIKE: Final = ("_allgather_base", "_reduce_scatter_base")
"""Operations of a process group whose tensors have the same shapes on every rank; torch calls them by these names."""


def new_group_function() -> Callable[..., object]:
    """torch's function that creates a process group.

    Raises:
        TrainerKitError: this release of torch has none under that name.
    """
    with needs_private(_USE):
        function: Callable[..., object] = getattr(dist.distributed_c10d, NEW_GROUP)
        return function


def worlds_of_threads() -> type:
    """The class of torch's worlds with one for each thread, which torch tests its own strategies with.

    Raises:
        TrainerKitError: this release of torch does not have it.
    """
    # Imported here: it imports torch's own test tools.
    with needs_private(_USE):
        from torch.testing._internal.distributed.multi_threaded_pg import (
            ThreadLocalWorld,
        )

        # The method that a subclass overrides.
        _ = ThreadLocalWorld._get_world
    return ThreadLocalWorld


# Gives each thread a registry of group names of its own. Without it ranks would take each other's groups.
isolate_threads: Final[Callable[[bool], None]] = find_private(
    "torch._C._distributed_c10d._set_thread_isolation_mode", _USE
)

# -- what a step did ----------------------------------------------------------------------------------------------


class _Mode(Protocol):
    """A mode that records the operations inside it."""

    def __enter__(self) -> object: ...
    def __exit__(self, *exception: object) -> object: ...
    def debug_string(self) -> str: ...


def debug_mode() -> Callable[..., _Mode] | None:
    """The class of a mode that records operations; None where torch has none: a finding then names the module only."""
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        return None
    return DebugMode


def compiled_frames() -> int:
    """How many functions torch has compiled in this process.

    Read without an import, which takes seconds: nothing is compiled before someone has imported it.
    """
    compiler = sys.modules.get(f"{COMPILER}.utils")
    if compiler is None:
        return 0
    frames: Counter[str] = compiler.counters["frames"]
    return frames["total"]


# -- names --------------------------------------------------------------------------------------------------------

FSDP_MODULE: Final = "_fsdp_wrapped_module"
"""What FSDP1 puts into the name of a weight. Without it such a weight has no counterpart in the compared run."""
