"""Cast the weights of a module to a dtype; torchmetrics objects in it keep the dtypes of their states."""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
from torch import Tensor, nn

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
    excluded = {id(part) for outer in excepted for part in outer.modules()}
    unchanged = {id(tensor) for outer in excepted for tensor in _tensors_in(outer)}

    def cast(tensor: Tensor) -> Tensor:
        return (
            tensor.to(dtype)
            if tensor.is_floating_point() and id(tensor) not in unchanged
            else tensor
        )

    for part in module.modules():
        if id(part) in excluded:
            continue
        if _is_metric(part):
            nn.Module._apply(part, cast, recurse=False)  # type: ignore[no-untyped-call]
        elif "recurse" in inspect.signature(part._apply).parameters:
            part._apply(cast, recurse=False)  # type: ignore[no-untyped-call]
        else:  # overridden as torch defined it before 2.1: it walks the children itself
            part._apply(cast)  # type: ignore[no-untyped-call]


def _is_metric(module: nn.Module) -> bool:
    return hasattr(
        type(module), "update_count"
    )  # of torchmetrics, which need not be installed


def _tensors_in(module: nn.Module) -> list[Tensor]:
    """The tensors that ``Module._apply`` visits."""
    parameters = list(module.parameters())
    return [
        *parameters,
        *(p.grad for p in parameters if p.grad is not None),
        *module.buffers(),
    ]
