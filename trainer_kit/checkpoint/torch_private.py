"""The private names of torch that stand in files, checked with torch 2.13 and 2.14; no other module here names one.

They are compared with what a file has. `core.torch_private` has the names that other rooms use too.
"""

from __future__ import annotations

from typing import Final

from trainer_kit.core.torch_private import COMPILER

__all__ = [
    "LAST_RATES",
    "LAYOUT_FUNCTION",
    "MEMORY_FORMAT",
    "MUTATION_GUARD",
    "STORAGE_RECORD",
    "STRIDED_SHARD",
]

LAST_RATES: Final = "_last_lr"
"""A scheduler's rates in its state. Without it the rates of the file are not read: those of the user count."""
LAYOUT_FUNCTION: Final = "_get_layout"
MEMORY_FORMAT: Final = "_MEM_FORMAT_ENCODING"
STORAGE_RECORD: Final = "_StorageInfo"
"""What the .metadata of a torch distributed checkpoint refers to. A file with other names is refused by them."""
MUTATION_GUARD: Final = f"{COMPILER}.mutation_guard"
"""The module that replaces ``nn.Module.__setstate__`` once something compiles. Without it such modules are refused."""
STRIDED_SHARD: Final = "_StridedShard"
"""A placement of DTensors that are split twice along one dim. Without it a save would take a rank's part for a box."""
