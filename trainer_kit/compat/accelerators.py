"""Lightning's accelerator classes: which devices of one kind this machine has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from trainer_kit.core.devices import make_current
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.types import JsonObject

__all__ = [
    "ACCELERATORS",
    "AcceleratorRegistry",
    "CPUAccelerator",
    "CUDAAccelerator",
    "LightningAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "accelerator_of",
    "accelerator_word",
    "find_usable_cuda_devices",
]


class LightningAccelerator(ABC):
    """Base class of Lightning's accelerators: one kind of device.

    ``Trainer(accelerator=...)`` takes an object of the classes below. A class of your own is for `isinstance` and
    annotations: the Trainer runs on every device type of torch without such a class.
    """

    @abstractmethod
    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one of this process."""

    @abstractmethod
    def teardown(self) -> None:
        """Release what the accelerator holds."""

    @staticmethod
    @abstractmethod
    def parse_devices(devices: Any) -> object:
        """The devices that ``Trainer(devices=...)`` asks for."""

    @staticmethod
    @abstractmethod
    def get_parallel_devices(devices: Any) -> Sequence[torch.device]:
        """The devices as objects of torch."""

    @staticmethod
    @abstractmethod
    def auto_device_count() -> int:
        """The number of devices that ``devices="auto"`` takes."""

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Whether this machine has such a device."""

    @staticmethod
    @abstractmethod
    def name() -> str:
        """The word for ``Trainer(accelerator=...)``."""

    def get_device_stats(self, device: torch.device | str | int) -> JsonObject:
        """Statistics of a device by name; none by default."""
        return {}


class CPUAccelerator(LightningAccelerator):
    """The processes of the CPU.

    Example:
        >>> CPUAccelerator.is_available(), CPUAccelerator.parse_devices("2"), CPUAccelerator.name()
        (True, 2, 'cpu')
    """

    def setup_device(self, device: torch.device) -> None:
        """Check the type of a device."""
        # As in Lightning, which refuses a device of another kind at this place.
        _check_type(device, "cpu")

    def teardown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """The number of processes."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int | str) -> list[torch.device]:
        """One CPU device for each process."""
        return [torch.device("cpu")] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        """One process."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always True."""
        return True

    @staticmethod
    def name() -> str:
        """``"cpu"``."""
        return "cpu"


class CUDAAccelerator(LightningAccelerator):
    """The CUDA and ROCm devices of this machine.

    Example:
        >>> CUDAAccelerator.is_available() == (CUDAAccelerator.auto_device_count() > 0)
        True
    """

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one of this process."""
        _check_type(device, "cuda")
        make_current(device)

    def teardown(self) -> None:
        """Return unused memory to the device."""
        torch.cuda.empty_cache()

    def get_device_stats(self, device: torch.device | str | int) -> JsonObject:
        """The statistics of torch's memory allocator."""
        return dict(torch.cuda.memory_stats(device))

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """The indices of the devices."""
        # NVML's count where torch can use it: asking must not start CUDA in a process that forks later.
        return _parse_indices(devices, torch.cuda.device_count())

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        """The devices of these indices."""
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """All devices."""
        return torch.cuda.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is at least one device."""
        return torch.cuda.device_count() > 0

    @staticmethod
    def name() -> str:
        """``"cuda"``."""
        return "cuda"


class MPSAccelerator(LightningAccelerator):
    """The GPU of an Apple computer."""

    def setup_device(self, device: torch.device) -> None:
        """Check the type of a device."""
        _check_type(device, "mps")

    def teardown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """The index of the device."""
        # An Apple computer has one GPU that torch can use.
        return _parse_indices(devices, 1)

    @staticmethod
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        """The devices of these indices."""
        return [torch.device("mps", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """One device."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether torch can use the GPU."""
        return torch.backends.mps.is_available()

    @staticmethod
    def name() -> str:
        """``"mps"``."""
        return "mps"


