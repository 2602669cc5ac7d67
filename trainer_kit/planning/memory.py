"""Estimate the memory of weights, gradients and optimizer state from shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from torch import Tensor, nn

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["DTYPES", "MemoryEstimate", "Shapes", "describe_module", "estimate_memory"]

_BITS: Final = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8": 8,
    "int8": 8,
    "int4": 4,
}
DTYPES: Final = tuple(_BITS)
"""The dtypes with an estimate."""
_TRAINABLE: Final = ("float32", "bfloat16", "float16")
_ADAM_STATES: Final = 2


@final
@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of a module.

    Attributes:
        parameters: elements of all floating-point tensors, each tensor once.
        trainable: elements of these that are trained.
        fixed_bytes: bytes of all other tensors, which a conversion does not change, such as indices and masks.
        layers: elements by the name of the module that holds them directly, or of the block in which the model's
            ``_no_split_modules`` keeps it whole.
    """

    parameters: int
    trainable: int
    fixed_bytes: int
    layers: Mapping[str, int]


@final
@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a model in one dtype, on one device, without activations.

    Attributes:
        dtype: of weights, gradients and optimizer state alike.
        weights: of all weights; a forward without gradients needs no more.
        gradients: of trained weights; None for a dtype that is not used for training.
        optimizer: of both of Adam's states; None as for ``gradients``.
        largest_layer: of the largest of the layers, each of which offloading moves at once.
    """

    dtype: str
    weights: int
    gradients: int | None
    optimizer: int | None
    largest_layer: int

    @property
    def training(self) -> int | None:
        """Weights, gradients and optimizer state together."""
        if self.gradients is None or self.optimizer is None:
            return None
        return self.weights + self.gradients + self.optimizer


def describe_module(module: nn.Module | Mapping[str, Tensor]) -> Shapes:
    """Count the elements of a module, or of weights by name; they may be on the meta device.

    All weights by name count as trainable, because a file does not record which weights are frozen.

    Example:
        >>> shapes = describe_module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        >>> shapes.parameters, shapes.trainable, shapes.fixed_bytes, dict(shapes.layers)
        (32, 24, 8, {'0': 16, '1': 16})
    """
    blocks: dict[str, str] = {}
    if isinstance(module, nn.Module):
        trained = {id(tensor) for tensor in module.parameters() if tensor.requires_grad}
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        blocks = _blocks(module)
    else:
        # By identity: tied weights are one tensor, and count once.
        trained = set(map(id, module.values()))
        tensors = dict(module)
    parameters = 0
    trainable = 0
    fixed_bytes = 0
    layers: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            fixed_bytes += tensor.nbytes
            continue
        elements = tensor.numel()
        parameters += elements
        if id(tensor) in trained:
            trainable += elements
        # Offloading moves a whole layer at once, so the largest one must fit beside the rest.
        owner = name.rpartition(".")[0]
        layers[blocks.get(owner, owner)] += elements
    return Shapes(
        parameters=parameters,
        trainable=trainable,
        fixed_bytes=fixed_bytes,
        layers=layers,
    )


def _blocks(module: nn.Module) -> dict[str, str]:
    """The outermost block that stays whole, by the name of each module inside it."""
    undivided = getattr(module, "_no_split_modules", None) or ()
    blocks: dict[str, str] = {}
    for name, block in module.named_modules():
        # A block inside of a block is part of the outer one, which named_modules yields first.
        if type(block).__name__ not in undivided or name in blocks:
            continue
        for inner_name, _ in block.named_modules(prefix=name):
            blocks[inner_name] = name
    return blocks


def estimate_memory(
    shapes: Shapes, dtypes: Iterable[str] | None = None
) -> list[MemoryEstimate]:
    """Return the memory of ``shapes`` in each dtype, by default in all known ones, from wide to narrow.

    Raises:
        ConfigurationError: a dtype is unknown.

    Example:
        >>> for each in estimate_memory(describe_module(nn.Linear(10, 10)))[:2]:
        ...     print(each.dtype, each.weights, each.gradients, each.optimizer, each.training, each.largest_layer)
        float32 440 440 880 1760 440
        bfloat16 220 220 440 880 220
    """
    if dtypes is None:
        dtypes = DTYPES
    names = list(dtypes)
    for name in names:
        if name not in _BITS:
            raise ConfigurationError(
                f"the memory of {name!r} cannot be estimated",
                fix=did_you_mean(name, _BITS),
            )
    return [_memory_in(name, shapes) for name in names]


def _memory_in(dtype: str, shapes: Shapes) -> MemoryEstimate:
    largest = max(shapes.layers.values(), default=0)
    gradients = None
    optimizer = None
    if dtype in _TRAINABLE:
        gradients = _size(shapes.trainable, dtype)
        optimizer = _ADAM_STATES * gradients
    return MemoryEstimate(
        dtype=dtype,
        # Integer tensors keep their dtype in every conversion.
        weights=_size(shapes.parameters, dtype) + shapes.fixed_bytes,
        gradients=gradients,
        optimizer=optimizer,
        largest_layer=_size(largest, dtype),
    )


def _size(elements: int, dtype: str) -> int:
    """Bytes of so many elements, rounded up: those of 4 bits share a byte."""
    return -(-elements * _BITS[dtype] // 8)
