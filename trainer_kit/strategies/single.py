"""One process, one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.costs import Costs
from trainer_kit.core.devices import make_current
from trainer_kit.core.protocols import MicroSteps, Precision
from trainer_kit.strategies.costs import held_whole
from trainer_kit.strategies.gradients import clip_gradients
from trainer_kit.strategies.ported import Ported
from trainer_kit.strategies.state import load_optimizer_state, optimizer_state

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

    def gather_object(self, value: Any) -> list[Any]:
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

    def apart(self, anew: bool = False) -> None:
        """Nobody to go on beside training with."""


@final
class SingleDeviceStrategy(Ported):
    """One process trains on one device.

    Args:
        device: where, e.g. ``"cpu"`` or ``torch.device("cuda", 0)``.

    Example:
        >>> SingleDeviceStrategy("cpu").describe()
        'single device: cpu'
    """

    name = "single_device"
    gradient_divisor = 1
    reporter = 0
    sharded = lockstep = False
    shard_batch = None

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.world = self.data = self.losses = self.reports = Alone()

    def start(self) -> None:
        """Nobody to join."""
        make_current(self.device)

    def stop(self) -> None:
        """Nothing to let go of."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Layers are built where they run."""
        return torch.device(self.device)

    def place_module(self, module: nn.Module, precision: Precision) -> None:
        """Move the module."""
        module.to(self.device)

    def prepare_module(self, module: nn.Module, manual: bool, precision: Precision) -> None:
        """Move the module; nothing wraps it."""
        module.to(self.device)

    def wrap_module(self, module: nn.Module, precision: Precision) -> nn.Module:
        """Move the module; nothing wraps it."""
        return module.to(self.device)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Parameters are the very same objects."""

    def bind(self, method: Callable[..., Any], several: bool) -> Callable[..., Any]:
        """The method itself."""
        return method

    def bind_evaluation(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method itself."""
        return method

    def bind_backward(self, backward: Callable[..., None] | None) -> Callable[..., None] | None:
        """The user's own, or autograd's."""
        return backward

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

    def clip_gradients(
        self, parameters: Sequence[nn.Parameter], value: float, algorithm: str, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip by norm or by value."""
        return clip_gradients(parameters, value, algorithm, norm_type)

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's own."""
        return dict(module.state_dict())

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """As torch loads it."""
        module.load_state_dict(state, strict=strict)

    def optimizer_state(
        self, optimizer: Optimizer
    ) -> tuple[list[list[nn.Parameter]], Mapping[nn.Parameter, Mapping[str, Any]]]:
        """The optimizer's own."""
        return optimizer_state(optimizer)

    def load_optimizer_state(
        self,
        optimizer: Optimizer,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> None:
        """As torch loads it."""
        load_optimizer_state(optimizer, groups, state)

    @property
    def own_buffers(self) -> bool:
        """There is one copy."""
        return False

    def shared_buffers(self, module: nn.Module) -> AbstractContextManager[None]:
        """There is one copy."""
        return nullcontext()

    def costs(self, module: nn.Module, precision: Precision, ranks: int) -> Costs:
        """Everything, and nothing to send."""
        return held_whole(module, "one process holds everything")

    def describe(self) -> str:
        """One line for ``explain()``."""
        return f"single device: {self.device}"
