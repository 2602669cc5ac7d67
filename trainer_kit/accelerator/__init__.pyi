# Written by docs/generate_stubs.py from the table in __init__.py; edit that, then `make docs`.
from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.accelerator.processes import (
    PartialState,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    synchronize_rng_states,
)
from trainer_kit.core.lazy import NameLookup

__all__ = [
    "Accelerator",
    "PartialState",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "synchronize_rng_states",
]

__getattr__: NameLookup
