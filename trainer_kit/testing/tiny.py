"""`TinyModule`: a small module with every step that a Trainer calls; `record_hooks`: the hooks that a run calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule

__all__ = ["TinyModule", "record_hooks"]


class TinyModule(TrainModule):
    """One linear layer with every step and no data: give it batches of shape (n, 32), as a list or from a loader.

    The loss is the mean squared output, so it decreases from any start. It is logged as ``train_loss``, ``val_loss``
    and ``test_loss``; ``predict_step`` is the inherited one and returns the output, shape (n, 2).

    Args:
        lr: learning rate of plain SGD.

    Example:
        >>> from trainer_kit import Trainer
        >>> trainer = Trainer(max_steps=4, logger=False, barebones=True)
        >>> trainer.fit(TinyModule(lr=0.05), [torch.randn(8, 32) for _ in range(4)])
        >>> trainer.progress.samples
        32
    """

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output.

        Args:
            x: float32, shape (n, 32).

        Returns:
            float32, shape (n, 2).
        """
        output: Tensor = self.layer(x)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of one batch.

        Args:
            batch: float32, shape (n, 32).
            batch_idx: not used.
        """
        return self._loss("train_loss", batch)

    def validation_step(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        """The loss of one batch, of any of several loaders.

        Args:
            batch: float32, shape (n, 32).
            batch_idx: not used.
            dataloader_idx: not used.
        """
        return self._loss("val_loss", batch)

    def test_step(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        """The loss of one batch, of any of several loaders.

        Args:
            batch: float32, shape (n, 32).
            batch_idx: not used.
            dataloader_idx: not used.
        """
        return self._loss("test_loss", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the same result in one process and in several."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _loss(self, name: str, batch: Tensor) -> Tensor:
        loss: Tensor = self(batch).pow(2).mean()
        self.log(name, loss)
        return loss


_HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]


def record_hooks(callbacks: list[Callback]) -> list[str]:
    """Add a callback to ``callbacks`` that records every hook; returns the list of recorded names.

    The callback runs at its place in the list: if it is last, a name is recorded after the callbacks before it ran.

    Args:
        callbacks: the list for the Trainer; one callback is appended.

    Returns:
        A list that grows while the Trainer runs; ``clear()`` empties it.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule, record_hooks
        >>> names = record_hooks(callbacks := [])
        >>> trainer = Trainer(callbacks=callbacks, max_steps=1, barebones=True)
        >>> trainer.fit(TinyModule(), [torch.randn(4, 32)])
        >>> names[:4]
        ['setup', 'on_fit_start', 'on_train_start', 'on_train_epoch_start']
    """
    names: list[str] = []
    hooks = {name: _recording(name, names) for name in _HOOKS}
    # A class, since the bus finds hooks that a class overrides, and not attributes of an object.
    recorder = type("HookRecorder", (Callback,), hooks)
    callbacks.append(recorder())
    return names


def _recording(name: str, names: list[str]) -> Callable[..., None]:
    def hook(self: Callback, *arguments: object) -> None:
        names.append(name)

    return hook
