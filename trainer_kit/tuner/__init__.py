"""Searches a learning rate and a batch size with training steps on copies, before a fit."""

from __future__ import annotations

from functools import partial
from typing import final

from trainer_kit.core.lazy import other_names
from trainer_kit.training.session import Session
from trainer_kit.tuner.batch_size import scale_batch_size
from trainer_kit.tuner.learning_rate import LearningRates, lr_find

__all__ = ["LearningRates", "Tuner", "lr_find", "scale_batch_size"]

__getattr__ = other_names(__name__)


@final
class Tuner:
    """`lr_find` and `scale_batch_size` of one Trainer, by Lightning's names.

    Args:
        trainer: a `Trainer`.

    Example:
        >>> import torch
        >>> from trainer_kit import Trainer
        >>> from trainer_kit.testing import TinyModule
        >>> tuner = Tuner(Trainer(max_epochs=1, barebones=True, accelerator="cpu", devices=1))
        >>> data = [torch.randn(4, 32) for _ in range(8)]
        >>> len(tuner.lr_find(TinyModule(), data, num_training=10, update_attr=False).results["loss"])
        10
    """

    def __init__(self, trainer: Session) -> None:
        self.lr_find = partial(lr_find, trainer)
        self.scale_batch_size = partial(scale_batch_size, trainer)
