"""The line of a finished epoch shows that epoch's values, those of its end included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule


class Counting(TinyModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("index", float(batch_idx), prog_bar=True)
        self.log("mean", float(batch_idx), prog_bar=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_the_line_of_an_epoch_has_its_own_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Counting(), [torch.randn(2, 32)] * 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Epoch 0/0: 3/3 batches")
    assert set(line.split(", ")[2:]) == {"index=2", "mean=1"}
