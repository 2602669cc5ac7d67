"""What a mesh does around whole steps: sequences that are divided ahead of them, losses that are divided in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.strategies.transforms.context import ContextParallel, context_parallel, with_positions
from trainer_kit.strategies.transforms.tensor import whole_outputs

__all__ = ["AroundSteps"]


@final
class AroundSteps:
    """Nothing, until `take` finds something in a plan."""

    def __init__(self) -> None:
        self._context: ContextParallel | None = None
        self._placed: Callable[[Any], Any] | None = None
        self._splits_loss = False

    def take(self, module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
        """What the plan of a module asks for.

        Args:
            module: whose steps they are.
            plan: how it may be split.
            mesh: with the axes ``cp`` and ``tp``.
        """
        self._splits_loss = mesh["tp"].size() > 1 and plan.loss_parallel
        if plan.context is not None and plan.context.positions is not None:
            self._placed = partial(with_positions, plan.context)
        if mesh["cp"].size() > 1:
            self._context = context_parallel(module, plan)
            self._context.apply(module, mesh["cp"])

    @property
    def shard_batch(self) -> Callable[[Any], Any] | None:
        """A part of each sequence; positions, where the plan asks for them."""
        return self._placed if self._context is None else self._context.shard_batch

    def method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A step; a loss that is divided becomes one number."""
        return whole_outputs(method) if self._splits_loss else method

    def evaluation(self, call: Callable[..., Any], whole: bool) -> Callable[..., Any]:
        """A step of an evaluation, which nothing else is around. ``whole``: batches are not divided."""
        if self._context is None and not self._splits_loss:
            return call
        place = self._placed if whole else None

        def evaluate(batch: Any, *others: Any) -> Any:
            with self.computing(divided=not whole):
                return call(batch if place is None else place(batch), *others)

        return evaluate

    @contextmanager
    def computing(self, divided: bool = True, first: bool = False) -> Iterator[None]:
        """Around a window.

        Args:
            divided: its batches are.
            first: look whether all attention is seen.
        """
        with ExitStack() as stack:
            if self._splits_loss:
                stack.enter_context(loss_parallel())
            if self._context is not None and divided:
                stack.enter_context(self._context.attending(checked=first))
            yield
