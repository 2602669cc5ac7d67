"""The times of a report are those of the steps, not of the thread that writes the journal."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.loggers import JSONLLogger, read_journal
from trainer_kit.testing import TinyModule

WRITES = threading.Event()
"""Whether values may be written: they are blocked until the last step, as by a slow disk."""


@pytest.fixture
def slow_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    append = JSONLLogger._append

    def wait(self: JSONLLogger, record: dict[str, Any]) -> None:
        # The beginning of a run is written before its first step, which waits for it.
        if "loss" in record:
            WRITES.wait(30)
        append(self, record)

    WRITES.clear()
    monkeypatch.setattr(JSONLLogger, "_append", wait)


class Timed(TinyModule):
    """A module that logs at each step, and notes when each step began."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.begun.append(time.time())
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_end(self) -> None:
        self.begun.append(time.time())
        WRITES.set()


def check_times(journal: Path, begun: list[float]) -> None:
    times = [record["time"] for record in read_journal(journal) if "loss" in record]
    assert len(times) == len(begun) - 1
    for number, at in enumerate(times):
        assert begun[number] <= at <= begun[number + 1], number


@pytest.mark.parametrize("word", ["csv", "jsonl"])
def test_a_slow_journal_of_a_fit_has_the_times_of_the_steps(
    tmp_path: Path, slow_journal: None, word: str
) -> None:
    module = Timed()
    trainer = tk.Trainer(
        max_epochs=1,
        logger=word,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, [torch.ones(2, 32)] * 5)
    check_times(Path(str(trainer.log_dir)) / "journal.jsonl", module.begun)


def test_a_slow_journal_of_a_custom_loop_has_the_times_of_the_steps(
    tmp_path: Path, slow_journal: None
) -> None:
    accelerator = tk.Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("exp")
    begun = []
    for step in range(5):
        begun.append(time.time())
        accelerator.log({"loss": 1.0}, step=step)
    begun.append(time.time())
    WRITES.set()
    accelerator.end_training()
    check_times(tmp_path / "exp" / "journal.jsonl", begun)
