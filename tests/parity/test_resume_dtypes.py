"""State of an optimizer in another dtype than its parameter comes back as it was saved, on every way in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_kit as tk
from tests.parity.plain import Classifier, assert_same, case, make_batches, make_net
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.strategies import MeshStrategy

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
}


class Masters(torch.optim.Optimizer):
    """SGD with momentum in float32 behind weights that are rounded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            own = self.state[p]
            if not own:
                own["master"], own["kept"] = (
                    p.detach().float(),
                    {"moments": [torch.zeros_like(p, dtype=torch.float32)]},
                )
            (moment,) = own["kept"]["moments"]
            moment.mul_(0.9).add_(p.grad.float())
            own["master"].sub_(moment, alpha=self.param_groups[0]["lr"])
            p.copy_(own["master"])


def masters(net: nn.Module) -> Masters:
    return Masters(net.parameters())


def nadam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(net.parameters(), lr=0.01)  # keeps a product in float32


def fit(
    root: Path, configure: Any, precision: str, ckpt: Any = None, **options: Any
) -> Classifier:
    module = Classifier(make_net(), configure)
    saving = (
        [ModelCheckpoint(root, every_n_train_steps=2, save_top_k=-1)]
        if ckpt is None
        else []
    )
    options = {
        "devices": 1,
        "callbacks": saving,
        "enable_checkpointing": bool(saving),
        **QUIET,
        **options,
    }
    trainer = tk.Trainer(max_epochs=2, precision=precision, **options)
    trainer.fit(module, make_batches(4), ckpt_path=ckpt)
    return module


@pytest.mark.parametrize(
    ("configure", "precision"), [(masters, "bf16-true"), (nadam, "64-true")]
)
def test_a_fit(tmp_path: Path, configure: Any, precision: str) -> None:
    whole = fit(tmp_path, configure, precision)
    assert_same(fit(tmp_path, configure, precision, tmp_path / "step-00000002"), whole)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_fits_on_two_ranks(tmp_path: Path) -> None:
    for name, strategy in (
        ("ddp", "ddp"),
        ("fsdp", "fsdp"),
        ("mesh", MeshStrategy(dp_replicate=2)),
    ):
        with case(strategy=name):
            options = {"strategy": strategy, "devices": 2}
            whole = {
                k: _whole(v)
                for k, v in fit(tmp_path / name, masters, "bf16-true", **options)
                .state_dict()
                .items()
            }
            checkpoint = tmp_path / name / "step-00000002"
            again = fit(tmp_path, masters, "bf16-true", checkpoint, **options)
            assert_same({k: _whole(v) for k, v in again.state_dict().items()}, whole)


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    def made() -> Any:
        accelerator, net = tk.Accelerator(cpu=True), make_net().bfloat16()
        return (accelerator, *accelerator.prepare(net, masters(net)))

    def train(accelerator: Any, net: Any, optimizer: Any) -> Any:
        for x, y in make_batches(3):
            accelerator.backward(nn.functional.cross_entropy(net(x.bfloat16()), y))
            optimizer.step()
            optimizer.zero_grad()
        return net

    first, second = made(), made()
    train(*first)
    first[0].save_state(tmp_path / "state")
    second[0].load_state(tmp_path / "state")
    assert_same(train(*second), train(*first))


@pytest.mark.parametrize(
    ("then", "now"), [("32-true", "bf16-true"), ("bf16-true", "64-true")]
)
def test_state_in_the_dtype_of_its_weight_follows_the_weight(
    tmp_path: Path, then: str, now: str
) -> None:
    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    seen: list[torch.dtype] = []

    class Looks(Classifier):
        def on_train_start(self) -> None:
            for own in self.optimizers().state.values():
                assert own["step"].dtype == torch.float32
                seen.append(own["exp_avg"].dtype)

    fit(tmp_path, adamw, then)
    trainer = tk.Trainer(
        max_epochs=2, precision=now, enable_checkpointing=False, **QUIET
    )
    trainer.fit(
        Looks(make_net(), adamw), make_batches(4), ckpt_path=tmp_path / "step-00000002"
    )
    assert set(seen) == {{"bf16-true": torch.bfloat16, "64-true": torch.float64}[now]}
