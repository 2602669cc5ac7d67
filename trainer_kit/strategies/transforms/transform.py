"""The contract of a transform: one change of a module, in place, by which several devices share its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Transform"]


class Transform(ABC):
    """One change of a module, made once in place. Parameters keep their names.

    Each default does nothing, so a transform overrides only what its axis needs. `MeshStrategy` calls the methods of
    its transforms in the order in which it applies them, see `MeshStrategy.transforms_of`.
    """

    axis: ClassVar[str] = ""
    """The mesh axis that it divides over; empty: it divides nothing, and `apply` gets the whole mesh."""

    divides_batch: ClassVar[bool] = False
    """Whether `shard_batch` does anything."""

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Change the module in place. A module that an earlier fit has changed stays as it is.

        Raises:
            StrategyError: the module cannot be changed that way.
        """

    def undo(self, module: nn.Module) -> None:
        """Called when a run ends. Default: the module stays as it is."""

    def shard_batch(self, batch: Any) -> Any:
        """Return this rank's part of a batch that is on the device. Default: the whole batch."""
        return batch

    def bind(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return how a step method of the module is called, in training and evaluation. Default: the method itself."""
        return method

    def bind_evaluation(self, step: Callable[..., Any], whole: bool) -> Callable[..., Any]:
        """Return how an evaluation step is called. Default: the step itself.

        Args:
            step: as `bind` and the data axes return it.
            whole: batches have not been through `shard_batch`.
        """
        return step

    def computing(self, first: bool) -> AbstractContextManager[Any]:
        """Return the context of an accumulation window; ``first``: of a run. Default: none."""
        return nullcontext()

    def check_gradients(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called once, after the first window, on every rank of the axis. Default: nothing is checked.

        Raises:
            StrategyError: the gradients show that the module computes with wrong parts.
        """
