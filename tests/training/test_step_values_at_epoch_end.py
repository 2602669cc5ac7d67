"""A value that only single steps log is there for monitors and the bar when the epoch ends between two flushes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_kit import Callback, Trainer
from trainer_kit.testing import TinyModule


class Counting(TinyModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("index", float(batch_idx), prog_bar=True)
        return super().training_step(batch, batch_idx)


class Seen(Callback):
    order = "late"

    def __init__(self) -> None:
        self.metrics: list[float] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append(float(trainer.callback_metrics["index"]))

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.logged.append((step, dict(metrics)))


@pytest.mark.parametrize("log_every", [50, 2, 3])
def test_the_last_value_of_the_epoch_is_seen(log_every: int) -> None:
    seen = Seen()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=log_every,
        callbacks=seen,
        logger=seen,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Counting(), [torch.randn(2, 32)] * 3)
    assert seen.metrics == [2.0, 2.0]
    assert trainer.progress_bar_metrics["index"] == 2.0
    assert [step for step, values in seen.logged if "index" in values] == list(
        range(log_every, 7, log_every)
    )
