"""A custom logger: any object with ``log_metrics(metrics, step)``. This one writes into an SQLite table.

    python examples/custom_logger.py

The methods ``log_hyperparams``, ``after_save_checkpoint``, ``save`` and ``finalize`` are called if they exist. Only
rank 0 calls a logger, with numbers that are already reduced over all ranks.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk


class SQLiteLogger:
    def __init__(self, path: str) -> None:
        self.path, self.run = Path(path), 0
        self.connection: sqlite3.Connection | None = None

    def open(self) -> sqlite3.Connection:
        if (
            self.connection is None
        ):  # opened at the first value, so an unused logger creates no file
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(self.path)
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS runs (run INTEGER PRIMARY KEY, params, status)"
            )
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS metrics (run, step, name, value)"
            )
            self.run = self.connection.execute(
                "INSERT INTO runs VALUES (NULL, '{}', 'running')"
            ).lastrowid
        return self.connection

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        connection = self.open()
        rows = [(self.run, step, name, value) for name, value in metrics.items()]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.open().execute(
            "UPDATE runs SET params = ? WHERE run = ?",
            [json.dumps(params, default=repr), self.run],
        )

    def finalize(self, status: str) -> None:  # "success", "failed" or "interrupted"
        if self.connection is not None:
            self.connection.execute(
                "UPDATE runs SET status = ? WHERE run = ?", [status, self.run]
            )
            self.connection.commit()
            self.connection.close()
            self.connection = None


class Classifier(tk.TrainModule):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        logits = self.net(points)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("loss", loss)
        self.log(
            "accuracy",
            (logits.argmax(1) == labels).float().mean(),
            on_step=False,
            on_epoch=True,
        )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--database", default="runs/metrics.sqlite")
    args = parser.parse_args()

    tk.seed_everything(1)
    points = torch.randn(512, 2)
    data = TensorDataset(points, (points[:, 0] > points[:, 1]).long())
    logger = SQLiteLogger(args.database)
    # Several loggers: [logger, "tensorboard"].
    trainer = tk.Trainer(
        max_epochs=args.epochs,
        logger=logger,
        log_every_n_steps=4,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))

    with closing(sqlite3.connect(args.database)) as connection:
        for run, params, status in connection.execute(
            "SELECT * FROM runs ORDER BY run DESC LIMIT 1"
        ):
            trainer.print(f"run {run}: {status}, {params}")
            found = connection.execute(
                "SELECT name, count(*), max(step), value FROM metrics WHERE run = ? GROUP BY name",
                [run],
            )
            for name, count, step, value in found:
                trainer.print(f"{name}: {count} rows, {value:.3f} at step {step}")


if __name__ == "__main__":
    main()
