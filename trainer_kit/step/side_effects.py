"""What a step leaves behind besides gradients: undone where a step is repeated, left out, or a padding batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

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


def remember_effects(
    module: nn.Module, callbacks: Iterable[Any] = (), attributes: bool = True
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
    undo_metrics = remember_metrics([module, *callbacks])
    parts = list(module.modules())
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in parts
        for name, buffer in part.named_buffers(recurse=False)
    ]
    users = [part for part in parts if part is module or _is_of_user(part)] if attributes else []
    bindings = [(part, _public(part)) for part in users]
    undo_values = [_undo(value) for _, names in bindings for value in names.values()]

    def undo() -> None:
        for part, name, buffer, before in buffers:
            buffer.data.copy_(
                before
            )  # as data: a backward may still look at whether it was written to
            if getattr(part, name) is not buffer:  # a step may assign another tensor
                setattr(part, name, buffer)
        undo_metrics()
        for undo_value in undo_values:
            undo_value()
        for part, names in bindings:
            present = vars(part)
            for name in [name for name in _public(part) if name not in names]:
                del present[name]
            present.update(names)

    return undo


def _public(part: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(part).items()
        if name[0] != "_" and not _ENGINE.match(name)
    }


def _is_of_user(part: nn.Module) -> bool:
    """Whether a class of the user may count in plain attributes. Those of a metric are among its states."""
    if isinstance(part, TrainModule):
        return True
    return not type(part).__module__.startswith(("torch.", "torchmetrics.")) and not is_metric(part)


def _undo(value: Any) -> Callable[[], None]:
    """Return a function that restores a small tensor, or the items of a list, dict or set, nested too."""
    if isinstance(value, Tensor):
        return _undo_tensor(value)
    if type(value) not in (list, dict, set):
        return _nothing
    before = value.copy()
    undo_items = [_undo(item) for item in (value.values() if type(value) is dict else value)]

    def put_back() -> None:
        value.clear()
        (value.extend if type(value) is list else value.update)(before)
        for undo_item in undo_items:
            undo_item()

    return put_back


def _undo_tensor(tensor: Tensor) -> Callable[[], None]:
    if tensor.requires_grad or tensor.is_meta or tensor.numel() > _LARGEST:
        return _nothing
    before = tensor.detach().clone()

    def put_back() -> None:
        with torch.no_grad():
            tensor.data.copy_(before)

    return put_back


def _nothing() -> None:
    """Do nothing: nothing in the object changes in place."""
