"""The losses since the last look at whether all of them were finite."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["LossLog"]


@final
class LossLog(list[tuple[Tensor | float, int, int]]):
    """Losses that no check has read yet, each with the steps completed before it and the number of its batch.

    A list, because ``append`` is called in every micro-batch and must cost no Python call.

    Args:
        scaled: whether losses are scaled, so that an overflowed step is skipped.
    """

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self._scaled = scaled
        self._had_losses = False

    @property
    def has_returned_a_loss(self) -> bool:
        """Whether any step of the run has returned a loss."""
        return self._had_losses or bool(self)

    def take(self) -> list[tuple[Tensor | float, int, int]]:
        """Return the losses, and drop them here."""
        entries = list(self)
        self._had_losses = self.has_returned_a_loss
        self.clear()
        return entries

    def drop_after(self, count: int) -> None:
        """Drop the losses of a run of a window that does not count."""
        del self[count:]

    def take_first_bad(self) -> tuple[int, int, float] | None:
        """Drop the losses; return step, batch number and value of the first NaN or infinity among them, if any.

        With scaling an overflowed step is skipped, not wrong: None if any of the losses was finite. A sync point.
        """
        entries = list(self)
        if not entries:
            return None
        self._had_losses = True
        self.clear()
        losses: list[Any] = [loss for loss, _, _ in entries]
        if float in map(type, losses):
            # no sync point: numbers on the CPU
            finite = list(map(math.isfinite, losses))
        else:
            finite = _are_finite(losses)
        is_fine = any(finite) if self._scaled else all(finite)
        if is_fine:
            return None
        loss, completed_steps, batch_index = entries[finite.index(False)]
        value = float(loss)  # sync point: the run ends or goes back
        return completed_steps + 1, batch_index, value


def _are_finite(losses: list[Any]) -> list[bool]:
    """For each loss on a device whether it is finite, with one read for all of them."""
    try:
        # A third of the time of reshaping each.
        values = torch.stack(losses).reshape(-1)
    except RuntimeError:
        # Of shape () and (1,) in one run.
        values = torch.cat([loss.reshape(1) for loss in losses])
    flags = values.isfinite()
    finite: list[bool] = flags.tolist()  # sync point: where values are read anyway
    return finite
