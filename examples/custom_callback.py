"""Two custom callbacks: a running average of the weights, and a stop with a reason.

    python examples/custom_callback.py

A callback overrides the hooks it needs; the others cost nothing. It does not control the loop, but requests actions:
``trainer.stop``, ``trainer.request_checkpoint``, ``trainer.request_validation``. Every checkpoint contains
the result of ``state_dict``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk


class WeightAverage(tk.Callback):
    """Keep an exponential average of the parameters, and validate with it."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay, self.average = decay, {}

    def on_fit_start(self, trainer: tk.Trainer, module: tk.TrainModule) -> None:
        if (
            not self.average
        ):  # otherwise it was restored from a checkpoint, before this hook
            self.average = {
                name: p.detach().clone() for name, p in module.named_parameters()
            }

    @torch.no_grad()
    def on_train_step_end(self, trainer: tk.Trainer, module: tk.TrainModule) -> None:
        for name, parameter in module.named_parameters():
            self.average[name].lerp_(parameter, 1 - self.decay)

    def on_validation_start(self, trainer: tk.Trainer, module: tk.TrainModule) -> None:
        self.swap(module)

    def on_validation_end(self, trainer: tk.Trainer, module: tk.TrainModule) -> None:
        self.swap(module)

    @torch.no_grad()
    def swap(self, module: tk.TrainModule) -> None:
        for name, parameter in module.named_parameters():
            kept = parameter.clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)

    def state_dict(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.average = dict(state_dict["average"])


class StopWhenGoodEnough(tk.Callback):
    def __init__(self, val_loss: float) -> None:
        self.val_loss = val_loss

    def on_validation_end(self, trainer: tk.Trainer, module: tk.TrainModule) -> None:
        if (
            not trainer.sanity_checking
            and (reached := trainer.callback_metrics["val_loss"]) < self.val_loss
        ):
            trainer.stop(f"val_loss {reached:.4f} is below {self.val_loss}")


class Regression(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--good-enough",
        type=float,
        default=0.0,
        help="stop once val_loss is below this",
    )
    args = parser.parse_args()

    tk.seed_everything(1)
    inputs = torch.randn(2048, 8)
    clean = inputs.sin().sum(dim=1, keepdim=True)
    train = DataLoader(
        TensorDataset(inputs[:1536], clean[:1536] + torch.randn(1536, 1)),
        batch_size=16,
        shuffle=True,
    )
    val = DataLoader(TensorDataset(inputs[1536:], clean[1536:]), batch_size=512)

    average = WeightAverage()
    trainer = tk.Trainer(
        max_epochs=args.epochs,
        callbacks=[average, StopWhenGoodEnough(args.good_enough)],
        logger=False,
        enable_checkpointing=False,
    )

    @trainer.on("train_step_end", every="200st")
    def tell(trainer: tk.Trainer, module: tk.TrainModule) -> None:
        trainer.print(f"step {trainer.global_step}")

    module = Regression()
    trainer.fit(module, train, val)
    with_average = trainer.callback_metrics["val_loss"]
    without = tk.Trainer(barebones=True).validate(module, val, verbose=False)[0][
        "val_loss"
    ]
    trainer.print(
        f"val_loss with averaged weights {with_average:.4f}, with the last ones {without:.4f}"
    )


if __name__ == "__main__":
    main()
