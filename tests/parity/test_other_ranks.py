"""A run goes on in the middle of an epoch on another number of ranks: no sample twice, none left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Trainer, TrainModule
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import run_distributed


class Ids(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].long().flatten().tolist()
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(directory: str, ranks: int, batches: int, resume: bool) -> list[int]:
    module = Ids()
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        seed=1,
        max_epochs=1,
        limit_train_batches=1.0,
        max_steps=batches,
        barebones=True,
    )
    data = DataLoader(TensorDataset(torch.arange(24.0).unsqueeze(1)), batch_size=2, shuffle=True)
    path = Path(directory) / "cut"
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.seen


def test_two_ranks_then_one(tmp_path: Path) -> None:
    before = run_distributed(train, 2, str(tmp_path), 2, 3, False)
    after = train(str(tmp_path), 1, -1, True)
    assert len(before[0] + before[1]) == len(after) == 12
    assert sorted(before[0] + before[1] + after) == list(range(24))


def test_one_rank_then_two(tmp_path: Path) -> None:
    before = train(str(tmp_path), 1, 4, False)
    after = run_distributed(train, 2, str(tmp_path), 2, -1, True)
    assert sorted(before + after[0] + after[1]) == list(range(24))


def test_no_whole_number_of_batches_is_refused(tmp_path: Path) -> None:
    train(str(tmp_path), 1, 3, False)
    with pytest.raises(CheckpointError, match="no whole number of batches"):
        run_distributed(train, 2, str(tmp_path), 2, -1, True)
