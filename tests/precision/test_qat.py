"""Quantization-aware training: the same bits as torchao's prepare, train, convert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision import QATPrecision

pytestmark = pytest.mark.slow  # importing the library takes seconds


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 32, generator=draw), torch.randint(3, (6,), generator=draw))
        for _ in range(6)
    ]


def test_the_same_bits_as_torchao_by_hand(tmp_path: Path) -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )

    def inner(module: nn.Module, name: str) -> bool:
        return name in ("first", "second")

    plain = Net()
    quantize_(plain, QATConfig(config, step="prepare"), filter_fn=inner)
    optimizer = plain.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        optimizer.step()

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    module, precision = Net(), QATPrecision(exceptions=["head"])
    for start in (None, tmp_path / "step-00000003"):
        module, callbacks = Net(), [saving] if start is None else []
        trainer = tk.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, precision=precision, callbacks=callbacks, **quiet,
            enable_checkpointing=start is None,
        )  # fmt: skip
        trainer.fit(module, batches(), ckpt_path=start)
        for name, value in (
            Net().state_dict().items()
        ):  # names and dtypes are those of the model without it
            assert module.state_dict()[name].dtype == value.dtype
            assert torch.equal(module.state_dict()[name], plain.state_dict()[name])
    exported = precision.export(module)
    quantize_(plain, QATConfig(config, step="convert"), filter_fn=inner)
    x, _ = batches()[0]
    with torch.no_grad():
        assert torch.equal(exported(x), plain(x))
        assert torch.allclose(exported(x), module(x), atol=1e-5)
    assert [type(part).__name__ for part in exported.children()] == ["Linear"] * 3
    assert type(exported.first.weight).__name__.startswith("Intx")
    assert type(exported.head.weight) is nn.Parameter
    assert type(module.first.weight) is nn.Parameter  # it can be trained further
    assert module.trainer is trainer


def test_a_refusal_of_torchao_is_an_error_before_the_first_step() -> None:
    from torchao.quantization import Float8WeightOnlyConfig

    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=QATPrecision(Float8WeightOnlyConfig()),
        barebones=True,
    )
    with pytest.raises(PrecisionError, match="torchao failed to convert this model"):
        trainer.fit(Net(), batches())
