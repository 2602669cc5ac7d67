# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
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
from trainer_kit.checkpoint.store import CheckpointRecord, Repair, checkpoints, repair
from trainer_kit.checkpoint.weights import export, read_weights
from trainer_kit.core.lazy import NameLookup

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

__getattr__: NameLookup
