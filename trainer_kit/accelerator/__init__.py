"""The `Accelerator`: the features of the Trainer for training loops that users write themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_kit.core.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {name: "accelerator" if name == "Accelerator" else "processes" for name in __all__},
)
