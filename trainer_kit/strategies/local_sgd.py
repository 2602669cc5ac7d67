"""Local SGD: each rank steps on its own gradients, and the ranks average weights every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_kit.core.errors import StrategyError
from trainer_kit.core.state_names import named_state, plain_state
from trainer_kit.strategies.process_group import ProcessGroup, average
from trainer_kit.strategies.state import States

__all__ = ["PostLocalSGD", "Replicas", "fill_absent"]


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
        self.options, self.world = options, world
        self.local = False
        self.diverged = (
            options is not None
        )  # of a resumed run, until its first step says more
        self._due = self._own = False

    def begin(self, completed: int) -> bool:
        """Begin a window after so many steps; return whether it exchanges no gradients."""
        assert self.options is not None
        after = completed + 1 - self.options.warmup_steps
        self.local = after > 0
        self._due = self.local and after % self.options.period == 0
        return self.local

    def stepping(self, optimizer: Optimizer) -> Callable[..., Any]:
        """The optimizer's step, and the average of its parameters where it is due."""
        own = optimizer.step
        if self.options is None:
            return own

        def step(*args: Any, **options: Any) -> Any:
            result = own(*args, **options)
            self.diverged = self.local and not self._due
            if self._due:
                average(
                    (p for group in optimizer.param_groups for p in group["params"]),
                    self.world,
                )
            return result

        return step

    def unite(self, module: nn.Module) -> None:
        """Average the weights, where they differ."""
        if self.diverged:
            average(module.parameters(), self.world)
            self.diverged = False

    @contextmanager
    def united(self, module: nn.Module) -> Iterator[None]:
        """Inside, every rank has the average; afterwards its own weights again."""
        diverged = self.diverged
        own = [(p, p.detach().clone()) for p in module.parameters()] if diverged else []
        self.unite(module)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in own:
                    parameter.copy_(value)
            self.diverged = diverged

    @contextmanager
    def own(self) -> Iterator[None]:
        """Inside, states are those of this rank; outside, the average of all ranks."""
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """With averaged weights; every rank must call it."""
        state = plain_state(module)
        if self._own or not self.diverged:
            return state
        weights = named_state(module)
        return {
            **state,
            **self._averaged(
                {"": {name: state[name] for name in state if name in weights}}
            )[""],
        }

    def optimizer_state(
        self, groups: Sequence[Sequence[nn.Parameter]], state: States
    ) -> States:
        """With averaged moments, where every rank has them; every rank must call it."""
        if self._own or not self.local:
            return state
        parameters = [p for group in groups for p in group]
        numbers: list[float] = [len(_floats(state.get(p, {}))) for p in parameters]
        rows = self.world.agree(numbers)
        alike = [
            p
            for p, *counts in zip(parameters, *rows, strict=True)
            if counts[0] and len(set(counts)) == 1
        ]
        return {**state, **self._averaged({p: state[p] for p in alike})}

    def _averaged(
        self, states: Mapping[Any, Mapping[str, Any]]
    ) -> dict[Any, dict[str, Any]]:
        copies = {key: {**own, **_floats(own)} for key, own in states.items()}
        average(
            [own[name] for key, own in copies.items() for name in _floats(states[key])],
            self.world,
        )
        return copies


def _floats(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors that can be averaged."""
    tensors = {
        name: value for name, value in values.items() if isinstance(value, Tensor)
    }
    return {
        name: value.detach().clone()
        for name, value in tensors.items()
        if value.is_floating_point()
    }


def fill_absent(parameters: Iterable[nn.Parameter]) -> None:
    """Give a rank without data gradients of zeros, so that its optimizer steps as the others do."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
