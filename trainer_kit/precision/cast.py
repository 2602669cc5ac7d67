"""Cast the weights of a module to a dtype; torchmetrics objects in it keep the dtypes of their states."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from trainer_kit.core.torch_private import (
    apply_of_base,
    apply_to_direct_tensors,
)

__all__ = ["cast_module"]


def cast_module(
    module: nn.Module, dtype: torch.dtype, excepted: Collection[nn.Module] = ()
) -> None:
    """Cast the floating-point parameters and buffers of a module, in place.

    The states of a metric are no weights: they are sums over many batches, which bfloat16 would round. ``half`` and
    ``double`` of torchmetrics leave them alone too; its ``set_dtype`` is the one method that casts them. Networks and
    buffers inside a metric are cast, since they meet the outputs of the model.

    Args:
        module: the module; a metric itself is cast with its states.
        dtype: the new dtype.
        excepted: modules that keep their dtype, with everything inside them.
    """
    if _is_metric(module):
        module.set_dtype(dtype)  # type: ignore[operator]
        return
    excluded_modules: set[int] = set()
    excluded_tensors: set[int] = set()
    for outer in excepted:
        excluded_modules.update(map(id, outer.modules()))
        excluded_tensors.update(map(id, _collect_tensors(outer)))

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or id(tensor) in excluded_tensors:
            return tensor
        return tensor.to(dtype)

    for submodule in module.modules():
        if id(submodule) in excluded_modules:
            continue
        if _is_metric(submodule):
            # Not the metric's own override, which also casts its states.
            apply_of_base(submodule, cast, recurse=False)
        else:
            apply_to_direct_tensors(submodule, cast)


def _is_metric(module: nn.Module) -> bool:
    # By an attribute: torchmetrics need not be installed.
    return hasattr(type(module), "update_count")


def _collect_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that `apply_of_base` visits, gradients included."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]