class XLAAccelerator(LightningAccelerator):
    """The devices of torch_xla, such as TPUs."""

    def setup_device(self, device: torch.device) -> None:
        """torch_xla selects the device."""

    def teardown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> int | str | Sequence[int]:
        """What was asked for; torch_xla divides it."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: int | Sequence[int]) -> list[torch.device]:
        """The devices of these indices."""
        indices: Sequence[int]
        if isinstance(devices, int):
            indices = range(devices)
        else:
            indices = devices
        return [torch.device("xla", index) for index in indices]

    @staticmethod
    def auto_device_count() -> int:
        """The devices of this machine, as torch_xla counts them."""
        if not XLAAccelerator.is_available():
            return 0
        from torch_xla import runtime

        return int(runtime.addressable_runtime_device_count())

    @staticmethod
    def is_available() -> bool:
        """Whether torch_xla is installed."""
        # Found and not imported: asking must not start the runtime of a TPU.
        from importlib.util import find_spec

        return find_spec("torch_xla") is not None

    @staticmethod
    def name() -> str:
        """``"tpu"``."""
        return "tpu"


_CLASSES: Final[dict[str, type[LightningAccelerator]]] = {
    "cpu": CPUAccelerator,
    "cuda": CUDAAccelerator,
    "mps": MPSAccelerator,
    "tpu": XLAAccelerator,
}


class AcceleratorRegistry(Mapping[str, type[LightningAccelerator]]):
    """Lightning's registry of accelerators; it is read, and its words are those of ``Trainer(accelerator=...)``.

    Example:
        >>> sorted(ACCELERATORS.available_accelerators()), ACCELERATORS.get("cpu").name(), "cuda" in ACCELERATORS
        (['cpu', 'cuda', 'mps', 'tpu'], 'cpu', True)
    """

    def __getitem__(self, name: str) -> type[LightningAccelerator]:
        return _CLASSES[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def available_accelerators(self) -> set[str]:
        """The words."""
        return set(_CLASSES)

    def get(self, name: str, default: Any = None) -> Any:
        """An accelerator of this word.

        Raises:
            KeyError: there is none, and no default.
        """
        # An object and not the class, as Lightning's registry returns it.
        if name in _CLASSES:
            return _CLASSES[name]()
        if default is not None:
            return default
        raise KeyError(
            f"no accelerator is called {name!r}; {did_you_mean(name, _CLASSES)}"
        )

    def register(self, name: str, *args: object, **options: object) -> NoReturn:
        """Refused: the Trainer takes every device type of torch without a class for it.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "accelerators cannot be registered",
            found=f"register({name!r})",
            fix="pass the device type of torch: Trainer(accelerator=...) accepts every device type of torch",
        )


ACCELERATORS: Final = AcceleratorRegistry()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of CUDA devices on which a tensor can be created.

    Args:
        num_devices: how many; -1 for all.

    Raises:
        ConfigurationError: there are fewer.

    Example:
        >>> find_usable_cuda_devices(0)
        []
    """
    usable: list[int] = []
    # One by one, since only creating a tensor shows that a device can be used.
    for index in range(torch.cuda.device_count()):
        if len(usable) == num_devices:
            break
        try:
            torch.tensor(0.0, device=torch.device("cuda", index))
        # Another process has the device in exclusive mode.
        except RuntimeError:
            continue
        usable.append(index)
    if len(usable) < num_devices:
        raise ConfigurationError(
            "there are fewer usable CUDA devices",
            found=f"num_devices={num_devices}, {len(usable)} usable",
        )
    return usable


def accelerator_of(device: torch.device) -> LightningAccelerator:
    """The accelerator object of a device."""
    key = device.type
    if key == "xla":
        key = "tpu"
    cls = _CLASSES.get(key)
    if cls is None:
        # An AttributeError, because a property asks: hasattr(trainer, "accelerator") is then False.
        raise AttributeError(
            f"Lightning has no accelerator for {device.type}: trainer.strategy.device is the device"
        )
    return cls()


def accelerator_word(accelerator: str | LightningAccelerator) -> str:
    """The word for an argument ``accelerator=`` that may be an object.

    Raises:
        ConfigurationError: it is an accelerator class of the user.
    """
    if not isinstance(accelerator, LightningAccelerator):
        return accelerator
    # By exact type: a subclass may override what the Trainer would never call.
    if type(accelerator) not in _CLASSES.values():
        raise ConfigurationError(
            "custom accelerator classes are not supported",
            found=f"accelerator={type(accelerator).__name__}()",
            fix='pass the device type of torch, such as accelerator="cuda"; every device type of torch works',
        )
    return accelerator.name()


def _check_type(device: torch.device, kind: str) -> None:
    if device.type != kind:
        raise ConfigurationError(
            f"this accelerator drives devices of type {kind}", found=str(device)
        )


def _parse_indices(devices: int | str | Sequence[int], count: int) -> list[int]:
    if devices in (-1, "-1", "auto"):
        return list(range(count))
    if isinstance(devices, str):
        numbers = [int(text) for text in devices.split(",") if text.strip()]
        # As in Lightning: "2," is the device of index 2, and "2" the first two devices.
        if "," in devices:
            return numbers
        return list(range(numbers[0]))
    if isinstance(devices, int):
        return list(range(devices))
    return list(devices)
