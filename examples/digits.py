"""Train a small convolutional network on scikit-learn's handwritten digits, and test its best checkpoint.

    python examples/digits.py                # on the available device
    python examples/digits.py --devices 2    # on two processes: the same global batch, the same accuracy

The data comes with scikit-learn: 1797 images of 8x8 pixels; nothing is downloaded. The run writes to ./runs.
"""

# %% [markdown]
# ## The data
#
# A `DataModule` is optional: it groups the training, validation and test loaders. `setup` is called on every process
# before the loaders are created.

# %%
from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint


class Digits(tk.DataModule):
    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = (
            torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        )  # (1797, 1, 8, 8), 0 to 1
        labels = torch.tensor(digits.target)
        train, rest = train_test_split(
            range(len(labels)), test_size=0.3, random_state=0, stratify=labels
        )
        val, test = train_test_split(
            rest, test_size=0.5, random_state=0, stratify=labels[rest]
        )
        self.parts = {
            name: TensorDataset(images[part], labels[part])
            for name, part in (("train", train), ("val", val), ("test", test))
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.parts["train"], shuffle=True
        )  # batches: see global_batch_size below

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["val"], batch_size=256)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts["test"], batch_size=256)


# %% [markdown]
# ## The module
#
# A `TrainModule` is an `nn.Module` that also defines the training step for one batch. *Why is there no `.cuda()`,
# `.to(device)`, `.backward()`, `.step()`, `.train()` or `no_grad()`?* The Trainer calls these where a hand-written loop
# would: it moves batches and weights to the device, runs backward on the loss that `training_step` returns, and
# validates in evaluation mode without gradients. The same file runs on a CPU, on one GPU and on several.
#
# *Why `self.log`?* It keeps the value on the device, averages it over the epoch (weighted by batch) and over all
# processes, and passes it to the progress bar, to the loggers, and to the callbacks that monitor it by name.


# %%
class ConvNet(tk.TrainModule):
    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 16, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}_loss", loss)
        self.log(
            f"{stage}_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True
        )
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=steps
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# %% [markdown]
# ## Training and testing
#
# `EarlyStopping` ends the run when the validation loss stops falling; `ModelCheckpoint` keeps the checkpoint with the
# best accuracy, which `test(ckpt_path="best")` loads. `global_batch_size` is the number of images per step over all
# processes, so `--devices 2` trains the same model.


# %%
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices", default="auto", help="how many; on a CPU: processes"
    )
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--root", default="runs", help="where runs are written")
    parser.add_argument(
        "--fast", action="store_true", help="two epochs of four batches"
    )
    args = parser.parse_args()

    tk.seed_everything(1)
    trainer = tk.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=2 if args.fast else args.epochs,
        limit_train_batches=4 if args.fast else None,
        global_batch_size=64,
        default_root_dir=args.root,
        log_every_n_steps=10,
        callbacks=[
            EarlyStopping("val_loss", patience=5),
            ModelCheckpoint(
                monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}"
            ),
            LearningRateMonitor("step"),
        ],
    )
    data = Digits()
    trainer.fit(ConvNet(), datamodule=data)
    results = trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    trainer.print(f"test accuracy {results[0]['test_acc']:.4f}")
    trainer.print(f"best checkpoint: {trainer.checkpoint_callback.best_model_path}")
    trainer.print(f"curves: tensorboard --logdir {trainer.log_dir}")


if __name__ == "__main__":
    main()

# %% [markdown]
# ## What next?
#
# *Where are the curves?* In `report.html` in the run directory, a page that needs no server ([the
# report](../guide/report.md)), and in TensorBoard with `tensorboard --logdir runs`. The accuracy on the test images is
# above 97 %.
#
# *How do I resume a run that was killed?* Add `resume="auto"` to the Trainer, and run the same command again
# ([resuming](../guide/resuming.md)).
#
# *How do I use two GPUs?* Pass `--devices 2`, or keep the default `"auto"`, which uses all available GPUs ([distributed
# training](../guide/distributed.md)).
#
# *How do I predict?* Add a `predict_step` to the module and call `trainer.predict(dataloaders=...)`
# ([getting started](../guide/getting-started.md)).
