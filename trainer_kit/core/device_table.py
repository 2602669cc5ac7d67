"""What the data sheets of accelerators promise: matmul FLOP/s, memory, and the links between devices."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, final

import torch

from trainer_kit.core.errors import ConfigurationError, did_you_mean

__all__ = ["Device", "device_peak", "find_device", "known_devices"]

_OTHER_WORDS: Final = {
    "a100": "a100-80",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "rtx4090": "rtx-4090",
}


@final
@dataclass(frozen=True, kw_only=True)
class Device:
    """One row of the table. Rates are those of data sheets; nothing is measured.

    Attributes:
        name: the words of the driver's name that identify the device.
        half: TFLOP/s of dense 16-bit matmuls.
        tf32: TFLOP/s of float32 matmuls with TF32, or of plain ones on devices without TF32.
        single: TFLOP/s of float32 matmuls.
        memory: GB of device memory; 0 where the driver's name does not tell the variants apart.
        bandwidth: GB/s of device memory.
        link: GB/s, in one direction, from a device to the others of its machine.
        host: GB/s, in one direction, between a device and the host's memory.
        group: how many devices ``link`` joins.
        network: GB/s, in one direction, of each device's share of the network of ``system``.
        system: the machine that ``group`` and ``network`` describe.
        bf16: whether bfloat16 matmuls are as fast as those of float16.
        source: the data sheet.
    """

    name: str
    half: float
    tf32: float
    single: float
    memory: float = 0
    bandwidth: float = 0
    link: float = 0
    host: float = 0
    group: int = 8
    network: float = 0
    system: str = ""
    bf16: bool = True
    source: str

    def flops(self, precision: str, tf32: bool | None = None) -> float | None:
        """The largest FLOP/s in a precision of the Trainer, without sparsity; None where it is not known.

        Args:
            precision: None is known for 64-bit floats, for 8-bit matmuls, and for bf16 on devices that emulate it.
            tf32: whether float32 matmuls use TF32; None: as torch is set.
        """
        # "8" finds fp8 and int8.
        if any(name in precision for name in ("64", "8", "transformer-engine")):
            return None
        if "bf16" in precision and not self.bf16:
            return None
        if "32" in precision:
            if tf32 is None:
                tf32 = torch.get_float32_matmul_precision() != "highest"
            if tf32:
                return 1e12 * self.tf32
            return 1e12 * self.single
        return 1e12 * self.half


@cache
def _rows() -> list[Device]:
    # Rates of tensor cores are the dense ones: NVIDIA's sheets give them with sparsity, which is twice as much.
    # Matmuls of consumer cards are summed in float32. An MI250X is two devices, each with half of what its sheet
    # gives. Rates of links are those of one direction: the sheets give the sum of both.
    text = files(__package__).joinpath("device_table.json").read_text("utf-8")
    return [Device(**row) for row in json.loads(text)]


_OTHER_CHIPS: Final = frozenset(
    ("Ti", "SUPER", "D", "Laptop", "Mobile", "Max", "MIG", "GRID")
)
"""Words of a name that make it another chip than the one without them, or a part of one."""


def known_devices() -> dict[str, Device]:
    """The devices whose memory and links are known, by the word that `find_device` takes.

    Example:
        >>> sorted(known_devices())[:3]
        ['a100-40', 'a100-80', 'a10g']
    """
    devices = {}
    for row in _rows():
        if row.memory:
            key = row.name.lower().replace(" ", "-").removesuffix("gb")
            devices[key] = row
    return devices


def find_device(word: str) -> Device:
    """The row of a word such as ``"h100"`` or ``"a100-80"``.

    Raises:
        ConfigurationError: the table has no such device.

    Example:
        >>> find_device("H200").memory, find_device("a100-40").bandwidth
        (141, 1555)
    """
    key = word.lower().replace(" ", "-").replace("_", "-")
    key = key.removeprefix("nvidia-").removesuffix("gb")
    key = _OTHER_WORDS.get(key, key)
    devices = known_devices()
    if key not in devices:
        raise ConfigurationError(
            "this device has no known data sheet",
            found=repr(word),
            fix=did_you_mean(key, sorted(devices)),
        )
    return devices[key]


def device_peak(name: str, precision: str) -> float | None:
    """The largest FLOP/s that a device reaches by its data sheet, without sparsity; None where it is not known.

    Args:
        name: as the driver gives it.
        precision: of the Trainer. ``32-true`` counts TF32 where torch's float32 matmuls use it.

    Example:
        >>> device_peak("NVIDIA H100 80GB HBM3", "bf16-mixed"), device_peak("an unknown one", "32-true")
        (989000000000000.0, None)
    """
    spaced = name.replace("-", " ").replace("/", " ")
    name_parts = set(spaced.split())
    matches = [row for row in _rows() if name_parts.issuperset(row.name.split())]
    if not matches:
        return None
    # The longest name is the most specific one.
    row = max(matches, key=lambda match: len(match.name))
    # "RTX 4090 Laptop" is a slower chip than the row "RTX 4090": no figure is better than a wrong one.
    unmatched = name_parts - set(row.name.split())
    if unmatched & _OTHER_CHIPS:
        return None
    return row.flops(precision)
