"""`AutoMicroBatch`: repeats a step that ran out of memory with smaller micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback

__all__ = ["AutoMicroBatch"]


@final
class AutoMicroBatch(Callback):
    """When a step runs out of memory, repeat it with every batch split into twice as many parts, on every rank.

    The parts of a batch run one after the other, and their gradients are weighted by their samples: up to rounding the
    step has the same result as with the full batch. The number of parts is kept for later steps, is the same on every
    rank, and is saved in checkpoints. Hooks and ``batch_idx`` count the loader's batches, not the parts.

    A split step calls ``training_step`` once per part. Computations over the full batch (``BatchNorm``, contrastive
    losses) therefore have another result, and dropout draws other numbers. When a window is repeated, its hooks are
    called again, and attributes that ``training_step`` has set are not undone.

    With several ranks gradients are synchronised after the backward of a window, not during it. Each step of a run with
    this callback costs a copy of the buffers and one small collective.

    Args:
        parts: the number of parts of each batch, from the first step on.

    Raises:
        ConfigurationError: for a number below 1, manual optimization, several losses, optimizers that evaluate the loss
            again, and engines other than one device and DDP: their forward needs every rank, so that a rank which ran
            out of memory would stop the others.

    Example:
        >>> from trainer_kit import Trainer
        >>> trainer = Trainer(max_epochs=1, callbacks=[AutoMicroBatch()], barebones=True)
    """

    def __init__(self, parts: int = 1) -> None:
        if parts < 1:
            raise ConfigurationError("parts must be at least 1", found=f"parts={parts}")
        self.parts = parts

    @property
    def splits_batches(self) -> bool:
        """What the loop asks."""
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.parts = max(self.parts, int(state_dict["parts"]))
