"""One accumulation window and what runs it: all code between the loop and the user's step.

For each micro-batch a strategy calls `Window.begin`, `Window.forward`, `Window.backward` and `Window.end`. The strategy
decides the order of forwards and backwards (a pipeline interleaves them) and when ranks exchange gradients; the window
makes every hook call, so that hooks come in one order under every strategy. The optimizer step comes after the window:
`trainer_kit.step.optimize`.

A rank may lack a micro-batch that other ranks have (``batches[i] is None``). It runs a padding batch then, for the
collectives of the others, without logs and weight. Its batch has no hooks; the hook before gradients are dropped, which
belongs to the window, is called for it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.progress import Progress
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.tensors import tensors_of
from trainer_kit.metrics.metrics import Metrics
from trainer_kit.precision.precision import Precision
from trainer_kit.step.bus import Bus
from trainer_kit.step.early_exit import EarlyEpochExit, ExitAgreement
from trainer_kit.step.losses import LossLog

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    @dataclass_transform(kw_only_default=True)
    class _Record:
        """To the type checker, a dataclass."""
else:
    # Its constructor is written in C. A window is made in every step, where one of Python would be one more call.
    _Record = SimpleNamespace

__all__ = ["GradientRules", "Window", "WindowRunner"]

_COUNTS_OF_WINDOWS = ("batch", "epoch_batch", "samples", "tokens")
"""What a window counts in `Progress`."""

# Batches and what a step returns are the user's.
_Batch: TypeAlias = Any
_Outputs: TypeAlias = Any
# One loss, or one for each named optimizer.
_Losses: TypeAlias = Any


@dataclass(frozen=True)
class GradientRules:
    """What the optimizers want done with the losses and gradients of a window.

    Attributes:
        by_loss: the parameters of each named optimizer, whose loss has its name; None for a single loss.
        droppable: the parameters whose gradients are dropped before the first backward; None: ``drop`` is called.
        drop: drops the gradients of the window before; gets the index of the batch that runs.
        repeats: whether an optimizer may run a window again.
        same_random: whether the repetition needs the random numbers of the first run.
    """

    by_loss: Mapping[str, list[nn.Parameter]] | None = None
    droppable: list[nn.Parameter] | None = None
    drop: Callable[[int], None] = lambda index: None
    repeats: bool = False
    same_random: bool = False


@final
class WindowRunner:
    """What the windows of a fit run with, and what is counted over all of them.

    Args:
        bus: the hooks.
        metrics: receives the current hook and the weight of the batch.
        progress: batches and samples are counted here.
        step: how ``training_step`` is called with (batch, batch_idx).
        precision: casts, scales.
        gradients: what the optimizers want done with losses and gradients.
        backward: the user's own ``backward``, or None.
        manual: the step calls backward itself.
        move: copies a batch to the device; None where it is there.
        agree_on_exit: agrees with the other ranks on leaving the epoch; None where no hook can leave it.
        run_padding: runs the step for a micro-batch that this rank lacks; returns what backward is called on, or None.
        checks_every_loss: take no short cut for a step that returns a tensor: its memory may be used again.

    Attributes:
        losses: the losses that were not checked yet.
        skipped: how many times the step returned None.
        padded: how many micro-batches this rank did not have, in windows that were loaded.
        checks_next_output: whether what the next step returns is checked; False: a tensor is taken for a good loss.
    """

    def __init__(
        self,
        bus: Bus,
        metrics: Metrics,
        progress: Progress,
        step: Callable[..., Any],
        precision: Precision,
        gradients: GradientRules,
        *,
        backward: Callable[..., None] | None = None,
        manual: bool = False,
        move: Callable[[_Batch], _Batch] | None = None,
        agree_on_exit: ExitAgreement | None = None,
        run_padding: Callable[[Window], _Losses] | None = None,
        checks_every_loss: bool = False,
    ) -> None:
        self.bus = bus
        self.metrics = metrics
        self.progress = progress
        self.step = step
        self.gradients = gradients
        self.user_backward = backward
        self.manual = manual
        self.move = move
        self.agree_on_exit = agree_on_exit
        self.run_padding = run_padding or _run_nothing
        self.autocast = precision.forward_context()
        self.scale = precision.scale_loss if precision.scales else None
        # Only this hook reads outputs, and their copy costs a kernel for each micro-batch.
        self.wants_outputs = bool(bus.on_train_batch_end)
        self.losses = LossLog(scaled=precision.scales)
        self.skipped = 0
        self.padded = 0
        self.repeats = gradients.repeats
        self.same_random = gradients.same_random
        # The first loss of a run is always checked: its shape and its graph are those of all later ones.
        self.checks_next_output = True
        # In these runs a step may return something else than one loss, or its loss needs more than its factor.
        self._checks_every_output = (
            manual
            or checks_every_loss
            or precision.scales
            or gradients.repeats
            or gradients.by_loss is not None
        )
        # A padding batch runs backward like any other, but calls no hook.
        self.silent_bus = bus.silent()

    @property
    def has_backward_hooks(self) -> bool:
        """Whether ``on_before_backward`` or ``on_after_backward`` is overridden."""
        return bool(self.bus.on_before_backward or self.bus.on_after_backward)

    def move_batches_with(self, move: Callable[[_Batch], _Batch] | None) -> None:
        """Copy batches to the device in another way from the next window on."""
        self.move = move

    def accept_loss(self, loss: Tensor) -> None:
        """Check the first loss of a run; later ones are like it, unless steps are always looked at closely."""
        _check_loss(loss)
        self.checks_next_output = self._checks_every_output

    def count_skipped(self) -> None:
        """Count a step that returned None."""
        self.skipped += 1

    def count_padding(self) -> None:
        """Count a micro-batch that this rank does not have."""
        self.padded += 1

    def backward_of_each(self, losses: Mapping[str, Tensor], bus: Bus) -> None:
        """Backward of the losses of several optimizers, with the hooks of ``bus``."""
        backward = self.user_backward or _backward
        for name, parameters in (self.gradients.by_loss or {}).items():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if name not in losses or not trained:
                continue
            for hook in bus.on_before_backward:
                hook(losses[name])
            # Only into its own optimizer's parameters; the graph stays for the next name's backward.
            backward(losses[name], inputs=trained, retain_graph=True)
            for hook in bus.on_after_backward:
                hook()

    def for_repetition(self) -> WindowRunner:
        """A runner whose only effects are gradients and losses: it calls no other hooks, and counts nothing."""
        # Shallow: losses of a repetition are checked like others.
        runner = copy(self)
        runner._silence()
        return runner

    def _silence(self) -> None:
        self.bus = self.bus.silent("on_before_backward", "on_after_backward")
        self.progress = Progress()
        self.agree_on_exit = None
        self.same_random = False

    def remember_counts(self) -> Callable[[], None]:
        """Return a function that forgets what was counted from here on."""
        progress, losses = self.progress, len(self.losses)
        counts = {name: getattr(progress, name) for name in _COUNTS_OF_WINDOWS}
        skipped, padded = self.skipped, self.padded

        def forget() -> None:
            for name, count in counts.items():
                setattr(progress, name, count)
            self.losses.drop_after(losses)
            self.skipped = skipped
            self.padded = padded

        return forget

    def release(self) -> None:
        """Drop the reference to the strategy's wrapper, which holds a process group."""
        self.step = _refuse_step


