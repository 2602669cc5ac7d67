"""What a step leaves behind besides gradients: undone where a step is repeated, left out, or a padding batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from trainer_kit.core.module import TrainModule
from trainer_kit.metrics.objects import is_metric, remember_metrics

__all__ = ["remember_effects"]

_LARGEST: Final = 2**16
"""Elements of a tensor attribute that is copied; a larger one is data, not a count."""

_ENGINE: Final = re.compile(
    r"ds_|applied_pre_backward_ref_cnt$|(pre|post)_bwd_fn$|need_full_gather|all_parameters$"
)
"""Attributes of modules in which DeepSpeed keeps the progress of its forward and backward passes."""


class _Container(Protocol):
    def copy(self) -> object: ...
    def clear(self) -> None: ...


def remember_effects(
    module: nn.Module, callbacks: Iterable[object] = (), attributes: bool = True
) -> Callable[[], None]:
    """Return a function that undoes what steps change from here on, as often as it is called.

    It puts back buffers, metric objects, and the public attributes of the user's modules: numbers, small tensors,
    lists, dicts and sets, and which object any other name is bound to. Random generators and logged values are the
    caller's.

    Args:
        module: whose steps run.
        callbacks: whose metric objects are put back, too.
        attributes: whether attributes are put back.
    """
    modules = list(module.modules())
    undos = [_remember_buffers(submodule) for submodule in modules]
    undos.append(remember_metrics([module, *callbacks]))
    if attributes:
        undos += [
            _remember_attributes(submodule)
            for submodule in modules
            if submodule is module or _is_of_user(submodule)
        ]

    def undo() -> None:
        for undo_part in undos:
            undo_part()

    return undo


def _remember_buffers(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the buffers of one module: their values, and which tensors they are."""
    buffers = dict(module.named_buffers(recurse=False))
    copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def restore() -> None:
        for name, buffer in buffers.items():
            # As data: autograd would find the buffer changed in a backward that still needs it.
            buffer.data.copy_(copies[name])
            # A step may have assigned another tensor.
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)

    return restore


def _remember_attributes(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the public attributes of one module, and what their values hold."""
    attributes = _public_attributes(module)
    restore_values = [_remember_value(value) for value in attributes.values()]

    def restore() -> None:
        for restore_value in restore_values:
            restore_value()
        # Past `__setattr__`, which a class of the user may override.
        present = vars(module)
        for name in _public_attributes(module):
            if name not in attributes:
                del present[name]
        present.update(attributes)

    return restore


def _public_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not _ENGINE.match(name)
    }


def _is_of_user(module: nn.Module) -> bool:
    """Whether a class of the user may count in plain attributes. Those of a metric are among its states."""
    if isinstance(module, TrainModule):
        return True
    if type(module).__module__.startswith(("torch.", "torchmetrics.")):
        return False
    return not is_metric(module)


def _remember_value(value: object) -> Callable[[], None]:
    """Return a function that restores a small tensor, or the items of a list, dict or set, nested too."""
    if isinstance(value, Tensor):
        return _remember_tensor(value)
    # Exact types: of a subclass nothing is known, such as how it is filled.
    if type(value) is list:
        return _remember_items(value, value, value.extend)
    if type(value) is dict:
        return _remember_items(value, value.values(), value.update)
    if type(value) is set:
        return _remember_items(value, value, value.update)
    return _nothing


def _remember_items(
    container: _Container, items: Iterable[object], fill: Callable[[Any], None]
) -> Callable[[], None]:
    copy = container.copy()
    restore_items = [_remember_value(item) for item in items]

    def restore() -> None:
        container.clear()
        fill(copy)
        for restore_item in restore_items:
            restore_item()

    return restore


def _remember_tensor(tensor: Tensor) -> Callable[[], None]:
    # A tensor on the meta device has no values.
    if tensor.requires_grad or tensor.is_meta or tensor.numel() > _LARGEST:
        return _nothing
    copy = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            tensor.data.copy_(copy)

    return restore


def _nothing() -> None:
    """Do nothing: nothing in the object changes in place."""
