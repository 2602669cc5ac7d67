"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.compare import Difference, diff
from trainer_kit.checkpoint.convert import export
from trainer_kit.checkpoint.mend import Repair, repair
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.reshard import read_sharded
from trainer_kit.checkpoint.sharded import ShardedSnapshot, take_sharded_snapshot, write_sharded, write_sharded_snapshot
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
    "read_sharded",
    "read_weights",
    "repair",
    "take_sharded_snapshot",
    "verify_checkpoint",
    "write_checkpoint",
    "write_sharded",
    "write_sharded_snapshot",
]
