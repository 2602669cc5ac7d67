"""Ranks whose clocks run at different speed end, and validate, at the same step."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Callback, Trainer
from trainer_kit.testing import TinyModule, run_distributed


class Validations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)


def train(settings: dict[str, Any]) -> tuple[int, list[int], float]:
    rank = int(os.environ["RANK"])
    steps = 0

    def clock() -> float:
        return steps * (
            1.0 + rank / 2
        )  # rank 0 takes a second a step, rank 1 half as much again

    time.monotonic = clock
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        callbacks=(validations := Validations()),
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **settings,
    )

    @trainer.on("train_step_end")
    def tick(trainer: Any, module: Any) -> None:
        nonlocal steps
        steps += 1

    trainer.fit(
        TinyModule(),
        DataLoader(torch.randn(800, 32), batch_size=4),
        DataLoader(torch.randn(8, 32)),
    )
    return trainer.global_step, validations.steps, trainer.progress.seconds


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_duration": "27s"}, 18),
        ({"max_duration": "100s", "val_check_interval": "29s"}, 67),
    ],
)
def test_clocks_that_differ_decide_together(
    settings: dict[str, Any], steps: int
) -> None:
    first, second = run_distributed(train, 2, settings)
    assert first == second
    # Steps of a second are looked at one by one, and the slowest rank's 1.5 seconds count for both.
    assert first[0] == steps
    assert first[2] == 1.5 * steps
    if "val_check_interval" in settings:
        assert first[1] == [20, 39, 58]
