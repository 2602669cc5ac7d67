"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.protocols import MicroSteps
from trainer_kit.strategies.gradients import clip_gradients

__all__ = ["Alone", "SingleDeviceStrategy"]


@final
class Alone:
    """A group of one: what every collective is when there is nobody else."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Shape (1, *tensor.shape)."""
        return tensor.unsqueeze(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value itself."""
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""

    def agree(self, values: list[float]) -> list[list[float]]:
        """One row."""
        return [values]


@final
class SingleDeviceStrategy:
    """One process trains on one device.

    Args:
        device: where, e.g. ``"cpu"`` or ``torch.device("cuda", 0)``.

    Example:
        >>> SingleDeviceStrategy("cpu").describe()
        'single device: cpu'
    """

    name = "single_device"
    gradient_divisor = 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.world = self.data = Alone()

    def start(self) -> None:
        """Nobody to join."""

    def stop(self) -> None:
        """Nothing to let go of."""

    def place_module(self, module: nn.Module) -> None:
        """Move the module."""
        module.to(self.device)

    def prepare_module(self, module: nn.Module, manual: bool) -> None:
        """Move the module; nothing wraps it."""
        module.to(self.device)

    def wrap_module(self, module: nn.Module) -> nn.Module:
        """Move the module; nothing wraps it."""
        return module.to(self.device)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Parameters are the very same objects."""

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """The method itself."""
        return method

    def bind_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's own step."""
        return optimizer.step

    def forward_backward(self, micro: MicroSteps) -> None:
        """One micro-batch after the other."""
        for index in range(micro.count):
            micro.begin(index)
            loss = micro.forward(index)
            if loss is not None:
                micro.backward(index, loss)
            micro.end(index)

    def arm(self, loss: Tensor) -> None:
        """Nothing to synchronise."""

    def clip_gradients(self, parameters: Sequence[nn.Parameter], value: float, algorithm: str) -> None:
        """Clip by norm or by value."""
        clip_gradients(parameters, value, algorithm)

    @property
    def own_buffers(self) -> bool:
        """There is one copy."""
        return False

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """There is one copy."""
        return nullcontext()

    def barrier(self, name: str | None = None) -> None:
        """Nobody to wait for."""

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """The value itself."""
        return value

    def describe(self) -> str:
        """One line for ``explain()``."""
        return f"single device: {self.device}"
