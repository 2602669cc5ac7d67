"""Weights in float16 under mixed precision, which needs float32 weights: refused in words by every entry point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError


class Half(tk.TrainModule):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).half()
        self.head = nn.Linear(2, 1)
        self.base.requires_grad_(not frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.base(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.1
        )


def by_trainer(module: Half) -> None:
    tk.Trainer(
        max_steps=1, accelerator="cpu", barebones=True, precision="16-mixed"
    ).fit(module, [torch.randn(2, 2)])


def by_accelerator(module: Half) -> None:
    accelerator = tk.Accelerator(cpu=True, mixed_precision="fp16")
    optimizer = module.configure_optimizers()
    model, optimizer = accelerator.prepare(
        nn.Sequential(module.base, module.head), optimizer
    )
    accelerator.backward(model(torch.randn(2, 2)).square().mean())
    optimizer.step()


def clipped(module: Half) -> None:
    accelerator = tk.Accelerator(cpu=True, mixed_precision="fp16")
    optimizer = module.configure_optimizers()
    model, optimizer = accelerator.prepare(
        nn.Sequential(module.base, module.head), optimizer
    )
    accelerator.backward(model(torch.randn(2, 2)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def by_fabric(module: Half) -> None:
    fabric = tk.Fabric(accelerator="cpu", devices=1, precision="16-mixed")
    optimizer = module.configure_optimizers()
    model, optimizer = fabric.setup(nn.Sequential(module.base, module.head), optimizer)
    fabric.backward(model(torch.randn(2, 2)).square().mean())
    optimizer.step()


@pytest.mark.parametrize("train", [by_trainer, by_accelerator, clipped, by_fabric])
def test_float16_weights_are_refused_where_they_are_trained(train: Any) -> None:
    with pytest.raises(
        PrecisionError, match="2 of 4 parameters of SGD in float16"
    ) as refused:
        train(Half())
    assert "torch.float32" in str(refused.value)


@pytest.mark.parametrize("train", [by_trainer, by_accelerator, by_fabric])
def test_frozen_float16_weights_are_left_as_they_are(train: Any) -> None:
    module = Half(frozen=True)
    train(module)
    assert [weight.dtype for weight in module.parameters()] == [torch.float16] * 2 + [
        torch.float32
    ] * 2
