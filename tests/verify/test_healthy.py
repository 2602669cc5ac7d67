"""`verify` raises no false alarm: models, strategies and precisions whose training is right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.verify import verified
from trainer_kit.core.parallel import ParallelPlan

pytestmark = pytest.mark.long


class Convolutions(verified.Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 4, 4),
            nn.Flatten(),
        )  # fmt: skip

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
                "interval": "step",
            }
        ]


class Attention(verified.Classifier):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 16)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
                for _ in range(2)
            ]
        )
        self.last = nn.Linear(16, 4)
        del self.net

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0].unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.last(x.mean(1)), batch[1])
        self.log("loss", loss)
        return loss


class Recurrent(verified.Classifier):
    def __init__(self):
        super().__init__()
        self.rnn, self.net = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(
            self.net(self.rnn(batch[0].unsqueeze(-1))[0][:, -1]), batch[1]
        )


class Divided(verified.Classifier):
    """Says how tensor parallelism may split it."""

    def configure_parallel(self, mesh):
        return ParallelPlan(
            tensor={"net.0": "colwise_rep", "net.4": "colwise", "net.5": "rowwise"}
        )


MODELS = {
    "mlp": lambda: verified.Classifier(),
    "dropout": lambda: verified.Classifier(dropout=0.2),
    "tied": lambda: verified.Tied(),
    "convolutions": Convolutions,
    "attention": Attention,
    "recurrent": Recurrent,
    "divided": Divided,
}
PAIRS = [
    ("mlp", "ddp", "32-true", {}),
    ("mlp", "fsdp", "32-true", {"accumulate_grad_batches": 2}),
    ("mlp", "ddp", "bf16-mixed", {}),
    ("mlp", "fsdp", "bf16-mixed", {"gradient_clip_val": 0.1}),
    ("mlp", "fsdp", "bf16-true", {}),
    ("mlp", "ddp", "64-true", {"accumulate_grad_batches": 2}),
    ("mlp", "single_device", "bf16-mixed", {"devices": 1}),
    ("dropout", "ddp", "bf16-true", {}),
    ("dropout", "fsdp", "32-true", {"gradient_clip_val": 0.5}),
    ("dropout", "ddp", "32-true", {"activation_checkpointing": ["Sequential"]}),
    ("tied", "ddp", "bf16-mixed", {}),
    ("tied", "fsdp", "32-true", {"accumulate_grad_batches": 2}),
    ("convolutions", "ddp", "32-true", {}),
    ("convolutions", "fsdp", "bf16-mixed", {}),
    ("convolutions", "single_device", "32-true", {"devices": 1}),
    ("attention", "ddp", "32-true", {}),
    ("attention", "fsdp", "bf16-mixed", {"activation_checkpointing": True}),
    ("attention", "fsdp", "64-true", {}),
    pytest.param(
        *("recurrent", "ddp", "bf16-mixed", {}),
        marks=pytest.mark.skipif(
            torch.backends.mkldnn.is_available()
            and not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            reason="oneDNN's LSTM in bfloat16 needs AVX-512",
        ),
    ),
    ("divided", "tp", "32-true", {"accumulate_grad_batches": 2}),
    ("mlp", "pp", "32-true", {"accumulate_grad_batches": 2}),
    (
        "recurrent",
        "fsdp",
        "32-true",
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ),
]


@pytest.mark.parametrize(("model", "strategy", "precision", "options"), PAIRS)
def test_no_false_alarm(model, strategy, precision, options):
    torch.manual_seed(0)
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "seed": 1,
        **options,
    }
    trainer = tk.Trainer(strategy=strategy, precision=precision, **options)
    found = trainer.verify(MODELS[model](), verified.loader(), steps=3)
    print(found)
    assert found.ok, str(found)
    assert {check.name for check in found.checks if check.status == "ok"} >= {
        "our loop",
        "samples",
        "data",
        "training",
    }
