"""A module and data that draw from every generator, and what a fit of them leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainer_kit as tk


class Samples(Dataset):
    """Draws from the global generators, and from one of its own, which no checkpoint knows."""

    def __init__(self, count: int = 96, own: bool = True) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
        self.rng = np.random.default_rng(3) if own else None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[index]
        noise = random.random() + np.random.rand() + torch.rand(1).item()
        if self.rng is not None:
            noise += self.rng.random()
        return x + 0.01 * noise, x.sum().reshape(1)


class Stream(IterableDataset):
    """Knows how often it was read."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.passes = samples, 0

    def __iter__(self) -> Any:
        self.passes += 1
        yield from (
            self.samples[(7 * self.passes + i) % len(self.samples)] for i in range(24)
        )


class Net(tk.TrainModule):
    """Has buffers, random layers, a scheduler and attributes that steps change.

    Args:
        lr: of Adam.
        batch_size: of its own loader.
        in_step: called with the module in each step.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        batch_size: int = 4,
        in_step: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lr, self.batch_size, self.in_step, self.seen = lr, batch_size, in_step, []
        self.layers = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(16, 1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch_idx)
        if self.in_step is not None:
            self.in_step(self, batch)
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
                "interval": "step",
            }
        ]

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(own=False), batch_size=self.batch_size, shuffle=True)


def trainer(*callbacks: Any, **options: Any) -> tk.Trainer:
    """A quiet one on the CPU."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    here = {"accelerator": "cpu", "logger": False, "max_epochs": 2}
    return tk.Trainer(
        callbacks=list(callbacks), **{"devices": 1, **quiet, **here, **options}
    )


def generators() -> list[Any]:
    """The states of the global generators."""
    return [
        random.getstate(),
        list(np.random.get_state()[1]),
        np.random.get_state()[2],
        torch.get_rng_state().tolist(),
    ]


def left_behind(made: tk.Trainer, module: Net, data: Any = None) -> dict[str, Any]:
    """Everything that may differ after a fit, as plain data."""
    dataset = getattr(data, "dataset", None)
    return {
        "weights": {
            n: getattr(v, "_local_tensor", v).tolist()
            for n, v in module.state_dict().items()
        },
        "optimizer": {
            key: {
                name: getattr(value, "_local_tensor", torch.as_tensor(value)).tolist()
                for name, value in state.items()
            }
            for key, state in made.optimizers[0].state_dict()["state"].items()
        },
        "lr": [group["lr"] for group in made.optimizers[0].param_groups],
        "seen": module.seen,
        "generators": generators(),
        "progress": {
            k: v for k, v in made.progress.state_dict().items() if k != "seconds"
        },
        "metrics": {
            name: float(value) for name, value in made.callback_metrics.items()
        },
        "of the data": [
            getattr(dataset, "passes", 0),
            None
            if getattr(dataset, "rng", None) is None
            else dataset.rng.bit_generator.state,
            None
            if getattr(data, "generator", None) is None
            else data.generator.get_state().tolist(),
        ],
    }


def files(place: Path) -> list[str]:
    """All files below a directory."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))
