"""``Trainer(compile="step")``: runs the micro-steps of windows as flat graphs of operators.

A kind of batch is captured when it comes for the second time. The step runs as always then; afterwards it is traced,
and its graph runs once on the same batch. The next batch of the kind runs both ways, too: a graph that holds something
of the batch that it was traced with differs there. Only one that gives the same bits both times is used from then on.
Whatever cannot be captured runs as without this, and the reason is printed once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.files import same_bits
from trainer_kit.core.display import plural
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.torch_private import version_of
from trainer_kit.step.batch_kinds import (
    CaptureRefused,
    copy_containers,
    describe_batch,
)
from trainer_kit.step.module_state import ModuleState, find_hook, state_tensors
from trainer_kit.step.side_effects import remember_effects
from trainer_kit.step.step_graph import StepGraph, has_layout_of, trace_step
from trainer_kit.step.torch_private import reads_value
from trainer_kit.step.window import Window
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.strategy import Strategy

__all__ = ["CapturedSteps"]

_MOST_GRAPHS: Final = 8
"""Graphs of one fit: each is traced once, which takes as long as many steps."""
_MOST_KINDS: Final = 1000
"""Kinds of batches that are remembered to have come once."""


@final
@dataclass
class _Captured:
    """A graph, and the state of the module that it holds for.

    Attributes:
        is_confirmed: whether it has given the same bits as the step on a batch that it was not traced with.
    """

    graph: StepGraph
    state: ModuleState
    is_confirmed: bool = False


@final
class CapturedSteps:
    """Replaces ``strategy.forward_backward`` and the backward of windows.

    Args:
        strategy: one under which forward and backward are the module's alone.
        module: whose step is captured.
        step: the module's, with a batch and its index.
        say: prints a line.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: TrainModule,
        step: StepMethod,
        say: Callable[[str], None],
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._step = step
        self._say = say
        self._captured: dict[Hashable, list[_Captured]] = {}
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._reasons: list[str] = []
        # Of a replay whose hooks of the backward run next: parameters, and their gradients.
        self._gradients: tuple[list[nn.Parameter], list[Tensor]] | None = None
        # Of a step that is captured.
        self._comparison: _Comparison | None = None

    def __call__(self, window: Window) -> None:
        """Forward and backward of one window."""
        for index in range(window.count):
            window.begin(index)
            tensors: list[Tensor] = []
            try:
                kind = describe_batch(window.batch, tensors)
            except CaptureRefused as refusal:
                self._note(str(refusal))
                _run(window, index)
            else:
                for captured in self._captured.get(kind, ()):
                    if captured.state.is_current():
                        if captured.is_confirmed:
                            self._replay(captured.graph, window, index, tensors)
                        else:
                            self._capture(window, index, kind, tensors, captured)
                        break
                else:
                    self._run_new(window, index, kind, tensors)
            window.end(index)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Store the gradients of a replay, or compute those of a step that has run."""
        if self._gradients is not None:
            parameters, gradients = self._gradients
            self._gradients = None
            # As autograd adds them.
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
            return
        if self._comparison is not None:
            self._comparison.note_before()
        loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's
        if self._comparison is not None:
            self._comparison.note_after()

    def describe(self) -> str:
        """What was captured, and why something was not."""
        captured = list(chain.from_iterable(self._captured.values()))
        texts = [f"not captured: {reason}" for reason in self._reasons]
        if captured:
            sizes = ", ".join(str(each.graph.operators) for each in captured)
            texts.insert(0, f"{plural(len(captured), 'graph')} ({sizes} operators)")
        if not texts:
            return "captured at the second batch of each shape"
        return "; ".join(texts)

    def _replay(
        self,
        graph: StepGraph,
        window: Window,
        index: int,
        tensors: list[Tensor],
    ) -> None:
        """Run a graph in the place of a step."""
        metrics = window.runner.metrics
        metrics.hook = "training_step"
        # Before the graph, which makes new gradients: there is never memory for both. Hooks are called after it.
        if window.runner.gradients.droppable is not None:
            window.start_gradients()
        factor = graph.unit
        if window.factors is not None:
            factor = factor * window.factors[index]
        loss, gradients, logged, returned = graph.run(*tensors, factor)
        if graph.logs:
            graph.record_logs(metrics.log, logged)
        output = loss
        if graph.returned is not None:
            output = graph.output_of(loss, returned)
        self._gradients = graph.parameters, gradients
        try:
            window.backward(index, window.weighted(loss, output, index))
        finally:
            # After an exception of a hook, which may have come before the backward.
            self._gradients = None

    def _run_new(
        self,
        window: Window,
        index: int,
        kind: Hashable,
        tensors: list[Tensor],
    ) -> None:
        """Run a step that no graph can run, and capture it if its batch is of a kind that comes again."""
        if kind in self._refused:
            _run(window, index)
            return
        if kind not in self._seen:
            if len(self._seen) < _MOST_KINDS:
                self._seen.add(kind)
            else:
                self._note("batches are of too many kinds")
            _run(window, index)
            return
        captured = self._captured.setdefault(kind, [])
        if sum(map(len, self._captured.values())) >= _MOST_GRAPHS:
            self._refuse_further(kind, captured)
            _run(window, index)
            return
        self._capture(window, index, kind, tensors)

    def _refuse_further(self, kind: Hashable, captured: list[_Captured]) -> None:
        """Capture no more: batches or attributes are of too many kinds."""
        self._refused.add(kind)
        reason = (
            f"there are {_MOST_GRAPHS} graphs already, and batches are of more kinds"
        )
        if captured:
            change = captured[-1].state.find_change()
            reason = f"{change or 'an attribute of the module'} changes too often"
        self._note(reason)

    def _note(self, reason: str) -> None:
        """Say once why something is not captured."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            self._say(f'compile="step": a step runs without a graph: {reason}')

    def _capture(
        self,
        window: Window,
        index: int,
        kind: Hashable,
        tensors: list[Tensor],
        captured: _Captured | None = None,
    ) -> None:
        """Run a step, trace it or take the graph that was captured, and keep the graph if it does the same."""
        module = self._module
        try:
            _check_tensors(module, tensors)
            start = _Moment(module, self._strategy.device)
        except CaptureRefused as refusal:
            self._refuse(kind, refusal, captured)
            _run(window, index)
            return
        batch = copy_containers(window.batch)
        versions = list(map(version_of, tensors))
        comparison = self._comparison = _Comparison(module)
        try:
            loss = _run(window, index)
        finally:
            self._comparison = None
        outcome = _Moment(module, self._strategy.device)
        try:
            if loss is None:
                raise CaptureRefused("training_step returned no loss")
            if versions != list(map(version_of, tensors)):
                raise CaptureRefused("training_step changes its batch")
            start.check_parameters(outcome)
            start.restore()
            if captured is None:
                graph = self._trace(window, batch, tensors, loss.detach())
                captured_now = _Captured(graph, start.state)
            else:
                captured_now = captured
            _check_unchanged(start.state, batch, kind)
            start.restore()
            _check_equal(captured_now.graph, window, index, tensors, loss, comparison)
            outcome.check_reached()
        # Of any class: the step itself has run, and training continues from its outcome.
        except Exception as error:
            self._refuse(kind, error, captured)
        else:
            if captured is None:
                self._captured[kind].append(captured_now)
            captured_now.is_confirmed = captured is not None
        finally:
            outcome.restore()

    def _refuse(
        self, kind: Hashable, error: Exception, captured: _Captured | None
    ) -> None:
        """Note that batches of a kind run without a graph, and why."""
        self._refused.add(kind)
        if captured is not None:
            self._captured[kind].remove(captured)
        reason = str(error)
        if not isinstance(error, CaptureRefused):
            reason = _reason_of(error)
        self._note(reason)

    def _trace(
        self,
        window: Window,
        batch: object,
        tensors: list[Tensor],
        loss: Tensor,
    ) -> StepGraph:
        module = self._module
        hook = find_hook(module)
        if hook is not None:
            raise CaptureRefused(f"each step calls {hook}")
        if any(type(each) is not nn.Parameter for each in module.parameters()):
            raise CaptureRefused("a parameter has its own class")
        return trace_step(
            module,
            self._step,
            batch,
            tensors,
            torch.ones_like(loss),
            window.runner.autocast,
        )


