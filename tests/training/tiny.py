"""What tests of the loop train and log to, where neither is what they look at."""

from __future__ import annotations

import torch
from torch import nn

from trainer_kit import TrainModule


class Tiny(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder:
    """A logger that knows how it ended."""

    def __init__(self):
        self.finalized = []

    def log_metrics(self, metrics, step):
        pass

    def finalize(self, status):
        self.finalized.append(status)
