"""The interface of a transform: an in-place change of a module that distributes or recomputes its work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer_kit.core.types import Batch
from trainer_kit.strategies.signatures import StepMethod

__all__ = ["Transform"]


class Transform(ABC):
    """One change of a module, made once in place. Parameters keep their names.

    Each default does nothing, so a transform overrides only what its axis needs. `MeshStrategy` calls the methods of
    its transforms in the order in which it applies them, see `MeshStrategy.transforms_of`.
    """

    axis: ClassVar[str] = ""
    """The mesh axis that it splits over; empty: it splits nothing, and `apply` gets the whole mesh."""

    divides_batch: ClassVar[bool] = False
    """Whether the transform overrides `shard_batch`."""

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Change the module in place. A module that an earlier fit has changed stays as it is.

        Raises:
            StrategyError: the module cannot be changed that way.
        """

    def undo(self, module: nn.Module) -> None:
        """Called when a run ends. Default: the module stays as it is."""

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch that is on the device. Default: the whole batch."""
        return batch

    def bind(self, method: StepMethod) -> StepMethod:
        """Wrap a step method of the module, for training and evaluation. Default: the method itself."""
        return method

    def bind_evaluation(self, step: StepMethod, whole: bool) -> StepMethod:
        """Wrap an evaluation step. Default: the step itself.

        Args:
            step: the step, wrapped by `bind` and the data axes.
            whole: `shard_batch` has not split the batches.
        """
        return step

    def computing(self, first: bool) -> AbstractContextManager[object]:
        """Return a context for an accumulation window; ``first``: it is the first of the run. Default: none."""
        return nullcontext()

    def check_gradients(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Check the gradients once, after the first window, on every rank of the axis. Default: no check.

        Raises:
            StrategyError: the gradients show that the module is split incorrectly.
        """
