"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer_kit.core.costs import Costs, shard_costs
from trainer_kit.core.devices import make_current
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Alone", "SingleDeviceStrategy"]


@final
class Alone:
    """A group of one rank: every collective returns its input."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The tensor itself."""
        return tensor

    @property
    def group(self) -> None:
        """None: a single process needs no process group."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Shape (1, *tensor.shape)."""
        return tensor.unsqueeze(0)

    def all_gather_object(self, value: object) -> list[Any]:
        """The value alone."""
        return [value]

    def gather_object(self, value: object) -> list[Any]:
        """The value alone."""
        return [value]

    def broadcast(self, value: object, source: int = 0) -> Any:
        """The value itself."""
        return value

    def barrier(self) -> None:
        """Returns at once."""

    def agree(self, values: list[float]) -> list[list[float]]:
        """One row."""
        return [values]

    def side_group(self, recreate: bool = False) -> None:
        """A single rank needs no side group."""


@final
class SingleDeviceStrategy(Strategy):
    """One process trains on one device.

    Args:
        device: where, e.g. ``"cpu"`` or ``torch.device("cuda", 0)``.

    Example:
        >>> SingleDeviceStrategy("cpu").describe()
        'single device: cpu'
    """

    name = "single_device"
    engine = "single"
    why_not_captured = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.world = self.data = self.losses = self.reports = Alone()

    def start(self) -> None:
        """Make the device current; no process group is created."""
        make_current(self.device)

    def without_exchange(self) -> Callable[[], AbstractContextManager[object]]:
        """There is nothing to exchange."""
        return nullcontext

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """The process holds everything and sends nothing."""
        return shard_costs(module, "one process, nothing sharded")

    def describe(self) -> str:
        """One line for ``explain()``."""
        return f"single device: {self.device}"
