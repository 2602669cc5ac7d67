"""The module's Trainer in the plain loop of `verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.progress import Progress
from trainer_kit.core.tensors import map_leaves
from trainer_kit.step.optimizers import OptimizerProxy, Optimizers, parameters_of
from trainer_kit.training.session import Session
from trainer_kit.verify.manual import PlainOptimizer

__all__ = ["Logs", "NeedsJoinError", "PlainTrainer"]


@final
class NeedsJoinError(ConfigurationError):
    """The ranks of a plain loop must run together, because ``training_step`` gathers their values."""


@final
class Logs:
    """Takes ``self.log`` of the module; keeps weighted means of values that belong to steps, and sums of an epoch."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.found: dict[str, list[tuple[float, float]]] = {}
        self.epoch: dict[str, tuple[float, float]] = {}

    def log(self, name: str, value: Any, *options: Any) -> None:
        """See `TrainModule.log`: (prog_bar, logger, on_step, on_epoch, reduce_fx, sync, add, batch_size, rank_zero)."""
        _, logger, on_step, on_epoch, reduce_fx, sync, _, batch_size, rank_zero = (
            options
        )
        if (
            reduce_fx != "mean"
            or not sync
            or rank_zero
            or not isinstance(value, (int, float, Tensor))
        ):
            return
        weight = self.weight if batch_size is None else float(batch_size)
        if on_epoch:
            for key in (name, f"{name}_epoch"):
                total, weights = self.epoch.get(key, (0.0, 0.0))
                self.epoch[key] = (total + float(value) * weight, weights + weight)
        if logger is not False and on_step is not False:
            self.found.setdefault(f"{name}_step" if on_epoch else name, []).append(
                (float(value), weight)
            )


@final
class PlainTrainer:
    """The module's Trainer in the plain loop: attributes of the real one, and the position of this loop."""

    def __init__(
        self, trainer: Session, progress: Progress, world: int, rank: int = 0
    ) -> None:
        self._trainer, self.world_size = trainer, world
        self.global_rank = self.local_rank = rank
        self.progress, self.metrics = progress, Logs()
        self.training, self.evaluating, self.is_global_zero = True, False, rank == 0
        self.backward: Callable[..., None] | None = None
        self.gather: Callable[[Any, bool], Any] | None = None

    def take(self, made: Optimizers, manual: list[PlainOptimizer]) -> None:
        """Answer the module's ``optimizers()`` and ``lr_schedulers()``."""
        self.optimizers, self.manual_optimizers = (
            made.optimizers,
            manual or made.optimizers,
        )
        self.lr_scheduler_configs = made.schedulers

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
        if self.backward is None:  # with the words of the real one
            self._trainer.manual_backward(loss, *arguments, **options)
        else:
            self.backward(loss, *arguments, **options)

    def clip_gradients(
        self, optimizer: Any, value: float | None, algorithm: str | None
    ) -> None:
        """Clip the gradients of one optimizer; None: by the Trainer's value or algorithm."""
        own_value, own_algorithm = self._trainer.settings.clip or (None, "norm")
        value = own_value if value is None else value
        if value is None:
            return
        parameters = parameters_of(OptimizerProxy.unwrapped(optimizer))
        if (algorithm or own_algorithm) == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Stack the tensors of all ranks; unchanged in one process."""
        if self.world_size == 1:
            return data
        data = map_leaves(data, torch.tensor, (int, float))
        if self.gather is None:
            raise ConfigurationError(
                "verify cannot compare a step that gathers values of ranks that share their data",
                found="all_gather",
                fix="verify with a strategy that gives each rank data of its own",
            )
        return self.gather(data, sync_grads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)
