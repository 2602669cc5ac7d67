"""A program with mistakes that an editor must underline; tests/test_typing.py runs type checkers on it.

A line with a mistake ends in ``# error``; no other line may have one. The program never runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import assert_type

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, ModelCheckpoint


class Net(tk.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs: Tensor = self.layer(batch)
        loss = outputs.sum()
        self.log("loss", loss, prog_bar=True)
        self.log("loss", loss, progress_bar=True)  # error
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log_dict({"size": float(len(batch))})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class AsInLightning(tk.Callback):
    """Lightning's parameter names, annotated with the classes that the user's program has."""

    def setup(
        self, trainer: tk.Trainer, pl_module: tk.LightningModule, stage: str
    ) -> None:
        self.stage = stage

    def on_train_epoch_end(
        self, trainer: tk.Trainer, pl_module: tk.LightningModule
    ) -> None:
        assert_type(trainer.callback_metrics, dict[str, Tensor])
        trainer.stop("done")

    def on_train_batch_end(
        self,
        trainer: tk.Trainer,
        pl_module: Net,
        outputs: object,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        assert_type(pl_module.layer, torch.nn.Linear)


class WithOtherNames(tk.Callback):
    def on_train_start(self, trainer: tk.Trainer, module: Net) -> None:
        module.print(trainer.max_epochs)

    def on_validation_batch_end(
        self,
        trainer: tk.Trainer,
        module: Net,
        out: Any,
        batch: Tensor,
        index: int,
        loader: int = 0,
    ) -> None:
        module.print(index, loader)

    def on_train_end(self, trainer: tk.Trainer) -> None:  # error
        trainer.print("done")


data = tk.DataModule.from_datasets(TensorDataset(torch.zeros(2, 2)))
trainer = tk.Trainer(
    max_epochs=1,
    callbacks=[AsInLightning(), EarlyStopping("loss"), ModelCheckpoint(monitor="loss")],
    devices=2,
    precision="bf16-mixed",
)
trainer.fit(Net(), datamodule=data)
trainer.fit(Net(), dataloader=data)  # error
assert_type(trainer.predict(Net()), list[Any] | None)
assert_type(trainer.validate(Net()), list[dict[str, float]])
assert_type(trainer.checkpoint_callback, ModelCheckpoint | None)
assert_type(Net.load_from_checkpoint("last.ckpt"), Net)
tk.Trainer(max_epoch=3)  # error
tk.Trainer(max_epochs="3")  # error
EarlyStopping("loss", patient=3)  # error

accelerator = tk.Accelerator(mixed_precision="bf16")
model, optimizer = accelerator.prepare(Net(), torch.optim.Adam([torch.zeros(1)]))
with accelerator.accumulate(model):
    accelerator.backward(torch.tensor(1.0))
tk.Accelerator(gradient_accumulation=2)  # error
