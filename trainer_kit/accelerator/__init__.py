"""The `Accelerator`: the features of the Trainer for training loops that users write themselves."""

from __future__ import annotations

from typing import Final

from trainer_kit.core.lazy import lazy_names, locate_names

_HOMES: Final = {
    "accelerator": "Accelerator",
    "processes": (
        "PartialState broadcast broadcast_object_list gather gather_object "
        "pad_across_processes reduce synchronize_rng_states"
    ),
}
__all__ = sorted(locate_names(_HOMES))
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
