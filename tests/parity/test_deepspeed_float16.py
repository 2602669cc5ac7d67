"""DeepSpeed's loss scale in float16: resumed in every bit, taken over by other engines, and what it skips is known."""

from __future__ import annotations

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    case,
    make_batches,
    make_net,
    same_state,
    sgd,
)
from trainer_kit.state.resume import read_state, resolve_source
from trainer_kit.strategies import DeepSpeedStrategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed",
    ),
]

SCALE: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "initial_scale_power": 8,
        "loss_scale_window": 2,
        "hysteresis": 2,
    }
}
OVERFLOWS = {1, 2, 5}
"""Steps whose gradients do not fit float16."""
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Overflowing(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        return loss * 1e5 if self.global_step in OVERFLOWS else loss

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Infinite(Overflowing):
    """Its loss is finite, and its gradient is not."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, weight = (
            F.cross_entropy(self.net(batch[0]), batch[1]),
            self.net[0].weight.sum(),
        )
        return (
            loss + (weight - weight.detach()).sqrt()
            if self.global_step in OVERFLOWS
            else loss
        )


def trained(
    stage: int | None,
    steps: int,
    start: Path | None = None,
    seed: int = 0,
    **options: Any,
) -> tk.Trainer:
    gc.freeze()
    strategy = (
        "single_device"
        if stage is None
        else DeepSpeedStrategy(stage=stage, config=SCALE)
    )
    options = {"precision": "16-mixed", **QUIET, **options}
    trainer = tk.Trainer(
        strategy=strategy,
        devices=1,
        accelerator="cpu",
        seed=1,
        max_steps=steps,
        **options,
    )
    trainer.fit(Overflowing(make_net(seed)), make_batches(10), ckpt_path=start)
    return trainer


def goes_on_in_every_bit(path: Path, stage: int) -> None:
    precision = "16-true" if stage == 1 else "16-mixed"
    straight = trained(stage, 8, precision=precision)
    straight.save_checkpoint(path / "straight")
    trained(stage, 4, precision=precision).save_checkpoint(path / "half")
    trained(stage, 8, path / "half", seed=7, precision=precision).save_checkpoint(
        path / "resumed"
    )
    states = [
        read_state(resolve_source(path / name), False)
        for name in ("straight", "resumed", "half")
    ]
    assert states[0]["precision"] == states[1]["precision"] != states[2]["precision"]
    assert states[2]["precision"]["scale"] < 256
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        same_state(states[0][part], states[1][part])
    # A skipped step is one of the run, and none of the scheduler.
    assert straight.global_step == 8
    assert straight.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        0.1 * 0.5 ** (8 - len(OVERFLOWS))
    )


def scales_pass_between_engines(path: Path, stage: int) -> None:
    kept = read_state(resolve_source(path / "half"), False)["precision"]
    taken = trained(
        None, 4, path / "half"
    ).precision_plugin.state_dict()  # as many steps: none is taken
    assert {key: taken[key] for key in kept if key != "deepspeed"} == {
        k: v for k, v in kept.items() if k != "deepspeed"
    }
    trained(None, 4).save_checkpoint(path / "single")
    theirs = read_state(resolve_source(path / "single"), False)["precision"]
    mine = trained(stage, 4, path / "single").precision_plugin.state_dict()
    assert mine["scale"] == theirs["scale"]
    assert (
        mine["_growth_tracker"] == theirs["_growth_tracker"] % mine["growth_interval"]
    )


def a_loop_of_ones_own_hears_it(path: Path, stage: int) -> None:
    plugin = tk.DeepSpeedPlugin({**SCALE, "zero_optimization": {"stage": stage}})

    def prepared(seed: int) -> tuple[tk.Accelerator, nn.Module, Any, Any]:
        accelerator = tk.Accelerator(
            cpu=True, mixed_precision="fp16", deepspeed_plugin=plugin
        )
        net = make_net(seed)
        optimizer = sgd(net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return (accelerator, *accelerator.prepare(net, optimizer, schedule))

    accelerator, model, optimizer, schedule = prepared(0)
    skipped, norms = [], []
    for step, (x, y) in enumerate(make_batches(4)):
        accelerator.backward(
            F.cross_entropy(model(x), y) * (1e5 if step in OVERFLOWS else 1)
        )
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        schedule.step()
        optimizer.zero_grad()
    assert skipped == [False, True, True, False]
    assert 0.01 < norms[0] < 10, "the norm is that without the scale"
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    optimizer.step()  # nothing has been asked for, and nothing is skipped
    assert not accelerator.optimizer_step_was_skipped
    accelerator.save_state(path / "raw")
    before = accelerator.precision.state_dict()
    accelerator.free_memory()
    other = prepared(3)[0]
    assert other.precision.state_dict() != before
    other.load_state(path / "raw")
    assert other.precision.state_dict() == before
    other.free_memory()


def skips_without_a_scale_are_known(path: Path, stage: int) -> None:
    module = Infinite(make_net())
    strategy = DeepSpeedStrategy(stage=stage)
    options = {"precision": "bf16-mixed", "accelerator": "cpu", "devices": 1, **QUIET}
    trainer = tk.Trainer(strategy=strategy, max_steps=8, **options)
    trainer.fit(module, make_batches(10))
    assert trainer.precision_plugin.state_dict() == {}
    weights = trainer.strategy.module_state(module).values()
    assert all(value.isfinite().all() for value in weights)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        0.1 * 0.5 ** (8 - len(OVERFLOWS))
    )


@pytest.mark.long
@pytest.mark.world_size(1, process_group=False, timeout=150)
def test_the_scale_is_kept_and_skipped_steps_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]  # nobody launched this process
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    # Most CPUs have no fast float16, which is why it is refused there; slow it runs everywhere.
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: True)
    for stage in (0, 1, 3):  # stages 1 and 2 are one engine's
        for check in (
            goes_on_in_every_bit,
            scales_pass_between_engines,
            a_loop_of_ones_own_hears_it,
            skips_without_a_scale_are_known,
        ):
            with case(stage=stage, check=check.__name__):
                check(tmp_path / f"{stage}", stage)
