"""What trains nothing, or does not validate, is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_kit import Trainer
from trainer_kit.testing import TinyModule

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class NoReturn(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class NoOptimizer(TinyModule):
    def configure_optimizers(self) -> Any:
        return None


def test_a_forgotten_return(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_epochs=1, **QUIET).fit(NoReturn(), [torch.randn(4, 32)] * 2)
    assert "nothing was trained: no training_step of this epoch returned a loss" in capsys.readouterr().out


def test_no_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_epochs=1, **QUIET).fit(NoOptimizer(), [torch.randn(4, 32)] * 2)
    assert "no optimizer: configure_optimizers returned None" in capsys.readouterr().out


def test_loaders_without_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    from trainer_kit import TrainModule

    class Trains(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    Trainer(max_epochs=1, **QUIET).fit(Trains(), [torch.randn(4, 32)], [torch.randn(4, 32)])
    assert "no validation: Trains has no validation_step" in capsys.readouterr().out
