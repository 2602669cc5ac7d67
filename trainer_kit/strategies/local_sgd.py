"""Local SGD: each rank steps on its own gradients, and the ranks average weights every few steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.state_names import named_state, plain_state
from trainer_kit.core.types import SavedState, StateDict
from trainer_kit.strategies.process_group import ProcessGroup, average
from trainer_kit.strategies.signatures import StepMethod
from trainer_kit.strategies.state import States

__all__ = ["PostLocalSGD", "Replicas", "fill_absent"]

_K = TypeVar("_K")


@final
@dataclass(frozen=True)
class PostLocalSGD:
    """Average weights every ``period`` steps, and exchange no gradients in between.

    Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; https://arxiv.org/abs/1805.09767. With
    ``warmup_steps``: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (post-local SGD).

    Args:
        period: optimizer steps from one average to the next.
        warmup_steps: optimizer steps with exchanged gradients before that.

    Raises:
        StrategyError: fewer than one step, or fewer than none.

    Example:
        >>> from trainer_kit.strategies import DDPStrategy
        >>> DDPStrategy(local_sgd=PostLocalSGD(period=8, warmup_steps=1000)).describe()
        'DistributedDataParallel on cpu: gradient_as_bucket_view, broadcast_buffers; weights averaged every 8 steps'
    """

    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.period < 1 or self.warmup_steps < 0:
            raise StrategyError(
                "local SGD needs a positive period in steps",
                found=repr(self),
                fix="pass values such as period=8, warmup_steps=1000",
            )


@final
class Replicas:
    """The weights of ranks that may differ: when they are averaged, and what a checkpoint has meanwhile.

    Args:
        options: when; None: never, because every rank steps on the same gradients.
        world: the ranks.

    Attributes:
        local: whether the window under way exchanges no gradients.
        diverged: whether weights differ from rank to rank now.
    """

    def __init__(self, options: PostLocalSGD | None, world: ProcessGroup) -> None:
        self.options = options
        self.world = world
        self.local = False
        # A resumed run may have different weights on each rank: its first step decides.
        self.diverged = options is not None
        self._is_due = False
        self._is_unaveraged = False

    def begin(self, completed: int) -> bool:
        """Begin a window after this many steps; return whether it exchanges no gradients."""
        assert self.options is not None
        # Counted with the step of this window, over the whole run: a resumed run averages in the same steps.
        local_steps = completed + 1 - self.options.warmup_steps
        self.local = local_steps > 0
        self._is_due = self.local and local_steps % self.options.period == 0
        return self.local

    def bind_step(self, optimizer: Optimizer) -> StepMethod:
        """The optimizer's step, followed by the average of its parameters in steps in which it is due."""
        step_alone = optimizer.step
        if self.options is None:
            return step_alone

        def step(*args: Any, **options: Any) -> object:
            result = step_alone(*args, **options)
            # After the step: weights differ from here on, unless they are averaged now.
            self.diverged = self.local and not self._is_due
            if self._is_due:
                parameters: list[nn.Parameter] = []
                for group in optimizer.param_groups:
                    parameters += group["params"]
                average(parameters, self.world)
            return result

        return step

    def average_weights(self, module: nn.Module) -> None:
        """Average the weights if they differ."""
        if self.diverged:
            average(module.parameters(), self.world)
            self.diverged = False

    @contextmanager
    def averaged(self, module: nn.Module) -> Iterator[None]:
        """Inside, every rank has the average; afterwards its own weights again."""
        diverged = self.diverged
        # Equal weights need no copies, which take as much memory as the model.
        parameters = list(module.parameters()) if diverged else []
        rank_weights = [parameter.detach().clone() for parameter in parameters]
        self.average_weights(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weight in zip(parameters, rank_weights, strict=True):
                    parameter.copy_(weight)
            self.diverged = diverged

    @contextmanager
    def unaveraged(self) -> Iterator[None]:
        """Inside, states are those of this rank; outside, the average of all ranks."""
        self._is_unaveraged = True
        try:
            yield
        finally:
            self._is_unaveraged = False

    def module_state(self, module: nn.Module) -> StateDict:
        """With averaged weights; every rank must call it."""
        state = plain_state(module)
        if self._is_unaveraged or not self.diverged:
            return state
        # Buffers are not averaged: those of rank 0 are taken, see `DDPStrategy.shared_buffers`.
        names = named_state(module)
        weights = {name: value for name, value in state.items() if name in names}
        return {**state, **self._average_states({"": weights})[""]}

    def optimizer_state(
        self, groups: Sequence[Sequence[nn.Parameter]], state: States
    ) -> States:
        """With averaged moments, where every rank has them; every rank must call it."""
        if self._is_unaveraged or not self.local:
            return state
        parameters = list(chain.from_iterable(groups))
        # An optimizer may have no state of a parameter that this rank did not use: no average is defined for it.
        rank_counts: list[float] = [
            _count_moments(state.get(p, {})) for p in parameters
        ]
        rows = self.world.agree(rank_counts)
        complete: dict[nn.Parameter, SavedState] = {}
        for parameter, *counts in zip(parameters, *rows, strict=True):
            if counts[0] and len(set(counts)) == 1:
                complete[parameter] = state[parameter]
        return {**state, **self._average_states(complete)}

    def _average_states(self, states: Mapping[_K, SavedState]) -> dict[_K, StateDict]:
        """Copies of the states, in which tensors of floats are the average of all ranks."""
        copies: dict[_K, StateDict] = {}
        averaged: list[Tensor] = []
        for key, values in states.items():
            copies[key] = dict(values)
            for name, value in values.items():
                if _is_averageable(value):
                    copies[key][name] = value.detach().clone()
                    averaged.append(copies[key][name])
        average(averaged, self.world)
        return copies


def _is_averageable(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _count_moments(state: SavedState) -> int:
    return sum(_is_averageable(value) for value in state.values())


def fill_absent(parameters: Iterable[nn.Parameter]) -> None:
    """Give a rank without data gradients of zeros, so that its optimizer steps as the others do."""
    # An optimizer skips a parameter without a gradient, and would not decay it or move it by momentum.
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
