"""Where each tensor of a model is to be, and where it is used: read from a device map, and checked."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import StrategyError, did_you_mean
from trainer_kit.inference.budget import Device, accelerators, name_of, resolve_device

__all__ = ["Places", "Slot", "Tied", "check_device_map", "find_tied", "first_names"]


@final
@dataclass(frozen=True)
class Slot:
    """One place of a module that a tensor is in.

    Attributes:
        path: the module's name.
        module: the module.
        key: the parameter or buffer.
    """

    path: str
    module: nn.Module
    key: str

    @property
    def name(self) -> str:
        """Of the tensor."""
        return f"{self.path}.{self.key}" if self.path else self.key


@final
@dataclass(frozen=True, eq=False)
class Tied:
    """A tensor and everywhere it is: one slot, or several that share it.

    Attributes:
        tensor: a parameter or buffer.
        slots: in the order of modules.
        persistent: whether a state_dict has it.
    """

    tensor: Tensor
    slots: list[Slot] = field(default_factory=list)
    persistent: bool = True

    @property
    def is_buffer(self) -> bool:
        """Whether it is no parameter."""
        return self.slots[0].key in self.slots[0].module._buffers


def find_tied(model: nn.Module) -> list[Tied]:
    """Every parameter and buffer once."""
    found: dict[int, Tied] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                persistent = key not in module._non_persistent_buffers_set
                tied = found.setdefault(id(tensor), Tied(tensor, [], persistent))
                tied.slots.append(Slot(path, module, key))
    return list(found.values())


def first_names(names: Collection[str]) -> str:
    """A few of many names, for a message.

    Example:
        >>> first_names(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, int | str]:
    """The map with devices as keys of maps are written.

    Raises:
        StrategyError: it is empty, or has no device for a tensor.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {slot.name for tied in find_tied(model) for slot in tied.slots}
    found = {name: name_of(device) for name, device in device_map.items()}
    places = Places(found, None)
    missing = [
        slot.name for tied in find_tied(model) if tied.persistent for slot in tied.slots if not places.covers(slot.name)
    ]
    unknown = [name for name in found if name not in known]
    hint = f"; {unknown[0]!r} is no module: {did_you_mean(unknown[0], known)}" if unknown else ""
    if missing or not found:
        raise StrategyError(
            f"the device map has no device for {first_names(missing) or 'anything'}",
            found=f"devices for {first_names(list(found)) or 'nothing'}",
            fix=f"name every module, or those that hold them, or '' for the rest{hint}",
        )
    if unknown:
        warnings.warn(f"the device map names what the model does not have: {first_names(unknown)}{hint}", stacklevel=4)
    return found


@final
class Places:
    """A device map, and the device that runs what is offloaded.

    Args:
        device_map: from `check_device_map`.
        main: where offloaded layers run; None: on the first accelerator of the map, or the CPU.
    """

    def __init__(self, device_map: Mapping[str, int | str], main: Device | None) -> None:
        self._map = dict(device_map)
        first: Sequence[int | str] = accelerators(self._map.values())
        self.main: int | str = name_of(main) if main is not None else first[0] if first else "cpu"

    def covers(self, name: str) -> bool:
        """Whether there is a device for it."""
        return any(key in self._map for key in _above(name))

    def of(self, name: str) -> int | str:
        """The device of a module or tensor: that of the smallest part of the model that is named and has it."""
        return next((self._map[key] for key in _above(name) if key in self._map), self.main)

    def is_away(self, name: str) -> bool:
        """Whether it is offloaded: on disk, or in the host's memory while an accelerator computes."""
        device = self.of(name)
        return device == "disk" or (device == "cpu" and self.main != "cpu")

    def runs_on(self, name: str) -> torch.device:
        """The device that computes with it."""
        return resolve_device(self.main if self.is_away(name) else self.of(name))


def _above(name: str) -> Iterator[str]:
    """The name, and those of the modules around it, the model last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
