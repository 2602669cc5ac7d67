"""Precisions of vendors on two ranks: as one process trains, which also ran on these ranks, each for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import case
from trainer_kit.precision import MixedPrecision, TruePrecision

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")


class Net(tk.TrainModule):
    """A frozen layer with an adapter, layers that are trained, and a norm and a head that are exceptions."""

    def __init__(self, seed: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.down, self.up = nn.Linear(32, 64), nn.Linear(32, 16, bias=False), nn.Linear(16, 64, bias=False)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4)
        if frozen:
            self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]) + self.up(self.down(batch[0]))
        return F.cross_entropy(self.head(self.norm(torch.tanh(hidden))).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def loader(size: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    count = 44  # 16 samples a step, and a step of 12
    data = TensorDataset(torch.randn(count, 32, generator=draw), torch.randint(4, (count,), generator=draw))
    return DataLoader(data, batch_size=size)


def make(name: str) -> Any:
    precision = tk.precision
    if name == "fp8":
        return precision.Float8Precision("rowwise", "32-true", exceptions=["head"])
    if name == "qat":
        return precision.QATPrecision(exceptions=["head", "up"])
    if name == "bf16-true":
        return TruePrecision(torch.bfloat16, exceptions={"norm": "32", "head": "32"})
    if name == "bf16-mixed":
        return MixedPrecision(torch.bfloat16, exceptions=["norm", "head"])
    return precision.BitsandbytesPrecision(name, base="32-true", exceptions=["head"])  # type: ignore[arg-type]


def fit(module: Net, name: str, size: int, **options: Any) -> dict[str, Tensor]:
    path = options.pop("ckpt_path", None)
    trainer = tk.Trainer(accelerator="cpu", max_epochs=1, precision=make(name), **{"barebones": True, **options})
    trainer.fit(module, loader(size), ckpt_path=path)
    state = trainer.strategy.module_state(module)
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def check(strategy: str, names: list[str], directory: Path) -> None:
    for name in names:
        with case(precision=name):
            frozen = name in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
            alone = fit(Net(0, frozen), name, 8, devices=1, accumulate_grad_batches=2)
            quiet: dict[str, Any] = {}
            if strategy == "ddp":
                quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
                saving = tk.callbacks.ModelCheckpoint(directory / name, every_n_train_steps=2)
                quiet |= {"barebones": False, "callbacks": [saving]}
            # Another start on rank 1: every part of a quantised weight has to come from rank 0.
            several = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 2}
            mine = fit(Net(dist.get_rank(), frozen), name, 4, **several, **quiet)
            resumed = mine
            if strategy == "ddp":
                resumed = fit(Net(7, frozen), name, 4, ckpt_path=directory / name / "step-00000002", **several)
            # Scales of fp8 are those of a rank's own batch; bfloat16 rounds sums of another order.
            atol = {"fp8": 1e-2, "qat": 1e-2, "bf16-true": 2e-2, "bf16-mixed": 1e-2}.get(name, 1e-6)
            assert mine.keys() == alone.keys() == resumed.keys()
            for key, value in alone.items():
                assert mine[key].dtype == value.dtype
                far = (mine[key].double() - value.double()).abs() > (atol if value.is_floating_point() else 0)
                # QAT drops the gradient of a weight beyond the largest integer: the order of a sum decides on which
                # side the largest of a group falls, on one process too.
                assert far.double().mean() <= (0.02 if name == "qat" else 0), key
                assert torch.equal(mine[key], resumed[key]), key
            moved = float((mine["down.weight"] - Net(0, frozen).down.weight.detach()).abs().max())
            assert moved > 10 * atol or name.startswith("bf16")


NAMES = ["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training", "qat", "fp8", "bf16-true", "bf16-mixed"]


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_ddp(tmp_path: Path) -> None:
    check("ddp", NAMES, tmp_path)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_fsdp(tmp_path: Path) -> None:
    check("fsdp", [name for name in NAMES if name != "bf16-true"], tmp_path)
