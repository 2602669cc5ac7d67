"""Local SGD in a custom training loop: processes step separately, and average weights every few steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import final

from torch import nn

from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies.process_group import average

__all__ = ["LocalSGD"]


@final
class LocalSGD:
    """Skip the gradient exchange in this context, and average weights every ``local_sgd_steps`` steps.

    Source: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; https://arxiv.org/abs/1805.09767.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: a prepared model.
        local_sgd_steps: the number of optimizer steps between two averages.
        enabled: False: the context has no effect, as on a single process.

    Raises:
        ConfigurationError: ``local_sgd_steps`` is below one, or the model is sharded.

    Example:
        >>> import torch
        >>> from trainer_kit import Accelerator, LocalSGD
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(16, 4, 2):
        ...         accelerator.backward(model(batch).mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if local_sgd_steps < 1:
            raise ConfigurationError(
                "local_sgd_steps is at least 1",
                found=f"local_sgd_steps={local_sgd_steps}",
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        if self.enabled and accelerator.strategy.sharded:
            raise ConfigurationError(
                "local SGD cannot average a sharded model",
                found=f"LocalSGD under {accelerator.strategy.name!r}",
                fix="train data parallel (DDP), or leave LocalSGD out",
            )
        self.num_steps = 0
        self._no_sync: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.enabled:
            # Steps since the last average would leave each process with other weights. After an error the other
            # processes may not come to the average.
            if error is None and self.num_steps % self.local_sgd_steps:
                self._average()
            self._no_sync.__exit__(kind, error, traceback)

    def step(self) -> None:
        """Count a step, and average weights when due; call this after each ``optimizer.step()``."""
        # Inside an accumulation window the optimizer has not stepped.
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        model = self.accelerator.unwrap_model(self.model)
        # One parameter at a time, so that no process holds a second copy of all weights.
        for parameter in model.parameters():
            average([parameter], self.accelerator.world)
