"""Lightning's loop objects: the counts at each hook of a fit, as Lightning has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_kit as tk

RECORDED = json.loads(Path(__file__).with_name("lightning_loops.json").read_text())
"""Printed by the same fit under the version of Lightning that the file names."""
HOOKS = {row.split()[0] for row in RECORDED["by_accumulate_grad_batches"]["1"]}


def digits(counts: Any) -> str:
    return "".join(str(value) for value in vars(counts).values())


def position(trainer: tk.Trainer, hook: str) -> str:
    loop = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    return " ".join(
        [
            hook,
            digits(loop.epoch_progress.current),
            digits(batches.current),
            digits(batches.total),
            str(batches.is_last_batch),
            str(loop.batch_idx),
            str(loop.total_batch_idx),
            str(loop.epoch_loop.global_step),
        ]
    )


class Reads(tk.Callback):
    def __init__(self) -> None:
        self.rows: list[str] = []


def reading(hook: str) -> Any:
    def read(self: Reads, trainer: tk.Trainer, *arguments: Any) -> None:
        self.rows.append(position(trainer, hook))

    return read


for name in HOOKS - {"training_step", "validation_step"}:
    setattr(Reads, name, reading(name))


class Net(tk.LightningModule):  # type: ignore[misc]
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(2, 1), reads.rows

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.append(position(self.trainer, "training_step"))
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows.append(position(self.trainer, "validation_step"))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        loop = self.trainer.fit_loop
        loop.setup_data()
        assert loop._data_source.is_defined()
        assert len(loop._data_source.dataloader()) == loop.max_batches == 3
        assert loop._data_source.instance is self.trainer.train_dataloader
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("accumulated", ["1", "2"])
def test_the_counts_at_each_hook_are_lightnings(accumulated: str) -> None:
    """Except at the start of a later epoch, where Lightning still has the batches of the last one."""
    reads = Reads()
    trainer = tk.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        callbacks=[reads],
        accumulate_grad_batches=int(accumulated),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, val = DataLoader(torch.randn(6, 2), 2), DataLoader(torch.randn(4, 2), 2)
    trainer.fit(Net(reads), train, val)
    recorded = list(RECORDED["by_accumulate_grad_batches"][accumulated])
    assert len(reads.rows) == len(recorded)
    starts = [row for row in recorded if row.startswith("on_train_epoch_start 2111")]
    assert len(starts) == 1
    columns = starts[0].split()
    columns[2], columns[4], columns[5] = "0000", "False", "-1"
    recorded[recorded.index(starts[0])] = " ".join(columns)
    assert reads.rows == recorded
    loop = trainer.fit_loop
    assert digits(loop.epoch_progress.total) == "2222"
    assert (loop.max_batches, loop.min_steps, loop.total_batch_idx) == (
        3,
        trainer.min_steps,
        5,
    )
    assert loop.epoch_loop._batches_that_stepped == trainer.global_step
    assert repr(loop.epoch_loop.batch_progress.total) == (
        "Counts(ready=6, started=6, processed=6, completed=6)"
    )


def test_the_loaders_of_evaluations() -> None:
    module = Net(Reads())
    trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=1)
    loaders = [DataLoader(torch.randn(4, 2), 2), DataLoader(torch.randn(6, 2), 2)]
    trainer.validate(module, loaders[0])
    trainer.test(module, loaders[1])
    trainer.predict(module, loaders[:1])
    for loop, sizes in [
        (trainer.validate_loop, [2]),
        (trainer.fit_loop.epoch_loop.val_loop, [2]),
        (trainer.test_loop, [3]),
        (trainer.predict_loop, [2]),
    ]:
        assert (list(loop.max_batches), loop.num_dataloaders) == (sizes, 1)
    assert trainer.predict_loop.current_batch_indices == []


def test_counts_cannot_be_set() -> None:
    trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=1)
    with pytest.raises(AttributeError, match=r"completed cannot be set: .*ckpt_path="):
        trainer.fit_loop.epoch_progress.current.completed = 3
    with pytest.raises(AttributeError, match=r"max_batches of FitLoop cannot be set"):
        trainer.fit_loop.max_batches = 3
    with pytest.raises(
        AttributeError, match=r"no inference_mode: Trainer\(inference_mode="
    ):
        trainer.validate_loop.inference_mode = False
    trainer.fit_loop.epoch_loop.max_steps = 5
    assert trainer.max_steps == 5
