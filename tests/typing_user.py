"""A program as users write it, with types: `make check` and tests/test_typing.py check it in strict mode.

It never runs: each construct is one that a user's ordinary code has.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import trainer_kit as tk
from trainer_kit import (
    Accelerator,
    LightningModule,
    Trainer,
    TrainModule,
    seed_everything,
)
from trainer_kit.callbacks import (
    EarlyStopping,
    GradientAccumulation,
    LearningRateMonitor,
    ModelCheckpoint,
    NaNGuard,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from trainer_kit.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from trainer_kit.precision import MixedPrecision
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, Strategy
from trainer_kit.tuner import Tuner

Batch = tuple[Tensor, Tensor]


class Classifier(TrainModule):
    def __init__(self, width: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.net(points)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"a": loss.detach(), "b": 1.0})
        if self.trainer.is_global_zero and self.global_step % 100 == 0:
            self.print(
                f"epoch {self.current_epoch} of {self.trainer.max_epochs}", self.device
            )
        return loss

    def validation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_acc", accuracy, batch_size=len(batch[0]))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.forward(batch[0]).softmax(1)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def setup(self, stage: str) -> None:
        self.example_input_array = torch.rand(1, 2)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.log("size", float(len(batch[0])))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1

    def on_train_epoch_end(self) -> None:
        value = self.trainer.callback_metrics.get("train_loss")
        if value is not None and float(value) > 10:
            self.trainer.should_stop = True


class Manual(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            loss = self.net(batch[0]).pow(2).mean()
            self.manual_backward(loss)
            self.clip_gradients(
                optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm"
            )
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Points(tk.DataModule):
    def setup(self, stage: str) -> None:
        points = torch.rand(2000, 2)
        self.points = TensorDataset(points, (points.sum(1) > 1).long())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.points, batch_size=32, shuffle=True)

    def val_dataloader(self) -> list[DataLoader[tuple[Tensor, ...]]]:
        return [DataLoader(self.points, batch_size=256)]


class StopWhenGood(tk.Callback):
    def __init__(self, loss: float) -> None:
        self.loss = loss

    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == 100:
            trainer.print(
                trainer.log_dir,
                trainer.default_root_dir,
                trainer.world_size,
                trainer.num_training_batches,
            )

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.callback_metrics["train_loss"] < self.loss:
            trainer.stop(f"train_loss is below {self.loss}")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        module.log("sanity", float(trainer.sanity_checking))

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss = state_dict["loss"]


def strategy(word: str) -> str | Strategy:
    if word == "fsdp":
        return FSDPStrategy()
    if word == "mesh":
        return MeshStrategy(dp_shard=2, tp=2)
    return DDPStrategy(find_unused_parameters=True) if word == "ddp" else "auto"


def train(directory: Path) -> float:
    seed_everything(1, workers=True)
    checkpoint = ModelCheckpoint(
        directory, monitor="val_acc", mode="max", save_top_k=2, save_last=True
    )
    trainer = Trainer(
        accelerator="auto", devices="auto", strategy=strategy("ddp"), precision="bf16-mixed", max_epochs=5,
        max_time="00:01:00:00", val_check_interval=0.5, limit_train_batches=0.1, accumulate_grad_batches=2,
        gradient_clip_val=1.0, default_root_dir=directory, deterministic=True, log_every_n_steps=10, resume="auto",
        logger=[CSVLogger(directory), TensorBoardLogger(str(directory), name="run"), WandbLogger(offline=True)],
        callbacks=[
            checkpoint, EarlyStopping("val_acc", mode="max", patience=3), LearningRateMonitor("step"), NaNGuard("skip"),
            GradientAccumulation({0: 1, 4: 8}), Timer(datetime.timedelta(hours=1)), TQDMProgressBar(refresh_rate=10),
            WeightAveraging(), StopWhenGood(0.01),
        ],
    )  # fmt: skip

    @trainer.on("train_step_end", every="100st")
    def show(trainer: Trainer, module: TrainModule) -> None:
        trainer.print("step", trainer.global_step, trainer.progress.samples)

    module, data = Classifier(), Points()
    trainer.fit(module, datamodule=data)
    trainer.fit(module, data.val_dataloader(), ckpt_path="last")
    results = trainer.validate(module, datamodule=data, ckpt_path="best")
    predictions = trainer.predict(module, data.val_dataloader())
    print(
        len(predictions or []),
        checkpoint.best_model_path,
        checkpoint.best_model_score,
        trainer.explain(),
    )
    loaded = Classifier.load_from_checkpoint(
        checkpoint.best_model_path, map_location="cpu", width=16
    )
    assert_type(loaded, Classifier)
    print(loaded.net, loaded.eval().freeze())
    assert_type(trainer.checkpoint_callback, ModelCheckpoint | None)
    assert_type(Points.load_from_checkpoint(directory), Points)
    print(Tuner(Trainer()).lr_find(module, datamodule=data).suggestion())
    for entry in tk.checkpoints(directory):
        print(entry.path, entry.step, tk.verify_checkpoint(entry.path))
    return results[0]["val_acc"]


def loop(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[float]:
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        log_with="tensorboard",
        project_dir=".",
    )
    accelerator.init_trackers("run", config={"lr": 0.1})
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    for points, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(loss.detach()).mean().item()
        accelerator.log({"loss": mean}, step=1)
        yield mean
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.save_state("state")
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    print(
        train(Path("runs")),
        MixedPrecision,
        sum(loop(nn.Linear(2, 2), DataLoader(TensorDataset(torch.rand(8, 2))))),
    )
