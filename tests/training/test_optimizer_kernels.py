"""`Trainer(optimizer_kernel=...)` trains as an optimizer that was made so, and is refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import trainer_kit as tk
from trainer_kit.testing import TinyModule


class Mine(Optimizer):
    """A third-party optimizer."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"])


class Module(TinyModule):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Optimizer:
        # A group without parameters is no obstacle.
        groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias]}]
        return self.kind(groups, **self.options)


def fit(module: Module, **options: Any) -> tuple[tk.Trainer, list[torch.Tensor]]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    trainer = tk.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, **options
    )
    trainer.fit(module, [torch.randn(4, 32) for _ in range(5)])
    return trainer, [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kernel", ["fused", "foreach", "auto"])
def test_it_trains_as_an_optimizer_that_was_made_so(
    kind: Any, kernel: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "fused" if kernel == "auto" else kernel
    silent = {"enable_checkpointing": False, "enable_progress_bar": False}
    _, expected = fit(Module(kind, lr=0.01, **{name: True}), **silent)
    trainer, weights = fit(Module(kind, lr=0.01), optimizer_kernel=kernel, **silent)
    for before, weight in zip(expected, weights, strict=True):
        assert torch.equal(before, weight)
    (optimizer,) = trainer.optimizers
    for group in optimizer.param_groups:
        assert group[name]
    line = f'optimizer_kernel="auto": {kind.__name__} uses fused'
    assert (line in capsys.readouterr().out) == (kernel == "auto")
    assert trainer.optimizer_kernel == kernel
    assert f"kernel {kernel}" in str(trainer.explain(Module(kind, lr=0.01)))


def test_plain_sgd_is_bit_equal_to_the_loop() -> None:
    silent = {"enable_checkpointing": False, "enable_progress_bar": False}
    _, expected = fit(Module(torch.optim.SGD, lr=0.01), **silent)
    _, weights = fit(
        Module(torch.optim.SGD, lr=0.01), optimizer_kernel="fused", **silent
    )
    for before, weight in zip(expected, weights, strict=True):
        assert torch.equal(before, weight)


def test_a_resumed_run_uses_the_kernel_of_its_argument(tmp_path: Any) -> None:
    """The checkpoint is that of a run with a loop: its options do not switch the kernel off, and its state is used."""
    module = Module(torch.optim.AdamW, lr=0.01)
    trainer, _ = fit(module, default_root_dir=tmp_path)
    path = tmp_path / "by-hand"
    trainer.save_checkpoint(path)
    again = Module(torch.optim.AdamW, lr=0.01)
    resumed = tk.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        optimizer_kernel="fused",
    )
    resumed.fit(again, [torch.randn(4, 32) for _ in range(5)], ckpt_path=path)
    (optimizer,) = resumed.optimizers
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer.state[again.layer.weight]["step"].item() == 15


@pytest.mark.parametrize(
    ("options", "kernel", "found"),
    [
        ({"kind": Mine}, "fused", "Mine has no fused kernel"),
        ({"kind": torch.optim.Rprop}, "fused", "Rprop has no fused kernel"),
        (
            {"kind": torch.optim.AdamW, "differentiable": True},
            "foreach",
            "one operation",
        ),
    ],
)
def test_what_has_no_such_kernel_is_refused(
    options: dict[str, Any], kernel: str, found: str
) -> None:
    with pytest.raises(tk.ConfigurationError, match=found) as caught:
        fit(Module(**options), optimizer_kernel=kernel, enable_checkpointing=False)
    assert 'optimizer_kernel="auto"' in str(caught.value)


def test_auto_leaves_an_optimizer_without_one_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Module(Mine), optimizer_kernel="auto", enable_checkpointing=False)
    assert "Mine uses Mine's default (" in capsys.readouterr().out


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(tk.ConfigurationError, match="did you mean 'fused'"):
        tk.Trainer(optimizer_kernel="fusd")


class Complex(Module):
    def __init__(self) -> None:
        super().__init__(torch.optim.AdamW)
        self.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_parameters_that_a_fused_kernel_does_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(tk.ConfigurationError, match=r"a parameter is torch\.complex64"):
        fit(Complex(), optimizer_kernel="fused", enable_checkpointing=False)
    fit(Complex(), optimizer_kernel="auto", enable_checkpointing=False)
    assert "AdamW's default (a parameter is torch.complex64" in capsys.readouterr().out


@pytest.mark.world_size(2)
def test_shards() -> None:
    """torch's fused SGD has no rule for them: it failed in the first step."""
    options = {"strategy": "fsdp", "enable_checkpointing": False, "devices": 2}
    batches = [torch.randn(4, 32) for _ in range(2)]
    trainer = tk.Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        optimizer_kernel="auto",
        **options,
    )
    trainer.fit(Module(torch.optim.SGD, lr=0.1), batches)
    assert not trainer.optimizers[0].param_groups[0].get("fused")
    trainer = tk.Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=1,
        optimizer_kernel="fused",
        **options,
    )
    trainer.fit(Module(torch.optim.AdamW, lr=0.1), batches)
    assert trainer.optimizers[0].param_groups[0]["fused"]
