"""Precisions of vendors on two ranks: as one process trains, which also ran on these ranks, each for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import case
from trainer_kit.core.errors import StrategyError
from trainer_kit.precision import MixedPrecision, TruePrecision
from trainer_kit.strategies import FSDPStrategy


class Net(tk.TrainModule):
    """A frozen layer with an adapter, layers that are trained, and a norm and a head that are exceptions."""

    kind = "sgd"

    def __init__(self, seed: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.down, self.up = (
            nn.Linear(32, 64),
            nn.Linear(32, 16, bias=False),
            nn.Linear(16, 64, bias=False),
        )
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4)
        if frozen:
            self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.first(batch[0]) + self.up(self.down(batch[0]))
        return F.cross_entropy(
            self.head(self.norm(torch.tanh(hidden))).float(), batch[1]
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return tk.optimizer(
            self.kind, [p for p in self.parameters() if p.requires_grad], lr=0.5
        )


def loader(size: int) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    count = 44  # 16 samples a step, and a step of 12
    data = TensorDataset(
        torch.randn(count, 32, generator=draw),
        torch.randint(4, (count,), generator=draw),
    )
    return DataLoader(data, batch_size=size)


def make(name: str) -> Any:
    precision = tk.precision
    if name == "fp8":
        return precision.Float8Precision("rowwise", "32-true", exceptions=["*head"])
    if name == "qat":
        return precision.QATPrecision(exceptions=["head", "up"])
    if name == "bf16-true":
        return TruePrecision(torch.bfloat16, exceptions={"norm": "32", "head": "32"})
    if name.endswith("mixed"):
        return MixedPrecision(
            {"1": torch.float16, "b": torch.bfloat16}[name[0]],
            exceptions=["norm", "head"],
        )
    if name == "as stored":
        return precision.BitsandbytesPrecision(
            "nf4-dq", base="32-true", exceptions={"norm": "32", "head": "32"}
        )
    return precision.BitsandbytesPrecision(name, base="32-true", exceptions=["*head"])  # type: ignore[arg-type]


def fit(module: Any, name: str, size: int, **options: Any) -> dict[str, Tensor]:
    path = options.pop("ckpt_path", None)
    trainer = tk.Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision=make(name),
        **{"barebones": True, **options},
    )
    trainer.fit(module, loader(size), ckpt_path=path)
    state = trainer.strategy.module_state(module)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def check(strategy: str, names: list[str], directory: Path) -> None:
    for name in names:
        with case(precision=name):
            frozen = name in ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")
            alone = fit(Net(0, frozen), name, 8, devices=1, accumulate_grad_batches=2)
            saving = tk.callbacks.ModelCheckpoint(
                directory / name, every_n_train_steps=2
            )
            quiet = {
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "barebones": False,
            }
            # Another start on rank 1: every part of a quantized weight has to come from rank 0.
            several = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": 2}
            mine = fit(
                Net(dist.get_rank(), frozen),
                name,
                4,
                callbacks=[saving],
                **several,
                **quiet,
            )
            resumed = fit(
                Net(7, frozen),
                name,
                4,
                ckpt_path=directory / name / "step-00000002",
                **several,
            )
            # Scales of fp8 are those of a rank's own batch; bfloat16 rounds sums of another order.
            atol = {
                "fp8": 1e-2,
                "qat": 1e-2,
                "bf16-true": 2e-2,
                "bf16-mixed": 1e-2,
                "16-mixed": 5e-3,
            }.get(name, 1e-6)
            assert mine.keys() == alone.keys() == resumed.keys()
            for key, value in alone.items():
                assert mine[key].dtype == value.dtype
                far = (mine[key].double() - value.double()).abs() > (
                    atol if value.is_floating_point() else 0
                )
                # QAT drops the gradient of a weight beyond the largest integer: the order of a sum decides on which
                # side the largest of a group falls, on one process too.
                assert far.double().mean() <= (0.02 if name == "qat" else 0), key
                assert torch.equal(mine[key], resumed[key]), key
            moved = float(
                (mine["down.weight"] - Net(0, frozen).down.weight.detach()).abs().max()
            )
            assert moved > 10 * atol or name.startswith("bf16")


NAMES = ["nf4-dq", "int8-training", "qat", "fp8", "bf16-true"]
OTHERS = ["nf4", "fp4", "fp4-dq", "int8"]


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.world_size(2, timeout=240)
def test_ddp(tmp_path: Path) -> None:
    check("ddp", NAMES, tmp_path)  # autocast is held elsewhere


@pytest.mark.long
@pytest.mark.timeout(250)
@pytest.mark.world_size(2, timeout=240)
@pytest.mark.parametrize(
    ("strategy", "names"), [("ddp", OTHERS), ("fsdp", [*OTHERS, "bf16-mixed"])]
)
def test_other_precisions(strategy: str, names: list[str], tmp_path: Path) -> None:
    check(strategy, names, tmp_path)


class Built(tk.TrainModule):
    """Only rank 0 has weights when layers are quantized."""

    def configure_model(self) -> None:
        self.net = Net(3, True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.net.configure_optimizers()


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.world_size(2, timeout=240)
def test_fsdp(tmp_path: Path) -> None:
    check("fsdp", [*NAMES, "16-mixed"], tmp_path)
    alone = fit(Net(3, True), "nf4-dq", 8, devices=1)
    built = fit(Built(), "nf4-dq", 4, strategy="fsdp", devices=2)
    for key, value in alone.items():
        torch.testing.assert_close(built[f"net.{key}"], value, rtol=0, atol=1e-6)
    # Floats are quantized, and then divided.
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "fsdp",
        "devices": 2,
        "logger": False,
    }
    options |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    saving, floats = (
        tk.callbacks.ModelCheckpoint(tmp_path / "floats", every_n_train_steps=1),
        Net(5, True),
    )
    tk.Trainer(
        precision="32-true", limit_train_batches=1, callbacks=[saving], **options
    ).fit(floats, loader(4))
    whole = {key: value.full_tensor() for key, value in floats.state_dict().items()}
    for mode in ("nf4-dq", "int8"):
        loading, expected = Net(0, True), Net(5, True)
        trainer = tk.Trainer(precision=make(mode), **options)
        trainer.validate(
            loading,
            loader(4),
            ckpt_path=tmp_path / "floats" / "step-00000001",
            verbose=False,
        )
        expected.load_state_dict(whole)
        make(mode).convert_module(expected)
        for key, value in trainer.strategy.module_state(loading).items():
            assert torch.equal(value.full_tensor(), expected.state_dict()[key]), key
    for kind in ("adamw8bit", "adamw_torch_8bit"):
        module = Net(0, False)
        module.kind = kind
        with pytest.raises(
            StrategyError,
            match=r"does not support sharded parameters\n  found: .*\n  fix:   train with DDP",
        ):
            fit(module, "bf16-mixed", 4, strategy="fsdp", devices=2)
    # Weights are gathered in another dtype; bytes, their scales, and exceptions are not.
    half = FSDPStrategy(
        mixed_precision=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float32
        )
    )
    gathered = fit(Net(3, True), "as stored", 4, strategy=half, devices=2)
    for key, value in alone.items():
        torch.testing.assert_close(gathered[key], value, rtol=0, atol=2e-2)
