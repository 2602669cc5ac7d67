"""``self.log(..., rank_zero_only=True)`` publishes the value of rank 0, on one process and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_kit as tk
from trainer_kit.testing import TinyModule


class Logs(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value = 1.0 + self.trainer.global_rank
        self.log("step", value, rank_zero_only=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", 4.0 + self.trainer.global_rank, rank_zero_only=True)


def fit(root: Path, devices: int) -> dict[str, float]:
    trainer = tk.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=root,
        log_every_n_steps=1,
    )
    trainer.fit(
        Logs(), [torch.randn(4, 32)] * 2 * devices, [torch.randn(4, 32)] * devices
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_on_one_process(tmp_path: Path) -> None:
    values = fit(tmp_path, 1)
    assert values["step_step"] == values["step_epoch"] == 1.0
    assert values["score"] == 4.0


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_on_two_processes(tmp_path: Path) -> None:
    values = fit(tmp_path, 2)
    if dist.get_rank() == 0:
        assert values["step_step"] == values["step_epoch"] == 1.0
        assert values["score"] == 4.0
