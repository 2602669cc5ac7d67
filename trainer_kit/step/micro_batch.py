"""The micro-batches of one accumulation window: all code between the loop and the user's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError, RankError
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.tensors import tensors_of
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus

__all__ = ["EarlyEpochExit", "MicroBatches", "exit_agreement"]

_OF_FIRST_RUN: Final = (
    "_bus",
    "_draws",
    "agree_on_exit",
    "batch",
    "contributed",
    "index",
    "loss",
    "outputs",
    "padded",
    "progress",
    "skipped",
)
"""Attributes that a second run of a window restores."""


class EarlyEpochExit(Exception):
    """``on_train_batch_start`` returned -1: Lightning's way to leave an epoch."""


def exit_agreement(bus: Bus, world: Group) -> Callable[[bool, bool], bool] | None:
    """How the ranks agree to leave an epoch: called for each micro-batch with (this rank leaves, it has a batch).

    The ranks agree at each micro-batch where any rank overrides ``on_train_batch_start``. None with one rank, or where
    no rank overrides it.

    Raises:
        RankError: by the returned function, when only some of the ranks with a batch leave.
    """
    if world.size == 1 or not any(
        row[0] for row in world.agree([bool(bus.on_train_batch_start)])
    ):
        return None

    def agree(leaves: bool, has_batch: bool) -> bool:
        rows = world.agree([leaves, has_batch])
        leaving = [
            rank for rank, (leaves_too, has) in enumerate(rows) if leaves_too and has
        ]
        staying = [
            rank
            for rank, (leaves_too, has) in enumerate(rows)
            if has and not leaves_too
        ]
        if leaving and staying:
            raise RankError(
                "on_train_batch_start returned -1 on some ranks only",
                found=f"on rank {', '.join(map(str, leaving))}, and not on rank {', '.join(map(str, staying))}",
                fix="decide by a value that is the same on all ranks: a step, or a value logged with sync_dist=True",
            )
        return bool(leaving)

    return agree


