"""The module's Trainer in the plain loop of `verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.progress import Progress
from trainer_kit.core.tensors import map_leaves
from trainer_kit.core.types import MetricValue, Nested
from trainer_kit.step.optimizers import OptimizerProxy, Optimizers, parameters_of
from trainer_kit.training.session import Session
from trainer_kit.verify.manual import PlainOptimizer

__all__ = ["Logs", "NeedsJoinError", "PlainTrainer", "StepLogs"]


@final
class NeedsJoinError(ConfigurationError):
    """The ranks of a plain loop must run together, because ``training_step`` gathers their values."""


StepLogs = dict[str, list[tuple[float, float]]]
"""The values that one micro-batch has logged by name, each with its weight."""


@final
class Logs:
    """Takes ``self.log`` of the module; keeps weighted means of values that belong to steps, and sums of an epoch.

    Attributes:
        weight: the weight of the running micro-batch in a mean.
        values: what the running micro-batch has logged.
        epoch: the weighted sum of each value in the epoch, and the sum of its weights.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.values: StepLogs = {}
        self.epoch: dict[str, tuple[float, float]] = {}

    def begin(self, weight: float, values: StepLogs | None = None) -> None:
        """Begin a micro-batch of this weight, or continue with one that has logged ``values``."""
        self.weight = weight
        self.values = {}
        if values is not None:
            self.values = values

    def log(self, name: str, value: MetricValue, *options: Any) -> None:
        """See `TrainModule.log`: (prog_bar, logger, on_step, on_epoch, reduce_fx, sync, add, batch_size, rank_zero)."""
        _, logger, on_step, on_epoch, reduce_fx, sync, _, batch_size, rank_zero = (
            options
        )
        # Only a mean over all ranks can be compared: other reductions, values of one rank
        # and metric objects have no weight here.
        is_mean = reduce_fx == "mean" and sync and not rank_zero
        if not is_mean or not isinstance(value, (int, float, Tensor)):
            return
        number = float(value)
        weight = self.weight
        if batch_size is not None:
            weight = float(batch_size)
        if on_epoch:
            # Schedulers may monitor a value under either name.
            for key in (name, f"{name}_epoch"):
                total, weights = self.epoch.get(key, (0.0, 0.0))
                self.epoch[key] = (total + number * weight, weights + weight)
        if logger is False or on_step is False:
            return
        step_name = name
        if on_epoch:
            step_name = f"{name}_step"
        self.values.setdefault(step_name, []).append((number, weight))


@final
class PlainTrainer:
    """The module's Trainer in the plain loop: attributes of the real one, and the position of this loop.

    Args:
        trainer: the verified configuration, whose attributes it shows.
        progress: the position of the plain loop.
        world: number of ranks of the compared run.
        rank: the rank that the module shall see.
        gather: stacks the tensors of all ranks for ``all_gather``; None: ranks share their data.
    """

    def __init__(
        self,
        trainer: Session,
        progress: Progress,
        world: int,
        rank: int = 0,
        gather: Callable[[Nested, bool], Nested] | None = None,
    ) -> None:
        self._trainer = trainer
        self.world_size = world
        self.global_rank = rank
        self.local_rank = rank
        self.is_global_zero = rank == 0
        self.progress = progress
        self.metrics = Logs()
        self.training = True
        self.evaluating = False
        self._backward: Callable[..., None] | None = None
        self._gather = gather

    def take(self, configured: Optimizers, manual: list[PlainOptimizer]) -> None:
        """Answer the module's ``optimizers()`` and ``lr_schedulers()``."""
        self.optimizers = configured.optimizers
        self.manual_optimizers = manual or configured.optimizers
        self.lr_scheduler_configs = configured.schedulers

    def run_backward_with(self, backward: Callable[..., None]) -> None:
        """Let ``manual_backward`` of the module call a function of the plain loop."""
        self._backward = backward

    @property
    def current_epoch(self) -> int:
        """Completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Completed steps."""
        return self.progress.step

    def manual_backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Run backward in manual optimization."""
        if self._backward is None:
            # Outside a step, or in automatic optimization: the real one refuses it.
            self._trainer.manual_backward(loss, *arguments, **options)
        else:
            self._backward(loss, *arguments, **options)

    def clip_gradients(
        self,
        optimizer: Optimizer | OptimizerProxy,
        value: float | None,
        algorithm: str | None,
    ) -> None:
        """Clip the gradients of one optimizer; None: by the Trainer's value or algorithm."""
        default_value, default_algorithm = self._trainer.settings.clip or (None, "norm")
        if value is None:
            value = default_value
        if value is None:
            return
        parameters = parameters_of(OptimizerProxy.unwrapped(optimizer))
        if (algorithm or default_algorithm) == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def all_gather(self, data: Nested, sync_grads: bool = False) -> Nested:
        """Stack the tensors of all ranks; unchanged in one process."""
        if self.world_size == 1:
            return data
        data = map_leaves(data, torch.tensor, (int, float))
        if self._gather is None:
            raise ConfigurationError(
                "verify cannot compare a step that gathers values of ranks that share their data",
                found="all_gather",
                fix="verify with a strategy that gives each rank different data",
            )
        return self._gather(data, sync_grads)

    def __getattr__(self, name: str) -> Any:
        # The user's module may read any attribute of its Trainer.
        return getattr(self._trainer, name)
