"""Gradient accumulation in a custom training loop: when gradients are complete, and the weight of each batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.torch_private import multiply_each
from trainer_kit.core.types import Keywords, SavedState, StateDict
from trainer_kit.precision.native import has_gradients
from trainer_kit.strategies.gradients import local_gradients

__all__ = ["Accumulation", "Batches", "GradientState"]


class Batches(Protocol):
    """The attributes of a prepared loader that accumulation reads."""

    size: int
    """The number of samples in the current batch on this process."""
    weight: float
    """The weight of the current batch on this process: its samples."""
    total: float | None
    """Its weight over all processes; None: unknown without an exchange."""
    nominal: float
    """The weight of a full batch, the same on every process."""
    counts: list[int] | None
    """For each process, the samples of the current batch that are not repeated; None: all of them."""
    end_of_dataloader: bool
    """Whether the current batch is the last one."""
    asked_for_sizes: bool
    """Whether `ask_for_sizes` was called."""
    batches_read: int
    """The number of batches yielded in all epochs."""

    @property
    def remainder(self) -> int:
        """The samples of the last batch over all processes; 0 if that batch is full, -1 if the number is unknown."""

    def ask_for_sizes(self) -> None:
        """Warn if the sample counts that determine batch weights are uncertain."""


@final
class Accumulation:
    """The accumulation window of a custom training loop; used as a context manager, one micro-batch of the window.

    The gradient of a step is ``sum(w_i g_i) / sum(w_i)`` over its micro-batches and all processes. The weights ``w_i``
    become known one at a time, so each loss is divided by an estimate, ``steps`` times the weight of the first batch.
    At the end, gradients are corrected if the sum differs: after a short window, a short batch, or with token
    weights.

    Args:
        steps: the number of micro-batches in a window.
        data: the processes over which batches are sharded.
        losses: the group over which gradients are averaged: ``data``, and processes that compute parts of one batch.
        sync_with_dataloader: whether the last batch of a loader ends a window.
        adjust_scheduler: whether schedulers count the calls inside a window.
        fixed_divisor: whether each loss is divided by ``steps``, and gradients are not corrected.
        quiet: returns the context in which models do not exchange gradients.
        complete: the strategy's function after the last backward of a window; returns the gradients in place.

    Attributes:
        sync: whether this micro-batch ends its window.
        batches: the loader of the current batch, or None.
        reading: loaders that are being read, the latest last.
        turn: the number of this micro-batch.
        optimizer_steps: the number of calls that stepped an optimizer.
        step: the number of micro-batches since the last end of a loader, as Accelerate counts them; 0 at that end.
        ahead: whether this micro-batch has not run its backward yet.
        joining: whether processes may have no batches left, so that weights are not exchanged.
        models: the models of the next context.
        corrected: optimizers whose gradients were corrected, and which have not stepped since.
    """

    def __init__(
        self,
        steps: int,
        data: Group,
        losses: Group,
        sync_with_dataloader: bool = True,
        adjust_scheduler: bool = True,
        fixed_divisor: bool = False,
        quiet: Callable[..., AbstractContextManager[None]] | None = None,
        complete: Callable[[Optimizer], list[Tensor]] | None = None,
    ) -> None:
        self.steps = steps
        self.data = data
        self.losses = losses
        self.sync_with_dataloader = sync_with_dataloader
        self.adjust_scheduler = adjust_scheduler
        self.fixed_divisor = fixed_divisor
        self.sync = True
        self.batches: Batches | None = None
        self.reading: list[Batches] = []
        self.turn = 0
        self.optimizer_steps = 0
        self.step = 0
        self.joining = False
        self.models: tuple[nn.Module, ...] = ()
        self.ahead = False
        self.corrected: set[Optimizer] = set()
        self._quiet = quiet
        self._complete = complete

        # Micro-batches since the window began.
        self._count = 0
        # Micro-batches that count toward `steps`; differs from `_count` after `place`.
        self._position = 0
        # The last micro-batch with a backward.
        self._last_backward = 0
        # The same, without this micro-batch.
        self._last_backward_before = 0

        # Open contexts of this micro-batch.
        self._depth = 0
        # One for each open context.
        self._quiet_contexts: list[AbstractContextManager[None] | None] = []
        # Ids of models, one entry per context of this micro-batch.
        self._entered: set[tuple[int, ...]] = set()
        # The loader and its batch of this micro-batch.
        self._batch: tuple[Batches | None, int] = (None, 0)

        # The divisor of losses.
        self._reference: float | None = None
        # The total weight at which gradients need no correction.
        self._expected = 0.0
        # The weight of the earlier micro-batches, over all processes.
        self._earlier_total = 0.0
        # The same, where each process knows only the weight of its data.
        self._earlier_local = 0.0
        # The weight of this micro-batch.
        self._weight = 0.0
        # Whether `_weight` covers all processes.
        self._weight_is_total = True
        # Whether weights are those of batches, so that gradients can be corrected.
        self._corrects = False
        # Whether the user passes weights.
        self._explicit = False
        # Whether the weights of other processes are unknown.
        self._exchanges_weights = False
        # Whether an optimizer has stepped with this window.
        self._stepped = False

    def __enter__(self) -> None:
        """Begin a micro-batch, or continue it with other models.

        A batch of a prepared loader is one micro-batch for all models: contexts of other models that are nested, or
        that follow on the same batch, belong to it. A context of the same models begins the next micro-batch, for a
        loop that divides a batch itself.
        """
        # Without further methods: this runs for every micro-batch, and calls cost more than anything else here.
        models = tuple(map(id, self.models))
        batches = self.batches
        # Counted over all epochs: two batches with the same index in two epochs are different ones.
        batch: tuple[Batches | None, int] = (None, 0)
        if batches is not None:
            batch = (batches, batches.batches_read)
        # A nested context belongs to the micro-batch of the outer one, whatever its models.
        if not self._depth:
            self.ahead = True
            entered = self._entered
            # The next micro-batch begins on another batch, and where the same models enter again. A context without
            # models cannot show that it continues one, so it always begins the next.
            if (
                not models
                or batch != self._batch
                or models in entered
                or () in entered
                or not entered
            ):
                self._batch = batch
                entered.clear()
                # `sync` is still that of the last micro-batch: true if it ended its window.
                if self.sync:
                    self._begin()
                    self._count = 0
                    self.corrected.clear()
                elif self._weight_is_total:
                    self._earlier_total += self._weight
                else:
                    self._earlier_local += self._weight
                self._weight = 0.0
                self._count += 1
                self.turn += 1
                self._last_backward_before = self._last_backward
                # The last batch of a loader ends its window however short: the optimizer would otherwise step with
                # gradients of two epochs.
                if (
                    batches is not None
                    and self.sync_with_dataloader
                    and batches.end_of_dataloader
                ):
                    self.step = 0
                    self._position = self.steps
                else:
                    self.step += 1
                    self._position += 1
                self.sync = self._position >= self.steps
                if self.sync:
                    self._position = 0
        self._entered.add(models)
        self._depth += 1
        quiet_context = None
        if self._quiet is not None and not self.sync:
            quiet_context = self._quiet(*self.models)
            quiet_context.__enter__()
        self._quiet_contexts.append(quiet_context)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the context; the micro-batch may go on with other models."""
        quiet_context = self._quiet_contexts.pop()
        self._depth -= 1
        if not self._depth:
            self.ahead = False
            # Again, because a loop may read its batch inside the context.
            batches = self.batches
            self._batch = (None, 0)
            if batches is not None:
                self._batch = (batches, batches.batches_read)
        if quiet_context is not None:
            quiet_context.__exit__(kind, error, traceback)

    def set_sync(self, sync: bool) -> None:
        """Set whether this micro-batch ends its window."""
        self.sync = sync
        if sync:
            self._position = 0

    def place(self, step: int) -> None:
        """Count micro-batches from ``step`` on: the window ends at the next multiple of ``steps``."""
        self.step = step
        self._position = step % self.steps

    def set_joining(self, joining: bool) -> None:
        """Set whether processes may have no batches left."""
        self.joining = joining

    def _begin(self) -> None:
        self._earlier_total = 0.0
        self._earlier_local = 0.0
        self._weight = 0.0
        self._reference = None
        self._explicit = False
        self._exchanges_weights = False
        self._stepped = False
        self._corrects = False
        if self.corrected:
            # After an abandoned step its gradients may be cleared: then the next ones need a correction of their own.
            # Gradients that are still there are corrected already, and must not be multiplied twice.
            self.corrected = set(filter(has_gradients, self.corrected))

    def scale(self, loss: Tensor, weight: float | None) -> Tensor:
        """Scale a loss for its backward, and record its weight.

        Outside `accumulate`, each loss is divided by the batch's weight over all processes: a loop that counts
        micro-batches gets the sum of their means, as in a single process. For streams this takes a small CPU exchange.

        Args:
            loss: a mean over the batch; with ``weight`` a sum.
            weight: the number of terms in the sum, for example tokens. None: the batch's samples.

        Raises:
            ConfigurationError: two losses of one batch have different weights, or only some losses have a weight.
                With ``fixed_divisor``: a loss has a weight.
        """
        # For `clears_gradients`: from here on `zero_grad` would delete gradients of this micro-batch.
        inside = self._depth > 0
        self._last_backward = self.turn
        self.ahead = False
        if weight is not None:
            return self._scale_sum(loss, float(weight))
        if self.fixed_divisor:
            self._reference = float(self.steps)
            # No division by one: it would add a node to the graph of every loss.
            if self.steps == 1:
                return loss
            return loss / self.steps
        # Explicit weights are counted in terms, those of loaders in samples: their sum has no meaning.
        if self._explicit and (inside or not self._stepped):
            raise ConfigurationError(
                "this loss has no weight, but others of this step have one",
                found="backward(loss) after backward(loss, weight=...)",
                fix="give every loss of the step its weight, or none",
            )
        batches = self.batches
        size = self.data.size
        if not inside:
            # The loop counts micro-batches itself: all have equal weight, so each backward adds a complete gradient.
            self._begin()
            if batches is not None and batches.total is None:
                batches.total = sum(row[0] for row in self.data.agree([batches.weight]))
        # Outside of a prepared loader all batches count the same.
        local_weight = 1.0
        total = float(size)
        if batches is not None:
            local_weight = batches.weight
            # Unknown without an exchange: take a full batch, which is the same number on every process, so that the
            # divisor is too. The exchange at the end of the window corrects the difference.
            if batches.total is None:
                total = batches.nominal * size
                self._exchanges_weights = True
            else:
                total = batches.total
            # In a single process without accumulation every weight cancels out, so a wrong size does no harm.
            if not batches.asked_for_sizes and (size > 1 or self.steps > 1):
                batches.ask_for_sizes()
        # The first loss of a window fixes the divisor of all of them: if the others weigh the same, nothing is left to
        # correct. A loop that counts micro-batches itself decides alone when a window ends, so it gets no correction.
        if self._reference is None:
            self._expected = self.steps * total
            self._reference = self._expected
            self._corrects = inside
        self._weight_is_total = batches is None or batches.total is not None
        self._weight = local_weight
        if self._weight_is_total:
            self._weight = total
        # Times the number of processes, because wrappers average gradients over them.
        factor = local_weight * size / self._reference
        if factor == 1.0:
            return loss
        return loss * factor

    def _scale_sum(self, loss: Tensor, weight: float) -> Tensor:
        if self.fixed_divisor:
            raise ConfigurationError(
                "with a fixed divisor no loss has a weight",
                found="backward(loss, weight=...) and GradientAccumulationPlugin(fixed_divisor=True)",
                fix="leave one of them out; weight= gives the mean over all tokens, in short windows too",
            )
        # Outside `accumulate` only a step ends a window: until then sums of several backwards are added up.
        if not self._depth and self._stepped:
            self._begin()
        if self._reference is not None and not self._explicit:
            raise ConfigurationError(
                "some losses of this step have a weight, and some have none",
                found="backward(loss, weight=...) after backward(loss)",
                fix="give every loss of the step its weight, or none",
            )
        if self._weight not in (0.0, weight):
            raise self._different_weights(weight)
        if self.joining:
            raise ConfigurationError(
                "weights are summed over the processes, and some may have no batch left",
                found="backward(loss, weight=...) inside join_uneven_inputs",
                fix="leave join_uneven_inputs out: prepared loaders give every process the same number of batches",
            )
        self._explicit = True
        self._exchanges_weights = True
        self._corrects = True
        # Sums are not divided before the backward: the correction divides by the weight of the whole window, once.
        # Wrappers average over the processes, which multiplying by their number (`_expected`) undoes.
        self._reference = 1.0
        self._expected = float(self.losses.size)
        self._weight = weight
        self._weight_is_total = False
        return loss

    def _different_weights(self, weight: float) -> ConfigurationError:
        fix = "read each micro-batch of the step inside `with accelerator.accumulate(model):`"
        if self._depth:
            fix = "use one weight per batch, and multiply the losses by their factors"
        return ConfigurationError(
            "two losses of one batch have different weights",
            found=f"weight={self._weight:g} and weight={weight:g}",
            fix=fix,
        )

    def clears_gradients(self, cleared_at: int) -> bool:
        """Whether ``zero_grad`` before a backward clears gradients: once per window, however often a loop calls it.

        Args:
            cleared_at: the micro-batch in which ``zero_grad`` was last called before a backward.
        """
        # The last micro-batch of the previous window.
        window_start = self.turn - self._count
        last_backward = self._last_backward_before
        # The gradients are those of an earlier window, which has ended.
        if 0 < last_backward <= window_start:
            return True
        # Loops call `zero_grad` before every backward or once per window; only the second kind means it inside a
        # window. A loop that does not call it before every backward abandons the window by this call.
        abandons = cleared_at != last_backward or cleared_at <= window_start
        return self.sync and abandons

    @property
    def exchanges_each_batch(self) -> bool:
        """Whether processes exchange gradients after each micro-batch, and not once per window."""
        return self._quiet is None and self.losses.size > 1

    @property
    def began(self) -> bool:
        """Whether `scale` was called since the window began."""
        return self._reference is not None

    @property
    def count(self) -> int:
        """Micro-batches since the window began; 0 in a loop without `accumulate`."""
        return self._count

    @property
    def divides(self) -> bool:
        """Whether `scale` has divided a loss by the number of micro-batches of a window."""
        return self.began and self.steps > 1 and not self._explicit

    def correct(self, optimizer: Optimizer) -> None:
        """Correct an optimizer's complete gradients for the weights of the window; once per window.

        If each process knows only its own weights, this takes a small exchange on the CPU.
        """
        self._stepped = True
        # Clipping, unscaling and the step all call this: the first of them corrects.
        if optimizer in self.corrected:
            return
        gradients: list[Tensor] | None = None
        # Before the correction: what an engine has not exchanged yet would be multiplied on this process only.
        if self._complete is not None:
            gradients = self._complete(optimizer)
            self.corrected.add(optimizer)
        if not self._corrects:
            return
        total = self._earlier_total
        local = self._earlier_local
        if self._weight_is_total:
            total += self._weight
        else:
            local += self._weight
        if self._exchanges_weights:
            # Weights of loaders: processes that compute parts of one batch all have its full weight, so it is summed
            # over the data shards only. Weights of the user belong to the part whose loss they come with.
            group = self.data
            if self._explicit:
                group = self.losses
            total += sum(row[0] for row in group.agree([local]))
            self.corrected.add(optimizer)
        # The usual case, at no cost: equal batches give the same floating-point sums on both sides.
        if total == self._expected:
            return
        if not total > 0:
            raise ConfigurationError(
                "the weights of a step sum to zero or less",
                found=f"sum of weights {total:g}",
            )
        self.corrected.add(optimizer)
        if gradients is None:
            gradients = local_gradients(optimizer)
        if gradients:
            multiply_each(gradients, self._expected / total)

    def end_reading(self, batches: Batches) -> None:
        """Remove a loader whose iteration has ended; of two loaders that are read together either may end first."""
        if batches in self.reading:
            self.reading.remove(batches)
        self.batches = None
        if self.reading:
            self.batches = self.reading[-1]

    def reset(self) -> None:
        """Abandon the current step."""
        self._begin()
        self.reading.clear()
        self._count = 0
        self._position = 0
        self.step = 0
        self.sync = True
        self.batches = None
        self.models = ()
        self._entered.clear()
        self.corrected.clear()

    def state_dict(self) -> StateDict:
        """Return the position in the window, without gradients."""
        return {"sync": self.sync, "count": self._count}

    def load_state_dict(self, state: SavedState, step: int) -> None:
        """Continue at a saved position, after ``step`` micro-batches."""
        self._begin()
        self.corrected.clear()
        self._entered.clear()
        self.step = step
        self.sync = bool(state["sync"])
        self._count = int(state["count"])
        # A state that was saved inside a window continues in it, without the gradients of its first micro-batches.
        self._position = 0
        if not self.sync:
            self._position = self._count


