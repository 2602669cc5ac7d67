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
    if isinstance(module, nn.Module):
        trained = {id(tensor) for tensor in module.parameters() if tensor.requires_grad}
        named = dict([*module.named_parameters(), *module.named_buffers()])
    else:
        trained = {
            id(tensor) for tensor in module.values() if tensor.is_floating_point()
        }
        named = dict(module)
    blocks = _blocks(module) if isinstance(module, nn.Module) else {}
    layers: Counter[str] = Counter()
    for name, tensor in named.items():
        if tensor.is_floating_point():
            home = name.rpartition(".")[0]
            layers[blocks.get(home, home)] += tensor.numel()
    floats = [tensor for tensor in named.values() if tensor.is_floating_point()]
    return Shapes(
        parameters=sum(tensor.numel() for tensor in floats),
        trainable=sum(tensor.numel() for tensor in floats if id(tensor) in trained),
        fixed_bytes=sum(
            tensor.nbytes for tensor in named.values() if not tensor.is_floating_point()
        ),
        layers=layers,
    )


def _blocks(module: nn.Module) -> dict[str, str]:
    """The outermost block that stays whole, by the name of each module inside it."""
    whole = getattr(module, "_no_split_modules", None) or ()
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        if type(part).__name__ in whole and name not in found:
            found |= {
                f"{name}.{inner}" if inner and name else inner or name: name
                for inner, _ in part.named_modules()
            }
    return found


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
    largest = max(shapes.layers.values(), default=0)

    def one(dtype: str) -> MemoryEstimate:
        bits = _BITS[dtype]
        trained = -(-shapes.trainable * bits // 8) if dtype in _TRAINABLE else None
        return MemoryEstimate(
            dtype=dtype,
            weights=-(-shapes.parameters * bits // 8) + shapes.fixed_bytes,
            gradients=trained,
            optimizer=None if trained is None else _ADAM_STATES * trained,
            largest_layer=-(-largest * bits // 8),
        )

    chosen = list(_BITS if dtypes is None else dtypes)
    for dtype in chosen:
        if dtype not in _BITS:
            raise ConfigurationError(
                f"the memory of {dtype!r} cannot be estimated",
                fix=did_you_mean(dtype, _BITS),
            )
    return [one(dtype) for dtype in chosen]
