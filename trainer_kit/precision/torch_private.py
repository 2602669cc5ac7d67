"""The private names of torch that precisions use, checked with torch 2.13 and 2.14; no other module here names one.

Layers of bitsandbytes also override two methods of ``nn.Module``, ``_apply`` and ``_load_from_state_dict``, because
public hooks see neither a cast nor a state before its shapes are compared. `core.torch_private` has the names that
other rooms use too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from trainer_kit.core.torch_private import find_private
from trainer_kit.core.types import StateDict

__all__ = [
    "load_from_state_dict",
    "scaled_matmul",
    "set_scaler_device",
    "state_after_update",
]

# Loads the direct tensors of one layer. A state of floats is quantized before its shapes are compared, which they are
# inside of it. Without it a checkpoint of floats would be refused by a quantized model.
load_from_state_dict: Final[Callable[..., None]] = find_private(
    "torch.nn.Module._load_from_state_dict", "loading of a quantized layer"
)

# One matmul in float8: fp8 support is detected by trying it, since torch has no list of devices.
# Without it the first step would fail in torchao, after the set-up.
scaled_matmul: Final[Callable[..., Tensor]] = find_private(
    "torch._scaled_mm", 'precision="fp8"'
)


def set_scaler_device(scaler: torch.amp.GradScaler, device_type: str) -> None:
    """Set where a scaler keeps its scale, which it reads when the first loss is scaled.

    Its constructor would count the devices through the runtime, after which a forked process cannot use them.
    """
    scaler._device = device_type


def state_after_update(scaler: torch.amp.GradScaler) -> StateDict:
    """The state after the scale is adapted; the scaler keeps its own, as other optimizers may still step with it.

    GradScaler has no method that computes the next scale alone, so it is updated, and put back. ``update`` forgets what
    was read of each optimizer's gradients, which no public method restores.
    """
    before = scaler.state_dict()
    per_optimizer = scaler._per_optimizer_states
    scaler.update()
    adapted: StateDict = scaler.state_dict()
    scaler.load_state_dict(before)
    scaler._per_optimizer_states = per_optimizer
    return adapted
