"""Pretrain a small language model on a mixture of two packed streams; resume it after a kill.

    python examples/pretrain_mixture.py
    python examples/pretrain_mixture.py --devices 2

``--kill-at 12`` kills the process in step 12, like a machine failure. The next start resumes from the last checkpoint
with the next row of the same data order, on one device or two.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint

VOCABULARY = 64
TOKENS = 64


class Documents(IterableDataset[list[int]]):
    """A stateless stream of token ids: each document counts upwards with its own stride, or repeats a pattern."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        # Use a separate generator: the order depends only on the epoch, so a resumed run reads the same documents.
        draw = random.Random(f"{self.kind} {self.epoch}")
        for _ in range(self.count):
            length = draw.randint(4, 40)
            first = draw.randrange(VOCABULARY)
            if self.kind == "web":
                step = draw.randint(1, 3)
                yield [(first + step * place) % VOCABULARY for place in range(length)]
            else:
                pattern = [draw.randrange(VOCABULARY) for _ in range(4)]
                yield [pattern[place % 4] for place in range(length)]


def weights(drawn: int) -> dict[str, float]:
    """More code towards the end."""
    return {"web": 0.8, "code": 0.2 + drawn / 1000}


def make_loader(num_workers: int = 0) -> DataLoader[dict[str, Tensor]]:
    sources = {
        "web": tk.data.shuffle(Documents("web", 300), buffer=50, seed=1),
        "code": tk.data.shuffle(Documents("code", 80), buffer=50, seed=1),
    }
    mixture = tk.data.mix(sources, weights, until=500)
    rows = tk.data.pack(mixture, tokens=TOKENS, open_rows=8)
    return DataLoader(rows, batch_size=4, num_workers=num_workers)


class LanguageModel(tk.TrainModule):
    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(TOKENS, width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        mask = tk.data.document_mask(batch["document_ids"])
        projections = self.attention(self.norm(hidden)).chunk(3, dim=-1)
        query, key, value = (
            projection.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in projections
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return self.logits(hidden)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The number of tokens: the loss of a step is the mean over tokens, on any number of devices."""
        return (batch["labels"] != -100).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class KillAt(tk.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: tk.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--root", default="runs")
    parser.add_argument("--weights", help="a file for the trained weights")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    trainer = tk.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=options.devices,
        precision=options.precision,
        # The number of rows per step does not depend on the number of devices.
        global_batch_size=8,
        resume="auto",
        default_root_dir=options.root,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=5),
            KillAt(options.kill_at),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = LanguageModel()
    trainer.fit(module, make_loader(options.workers))
    trainer.print(f"{trainer.global_step} steps")
    if options.weights and trainer.is_global_zero:
        torch.save(module.state_dict(), options.weights)


if __name__ == "__main__":
    main()