def _run(window: Window, index: int) -> Tensor | None:
    """Forward and backward of a micro-batch that has begun, as every strategy's; returns its loss."""
    loss: Tensor | None = window.forward(index)
    if loss is not None:
        window.backward(index, loss)
    return loss


def _reason_of(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    if reads_value(error):
        return "training_step reads a value out of a tensor (.item(), or an if)"
    return f"it cannot be traced ({type(error).__name__}: {text})"


def _check_unchanged(state: ModuleState, batch: object, kind: Hashable) -> None:
    """Refuse a step that changes attributes, or the containers of its batch."""
    change = state.find_change()
    if change is not None:
        raise CaptureRefused(f"training_step changes {change}")
    if describe_batch(batch, []) != kind:
        raise CaptureRefused("training_step changes its batch")


def _check_equal(
    graph: StepGraph,
    window: Window,
    index: int,
    tensors: list[Tensor],
    loss: Tensor,
    comparison: _Comparison,
) -> None:
    """Run a graph, and refuse it if loss or gradients differ in any bit from those of the step."""
    factor, weight = graph.unit, 1.0
    if window.factors is not None:
        weight = window.factors[index]
        factor = factor * weight
    graph_loss, gradients, _, _ = graph.run(*tensors, factor)
    if not same_bits(graph_loss * weight, loss.detach()):
        raise CaptureRefused("the graph of training_step gives a different loss")
    if not comparison.agrees_with(graph.parameters, gradients):
        raise CaptureRefused("the graph of training_step gives different gradients")


@final
class _Comparison:
    """The gradients before and after the backward of a step that is captured."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._before: list[Tensor | None] = []
        self._after: list[Tensor | None] = []

    def note_before(self) -> None:
        """The backward runs next."""
        self._before = self._copy_gradients()

    def note_after(self) -> None:
        """The backward has run; hooks that may change gradients have not."""
        self._after = self._copy_gradients()

    def agrees_with(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
    ) -> bool:
        """Whether a backward that gives these gradients leads to what the step's has led to."""
        added = dict(zip(map(id, parameters), gradients, strict=True))
        for parameter, before, after in zip(
            self._parameters, self._before, self._after, strict=True
        ):
            gradient = added.get(id(parameter))
            if gradient is None:
                gradient = before
            elif before is not None:
                gradient = before.add_(gradient)
            if gradient is None or after is None:
                if gradient is not after:
                    return False
            elif not has_layout_of(gradient, after) or not same_bits(gradient, after):
                return False
        return True

    def _copy_gradients(self) -> list[Tensor | None]:
        copies: list[Tensor | None] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.detach().clone()
            copies.append(gradient)
        return copies


@final
class _Moment:
    """What steps change besides gradients, as it is now: tensors, attributes, random generators.

    Args:
        module: whose steps they are.
        device: whose generator they draw from.

    Attributes:
        state: the attributes.

    Raises:
        CaptureRefused: something in the module cannot be put back.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._random = rng_state(device)
        self._generators = _generators(device)
        self._restore_effects = remember_effects(module)
        self.state = ModuleState(module)
        self._parameters = list(module.parameters())
        self._tensors = [*self._parameters, *state_tensors(module)]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    def restore(self) -> None:
        """Put everything back."""
        restore_rng(self._random, self._device)
        self._restore_effects()
        self.state.restore()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            # Only what differs: a tensor may lie in memory that cannot be written.
            if not same_bits(tensor.detach(), copy):
                # As data: it may be part of a graph of the user's.
                tensor.data.copy_(copy)

    def check_parameters(self, outcome: _Moment) -> None:
        """Refuse a step between this moment and another that changes a parameter."""
        for copy, later in zip(
            self._copies[: len(self._parameters)], outcome._copies, strict=False
        ):
            if not same_bits(copy, later):
                raise CaptureRefused("training_step changes a parameter")

    def check_reached(self) -> None:
        """Refuse a graph that has not led to this moment."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            if not same_bits(tensor.detach(), copy):
                raise CaptureRefused(
                    "the graph of training_step gives different buffers"
                )
        if _generators(self._device) != self._generators:
            raise CaptureRefused(
                "the graph of training_step draws different random numbers"
            )


def _check_tensors(module: nn.Module, tensors: list[Tensor]) -> None:
    """Refuse tensors that a trace could not tell apart, or that could not be put back."""
    state = state_tensors(module)
    identities = set(map(id, state))
    identities.update(map(id, tensors))
    if len(identities) < len(state) + len(tensors):
        raise CaptureRefused("one tensor occurs twice in the batch and the attributes")
    for tensor in state:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise CaptureRefused("a buffer is sparse or nested")
        if tensor.is_inference() or _is_expanded(tensor):
            raise CaptureRefused("a buffer cannot be written")


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a tensor lie in one place."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in dimensions)


def _generators(device: torch.device) -> bytes:
    """The state of all random generators, in a form that can be compared."""
    state = rng_state(device)
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.numpy().tobytes()  # no sync point: they are on the CPU
    return pickle.dumps(state)
