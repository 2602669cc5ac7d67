"""The engines with one rank on the device: nccl, parts in pinned memory, and the choice where a model does not fit."""

from __future__ import annotations

import gc
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_kit as tk
from tests.gpu.devices import (
    Net,
    assert_same,
    batches,
    by_hand,
    deterministic,
    device_of,
    fit,
    on_each_device,
    one_rank,
)
from trainer_kit.strategies import DDPStrategy, FSDPStrategy
from trainer_kit.testing import run_distributed
from trainer_kit.training import compose as room


class Seen(tk.Callback):
    """Where parts are, and what processes talk through, while training."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.backend = str(dist.get_backend_config())
        parts = [getattr(p, "to_local", lambda p=p: p)() for p in module.parameters()]
        self.devices = {part.device for part in parts}
        self.pinned = {
            part.is_pinned()
            for part in parts
            if part.device.type == "cpu" and torch.cuda.is_available()
        }


def engines() -> dict[str, Any]:
    return {
        "ddp": lambda: DDPStrategy(),
        "ddp, norms over all ranks": lambda: DDPStrategy(),
        "ddp on a named backend": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp": lambda: FSDPStrategy(),
        "fsdp offloaded": lambda: FSDPStrategy(cpu_offload=True),
    }


@pytest.mark.slow
@on_each_device
@pytest.mark.parametrize("engine", engines())
def test_one_rank(kind: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = device_of(kind), Seen()
    # Steps of parts on the host round in another way.
    plain, mine = Net(dropout=0.0), Net(dropout=0.0)
    with deterministic():
        by_hand(plain, batches(), device)
    with one_rank(monkeypatch):
        synced = "norms" in engine and kind != "cpu"  # torch has none for CPUs
        options = {
            "deterministic": True,
            "barebones": False,
            "enable_checkpointing": False,
            "sync_batchnorm": synced,
        }
        trainer = fit(
            mine,
            batches(),
            kind,
            strategy=engines()[engine](),
            callbacks=[seen],
            **options,
        )
        assert trainer.strategy.name in ("ddp", "fsdp")
        assert (
            any(isinstance(part, torch.nn.SyncBatchNorm) for part in mine.modules())
            == synced
        )
        assert trainer.strategy.world.all_gather_object("here") == ["here"]
        assert trainer.strategy.world.agree([1.0, 2.0]) == [[1.0, 2.0]]
        assert trainer.strategy.world.all_reduce(torch.ones(2), "mean").tolist() == [
            1.0,
            1.0,
        ]
        if engine.startswith("fsdp"):
            state = {
                name: getattr(v, "full_tensor", lambda v=v: v)()
                for name, v in mine.state_dict().items()
            }
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(
                    state[name].to(device), value, rtol=1e-5, atol=1e-6
                )
        else:
            assert_same(mine, plain)
        if kind != "cpu":
            assert ("nccl" in seen.backend) == ("named" not in engine)
            assert torch.accelerator.current_device_index() == device.index
            assert seen.devices == {
                torch.device("cpu") if "offloaded" in engine else device
            }
            assert seen.pinned == ({True} if "offloaded" in engine else set())
        del trainer, mine


def deepspeed(kind: str) -> list[float]:
    gc.freeze()  # the engine collects garbage when it is made: seconds, for all that was imported
    module = Net(dropout=0.0)
    fit(
        module,
        batches(6, last=6),
        kind,
        strategy="deepspeed_stage_2",
        gradient_clip_val=None,
    )
    return [float(loss) for loss in module.losses]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
@on_each_device
def test_deepspeed(kind: str) -> None:
    expected = Net(dropout=0.0)
    fit(expected, batches(6, last=6), kind, gradient_clip_val=None)
    (losses,) = run_distributed(deepspeed, 1, kind, process_group=False, timeout=110)
    assert losses == pytest.approx([float(loss) for loss in expected.losses], rel=1e-3)


@on_each_device
def test_a_model_that_does_not_fit(kind: str) -> None:
    """What ``strategy="auto"`` would take among several ranks of a device, by the memory that it tells."""
    device = device_of(kind)
    memory = room.device_memory(device, 1)
    assert memory is not None
    trainer = SimpleNamespace(
        strategy=DDPStrategy(device),
        sharded_alternative=FSDPStrategy(),
        precision_plugin=SimpleNamespace(name="32-true"),
        processes=1,
        environment=SimpleNamespace(local_world_size=1),
    )
    with torch.device("meta"):
        small, large = (
            torch.nn.Linear(8, 8),
            torch.nn.Linear(1024, memory // (4 * 4 * 1024)),
        )
    assert room.choose_by_memory(trainer, small, "fit")[0] is trainer.strategy
    taken, why = room.choose_by_memory(trainer, large, "fit")
    assert taken is trainer.sharded_alternative
    assert taken.device == device
    assert "do not fit" in why