@final
class Window(_Record):
    """The micro-batches of one optimizer step: loaded by `WindowLoader`, run by a strategy as `MicroSteps`.

    What changes in its life:

    ===================== =================== ========================= =============== =================
    when                  ``batch``           ``index``                 ``earlier``     ``started``
    ===================== =================== ========================= =============== =================
    before the epoch      of the last epoch   -1                        of last epoch   -1
    loaded, not begun     of the last window  of the last window        carried over    completed steps
    `begin`, has a batch  the new one         its number in the epoch   unchanged       unchanged
    `begin`, has none     None                unchanged                 the last batch  unchanged
    `turn_to`             as passed           as passed, in the epoch   unchanged       unchanged
    after its step        of the last `begin` of the last `begin`       unchanged       now one too small
    left out (`skip`)     None                of the last window        unchanged       unchanged
    abandoned             unchanged           unchanged                 unchanged       -1
    ===================== =================== ========================= =============== =================

    ``batch`` and ``earlier`` are carried over where this rank may need a padding batch, else they are None until
    `begin`. The window is open while ``started`` equals the count of steps: a state taken then takes back what it has
    counted.

    Attributes:
        runner: what it runs with.
        batches: one a micro-batch; None where this rank has none.
        sizes: samples of each micro-batch, over all ranks.
        weights: of the batches of this rank.
        factors: what each loss is multiplied by; None where every factor is 1.
        count: how many micro-batches.
        first: the index of the first one in its epoch.
        started: the count of steps when the window was loaded; -1 for a window that is not open.
        tokens: the window's weight over all ranks, where the user's ``loss_weight`` counts them.
        uneven: whether any rank may lack a micro-batch of this window.
        batch, index, outputs: of the micro-batch that ran last.
        loss: a copy of the last one, read where that is not a sync point.
        earlier: the last batch before those that this rank does not have.
        contributed: whether any micro-batch of the window added a gradient.
        has_old_gradients: whether the gradients of the previous window are still there.
        weighted_losses: each with the name of its optimizer; None where no optimizer runs a window again.
        random_state: of the first run, where a second one draws the same numbers.
    """

    runner: WindowRunner
    batches: list[_Batch]
    sizes: list[int]
    weights: Sequence[float]
    factors: list[float] | None
    count: int
    first: int
    started: int
    tokens: int = 0
    uneven: bool = False
    batch: _Batch = None
    index: int = -1
    outputs: _Outputs = None
    loss: Tensor | float | None = None
    earlier: _Batch = None
    contributed: bool = False
    has_old_gradients: bool = True
    weighted_losses: list[tuple[str | None, Tensor]] | None = None
    random_state: dict[str, Any] | None = None

    # SimpleNamespace compares by value, which tensors refuse.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def begin(self, index: int) -> None:
        """Move the batch to the device and call ``on_train_batch_start``."""
        runner, batch = self.runner, self.batches[index]
        # An optimizer that runs the window again asks for its loss, and may need the same dropout.
        if runner.repeats and index == 0:
            self.weighted_losses = []
            if runner.same_random:
                self.random_state = rng_state(_device_of(batch))
        # The data of another rank end later.
        if batch is None:
            self._begin_padding()
            return
        if runner.move is not None:
            batch = runner.move(batch)
        self.batch = batch
        self.index = self.first + index
        # Stored from here, as in `forward`: methods of the metrics would be two more Python calls in every step.
        runner.metrics.weight = self.weights[index]
        # -1 leaves the epoch, as in Lightning.
        leaves = False
        for hook in runner.bus.on_train_batch_start:
            if hook(batch, self.index) == -1:
                # The remaining hooks are called all the same.
                leaves = True
        # Every rank that has a batch, or a padding batch, takes part: a rank that left alone would hang the others.
        if runner.agree_on_exit is not None:
            leaves = runner.agree_on_exit(leaves, True)
        if leaves:
            raise EarlyEpochExit

    def _begin_padding(self) -> None:
        # The last batch of this rank is what it runs as padding. `batch` becomes None for `end` and for the loop, which
        # call `on_train_batch_end` only for a batch that exists.
        if self.batch is not None:
            self.earlier = self.batch
        self.batch = None
        self.outputs = None
        # The exchange that the other ranks make in `begin`.
        agree_on_exit = self.runner.agree_on_exit
        if agree_on_exit is not None and agree_on_exit(False, False):
            raise EarlyEpochExit

    def forward(self, index: int) -> _Losses:
        """The user's step; returns the weighted, scaled loss, or None where there is nothing to add."""
        runner = self.runner
        if self.batch is None:
            # The other ranks run collectives in their step, in which this one takes part.
            runner.count_padding()
            self.start_gradients()
            return runner.run_padding(self)
        runner.metrics.hook = "training_step"
        if runner.autocast is None:
            output = runner.step(self.batch, self.index)
        else:
            with runner.autocast:
                output = runner.step(self.batch, self.index)
        if runner.checks_next_output or output.__class__ is not Tensor:
            return self._read_output(output, index)
        # The usual case in one frame: one loss, as a tensor. `_read_output` and `weighted` do the same for the others.
        # A copy, for its memory may be written again: by its user, by a compiled step. On the CPU a number is cheapest.
        loss: Tensor | float
        if output.is_cpu:
            loss = output.item()  # no sync point
        else:
            loss = output.detach().clone()
        self.loss = loss
        runner.losses.append((loss, self.started, self.index))
        if runner.wants_outputs:
            # Another copy: hooks may keep it, and write into it.
            self.outputs = {"loss": output.detach().clone()}
        self.contributed = True
        # Most windows need no factor, and a product costs a kernel and a node of the graph.
        if self.factors is None:
            return output
        return output * self.factors[index]

    def note(self, loss: Tensor) -> None:
        """Remember a loss for the next look at whether all were finite; nothing is read from the device."""
        if loss.__class__ is Tensor and loss.is_cpu:
            self.loss = loss.item()  # no sync point
        else:
            self.loss = loss.detach().clone()
        self.runner.losses.append((self.loss, self.started, self.index))

    def _read_output(self, output: Any, index: int) -> _Losses:
        """Handle every result of a step other than a plain tensor."""
        runner = self.runner
        self.outputs = output
        # The module has called `manual_backward` itself; a loss with its graph would keep the activations until the
        # next batch.
        if runner.manual:
            if isinstance(output, Tensor):
                self.outputs = {"loss": output.detach()}
            return None
        if output is None:
            # As in Lightning: the batch adds nothing to the step. Its weight stays in the sum, which was known before.
            runner.count_skipped()
            self.start_gradients()
            return None
        is_mapping = isinstance(output, Mapping)
        by_loss = runner.gradients.by_loss
        if by_loss is None:
            loss = output
            if is_mapping:
                loss = output.get("loss")
            if isinstance(loss, Tensor):
                if runner.checks_next_output:
                    runner.accept_loss(loss)
                return self.weighted(loss, output, index)
        elif is_mapping and by_loss.keys() <= output.keys():
            return self._read_named_losses(output, by_loss, index)
        raise _no_loss(output, by_loss)

    def _read_named_losses(
        self, output: Mapping[str, Any], names: Mapping[str, object], index: int
    ) -> _Losses:
        """The losses of several optimizers, by name, without those that are None."""
        losses = {}
        for name in names:
            if output[name] is not None:
                losses[name] = self.weighted(output[name], output, index, name)
        self.outputs = {
            key: value.detach() if isinstance(value, Tensor) else value
            for key, value in output.items()
        }
        if losses:
            return losses
        # No backward follows, which would drop the gradients of the window before.
        self.start_gradients()
        return None

    def weighted(
        self, loss: Tensor, output: object, index: int, name: str | None = None
    ) -> Tensor:
        """Note a loss; return it with its weight in the window and the scale of the precision."""
        runner = self.runner
        # The losses that are checked, and that hooks see, are the user's own: without weight and scale.
        self.note(loss)
        if runner.wants_outputs:
            self.outputs = {"loss": loss.detach().clone()}
            if isinstance(output, Mapping):
                self.outputs = {**output, **self.outputs}
        self.contributed = True
        if self.factors is not None:
            loss = loss * self.factors[index]
        # The closure of an optimizer returns their sum: weighted, and not scaled.
        if self.weighted_losses is not None:
            self.weighted_losses.append((name, loss.detach().clone()))
        if runner.scale is None:
            return loss
        return runner.scale(loss)

    def backward(self, index: int, loss: _Losses) -> None:
        """Backward; drops the gradients of the previous window first."""
        runner = self.runner
        # Dropped this late, gradients of the last step can be read by hooks until the next backward.
        if self.has_old_gradients:
            self.has_old_gradients = False
            # Here and not by `drop`: a loop over the parameters is a Python call less in every step.
            droppable = runner.gradients.droppable
            if droppable is None:
                runner.gradients.drop(self.index)
            else:
                for parameter in droppable:
                    parameter.grad = None
        bus = runner.bus
        if self.batch is None:
            bus = runner.silent_bus
        if runner.gradients.by_loss is not None:
            runner.backward_of_each(loss, bus)
            return
        for hook in bus.on_before_backward:
            hook(loss)
        if runner.user_backward is None:
            loss.backward()
        else:
            runner.user_backward(loss)
        for hook in bus.on_after_backward:
            hook()

    def end(self, index: int) -> None:
        """Count the batch; call ``on_train_batch_end`` unless the optimizer step comes first."""
        # Counted from here: a method of the progress would be one more Python call in every micro-batch.
        progress = self.runner.progress
        progress.batch += 1
        progress.epoch_batch += 1
        progress.samples += self.sizes[index]
        if index + 1 == self.count:
            # The loop calls the hook of the last micro-batch after the optimizer step: callbacks that were written for
            # Lightning read the updated weights there.
            progress.tokens += self.tokens
        elif self.batch is not None:
            for hook in self.runner.bus.on_train_batch_end:
                hook(self.outputs, self.batch, self.index)

    @property
    def has_backward_hooks(self) -> bool:
        """Whether ``on_before_backward`` or ``on_after_backward`` is overridden."""
        return self.runner.has_backward_hooks

    def start_gradients(self) -> None:
        """Drop the gradients of the previous window, once."""
        # Also where this rank adds none: if another rank does, all of them step, and the gradients of the window before
        # would be applied again.
        if self.has_old_gradients:
            self.has_old_gradients = False
            self.runner.gradients.drop(self.index)

    def window_loss(self, name: str | None) -> Tensor | None:
        """What the window minimizes: the sum of its weighted losses, of one name where there are several.

        None where this rank has no part in it.
        """
        named_losses = self.weighted_losses or ()
        losses = [loss for loss_name, loss in named_losses if loss_name == name]
        if not losses:
            return None
        return torch.stack(losses).sum()

    @contextmanager
    def repeated(self) -> Iterator[Window]:
        """Yield a copy of this window, which a strategy runs once more.

        Only hooks of gradients are called, nothing is logged or counted. Where the rules of gradients say so, random
        layers draw the same. The weighted losses are those of the latest run; all else stays that of the first.
        """
        runner = self.runner.for_repetition()
        repeated = Window(
            runner=runner,
            batches=self.batches,
            sizes=self.sizes,
            weights=self.weights,
            factors=self.factors,
            count=self.count,
            first=self.first,
            started=self.started,
            tokens=self.tokens,
            uneven=self.uneven,
            batch=self.batch,
            index=self.index,
            earlier=self.earlier,
        )
        if self.random_state is not None:
            restore_rng(self.random_state, _device_of(self.batch))
        try:
            # Gradients are enabled here, because torch's optimizers call their closure in `step`, under `no_grad`.
            with runner.metrics.unrecorded(runner.metrics.hook), torch.enable_grad():
                yield repeated
        finally:
            self.weighted_losses = repeated.weighted_losses

    @contextmanager
    def as_padding(self) -> Iterator[None]:
        """Inside, losses weigh nothing and are not noted: those of a batch that stands in for a missing one."""
        factors, loss = self.factors, self.loss
        losses = len(self.runner.losses)
        # `manual_backward` multiplies by it: that backward must run for the collectives of the other ranks.
        self.factors = [0.0]
        try:
            yield
        finally:
            self.factors = factors
            self.loss = loss
            self.runner.losses.drop_after(losses)

    def dry_run(self, batch: _Batch, index: int) -> Any:
        """Run the user's step on a batch without hooks and logging; returns its result."""
        runner = self.runner
        with (
            runner.metrics.unrecorded("training_step"),
            runner.autocast or nullcontext(),
        ):
            return runner.step(batch, index)

    def run_parts(self, index: int, parts: Sequence[tuple[_Batch, float]]) -> None:
        """Forward and backward of a micro-batch that has begun, in parts with their shares of its weight."""
        batch, metrics = self.batch, self.runner.metrics
        weight = metrics.weight
        outputs: list[tuple[_Outputs, float]] = []
        for micro_batch, share in parts:
            self.batch = micro_batch
            if weight is not None:
                metrics.use_weight(weight * share)
            loss = self.forward(index)
            outputs.append((self.outputs, share))
            if loss is None:
                continue
            # A product costs a kernel and a node of the graph.
            if share != 1.0:
                loss = loss * share
            self.backward(index, loss)
        # What follows (hooks, the end of the batch) sees the whole batch with its weight.
        self.batch = batch
        metrics.use_weight(weight)
        # Hooks see one output for the whole batch.
        if not self.runner.wants_outputs or len(outputs) == 1:
            return
        losses = [
            values["loss"] * share
            for values, share in outputs
            if isinstance(values, Mapping) and "loss" in values
        ]
        if len(losses) == len(outputs):
            last_values, _ = outputs[-1]
            self.outputs = {**last_values, "loss": torch.stack(losses).sum()}

    def note_contribution(self) -> None:
        """Note that a micro-batch has added a gradient."""
        self.contributed = True

    def turn_to(self, index: int, batch: _Batch, outputs: _Outputs = None) -> None:
        """Go back to a micro-batch that has begun, for strategies that have several under way."""
        self.batch = batch
        self.index = self.first + index
        self.outputs = outputs
        self.runner.metrics.weight = self.weights[index]

    def remember(self) -> Callable[[], None]:
        """Return a function after which the window can run once more, as if it had not run."""
        forget_counts = self.runner.remember_counts()
        contributed, outputs = self.contributed, self.outputs
        loss, earlier = self.loss, self.earlier

        def forget() -> None:
            forget_counts()
            self.contributed = contributed
            self.outputs = outputs
            self.loss = loss
            self.earlier = earlier
            # The gradients that are there now are those of the attempt: the next backward drops them.
            self.has_old_gradients = True

        return forget

    def skip(self) -> None:
        """Count the micro-batches of this window as read, and hold none: nothing is trained on it."""
        # The position in the data goes on; samples and tokens count only what is trained on.
        self.runner.progress.pass_batches(self.count)
        self.count = 0
        # A state taken before this step is counted takes back what the window has counted: here, batches alone.
        self.sizes = []
        self.batch = None

    def abandon(self) -> None:
        """Say that this window is not open any more, although no step follows it."""
        self.started = -1

    def agree_on_contribution(self, group: Group) -> None:
        """Count the gradients of all ranks: one without data does not know whether the others skipped theirs."""
        self.contributed = any(row[0] for row in group.agree([self.contributed]))

    def release(self) -> None:
        """Drop the references to batches."""
        self.batch = None
        self.earlier = None
        self.outputs = None
        self.batches = []


def _no_loss(
    output: object, by_loss: Mapping[str, object] | None
) -> ConfigurationError:
    """The error for a step that returned something without a loss."""
    keys = ""
    if isinstance(output, Mapping):
        keys = f" with keys {', '.join(map(str, output))}"
    if isinstance(output, (int, float)):
        fix = "return the tensor, without .item() or float(): gradients need it"
    elif by_loss is None:
        fix = "return a tensor, a dict with 'loss', or None to skip"
    else:
        fix = f"return a dict with one loss for each optimizer: {', '.join(by_loss)}"
    return ConfigurationError(
        "training_step returned no loss",
        found=f"{type(output).__name__}{keys}",
        fix=fix,
    )


def _backward(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]  # torch does not annotate it


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


def _refuse_step(batch: object, batch_idx: int) -> NoReturn:
    raise RuntimeError("this fit is over")


def _run_nothing(window: Window) -> None:
    """Run nothing: no collective of the other ranks needs this one's step."""
