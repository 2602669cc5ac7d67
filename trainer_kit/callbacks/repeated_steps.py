"""`AutoMicroBatch`, `ReplayCheck`: run a step again, in smaller parts or to compare its results bit for bit."""

from __future__ import annotations

from typing import final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration
from trainer_kit.core.types import SavedState, StateDict

__all__ = ["AutoMicroBatch", "ReplayCheck"]


@final
class ReplayCheck(Callback):
    """Every so many steps, run forward and backward of a step twice, and compare loss and gradients bit for bit.

    A device that computes wrongly without an error (silent data corruption) gives another result; the run then ends
    before that step changes a weight, and the error names rank, device and the first gradient that differs. The second
    run sees the same batches, random numbers, buffers and metric objects, and leaves no trace in them; it calls no hook
    and logs nothing. Attributes that ``training_step`` sets are not undone. Training is not changed, but for the
    rounding of gradients that several ranks of DDP exchange after the backward instead of during it.

    Kernels that are not deterministic differ too: check with ``deterministic=True`` first. On engines other than one
    device and DDP every rank sees what another one sent, so a difference may be reported by more ranks than caused it.

    Args:
        every: optimizer steps between two checks. A check costs one more forward and backward.

    Raises:
        ConfigurationError: ``every`` is not an integer number of steps above 0; with manual optimization, and with
            optimizers that evaluate the loss again.
        TrainerKitError: in training, where the results differ.

    Example:
        >>> ReplayCheck(every=1000).replays_every
        1000
    """

    def __init__(self, every: int | str | Duration = 1000) -> None:
        steps = Duration.parse(every, "st")
        if steps.unit != "st" or steps.value < 1:
            raise ConfigurationError(
                "ReplayCheck needs a positive number of steps between two checks",
                found=f"every={every!r}",
                fix="pass every=1000",
            )
        self.replays_every = int(steps.value)


@final
class AutoMicroBatch(Callback):
    """When a step runs out of memory, repeat it with every batch split into twice as many parts, on every rank.

    The parts of a batch run one after the other, and their gradients are weighted by their samples: up to rounding the
    step has the same result as with the full batch. The number of parts is kept for later steps, is the same on every
    rank, and is saved in checkpoints. Hooks and ``batch_idx`` count the loader's batches, not the parts.

    A split step calls ``training_step`` once per part. Computations over the full batch (``BatchNorm``, contrastive
    losses) therefore have another result, and dropout draws other numbers. When a window is repeated, its hooks are
    called again, and attributes that ``training_step`` has set are not undone. The failed attempt leaves no trace in
    buffers, logged values, counts of samples, and metric objects of the module and of callbacks.

    With several ranks gradients are synchronized after the backward of a window, not during it. Each step of a run with
    this callback costs a copy of buffers and metric states, and one small collective.

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

    def double_parts(self) -> None:
        """See `trainer_kit.core.protocols.DoublesParts`."""
        self.parts *= 2

    def state_dict(self) -> StateDict:
        return {"parts": self.parts}

    def load_state_dict(self, state_dict: SavedState) -> None:
        # The larger: fewer parts would run out of memory again, and the user may have asked for more.
        self.parts = max(self.parts, int(state_dict["parts"]))
