"""`strategy="auto"`: whole copies where they fit a rank's memory, parts where they do not, and the reason."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import trainer_kit as tk
from trainer_kit.core.devices import device_memory
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from trainer_kit.testing import run_distributed
from trainer_kit.testing.conformance import assert_same, whole
from trainer_kit.training.auto_strategy import training_bytes

MEMORY = "trainer_kit.training.auto_strategy.device_memory"


class Built(tk.TrainModule):
    """48 numbers in 192 bytes: 768 with gradients and two moments."""

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> tk.Trainer:
    return tk.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "barebones": True,
            **options,
        }
    )


def batches() -> list[torch.Tensor]:
    return [
        torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)
    ]


def run(
    memory: int, verbs: tuple[str, ...], **options: Any
) -> tuple[tk.Trainer, Built, str]:
    made, module, said = trainer(**options), Built(), io.StringIO()
    with mock.patch(MEMORY, return_value=memory), redirect_stdout(said):
        for verb in verbs:
            getattr(made, verb)(module, batches())
    return made, module, said.getvalue()


def check_the_choice() -> None:
    fits = run(960, ("fit",))
    assert isinstance(fits[0].strategy, DDPStrategy)
    assert "auto" not in fits[2]
    made, _, said = run(959, ("fit", "validate", "fit"))
    assert isinstance(made.strategy, FSDPStrategy)
    if made.is_global_zero:
        line = (
            'strategy="auto": fsdp: replicas do not fit, 768 B of training state (as with Adam), '
            "and a rank has 959 B of memory (20% of it for activations)"
        )
        assert said.count(line) == 1
    once = run(959, ("fit",))
    assert_same(whole(once[1].state_dict()), fits[1].state_dict(), 1e-6)
    # An evaluation needs room for the weights alone; the fit that follows for more.
    assert isinstance(run(240, ("validate",))[0].strategy, DDPStrategy)
    assert isinstance(run(239, ("validate",))[0].strategy, FSDPStrategy)
    made, _, _ = run(240, ("validate", "fit"))
    assert isinstance(made.strategy, FSDPStrategy)
    assert made.global_step == 3
    # The rank with the least memory decides for all.
    uneven = 10**9 if made.is_global_zero else 100
    assert isinstance(run(uneven, ("fit",))[0].strategy, FSDPStrategy)
    assert isinstance(run(0, ("fit",))[0].strategy, DDPStrategy)  # nobody knows
    assert isinstance(run(1, ("fit",), strategy="ddp")[0].strategy, DDPStrategy)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_sharded_and_trains_alike() -> None:
    run_distributed(check_the_choice, 2)


def test_a_model_that_does_not_fit_is_reported_beforehand() -> None:
    module = Built()
    module.configure_model()
    with mock.patch(MEMORY, return_value=959):
        text = trainer().explain(module, batches())
    assert "strategy     FSDP on cpu" in text
    assert "auto         fsdp: replicas do not fit, 768 B of training state" in text
    assert "per rank     96 B of parameters" in text
    text = trainer().explain(module, batches())
    assert "auto         ddp: replicas fit, 768 B of training state" in text
    assert "auto   " not in trainer().explain(Built(), batches())  # no layers yet
    assert "auto   " not in trainer(strategy="ddp").explain(module, batches())


def test_one_process_is_its_device() -> None:
    made, _, said = run(1, ("fit",), devices=1)
    assert isinstance(made.strategy, SingleDeviceStrategy)
    assert not said


def test_sizes() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LazyLinear(4))
    assert training_bytes(net, "32-true", True) == 6 * 16
    net[0].requires_grad_(False)
    assert training_bytes(net, "bf16-mixed", True) == 6 * 4
    assert training_bytes(net, "64-true", False) == 6 * 8


def test_a_rank_of_a_cpu_has_its_share_of_the_host(tmp_path: Path) -> None:
    alone = device_memory(torch.device("cpu"), 1)
    assert alone is not None
    assert alone > 10**8
    assert device_memory(torch.device("cpu"), 4) == alone // 4
    limit = tmp_path / "memory.max"
    with mock.patch("trainer_kit.core.devices._LIMITS", (str(limit),)):
        limit.write_text("1000000\n")
        assert device_memory(torch.device("cpu"), 2) == 500000
        limit.write_text("max\n")
        assert (device_memory(torch.device("cpu"), 1) or 0) >= alone
