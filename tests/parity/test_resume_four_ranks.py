"""Sums over three or more ranks depend on where a gradient lies in its bucket: resumed runs must lay them out alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from trainer_kit.strategies import DDPStrategy


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The order of the layers is not the order in which they run.
        self.last, self.first = nn.Linear(96, 4), nn.Linear(16, 96)
        self.middle = nn.Linear(96, 96)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(
            self.last(self.middle(self.first(x).tanh()).tanh()), y
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(root: Path, steps: int, ckpt_path: Path | None = None, **options: Any) -> Net:
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 16, generator=draw), torch.randint(4, (96,), generator=draw)
    )
    module = Net()
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=DDPStrategy(**options),
        max_steps=steps,
        max_epochs=None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        seed=0,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return module


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_a_resumed_run_adds_in_the_same_order(tmp_path: Path) -> None:
    roots: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(roots)
    root = Path(roots[0])
    for name, options in (
        ("plain", {}),
        ("views", {"gradient_as_bucket_view": False}),
        ("hook", {"ddp_comm_hook": "bf16"}),
    ):
        whole = fit(root / name / "whole", 8, **options)
        fit(root / name / "part", 4, **options)
        resumed = fit(
            root / name / "rest",
            8,
            root / name / "part" / "checkpoints" / "step-00000004",
            **options,
        )
        for (key, expected), found in zip(
            whole.named_parameters(), resumed.parameters(), strict=True
        ):
            assert torch.equal(found, expected), (name, key)
