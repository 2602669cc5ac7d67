"""The state that optimizers of other libraries keep, for those whose step cannot run without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.tensors import local
from trainer_kit.core.types import ParamGroup

__all__ = ["state_of"]

_LEAST: Final = 4096
"""Elements below which a quantized optimizer keeps a parameter's state unquantized."""
_FLOAT: Final = 4
"""Bytes of a float32."""

_Size: TypeAlias = Callable[[Tensor, ParamGroup], float]


def _plain(moments: int) -> _Size:
    """The state of an optimizer that keeps tensors of the parameter's shape and dtype."""
    return lambda parameter, group: (
        # One float32 for the count of steps.
        moments * parameter.numel() * parameter.element_size() + _FLOAT
    )


def _quantized(moments: int, bits: int, block: int) -> _Size:
    """The state of an optimizer that keeps quantized moments, with a scale for each block."""
    moments_state = _plain(moments)

    def size(parameter: Tensor, group: ParamGroup) -> float:
        count = parameter.numel()
        # The libraries quantize whole blocks of large parameters only.
        if count < _LEAST or count % block:
            return moments_state(parameter, group)
        return moments * (count * bits / 8 + _FLOAT * count / block) + _FLOAT

    return size


def _factored(parameter: Tensor, group: ParamGroup) -> float:
    """Adafactor: a row and a column of a matrix, a first moment only with ``beta1``, and one number."""
    count = parameter.numel()
    elements = count
    # A vector has no rows and columns: its second moment is kept whole.
    if parameter.dim() > 1:
        elements = count // parameter.shape[-1] + count // parameter.shape[-2]
    if group.get("beta1") is not None:
        elements += count
    return elements * parameter.element_size() + _FLOAT


_SIZES: Final[Mapping[str, _Size]] = {
    "Adafactor": _factored,
    "Adam8bit": _quantized(2, 8, 256),
    "AdamW8bit": _quantized(2, 8, 256),
    "PagedAdam8bit": _quantized(2, 8, 256),
    "PagedAdamW8bit": _quantized(2, 8, 256),
    "Lion8bit": _quantized(1, 8, 256),
    "PagedLion8bit": _quantized(1, 8, 256),
    "AdamFp8": _quantized(2, 8, 256),
    "AdamWFp8": _quantized(2, 8, 256),
    "Adam4bit": _quantized(2, 4, 128),
    "AdamW4bit": _quantized(2, 4, 128),
    "Adam": _plain(2),
    "AdamW": _plain(2),
    "PagedAdam": _plain(2),
    "PagedAdamW": _plain(2),
    "Lion": _plain(1),
    "PagedLion": _plain(1),
}
"""By class name, of transformers, torchao and bitsandbytes: bytes that are kept for a parameter."""


def state_of(optimizers: Iterable[Optimizer]) -> tuple[int, tuple[str, ...]]:
    """The bytes of the state on this rank after the first step, and what is assumed, one line for each class.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(64, 128))
        >>> AdamW8bit = type("AdamW8bit", (torch.optim.SGD,), {})
        >>> state_of([AdamW8bit([weight], lr=0.1)])[0]  # two bytes an element, and a scale for each block of 256
        16644
        >>> state_of([type("Mine", (torch.optim.SGD,), {})([weight], lr=0.1)])[1]
        ("the state of Mine is unknown, assumed Adam's",)
    """
    total = 0.0
    lines: dict[str, None] = {}
    for optimizer in optimizers:
        # By name: the libraries need not be installed, and importing one may start a device.
        name = type(optimizer).__name__
        size = _SIZES.get(name)
        line = f"the state of {name} is calculated, and what its step allocates is not counted"
        if size is None:
            size = _plain(2)
            line = f"the state of {name} is unknown, assumed Adam's"
        # A dictionary keeps the order, and each line once.
        lines[line] = None
        for group in optimizer.param_groups:
            # The part of a sharded parameter that this rank holds.
            trained = [local(each) for each in group["params"] if each.requires_grad]
            total += sum(size(parameter, group) for parameter in trained)
    return int(total), tuple(lines)
