"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "background": "HostBuffers",
    "codecs": "codec",
    "commit": "write_checkpoint",
    "compare": "Difference diff",
    "lightning": "import_lightning",
    "read": "read_checkpoint verify_checkpoint",
    "sharded": (
        "ShardedSnapshot read_divided read_sharded take_sharded_snapshot "
        "write_sharded write_sharded_snapshot"
    ),
    "store": "CheckpointRecord Repair checkpoints repair",
    "weights": "export read_weights",
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
