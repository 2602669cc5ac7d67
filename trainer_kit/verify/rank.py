"""A rank of the plain loop of `verify`: its module and optimizers, and the values that it logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from lightning_utilities.core.overrides import is_overridden
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import ModuleHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.signatures import takes
from trainer_kit.core.types import Batch, StepOutput
from trainer_kit.step.closures import requires_closure
from trainer_kit.step.optimizers import Optimizers, configure_optimizers
from trainer_kit.verify.manual import PlainOptimizer
from trainer_kit.verify.recorder import Micro, without_validation
from trainer_kit.verify.trainer import PlainTrainer

__all__ = ["Logged", "Rank", "logged_by", "values_of_first_rank", "weighted_means"]

Logged = tuple[str, float, float]
"""Name, value and weight of what a rank has logged."""


@final
class Rank:
    """A module in the plain loop, with its optimizers; in manual optimization each rank has one.

    Args:
        loop: the module's Trainer.
        module: the module that is trained.
        move: moves a batch onto the device; None: it stays where it is.
        before: called before each step of an optimizer in manual optimization.
    """

    def __init__(
        self,
        loop: PlainTrainer,
        module: TrainModule,
        move: Callable[..., Batch] | None,
        before: Callable[[Rank, Optimizer], None],
    ) -> None:
        self.module = module
        self.loop = loop
        self.move = move
        # First: `configure_optimizers` may read ``self.trainer``.
        module.trainer = loop
        self.configured: Optimizers = configure_optimizers(module)
        _check(self.configured)
        by_hand: list[PlainOptimizer] = []
        if not module.automatic_optimization:
            for optimizer in self.configured.optimizers:
                by_hand.append(PlainOptimizer(optimizer, partial(before, self), module))
        loop.take(self.configured, by_hand)
        without_validation(self.configured.schedulers)
        self._takes_number = takes(module.training_step, 2)
        self._micro: Micro | None = None

    def step(self, batch: Batch, number: int) -> StepOutput:
        """Call ``training_step``, which may take no number."""
        if self._takes_number:
            return self.module.training_step(batch, number)
        return self.module.training_step(batch)

    def running(self) -> Micro | None:
        """The micro-batch that runs."""
        return self._micro

    def run(self, micro: Micro | None) -> None:
        """Set the micro-batch that runs."""
        self._micro = micro

    def owns(self, name: str) -> bool:
        """Whether the module overrides a method of `TrainModule`."""
        return is_overridden(name, self.module, TrainModule)

    def hook(self, name: str, *arguments: object) -> None:
        """Call a hook of the module, where it has one."""
        if is_overridden(name, self.module, ModuleHooks):
            getattr(self.module, name)(*arguments)


def _check(configured: Optimizers) -> None:
    """Refuse optimizers that compute the loss several times."""
    for optimizer in configured.optimizers:
        if requires_closure(optimizer):
            raise ConfigurationError(
                "verify cannot train this module with a plain loop",
                found=f"{type(optimizer).__name__} computes the loss several times in a step",
                fix="compare with trainer_kit.testing.check_strategy, or verify the module with another optimizer",
            )


def logged_by(rank: Rank) -> list[Logged]:
    """Name, value and weight of what a rank has logged last."""
    return [(name, *values[-1]) for name, values in rank.loop.metrics.values.items()]


def values_of_first_rank(logged: list[Logged]) -> dict[str, float]:
    """The values by name, without the suffix of values of a step."""
    values: dict[str, float] = {}
    for name, value, _ in logged:
        # A scheduler monitors the value of its rank under the name that the user has logged.
        values.setdefault(name.removesuffix("_step"), value)
    return values


def weighted_means(logged: list[Logged]) -> dict[str, float]:
    """The mean of each value over the ranks."""
    sums: dict[str, tuple[float, float]] = {}
    for name, value, weight in logged:
        total, weights = sums.get(name, (0.0, 0.0))
        sums[name] = total + value * weight, weights + weight
    return {name: total / weights for name, (total, weights) in sums.items() if weights}
