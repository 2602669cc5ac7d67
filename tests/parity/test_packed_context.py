"""Packed rows in parts train as whole ones do; a model that would mix their documents is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainer_kit as tk
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies import MeshStrategy
from trainer_kit.testing.conformance import whole

pytestmark = pytest.mark.slow
WHOLE_IDS = tk.ContextPlan(dims={"input_ids": 1, "labels": 1, "position_ids": 1})


class Packed(tk.TrainModule):
    """One block of attention over packed rows."""

    def __init__(self, masked: bool = True, plan: tk.ContextPlan = WHOLE_IDS) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.masked = masked
        self.plan = plan
        self.part = 0
        self.parts = 1
        self.tokens = nn.Embedding(50, 8)
        self.positions = nn.Embedding(16, 8)
        self.attention = nn.Linear(8, 24)
        self.head = nn.Linear(8, 50)

    def configure_parallel(self, mesh: Any) -> tk.ParallelPlan:
        self.part = mesh["cp"].get_local_rank()
        self.parts = mesh["cp"].size()
        return tk.ParallelPlan(context=self.plan)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        mask = None
        if self.masked:
            mask = tk.data.document_mask(
                batch["document_ids"], part=self.part, parts=self.parts
            )
        heads = self.attention(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=mask is None
        )
        logits = self.head(hidden + attended.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def loss_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(module: Packed, **options: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    documents = [
        torch.randint(1, 50, (length,), generator=draw)
        for length in torch.randint(1, 14, (40,), generator=draw).tolist()
    ]
    trainer = tk.Trainer(
        max_epochs=1, accelerator="cpu", precision="64-true", barebones=True, **options
    )
    loader = DataLoader(tk.data.pack(documents, tokens=16), batch_size=2)
    trainer.fit(module, loader)
    return whole(trainer.strategy.module_state(module))


@pytest.mark.world_size(2, timeout=240)
def test_two_context_ranks() -> None:
    options = {"strategy": MeshStrategy(cp=2), "devices": 2}
    weights = fit(Packed(), **options)
    expected = fit(Packed(), devices=1) if dist.get_rank() == 0 else weights
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
    options["strategy"] = MeshStrategy(cp=2)
    with pytest.raises(StrategyError, match="needs a mask over all keys"):
        fit(Packed(masked=False), **options)
    options["strategy"] = MeshStrategy(cp=2)
    with pytest.raises(StrategyError, match="need their document ids whole"):
        fit(Packed(plan=tk.ContextPlan(dims=1)), **options)