@final
class MicroBatches:
    """One window, loaded by `WindowLoader`, driven by a strategy.

    Args:
        bus: the hooks.
        metrics: receives the current hook and the weight of the batch.
        progress: batches and samples are counted here.
        step: how ``training_step`` is called with (batch, batch_idx).
        precision: casts, scales.
        backward: the user's own ``backward``, or None.
        several: None for one loss; else the parameters of each named optimizer.
        manual: the step calls backward itself.

    Attributes:
        batches, factors, weights: what `WindowLoader` loaded, one entry a micro-batch; ``factors`` is None where every
            factor is 1; a batch is None where this rank has none.
        count: how many micro-batches.
        batch, index, outputs: of the micro-batch that ran last.
        sizes: samples of each micro-batch, over all ranks.
        tokens: the window's weight over all ranks, where the user's ``loss_weight`` counts them.
        loss: a copy of the last one, read where that is not a sync point.
        losses: those since `first_bad` was asked, each with the steps completed before it and its batch's number.
        skipped: how many times the step returned None.
        padded: how many micro-batches this rank did not have, in windows that were loaded.
        uneven: whether any rank may lack a micro-batch of this window.
        started: the count of steps when the window was loaded.
        contributed: whether any micro-batch of the window added a gradient.
        fresh: whether the gradients of the previous window are still there.
        earlier: the last batch before those that this rank does not have.
        run_padding: runs the step for a micro-batch that this rank lacks; returns what backward is called on, or None.
        agree_on_exit: agrees with the other ranks on leaving the epoch; None where no hook can leave it.
        zero: drops them; where that is all there is to it, they are ``drops``.
    """

    def __init__(
        self,
        bus: Bus,
        metrics: Metrics,
        progress: Progress,
        step: Callable[..., Any],
        precision: Precision,
        backward: Callable[..., None] | None,
        several: Mapping[str, list[Any]] | None,
        manual: bool,
    ) -> None:
        self._bus, self._metrics, self.progress = bus, metrics, progress
        self._step, self._backward, self._several, self.manual = (
            step,
            backward,
            several,
            manual,
        )
        self._autocast: AbstractContextManager[Any] | None = precision.forward_context()
        self._scale = precision.scale_loss if precision.scales else None
        self.wants_outputs = bool(bus.on_train_batch_end)
        self.move: Callable[[Any], Any] | None = None
        self.zero: Callable[[], None] = _nothing
        self.run_padding: Callable[[], Any] = _nothing
        self.agree_on_exit: Callable[[bool, bool], bool] | None = None
        self.batches: list[Any] = []
        self.factors: list[float] | None = None
        self.weights: Sequence[float] = [1.0]
        self.sizes: list[int] = [0]
        self.tokens = 0
        self.count = self.first = self.index = self.skipped = self.padded = 0
        self.started = -1
        self.batch: Any = None
        self.earlier: Any = None
        self.outputs: Any = None
        self.loss: Tensor | float | None = None
        self.losses: list[tuple[Tensor | float, int, int]] = []
        self.always_unusual = manual or several is not None or precision.scales
        self.unusual = True  # the first loss is looked at closely
        self.drops: list[Any] = []
        self.contributed = self.uneven = False
        self.fresh = True
        self.remembers = False
        self.parts: list[tuple[str | None, Tensor]] = []
        self._noise: dict[str, Any] | None = None
        self._draws = False
        self._quiet = bus.silent()

    def begin(self, index: int) -> None:
        """Move the batch to the device and call ``on_train_batch_start``."""
        batch = self.batches[index]
        if self.remembers and index == 0:
            self.parts = []
            if self._draws:
                self._noise = rng_state(_device_of(batch))
        if batch is None:  # another rank's data ends later
            self.earlier = self.earlier if self.batch is None else self.batch
            self.batch = self.outputs = None
            if self.agree_on_exit is not None and self.agree_on_exit(False, False):
                raise EarlyEpochExit
            return
        if self.move is not None:
            batch = self.move(batch)
        self.batch, self.index = batch, self.first + index
        self._metrics.weight = self.weights[index]
        leaves = False
        for hook in self._bus.on_train_batch_start:
            if hook(batch, self.index) == -1:
                leaves = True  # the remaining hooks are called all the same
        if self.agree_on_exit is not None:
            leaves = self.agree_on_exit(leaves, True)
        if leaves:
            raise EarlyEpochExit

    def forward(self, index: int) -> Any | None:
        """The user's step; returns the weighted, scaled loss, or None where there is nothing to add."""
        batch = self.batch
        if batch is None:
            self.padded += 1
            self.start_gradients()
            return self.run_padding()
        self._metrics.hook = "training_step"
        if self._autocast is None:
            output = self._step(batch, self.index)
        else:
            with self._autocast:
                output = self._step(batch, self.index)
        if self.unusual or output.__class__ is not Tensor:
            return self._unusual(output, index)
        # The usual case in one frame: one loss, as a tensor.
        # A copy, for its memory may be written again: by its user, by a compiled step. On the CPU a number is cheapest.
        kept = self.loss = (
            output.item() if output.is_cpu else output.detach().clone()
        )  # no sync point
        self.losses.append((kept, self.started, self.index))
        if self.wants_outputs:
            self.outputs = {
                "loss": output.detach().clone()
            }  # hooks may keep it, and write into it
        self.contributed = True
        return output if self.factors is None else output * self.factors[index]

    def _weighed(
        self, loss: Tensor, output: object, index: int, name: str | None = None
    ) -> Tensor:
        self.note(loss)
        if self.wants_outputs:
            self.outputs = {
                **(output if isinstance(output, Mapping) else {}),
                "loss": loss.detach().clone(),
            }
        self.contributed = True
        if self.factors is not None:
            loss = loss * self.factors[index]
        if self.remembers:
            self.parts.append((name, loss.detach().clone()))
        return loss if self._scale is None else self._scale(loss)

    def note(self, loss: Tensor) -> None:
        """Remember a loss for the next look at whether all were finite; nothing is read from the device."""
        on_host = loss.__class__ is Tensor and loss.is_cpu
        kept = self.loss = (
            loss.item() if on_host else loss.detach().clone()
        )  # no sync point, as in `forward`
        self.losses.append((kept, self.started, self.index))

    def first_bad(self) -> tuple[int, int, float] | None:
        """The first NaN or infinity among the losses since the last call: its step, batch number and value.

        With scaling an overflowed step is skipped, not wrong: None if any of the losses was finite. A sync point.
        """
        seen, self.losses = self.losses, []
        if not seen:
            return None
        losses: list[Any] = [loss for loss, _, _ in seen]
        if float in map(type, losses):
            finite = list(
                map(math.isfinite, losses)
            )  # no sync point: numbers on the CPU
        else:
            try:
                values = torch.stack(losses).reshape(
                    -1
                )  # a third of the time of reshaping each
            except RuntimeError:  # of shape () and (1,)
                values = torch.cat([loss.reshape(1) for loss in losses])
            finite = (
                values.isfinite().tolist()
            )  # sync point: where values are read anyway
        if any(finite) if self._scale is not None else all(finite):
            return None
        at = finite.index(False)
        return (
            seen[at][1] + 1,
            seen[at][2],
            float(losses[at]),
        )  # sync point: the run ends or goes back

    def _unusual(self, output: Any, index: int) -> Any | None:
        """Handle every result of a step other than a plain tensor."""
        if self.manual:
            self.outputs = (
                {"loss": output.detach()} if isinstance(output, Tensor) else output
            )
            return None
        self.outputs = output
        if output is None:
            self.skipped += 1
            self.start_gradients()
            return None
        if (
            self._several is not None
            and isinstance(output, Mapping)
            and self._several.keys() <= output.keys()
        ):
            named = {}
            for name in self._several:
                if output[name] is not None:
                    named[name] = self._weighed(output[name], output, index, name)
            self.outputs = {
                k: v.detach() if isinstance(v, Tensor) else v for k, v in output.items()
            }
            if not named:
                self.start_gradients()
            return named or None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and self._several is None:
            if self.unusual:
                _check_loss(loss)
                self.unusual = self.always_unusual
            return self._weighed(loss, output, index)
        raise ConfigurationError(
            "training_step returned no loss",
            found=f"{type(output).__name__}"
            + (
                f" with keys {', '.join(map(str, output))}"
                if isinstance(output, Mapping)
                else ""
            ),
            fix="return the tensor, without .item() or float(): gradients need it"
            if isinstance(output, (int, float))
            else "return a tensor, a dict with 'loss', or None to skip"
            if self._several is None
            else f"return a dict with one loss for each optimizer: {', '.join(self._several)}",
        )

    def backward(self, index: int, loss: Any) -> None:
        """Backward; drops the gradients of the previous window first."""
        if self.fresh:
            self.fresh = False
            if self.drops:
                for parameter in self.drops:
                    parameter.grad = None
            else:
                self.zero()
        bus = self._bus if self.batch is not None else self._quiet
        if self._several is not None:
            for name, parameters in self._several.items():
                thawed = [
                    parameter for parameter in parameters if parameter.requires_grad
                ]
                if name in loss and thawed:
                    # Only into its own optimizer's parameters; the graph stays for the next name's backward.
                    self._one_backward(
                        bus, loss[name], inputs=thawed, retain_graph=True
                    )
            return
        for hook in bus.on_before_backward:
            hook(loss)
        if self._backward is None:
            loss.backward()
        else:
            self._backward(loss)
        for hook in bus.on_after_backward:
            hook()

    def _one_backward(self, bus: Bus, loss: Tensor, **options: Any) -> None:
        for hook in bus.on_before_backward:
            hook(loss)
        (self._backward or _backward)(loss, **options)
        for hook in bus.on_after_backward:
            hook()

    def remember(self, draws: bool) -> None:
        """Be ready for `again`; ``draws``: with the random numbers of the first run."""
        self.remembers = self.unusual = self.always_unusual = True
        self._draws = draws

    def window_loss(self, name: str | None) -> Tensor | None:
        """What the window minimises: the sum of its weighted losses, of one name where there are several.

        None where this rank has no part in it.
        """
        parts = [loss for of, loss in self.parts if of == name]
        return torch.stack(parts).sum() if parts else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the strategy runs the same window once more.

        Only hooks of gradients are called, nothing is logged or counted. With `remember`'s ``draws`` random layers draw
        the same. Outside, everything but the gradients and the parts of the loss is that of the first run.
        """
        metrics, kept = (
            self._metrics,
            {name: getattr(self, name) for name in _OF_FIRST_RUN},
        )
        table, hook = metrics.table, metrics.hook
        quiet = self._bus.silent()
        quiet.on_before_backward, quiet.on_after_backward = (
            self._bus.on_before_backward,
            self._bus.on_after_backward,
        )
        self._bus, self.progress, self.agree_on_exit, self._draws = (
            quiet,
            Progress(),
            None,
            False,
        )
        self.fresh, metrics.table = True, {}
        if self._noise is not None:
            restore_rng(self._noise, _device_of(self.batch))
        try:
            with torch.enable_grad():
                yield
        finally:
            metrics.table, metrics.hook = table, hook
            for name, value in kept.items():
                setattr(self, name, value)

    def dry_run(self, batch: Any, index: int) -> Any:
        """Run the user's step on a batch without hooks and logging; returns its result."""
        metrics = self._metrics
        table, metrics.table, metrics.hook = metrics.table, {}, "training_step"
        try:
            with self._autocast or nullcontext():
                return self._step(batch, index)
        finally:
            metrics.table = table

    def run_parts(self, index: int, parts: Sequence[tuple[Any, float]]) -> None:
        """Forward and backward of a micro-batch that has begun, in parts with their shares of its weight."""
        whole, weight, outputs = self.batch, self._metrics.weight, []
        for part, share in parts:
            self.batch = part
            if weight is not None:
                self._metrics.weight = weight * share
            loss = self.forward(index)
            outputs.append((self.outputs, share))
            if loss is not None:
                self.backward(index, loss if share == 1.0 else loss * share)
        self.batch, self._metrics.weight = whole, weight
        if not self.wants_outputs or len(outputs) == 1:
            return
        losses = [
            one["loss"] * share
            for one, share in outputs
            if isinstance(one, Mapping) and "loss" in one
        ]
        if len(losses) == len(outputs):
            self.outputs = {**outputs[-1][0], "loss": torch.stack(losses).sum()}

    def turn_to(self, index: int, batch: Any, outputs: Any = None) -> None:
        """Go back to a micro-batch that has begun, for strategies that have several under way."""
        self.batch, self.index, self.outputs = batch, self.first + index, outputs
        self._metrics.weight = self.weights[index]

    def release(self) -> None:
        """Drop the references to batches and to the strategy's wrapper, which holds a process group."""
        self._step = _over
        self.batch = self.earlier = self.outputs = None
        self.batches = []

    @property
    def has_backward_hooks(self) -> bool:
        """Whether ``on_before_backward`` or ``on_after_backward`` is overridden."""
        return bool(self._bus.on_before_backward or self._bus.on_after_backward)

    def start_gradients(self) -> None:
        """Drop the gradients of the previous window, once."""
        if self.fresh:
            self.fresh = False
            self.zero()

    def end(self, index: int) -> None:
        """Count the batch; call ``on_train_batch_end`` unless the optimizer step comes first."""
        progress = self.progress
        progress.batch += 1
        progress.epoch_batch += 1
        progress.samples += self.sizes[index]
        if index + 1 == self.count:
            progress.tokens += self.tokens
        elif self.batch is not None:
            for hook in self._bus.on_train_batch_end:
                hook(self.outputs, self.batch, self.index)


def _backward(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]


def _check_loss(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise ConfigurationError(
            "the loss is not a single number",
            found=f"shape {tuple(loss.shape)}",
            fix="return its .mean()",
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "the loss depends on no parameter that requires a gradient",
            found="a tensor without a graph",
            fix="compute it from the module's output, without .detach(), .item() or torch.no_grad()",
        )


def _device_of(batch: object) -> torch.device | None:
    return next((tensor.device for tensor in tensors_of(batch)), None)


def _over(batch: object, batch_idx: int) -> NoReturn:
    raise RuntimeError("this fit is over")


def _nothing() -> None:
    """Replaced by the optimizers'."""
