"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_kit.checkpoint.background import HostBuffers
    from trainer_kit.checkpoint.commit import write_checkpoint
    from trainer_kit.checkpoint.compare import Difference, diff
    from trainer_kit.checkpoint.convert import export
    from trainer_kit.checkpoint.mend import Repair, repair
    from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
    from trainer_kit.checkpoint.reshard import read_divided, read_sharded
    from trainer_kit.checkpoint.sharded import (
        ShardedSnapshot,
        take_sharded_snapshot,
        write_sharded,
        write_sharded_snapshot,
    )
    from trainer_kit.checkpoint.store import CheckpointRecord, checkpoints
    from trainer_kit.checkpoint.weights import read_weights

__all__ = [
    "CheckpointRecord",
    "Difference",
    "HostBuffers",
    "Repair",
    "ShardedSnapshot",
    "checkpoints",
    "diff",
    "export",
    "read_checkpoint",
    "read_divided",
    "read_sharded",
    "read_weights",
    "repair",
    "take_sharded_snapshot",
    "verify_checkpoint",
    "write_checkpoint",
    "write_sharded",
    "write_sharded_snapshot",
]

_MODULES = {
    "CheckpointRecord": "store",
    "Difference": "compare",
    "HostBuffers": "background",
    "Repair": "mend",
    "ShardedSnapshot": "sharded",
    "checkpoints": "store",
    "diff": "compare",
    "export": "convert",
    "read_checkpoint": "read",
    "read_divided": "reshard",
    "read_sharded": "reshard",
    "read_weights": "weights",
    "repair": "mend",
    "take_sharded_snapshot": "sharded",
    "verify_checkpoint": "read",
    "write_checkpoint": "commit",
    "write_sharded": "sharded",
    "write_sharded_snapshot": "sharded",
}


def __getattr__(name: str) -> Any:
    # A run needs a part of this room: what it does not ask for costs nothing.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