@final
class GradientState:
    """A view of the accumulation state under Accelerate's names.

    Args:
        accumulation: the Accelerator's accumulation window.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends its window."""
        return self._accumulation.sync

    @property
    def num_steps(self) -> int:
        """The number of micro-batches per optimizer step."""
        return self._accumulation.steps

    @property
    def active_dataloader(self) -> Batches | None:
        """The prepared loader that is being read, or None."""
        return self._accumulation.batches

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self._accumulation.batches is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its loader."""
        batches = self._accumulation.batches
        return batches is not None and batches.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The samples of the loader's last batch over all processes; 0 if that batch is full, -1 if unknown."""
        batches = self._accumulation.batches
        if batches is None:
            return -1
        return batches.remainder

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window."""
        return self._accumulation.sync_with_dataloader

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count the calls inside a window."""
        return self._accumulation.adjust_scheduler

    @property
    def initialized(self) -> bool:
        """True: the state of an accumulation exists with its Accelerator."""
        return True

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: the strategy reduces gradients on torch_xla, and no flag says when."""
        return False

    @property
    def dataloader_references(self) -> list[Batches | None]:
        """None, and the prepared loaders that are being read, the latest last."""
        return [None, *self._accumulation.reading]

    @property
    def plugin_kwargs(self) -> Keywords:
        """The options of `GradientAccumulationPlugin` that differ from its defaults."""
        options: Keywords = {"num_steps": self.num_steps}
        if not self.adjust_scheduler:
            options["adjust_scheduler"] = False
        if not self.sync_with_dataloader:
            options["sync_with_dataloader"] = False
        # Transformers' Trainer reads this option.
        if self._accumulation.exchanges_each_batch:
            options["sync_each_batch"] = True
        return options

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether this micro-batch ends its window; Transformers' Trainer counts micro-batches itself."""
        self._accumulation.set_sync(sync_gradients)
