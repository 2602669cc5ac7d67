"""What the tensors of a module take in memory, and which of them cannot be put on different devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.dtypes import torch_dtype
from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["Dtype", "Unit", "compute_module_sizes", "find_units", "named_tensors", "resolve_dtype", "tensor_sizes"]

Dtype: TypeAlias = "torch.dtype | str"
"""A dtype or its name; ``"int4"``, which torch has none of, counts half a byte an element."""

_BITS: Final = {"int4": 4, "int2": 2, "fp8": 8}


@final
@dataclass(eq=False)
class Unit:
    """What goes to one device: a layer, a block that is not split, a tensor that a split module has itself.

    Attributes:
        names: of modules or tensors; several where they share weights.
        weights: bytes of what is taken away when it is offloaded; what is shared counts once.
        buffers: bytes of what then stays on the device that computes.
    """

    names: list[str]
    weights: int = 0
    buffers: int = 0

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.weights + self.buffers

    def add(self, size: int, stays: bool) -> None:
        """Count a tensor."""
        if stays:
            self.buffers += size
        else:
            self.weights += size

    def take(self, other: Unit) -> None:
        """Become one with another unit."""
        self.names += other.names
        self.weights, self.buffers = self.weights + other.weights, self.buffers + other.buffers


def resolve_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype that is meant by ``"float16"`` or ``"torch.float16"``.

    Raises:
        ConfigurationError: torch has none of this name.

    Example:
        >>> resolve_dtype("torch.bfloat16")
        torch.bfloat16
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch_dtype(dtype.removeprefix("torch."))
    except TypeError as error:
        known = [name for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype)]
        raise ConfigurationError(f"unknown dtype {dtype!r}", fix=did_you_mean(dtype, known)) from error


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by every name that they have, in the order of modules."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def tensor_sizes(
    module: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> dict[str, int]:
    """Bytes by name, of parameters and buffers; what is shared has its size under each of its names.

    Args:
        module: it may be on the ``meta`` device.
        dtype: what numbers of floating point will be converted to; None: they stay as they are.
        special_dtypes: by name, other dtypes for some.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> tensor_sizes(layer), tensor_sizes(layer, "float16", {"bias": torch.float32})
        ({'weight': 48, 'bias': 16}, {'weight': 24, 'bias': 16})
    """
    special = special_dtypes or {}
    sizes = {}
    for name, tensor in named_tensors(module):
        given = special.get(name, dtype if tensor.is_floating_point() else None) or tensor.dtype
        sizes[name] = -(-tensor.numel() * _bits(given) // 8)
    return sizes


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every tensor and of every module that holds it, by name; ``""`` is the whole model.

    Args:
        model: it may be on the ``meta`` device.
        dtype: as for `tensor_sizes`.
        special_dtypes: likewise.
        buffers_only: leave parameters out.

    Example:
        >>> compute_module_sizes(nn.Sequential(nn.Linear(3, 4)))
        {'': 64, '0': 64, '0.weight': 48, '0.bias': 16}
    """
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    sizes: dict[str, int] = {}
    for name, size in tensor_sizes(model, dtype, special_dtypes).items():
        if buffers_only and name not in buffers:
            continue
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            holder = ".".join(parts[:depth])
            sizes[holder] = sizes.get(holder, 0) + size
    return sizes


def _bits(dtype: Dtype) -> int:
    return _BITS[dtype] if isinstance(dtype, str) and dtype in _BITS else resolve_dtype(dtype).itemsize * 8


def find_units(
    module: nn.Module,
    no_split_module_classes: Collection[str] | str | None,
    sizes: Mapping[str, int],
    buffers_stay: bool,
) -> list[Unit]:
    """Everything that a device map has to place, in the order of modules.

    Args:
        module: the model.
        no_split_module_classes: names of classes whose modules stay whole.
        sizes: from `tensor_sizes`.
        buffers_stay: they are not offloaded with the layer that has them.
    """
    given = no_split_module_classes or ()
    whole = {given} if isinstance(given, str) else set(given)
    kept = _kept_buffers(module, buffers_stay)
    units: list[Unit] = []
    owner: dict[int, Unit] = {}
    for name, tensors in _pieces("", module, whole):
        sharing = {id(unit) for unit in (owner.get(id(tensor)) for tensor in tensors.values()) if unit is not None}
        parts = [unit for unit in units if id(unit) in sharing]
        home = parts[0] if parts else Unit([])
        if not parts:
            units.append(home)
        for other in parts[1:]:  # this piece shares weights with both
            home.take(other)
            units.remove(other)
            owner.update({key: home for key, unit in owner.items() if unit is other})
        home.names.append(name)
        for key, tensor in tensors.items():
            if id(tensor) not in owner:
                owner[id(tensor)] = home
                home.add(sizes[key], stays=id(tensor) in kept)
    return units


def _pieces(name: str, part: nn.Module, whole: Collection[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Layers, whole blocks, and tensors that a module with layers has itself, by name, each with its tensors."""
    prefix = f"{name}." if name else ""
    children = {key: child for key, child in part._modules.items() if child is not None}
    if not children or type(part).__name__ in whole:
        yield name, {f"{prefix}{key}": tensor for key, tensor in named_tensors(part)}
        return
    for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
        if tensor is not None:
            yield f"{prefix}{key}", {f"{prefix}{key}": tensor}
    for key, child in children.items():
        yield from _pieces(f"{prefix}{key}", child, whole)


def _kept_buffers(module: nn.Module, buffers_stay: bool) -> set[int]:
    """The ids of buffers that stay when their layer is offloaded: those that no state_dict has are nowhere else."""
    return {
        id(tensor)
        for part in module.modules()
        for key, tensor in part._buffers.items()
        if tensor is not None and (buffers_stay or key in part._non_persistent_buffers_set)
    }
