"""The logged ``epoch`` belongs to training steps, and a step has one."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from tests.training.tiny import Tiny
from trainer_kit import Callback, Trainer


class Rows:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


class Net(Tiny):
    def training_step(self, batch, batch_idx):
        self.log("true_epoch", float(self.trainer.current_epoch))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("batch", batch.mean(), on_step=True, on_epoch=False)
        self.log("mean", batch.mean())

    test_step = validation_step


class AsksAgain(Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.request_validation("once more")


def test_values_of_evaluation_batches_have_no_epoch_and_a_training_step_has_one():
    rows = Rows()
    data = DataLoader(torch.ones(4, 2))
    options = {
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = Trainer(
        max_epochs=2, logger=rows, log_every_n_steps=1, callbacks=AsksAgain(), **options
    )
    module = Net()
    trainer.fit(module, data, data)
    during = list(rows.rows)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    assert not [
        values for _, values in rows.rows if "batch" in values and "epoch" in values
    ]
    true_epochs = {
        step: values["true_epoch"]
        for step, values in rows.rows
        if "true_epoch" in values
    }
    epochs = [(step, values["epoch"]) for step, values in during if "epoch" in values]
    assert [true_epochs[step] for step, _ in epochs] == [epoch for _, epoch in epochs]
    assert {step for step, values in rows.rows if "mean" in values} == {4, 8}


def test_values_on_an_axis_of_the_user_have_no_epoch_of_another_step():
    rows = Rows()

    class Logs(Callback):
        def on_train_end(self, trainer, module):
            trainer.log_metrics({"own": 1.0}, step=1)
            trainer.log_metrics({"now": 1.0})

    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=rows,
        callbacks=Logs(),
        enable_checkpointing=False,
    )
    trainer.fit(Tiny(), DataLoader(torch.ones(4, 2)))
    assert [
        (step, values)
        for step, values in rows.rows
        if "own" in values or "now" in values
    ] == [
        (1, {"own": 1.0}),
        (4, {"now": 1.0, "epoch": 0}),
    ]
