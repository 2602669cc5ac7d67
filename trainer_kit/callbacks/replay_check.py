"""`ReplayCheck`: runs a step again, and compares the results in bits."""

from __future__ import annotations

from typing import final

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.progress import Duration

__all__ = ["ReplayCheck"]


@final
class ReplayCheck(Callback):
    """Every so many steps run forward and backward of the step a second time, and compare loss and gradients in bits.

    A device that computes wrongly without an error (silent data corruption) gives another result; the run then ends
    before that step changes a weight, and the error names rank, device and the first gradient that differs. The second
    run sees the same batches, random numbers and buffers, calls no hook and logs nothing. Training is not changed, but
    for the rounding of gradients that several ranks of DDP exchange after the backward instead of during it.

    Kernels that are not deterministic differ too: check with ``deterministic=True`` first. On engines other than one
    device and DDP every rank sees what another one sent, so a difference may be reported by more ranks than caused it.

    Args:
        every: optimizer steps between two checks. A check costs one more forward and backward.

    Raises:
        ConfigurationError: ``every`` is not a whole number of steps above 0; with manual optimization, and with
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
