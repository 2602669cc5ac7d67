"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
    from trainer_kit.checkpoint.background import HostBuffers
    from trainer_kit.checkpoint.codecs import codec
    from trainer_kit.checkpoint.commit import write_checkpoint
    from trainer_kit.checkpoint.compare import Difference, diff
    from trainer_kit.checkpoint.lightning import import_lightning
    from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
    from trainer_kit.checkpoint.sharded import (
        ShardedSnapshot,
        read_divided,
        read_sharded,
        take_sharded_snapshot,
        write_sharded,
        write_sharded_snapshot,
    )
    from trainer_kit.checkpoint.store import (
        CheckpointRecord,
        Repair,
        checkpoints,
        repair,
    )
    from trainer_kit.checkpoint.weights import export, read_weights

__all__ = [
    "CheckpointRecord",
    "Difference",
    "HostBuffers",
    "Repair",
    "ShardedSnapshot",
    "checkpoints",
    "codec",
    "diff",
    "export",
    "import_lightning",
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
    **dict.fromkeys(("CheckpointRecord", "Repair", "checkpoints", "repair"), "store"),
    **dict.fromkeys(("Difference", "diff"), "compare"),
    **dict.fromkeys(
        ("ShardedSnapshot", "take_sharded_snapshot", "write_sharded_snapshot"),
        "sharded",
    ),
    **dict.fromkeys(("read_divided", "read_sharded", "write_sharded"), "sharded"),
    **dict.fromkeys(("export", "read_weights"), "weights"),
    **dict.fromkeys(("read_checkpoint", "verify_checkpoint"), "read"),
    "HostBuffers": "background",
    "codec": "codecs",
    "import_lightning": "lightning",
    "write_checkpoint": "commit",
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
