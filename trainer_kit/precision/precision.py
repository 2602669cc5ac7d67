"""The contract of a precision: in what dtype each computation of a run takes place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.precision.overflow import EngineSteps

__all__ = ["Precision"]


class Precision(ABC):
    """In what dtype each computation runs. Subclass it, and override what differs from plain float32.

    The Trainer and the Accelerator call these methods; a strategy that steps by itself calls `hand_over`. Every default
    leaves modules, batches, losses and gradients as they are.
    """

    name: str
    """As in ``Trainer(precision=name)``, for example ``"bf16-mixed"``."""
    param_dtype: torch.dtype | None = None
    """In what dtype an engine may gather weights for a forward; None: as they are stored, which FSDP always does."""
    reduce_dtype: torch.dtype | None = None
    """In what dtype such an engine adds up the gradients of several ranks; None: that of the gradients."""
    converts_batch: bool = False
    """Whether `convert_batch` is called on each batch."""
    scales: bool = False
    """Whether losses are scaled, so that `unscale_gradients` and `end_step` have work to do."""
    scaler: torch.amp.GradScaler | None = None
    """torch's gradient scaler, where losses are scaled by one."""
    skips: bool = False
    """Whether `optimizer_step` may leave a step out."""

    def check(self, device: torch.device, engine: str) -> None:
        """Raise a `PrecisionError` where this precision cannot run; called when the parts of a run are put together.

        Args:
            device: where the run computes.
            engine: of its strategy, as `trainer_kit.strategies.strategy.Strategy.engine`.
        """

    @abstractmethod
    def convert_module(self, module: nn.Module) -> None:
        """Cast parameters and buffers, in place."""

    def kept_modules(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose parameters an engine must gather as they are stored, each apart from the others.

        These are exceptions in another dtype, and layers with quantised weights. Default: none.
        """
        return []

    def convert_batch(self, batch: Any) -> Any:
        """Cast the floating-point tensors of a batch; called only where `converts_batch` is true."""
        return batch

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """The context of a forward, which is entered many times; None where there is none to enter."""
        return None

    def init_context(self) -> AbstractContextManager[Any]:
        """The context in which ``configure_model`` builds layers."""
        return nullcontext()

    def hand_over(self, steps: EngineSteps, scales: bool) -> None:
        """Called by an engine that steps by itself. Default: nothing to do.

        Args:
            steps: reports whether the engine skipped its last step, and holds the state of its loss scale.
            scales: whether the engine scales losses.
        """

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss on which backward is called."""
        return loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, once a step."""

    def optimizer_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> bool:
        """Run ``step`` unless gradients overflowed; returns whether it ran."""
        step()
        return True

    def adapt_scale(self, optimizers: Sequence[Optimizer]) -> None:
        """Called after a step of one of these optimizers: adapt the scale, unless another one has yet to step.

        Nobody else calls `end_step` in a loop of the user's own.
        """

    def end_step(self) -> None:
        """Called after every optimizer of a step has been stepped."""

    def abandon_step(self) -> None:
        """Called when an exception ended a step, so that the next one starts from a clean state."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
