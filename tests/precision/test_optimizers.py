"""Optimizers by name; low-bit states in checkpoints."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, RegistryError
from trainer_kit.core.registry import OPTIMIZERS

pytestmark = pytest.mark.slow  # importing the library takes seconds


class Net(tk.TrainModule):
    def __init__(self, name: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = (
            nn.Linear(64, 80),
            nn.Linear(80, 3),
        )  # 5120 values are enough for low bits, 240 are not
        self.name, self.options = name, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.first(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        return tk.optimizer(self.name, self.parameters(), lr=0.01, **self.options)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 64, generator=draw), torch.randint(3, (6,), generator=draw))
        for _ in range(6)
    ]


@pytest.mark.parametrize(
    ("name", "path", "stored"),
    [
        ("AdamW8bit", "bitsandbytes.optim:AdamW8bit", "state1"),
        ("lion_8bit", "bitsandbytes.optim:Lion8bit", "state1"),
        ("sgd8bit", "bitsandbytes.optim:SGD8bit", "state1"),
        ("adamw_torch_8bit", "torchao.optim:AdamW8bit", "exp_avg"),
        ("adamw_torch_4bit", "torchao.optim:AdamW4bit", "exp_avg"),
        ("adam_torch_fp8", "torchao.optim:AdamFp8", "exp_avg"),
    ],
)
def test_the_same_bits_as_a_plain_loop_and_after_a_resume(
    name: str, path: str, stored: str, tmp_path: Path
) -> None:
    module_name, _, class_name = path.partition(":")
    kind = getattr(import_module(module_name), class_name)
    options = {"momentum": 0.9} if name == "sgd8bit" else {}
    # torchao compiles its steps, which takes a minute: what they compute is the same without.
    with torch.compiler.set_stance("force_eager"):
        plain = Net()
        optimizer = kind(plain.parameters(), lr=0.01, **options)
        for batch in batches():
            optimizer.zero_grad()
            plain.training_step(batch, 0).backward()
            optimizer.step()

        def fit(**more: Any) -> Net:
            module = Net(name, **options)
            start = more.pop("ckpt_path", None)
            quiet = {
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
            }
            trainer = tk.Trainer(
                accelerator="cpu", devices=1, max_epochs=1, **quiet, **more
            )
            trainer.fit(module, batches(), ckpt_path=start)
            (module.used,) = trainer.optimizers
            return module

        module = fit(
            callbacks=[tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)]
        )
        resumed = fit(ckpt_path=tmp_path / "step-00000003", enable_checkpointing=False)
    assert type(resumed.used) is kind
    large = resumed.used.state[resumed.first.weight][stored]
    assert large.dtype == torch.uint8 or type(large).__name__.startswith("OptimState")
    for one in (module, resumed):
        for a, b in zip(one.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)


def test_names() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert type(tk.optimizer("Adam", parameters)) is torch.optim.Adam
    assert type(tk.optimizer("adamw_torch", parameters)) is torch.optim.AdamW
    assert (
        type(tk.optimizer("paged_adamw_8bit", parameters)).__name__ == "PagedAdamW8bit"
    )
    with pytest.raises(RegistryError, match="did you mean 'adamw8bit'"):
        tk.optimizer("adamw9bit", parameters)
    with pytest.raises(
        ConfigurationError, match=r"'sgd' cannot be made\n  found: .*unexpected keyword"
    ):
        tk.optimizer("sgd", parameters, rate=1)


def test_a_registered_name_and_a_library_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_targets", dict(OPTIMIZERS._targets))
    OPTIMIZERS.register("My_SGD", torch.optim.SGD)
    parameters = [nn.Parameter(torch.zeros(2))]
    assert type(tk.optimizer("My_SGD", parameters)) is torch.optim.SGD
    OPTIMIZERS.register("adagrad8bit", "bitsandbytes.optim:Adagrad8bit", overwrite=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        RegistryError, match=r"fix:   pip install 'trainer-kit\[bitsandbytes\]'"
    ):
        tk.optimizer("adagrad8bit", parameters)
