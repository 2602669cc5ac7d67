"""Accumulation in a loop of the user's own: when gradients are complete, and what each batch weighs in them."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group

__all__ = ["Batches", "Window"]


class Batches(Protocol):
    """A prepared loader, as far as weights go."""

    size: int
    """Samples of the current batch on this process."""
    total: int | None
    """Samples of it over all processes; None when only asking would tell."""
    end_of_dataloader: bool
    """Whether the current batch is the last."""


@final
class Window:
    """The micro-batches of one optimizer step.

    The gradient of a step is ``sum(w_i g_i) / sum(w_i)`` over its micro-batches and all processes. Weights are known
    one after the other here, so each loss is divided by what a whole window would weigh, ``steps`` times the first
    batch, and gradients are corrected once where the window turned out otherwise: a short last group, a short last
    batch, tokens.

    Args:
        steps: micro-batches of a window.
        world: the processes that share gradients.
        sync_with_dataloader: whether the last batch of a loader ends a window.

    Attributes:
        sync: whether this micro-batch ends its window.
        batches: the loader that is read, or None.
    """

    def __init__(self, steps: int, world: Group, sync_with_dataloader: bool = True) -> None:
        self.steps, self.world, self.sync_with_dataloader = steps, world, sync_with_dataloader
        self.sync = True
        self.batches: Batches | None = None
        self._count = 0  # micro-batches since a window began
        self._inside = False  # an `accumulate` context
        self._reference: float | None = None  # what losses were divided by
        self._expected = 0.0  # what a correction compares with
        self._weight = self._given = 0.0  # of this micro-batch; of the ones before it in this window
        self._explicit = False
        self._asks = False  # the weights of other processes are not known
        self._done = False  # an optimizer was stepped with it
        self._corrected: set[int] = set()

    def enter(self) -> None:
        """A micro-batch begins."""
        if self.sync:
            self._begin()
        self._count += 1
        last = self.sync_with_dataloader and self.batches is not None and self.batches.end_of_dataloader
        self.sync = last or self._count >= self.steps
        self._given += self._weight
        self._weight = 0.0
        self._inside = True

    def leave(self) -> None:
        """The micro-batch is over."""
        self._inside = False

    def _begin(self) -> None:
        self._count, self._given, self._weight = 0, 0.0, 0.0
        self._reference, self._explicit, self._asks, self._done = None, False, False, False
        self._corrected.clear()

    def scale(self, loss: Tensor, weight: float | None) -> Tensor:
        """The loss as its backward is called, and what it weighs remembered.

        Args:
            loss: a mean over the batch; with ``weight`` a sum of what is counted by it.
            weight: how much there is in ``loss``: tokens, for instance. None: the batch's samples.

        Raises:
            ConfigurationError: two losses of one batch weigh differently, or only some are given a weight.
        """
        if not self._inside and (self._done or self.steps == 1):
            self._begin()
        if weight is not None:
            return self._scale_sum(loss, float(weight))
        if self._explicit:
            raise ConfigurationError(
                "some losses of this step are given a weight, and this one is not",
                found="backward(loss) after backward(loss, weight=...)",
                fix="give every loss of the step its weight, or none",
            )
        size, total = 1.0, float(self.world.size)
        batches = self.batches
        if batches is not None and (self._inside or self.steps == 1):
            size = float(batches.size)
            self._asks = self._asks or batches.total is None
            total = size * self.world.size if batches.total is None else float(batches.total)
        if self._reference is None:
            self._reference = self._expected = self.steps * total
        self._weight = size if self._asks else total
        factor = size * self.world.size / self._reference
        return loss if factor == 1.0 else loss * factor

    def _scale_sum(self, loss: Tensor, weight: float) -> Tensor:
        if self._reference is not None and not self._explicit:
            raise ConfigurationError(
                "some losses of this step are given a weight, and some are not",
                found="backward(loss, weight=...) after backward(loss)",
                fix="give every loss of the step its weight, or none",
            )
        if self._weight not in (0.0, weight) and self._inside:
            raise ConfigurationError(
                "two losses of one batch weigh differently",
                found=f"weight={self._weight:g} and weight={weight:g}",
                fix="one weight a batch: put a factor between losses into the losses",
            )
        self._explicit = self._asks = True
        self._reference, self._expected = 1.0, float(self.world.size)
        self._weight = weight
        return loss

    def correct(self, optimizer: Optimizer) -> None:
        """Make an optimizer's complete gradients those of the window as it turned out; once a window.

        With several processes and weights that only they know this is a small exchange on the CPU.
        """
        self._done = True
        if self._reference is None or id(optimizer) in self._corrected or not (self._inside or self.steps == 1):
            return
        self._corrected.add(id(optimizer))
        found = self._given + self._weight
        if self._asks and self.world.size > 1:
            found = sum(row[0] for row in self.world.agree([found]))
        if found == self._expected:
            return
        if found <= 0:
            raise ConfigurationError("a step weighs nothing", found=f"sum of weights {found:g}")
        factor = self._expected / found
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def state_dict(self) -> dict[str, Any]:
        """Where the window stands; gradients are the user's business."""
        return {"sync": self.sync, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.sync, self._count = bool(state["sync"]), int(state["count"])
