"""Loggers of ranks that write nothing are not finalized when they take over the version of rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_kit as tk
from trainer_kit.loggers import CSVLogger
from trainer_kit.testing import TinyModule


class Watched(CSVLogger):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.statuses: list[str] = []

    def finalize(self, status: str) -> None:
        self.statuses.append(status)
        super().finalize(status)


@pytest.mark.world_size(2)
def test_only_rank_0_finalizes_its_logger_and_only_at_the_end(tmp_path: Path) -> None:
    logger = Watched(tmp_path)
    assert (
        logger.version == 0
    )  # also where a script has read the directory on every rank
    if dist.get_rank() == 1:
        logger.load_state_dict({"name": logger.name, "version": 5})
        assert logger.statuses == []
        logger.load_state_dict({"name": logger.name, "version": 0})
    for _ in range(2):
        trainer = tk.Trainer(
            max_steps=1,
            accelerator="cpu",
            devices=2,
            logger=logger,
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        trainer.fit(TinyModule(), [torch.randn(4, 32)] * 2)
    assert logger.statuses == (["success"] * 2 if dist.get_rank() == 0 else [])
