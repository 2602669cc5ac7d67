"""The script that ``trainer-kit test`` runs: six steps of a small module on every rank, with checkpoints."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.store import checkpoints
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.trainer import Trainer

__all__ = ["STEPS", "TrialModule", "main", "plain_weights", "trial_data"]

STEPS = 6
_BATCH = 8
# Large, because the loss is a hundredth: the weights must move by far more than the tolerance of `trial`.
_LR = 20.0


class TrialModule(TrainModule):
    """Two layers whose weights move far in a few steps, by gradients that no half precision overflows."""

    def __init__(self) -> None:
        super().__init__()
        # Every rank and the plain loop of `plain_weights` begin with the same weights.
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, made small so that a scaled one fits into 16 bits."""
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """A hundredth of the mean squared error, for ``x`` of shape (n, 32) and ``y`` of shape (n, 4)."""
        return nn.functional.mse_loss(self.layers(x).float(), y.float()) / 100

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum, so that a resume has state to restore."""
        return torch.optim.SGD(self.parameters(), lr=_LR, momentum=0.5)


def trial_data(world_size: int) -> TensorDataset:
    """The samples that all ranks take in `STEPS` steps."""
    generator = torch.Generator().manual_seed(11)
    samples = STEPS * _BATCH * world_size
    return TensorDataset(
        torch.randn(samples, 32, generator=generator),
        torch.randn(samples, 4, generator=generator),
    )


def plain_weights(world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after the same steps of a plain loop: one process, one batch of all ranks' samples."""
    module = TrialModule()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer = module.configure_optimizers()
    batch_size = _BATCH * world_size
    for x, y in DataLoader(trial_data(world_size), batch_size=batch_size):
        optimizer.zero_grad()
        module.loss(x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return before, module.state_dict()


def main() -> None:
    """Train, and write checkpoints and ``about.json`` to a directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument(
        "--precision", default=os.environ.get("TRAINER_KIT_MIXED_PRECISION")
    )
    parser.add_argument(
        "--resume",
        type=Path,
        help="a directory of an earlier run, whose first checkpoint is resumed",
    )
    options = parser.parse_args()
    try:
        trainer = _make_trainer(options)
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error
    checkpoint = None
    if options.resume is not None:
        checkpoint = checkpoints(options.resume / "checkpoints")[0].path
    trainer.fit(
        TrialModule(),
        DataLoader(trial_data(trainer.world_size), batch_size=_BATCH),
        ckpt_path=checkpoint,
    )
    if trainer.is_global_zero:
        metadata = {
            "world_size": trainer.world_size,
            "device": trainer.strategy.device.type,
            "strategy": trainer.strategy.name,
            "precision": trainer.precision,
        }
        (options.directory / "about.json").write_text(json.dumps(metadata))


def _make_trainer(options: argparse.Namespace) -> Trainer:
    return Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        precision=options.precision,
        max_steps=STEPS,
        logger=False,
        default_root_dir=options.directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=ModelCheckpoint(
            options.directory / "checkpoints",
            every_n_train_steps=STEPS // 2,
            save_top_k=-1,
        ),
    )


if __name__ == "__main__":
    main()
