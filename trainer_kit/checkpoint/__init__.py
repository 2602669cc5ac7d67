"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.checkpoint.background import HostBuffers
    from trainer_kit.checkpoint.commit import write_checkpoint
    from trainer_kit.checkpoint.compare import Difference, diff
    from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
    from trainer_kit.checkpoint.sharded import (
        ShardedSnapshot,
        read_divided,
        read_sharded,
        take_sharded_snapshot,
        write_sharded,
        write_sharded_snapshot,
    )
    from trainer_kit.checkpoint.store import CheckpointRecord, Repair, checkpoints, repair
    from trainer_kit.checkpoint.weights import export, read_weights

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

_HOME = {
    "CheckpointRecord": "store",
    "Difference": "compare",
    "HostBuffers": "background",
    "Repair": "store",
    "ShardedSnapshot": "sharded",
    "checkpoints": "store",
    "diff": "compare",
    "export": "weights",
    "read_checkpoint": "read",
    "read_divided": "sharded",
    "read_sharded": "sharded",
    "read_weights": "weights",
    "repair": "store",
    "take_sharded_snapshot": "sharded",
    "verify_checkpoint": "read",
    "write_checkpoint": "commit",
    "write_sharded": "sharded",
    "write_sharded_snapshot": "sharded",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
