"""The private names of torch that callbacks use, checked with torch 2.13 and 2.14; no other module here names one.

`core.torch_private` has the names that other rooms use too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainer_kit.core.torch_private import find_private

__all__ = ["record_memory", "save_memory_snapshot"]

_USE: Final = "PyTorchProfiler(memory_snapshot=True)"

# Begins to record each allocation of CUDA, and with `enabled=None` ends. torch documents no other names.
record_memory: Final[Callable[..., None]] = find_private(
    "torch.cuda.memory._record_memory_history", _USE
)
save_memory_snapshot: Final[Callable[[str], None]] = find_private(
    "torch.cuda.memory._dump_snapshot", _USE
)
