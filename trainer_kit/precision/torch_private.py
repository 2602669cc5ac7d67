"""The private names of torch that precisions use, checked with torch 2.13; no other module here names one.

Layers of bitsandbytes also override two methods of ``nn.Module``, ``_apply`` and ``_load_from_state_dict``, because
public hooks see neither a cast nor a state before its shapes are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor, nn

from trainer_kit.core.types import StateDict

__all__ = [
    "apply_to_direct_tensors",
    "apply_to_tensors",
    "forward_pre_hooks",
    "load_from_state_dict",
    "scaled_matmul",
    "set_scaler_device",
    "state_after_update",
]

# Replaces each tensor of a module, which `to`, `half` and `cuda` do through it. Without it casts would also cast the
# sums of metrics, and quantized weights.
apply_to_tensors: Final[Callable[..., nn.Module]] = nn.Module._apply

# Loads the direct tensors of one layer. A state of floats is quantized before its shapes are compared, which they are
# inside of it. Without it a checkpoint of floats would be refused by a quantized model.
load_from_state_dict: Final[Callable[..., None]] = nn.Module._load_from_state_dict

# The hooks ahead of a module's forward, by their key. Without it transformer layers with an exception inside would get
# one more hook with each run, or none: torch's fast path would then read weights past the exception.
forward_pre_hooks: Final[Callable[[nn.Module], dict[int, Callable[..., object]]]] = (
    attrgetter("_forward_pre_hooks")
)

# One matrix product in float8. It only finds out whether the device has such products, of which torch has no list.
# Without it the first step would fail in torchao, after the set-up.
scaled_matmul: Final[Callable[..., Tensor]] = torch._scaled_mm


def apply_to_direct_tensors(
    module: nn.Module, function: Callable[[Tensor], Tensor]
) -> None:
    """Replace each direct parameter and buffer of a module, as its class defines it."""
    if "recurse" in inspect.signature(module._apply).parameters:
        module._apply(function, recurse=False)  # type: ignore[no-untyped-call]  # torch's
    else:  # overridden as torch defined it before 2.1: it walks the children itself
        module._apply(function)  # type: ignore[no-untyped-call]  # torch's


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
