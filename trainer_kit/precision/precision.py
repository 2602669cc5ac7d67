"""The contract of a precision: the dtype of each computation of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.arguments import with_typed_arguments
from trainer_kit.core.errors import PrecisionError
from trainer_kit.core.types import Batch, SavedState, StateDict

__all__ = ["EXCHANGING", "EngineSteps", "Precision"]

EXCHANGING: Final = (
    "fp8", "transformer-engine", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training", "qat",
)  # fmt: skip
"""Names of the precisions that exchange layers; an engine that moves weights in its own way refuses all of them."""


class EngineSteps(Protocol):
    """Reports whether an engine skipped its last step, and holds the state of its loss scale (empty without one)."""

    skipped: bool
    """Whether the engine skipped its last step because gradients were not finite."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: SavedState) -> None: ...


class Precision(ABC):
    """The dtype of each computation of a run. Subclass it, and override what differs from plain float32.

    The Trainer and the Accelerator call these methods; a strategy that steps by itself calls `hand_over`. Every default
    leaves modules, batches, losses and gradients as they are.

    Example:
        >>> class BFloat16Weights(Precision):
        ...     name = "bf16-weights"
        ...     converts_batch = True
        ...     def convert_module(self, module):
        ...         module.bfloat16()
        ...     def convert_batch(self, batch):
        ...         return batch.bfloat16()
        >>> from trainer_kit import Trainer
        >>> Trainer(precision=BFloat16Weights(), logger=False).precision
        'bf16-weights'
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "kept_modules" in vars(cls):
            raise PrecisionError(
                f"{cls.__name__}.kept_modules would never be called",
                fix="name the method separately_gathered_modules",
            )
        with_typed_arguments(cls)

    name: str
    """As in ``Trainer(precision=name)``, for example ``"bf16-mixed"``."""
    param_dtype: torch.dtype | None = None
    """The dtype in which an engine may gather weights for a forward; None: as they are stored, as FSDP always does."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which such an engine sums the gradients of the ranks; None: that of the gradients."""
    converts_batch: bool = False
    """Whether `convert_batch` is called on each batch."""
    scales: bool = False
    """Whether losses are scaled, so that `unscale_gradients` and `end_step` have work to do."""
    scaler: torch.amp.GradScaler | None = None
    """torch's gradient scaler, where losses are scaled by one."""
    skips: bool = False
    """Whether `optimizer_step` may skip a step."""
    refused_devices: Mapping[str, str] = MappingProxyType({})
    """Devices where this precision does not run: by ``torch.device.type``, why."""

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a `PrecisionError` where this precision cannot run; called before the run starts.

        Engines declare by themselves what they refuse (``Strategy.refused_precisions``). Default: `refused_devices`.

        Args:
            device: where the run computes.
            engine: of its strategy, as `trainer_kit.strategies.strategy.Strategy.engine`.
        """
        if device.type in self.refused_devices:
            raise PrecisionError(
                f"precision {self.name!r} does not run on a device of type {device.type!r}",
                found=self.refused_devices[device.type],
                fix='use "bf16-mixed"',
            )

    @abstractmethod
    def convert_module(self, module: nn.Module) -> None:
        """Cast parameters and buffers, in place.

        Args:
            module: the whole module, before the strategy places or shards it.
        """

    def separately_gathered_modules(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose parameters an engine must gather as they are stored, each by itself.

        These are exceptions in another dtype, and layers with quantized weights. Default: none.

        Args:
            module: the module that `convert_module` got.
        """
        return []

    def convert_batch(self, batch: Batch) -> Batch:
        """Cast the floating-point tensors of a batch; called only where `converts_batch` is true.

        Args:
            batch: what the loader yields, in any nesting, on the device.

        Returns:
            The batch that ``on_after_batch_transfer`` and the step get.
        """
        return batch

    def forward_context(self) -> AbstractContextManager[object] | None:
        """The context of a forward, which is entered many times; None where there is none to enter."""
        return None

    def init_context(self) -> AbstractContextManager[object]:
        """The context in which ``configure_model`` builds layers."""
        return nullcontext()

    def hand_over(self, steps: EngineSteps, scales: bool) -> None:
        """Called by an engine that steps by itself. Default: nothing to do.

        Args:
            steps: reports whether the engine skipped its last step, and holds the state of its loss scale.
            scales: whether the engine scales losses.
        """

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss on which backward is called.

        Args:
            loss: a tensor of one element with its graph, weighted in its accumulation window.
        """
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, once a step.

        Args:
            optimizer: the optimizer that is about to step; a second call before its step changes nothing.
        """

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], object]) -> bool:
        """Run ``step`` unless gradients overflowed; returns whether it ran.

        Args:
            optimizer: the optimizer that ``step`` steps.
            step: takes no argument; its result is ignored.
        """
        step()
        return True

    def adapt_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Called after a step of one of these optimizers: adapt the scale, unless another one has yet to step.

        Called in custom training loops, where the user's code does not call `end_step`.

        Args:
            optimizers: all optimizers of the loop.
        """

    def end_step(self) -> None:
        """Called after every optimizer of a step has been stepped."""

    def abandon_step(self) -> None:
        """Called when an exception ended a step, so that the next one starts from a clean state."""

    def state_dict(self) -> StateDict:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: SavedState) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: plain data and tensors; empty if the checkpoint is of a run without a loss scale.
        """
