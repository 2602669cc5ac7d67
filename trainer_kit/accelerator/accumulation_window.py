"""Accumulation in a loop of the user's own: when gradients are complete, and what each batch weighs in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.precision.overflow import has_gradients
from trainer_kit.strategies.gradients import local

__all__ = ["Batches", "Window"]


class Batches(Protocol):
    """A prepared loader, as far as weights go."""

    weight: float
    """What the current batch weighs on this process: its samples."""
    total: float | None
    """What it weighs over all processes; None when only asking would tell, and nobody has asked."""
    nominal: float
    """What a whole batch weighs on a process, the same on every one of them."""
    end_of_dataloader: bool
    """Whether the current batch is the last."""
    asked: bool
    """Whether `ask_for_sizes` was called."""

    def ask_for_sizes(self) -> None:
        """Warn if the numbers of samples that weigh batches are not certain."""


@final
class Window:
    """The micro-batches of one optimizer step; as a context, one of them.

    The gradient of a step is ``sum(w_i g_i) / sum(w_i)`` over its micro-batches and all processes. Weights are known
    one after the other here, so each loss is divided by what a whole window would weigh, ``steps`` times the first
    batch, and gradients are corrected once where the window turned out otherwise: a short last group, a short last
    batch, tokens.

    Args:
        steps: micro-batches of a window.
        data: the processes among which batches are divided.
        losses: these, and those that compute parts of the same batch: gradients are averaged over all of them.
        sync_with_dataloader: whether the last batch of a loader ends a window.
        quiet: the context in which the gradients of some models stay on their process.
        complete: the strategy's, after the last backward of a window; returns the gradients where they are kept.

    Attributes:
        sync: whether this micro-batch ends its window.
        batches: the loader that gave the current batch, or None.
        reading: loaders that are being read, in the order in which that began.
        turn: the number of this micro-batch.
        ahead: whether its backward is still to come.
        joining: processes may have left, so nobody is asked.
    """

    def __init__(
        self,
        steps: int,
        data: Group,
        losses: Group,
        sync_with_dataloader: bool = True,
        quiet: Callable[..., AbstractContextManager[None]] | None = None,
        complete: Callable[[Optimizer], list[Tensor]] | None = None,
    ) -> None:
        self.steps, self.data, self.losses, self.sync_with_dataloader = steps, data, losses, sync_with_dataloader
        self.sync = True
        self.batches: Batches | None = None
        self.reading: list[Batches] = []
        self.turn = self._reached = 0  # and the last micro-batch with a backward
        self.joining = False
        self.models: tuple[nn.Module, ...] = ()  # of the next micro-batch
        self._quiet, self._complete = quiet, complete
        self._silence: AbstractContextManager[None] | None = None
        self._count = 0  # micro-batches since a window began
        self._inside = False  # an `accumulate` context
        self.ahead = False
        self._reference: float | None = None  # what losses were divided by
        self._expected = 0.0  # what a correction compares with
        self._known = self._mine = 0.0  # of the micro-batches before: over all processes, and of this one alone
        self._weight, self._shared = 0.0, True  # of this micro-batch; whether over all processes
        self._counts = False  # weights are those of batches: a correction means something
        self._explicit = False
        self._asks = False  # the weights of other processes are not known
        self._done = False  # an optimizer was stepped with it
        self.corrected: set[Optimizer] = set()
        """Whose gradients have been made right, and not used yet."""

    def __enter__(self) -> None:
        """A micro-batch begins."""
        if self.sync:
            self._begin()
            self._count = 0
            self.corrected.clear()
        elif self._shared:
            self._known += self._weight
        else:
            self._mine += self._weight
        self._weight = 0.0
        self._count += 1
        self.turn += 1
        batches = self.batches
        last = batches is not None and self.sync_with_dataloader and batches.end_of_dataloader
        self.sync = last or self._count >= self.steps
        self._inside = self.ahead = True
        if self._quiet is not None and not self.sync:
            self._silence = self._quiet(*self.models)
            self._silence.__enter__()

    def __exit__(self, *error: Any) -> None:
        """The micro-batch is over."""
        self._inside = self.ahead = False
        if self._silence is not None:
            silence, self._silence = self._silence, None
            silence.__exit__(*error)

    def _begin(self) -> None:
        self._known = self._mine = self._weight = 0.0
        self._reference = None
        self._explicit = self._asks = self._done = self._counts = False
        if self.corrected:  # a step that was not taken: gradients that are gone are not those of the next one
            self.corrected = {optimizer for optimizer in self.corrected if has_gradients(optimizer)}

    def scale(self, loss: Tensor, weight: float | None) -> Tensor:
        """The loss as its backward is called, and what it weighs remembered.

        Outside of `accumulate` each batch is divided by what it weighs over all processes: whoever counts micro-batches
        by himself gets the sum of their means, as in one process. For streams that is a small exchange on the CPU.

        Args:
            loss: a mean over the batch; with ``weight`` a sum of what is counted by it.
            weight: how much there is in ``loss``: tokens, for instance. None: the batch's samples.

        Raises:
            ConfigurationError: two losses of one batch weigh differently, or only some are given a weight.
        """
        inside, self._reached, self.ahead = self._inside, self.turn, False
        if weight is not None:
            return self._scale_sum(loss, float(weight))
        if self._explicit and (inside or not self._done):
            raise ConfigurationError(
                "some losses of this step are given a weight, and this one is not",
                found="backward(loss) after backward(loss, weight=...)",
                fix="give every loss of the step its weight, or none",
            )
        batches, size = self.batches, self.data.size
        if not inside:
            # A loop that counts micro-batches by itself: each has the same part, and is whole when it is added.
            self._begin()
            if batches is not None and batches.total is None:
                batches.total = sum(row[0] for row in self.data.agree([batches.weight]))
        if batches is None:
            mine, total = 1.0, float(size)
        elif batches.total is None:
            mine, total, self._asks = batches.weight, batches.nominal * size, True
        else:
            mine, total = batches.weight, batches.total
        if batches is not None and not batches.asked and (size > 1 or self.steps > 1):
            batches.ask_for_sizes()
        if self._reference is None:
            self._reference = self._expected = self.steps * total
            self._counts = inside
        self._shared = batches is None or batches.total is not None
        self._weight = total if self._shared else mine
        factor = mine * size / self._reference
        return loss if factor == 1.0 else loss * factor

    def _scale_sum(self, loss: Tensor, weight: float) -> Tensor:
        if not self._inside and self._done:
            self._begin()
        if self._reference is not None and not self._explicit:
            raise ConfigurationError(
                "some losses of this step are given a weight, and some are not",
                found="backward(loss, weight=...) after backward(loss)",
                fix="give every loss of the step its weight, or none",
            )
        if self._weight not in (0.0, weight):
            raise ConfigurationError(
                "two losses of one batch weigh differently",
                found=f"weight={self._weight:g} and weight={weight:g}",
                fix="one weight a batch: put a factor between losses into the losses"
                if self._inside
                else "read each micro-batch of the step inside `with accelerator.accumulate(model):`",
            )
        if self.joining:
            raise ConfigurationError(
                "weights are summed over the processes, and some may have no batch left",
                found="backward(loss, weight=...) inside join_uneven_inputs",
                fix="leave join_uneven_inputs out: loaders give every process equally many batches",
            )
        self._explicit = self._asks = self._counts = True
        self._reference, self._expected = 1.0, float(self.losses.size)
        self._weight, self._shared = weight, False
        return loss

    def empties(self, before: int) -> bool:
        """Whether ``zero_grad`` ahead of a backward drops gradients: once a window, however often a loop calls it.

        Args:
            before: in which micro-batch it was called ahead of a backward the last time.
        """
        earlier = self.turn - self._count  # the last micro-batch of the window before
        if 0 < self._reached <= earlier:
            return True
        # A loop that does not call it ahead of every backward gives the window up.
        return self.sync and not earlier < before == self._reached

    @property
    def began(self) -> bool:
        """Whether a loss came through `scale` since the window, or everything, began."""
        return self._reference is not None

    def correct(self, optimizer: Optimizer) -> None:
        """Make an optimizer's complete gradients those of the window as it turned out; once a window.

        With several processes and weights that only they know this is a small exchange on the CPU.
        """
        self._done = True
        if optimizer in self.corrected:
            return
        gradients: list[Tensor] | None = None
        if self._complete is not None:
            gradients = self._complete(optimizer)
            self.corrected.add(optimizer)
        if not self._counts:
            return
        found, mine = self._known, self._mine
        if self._shared:
            found += self._weight
        else:
            mine += self._weight
        if self._asks:
            among = self.losses if self._explicit else self.data  # parts of one batch weigh as much as all of it
            found += sum(row[0] for row in among.agree([mine]))
            self.corrected.add(optimizer)
        if found == self._expected:
            return
        if found <= 0:
            raise ConfigurationError("a step weighs nothing", found=f"sum of weights {found:g}")
        self.corrected.add(optimizer)
        if gradients is None:
            everything = [p.grad for group in optimizer.param_groups for p in group["params"]]
            gradients = [local(gradient) for gradient in everything if gradient is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._expected / found)

    def left(self, batches: Batches) -> None:
        """A loader is read no longer; of two that were read side by side either may end first."""
        if batches in self.reading:
            self.reading.remove(batches)
        self.batches = self.reading[-1] if self.reading else None

    def reset(self) -> None:
        """A step that was begun is given up."""
        self._begin()
        self.reading.clear()
        self._count, self.sync, self.batches, self.models = 0, True, None, ()
        self.corrected.clear()

    def state_dict(self) -> dict[str, Any]:
        """Where the window stands; gradients are the user's business."""
        return {"sync": self.sync, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._begin()
        self.corrected.clear()
        self.sync, self._count = bool(state["sync"]), int(state["count"])
