"""A step on the device: the weights of a loop by hand, nothing that waits, batches copied beside it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

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
)
from trainer_kit.callbacks import PyTorchProfiler
from trainer_kit.core.seed import rng_state
from trainer_kit.training import loaders


@on_each_device
def test_the_same_weights_as_by_hand(kind: str) -> None:
    device, data, plain, mine = device_of(kind), batches(), Net(), Net()
    with deterministic():
        optimizer = by_hand(plain, data, device)
        noise = rng_state(device)
    trainer = fit(mine, data, kind, deterministic=True)
    assert trainer.strategy.device == device
    assert {p.device for p in mine.parameters()} == {device}
    assert_same(mine, plain)
    for name in {
        "torch",
        "device",
    } & noise.keys():  # generators, the device's own too, drew the same
        assert noise[name].equal(rng_state(device)[name])
    for p, q in zip(plain.parameters(), mine.parameters(), strict=True):
        state = trainer.optimizers[0].state[q]
        assert all(
            value.equal(state[name]) for name, value in optimizer.state[p].items()
        )


@on_each_device
def test_the_same_weights_with_an_accelerator(kind: str) -> None:
    device, data, plain, mine = device_of(kind), batches(8, last=6), Net(), Net()
    with deterministic():
        by_hand(plain, data, device)
        accelerator = tk.Accelerator(cpu=kind == "cpu", gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(
            mine, mine.configure_optimizers(), data
        )
        torch.manual_seed(5)
        for _ in range(2):
            for x, y in loader:
                assert x.device == accelerator.device == device
                with accelerator.accumulate(model):
                    accelerator.backward(mine.loss((x, y)))
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
    assert_same(mine, plain)


class Strict(tk.Callback):
    """From the second step on, what waits for the device is an error; up to the end of the last one."""

    def __init__(self, kind: str, last: int) -> None:
        self.kind, self.last, self.strict = kind, last, 0

    def set(self, mode: str) -> None:
        if self.kind == "cuda":
            torch.cuda.set_sync_debug_mode(mode)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 1:
            self.set("error")
        self.strict += 1
        if trainer.global_step == self.last:
            self.set("default")

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        self.set("default")


class Logging(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss, "fixed": 0.5}, on_step=True, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@on_each_device
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_step_waits_for_the_device(kind: str, precision: str) -> None:
    steps = 10 if kind == "cpu" else 300  # more than as many values as are kept apart
    strict = Strict(kind, steps)
    options = {
        "max_epochs": 1,
        "log_every_n_steps": 10_000,
        "enable_checkpointing": False,
    }
    fit(
        Logging(),
        batches(2 * steps, last=6),
        kind,
        precision=precision,
        barebones=False,
        callbacks=[strict],
        **options,
    )
    assert strict.strict == steps


class Busy(tk.TrainModule):
    """Computes long on each batch, which its memory must outlive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.sums: list[Tensor] = []
        self.taken: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        for _ in range(30):
            x = x * 1.0
        self.sums.append(x.sum(dtype=torch.float64))
        return self.weight * x.mean()

    def on_train_epoch_end(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            self.taken.append(torch.accelerator.memory_reserved())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@on_each_device
@pytest.mark.parametrize("pinned", [False, True])
def test_batches_are_pinned_and_copied_during_the_steps(
    kind: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, size = device_of(kind), 1 << (10 if kind == "cpu" else 20)
    seen: list[tuple[bool, bool]] = []
    real = loaders.move_to_device
    usual = (
        None if kind == "cpu" else torch.accelerator.current_stream(device).stream_id
    )

    def spy(batch: Any, to: torch.device) -> Any:
        seen.append(
            (
                batch[0].is_pinned(),
                torch.accelerator.current_stream(device).stream_id != usual,
            )
        )
        return real(batch, to)

    monkeypatch.setattr(loaders, "move_to_device", spy)
    data = DataLoader(
        TensorDataset(torch.arange(24.0).repeat_interleave(size).view(24, size)),
        batch_size=2,
        pin_memory=pinned and kind != "cpu",
    )
    module = Busy()
    fit(
        module,
        data,
        kind,
        max_epochs=6,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
    )
    assert [float(one) / size for one in module.sums] == [
        4.0 * i + 1 for i in range(12)
    ] * 6
    assert seen == ([] if kind == "cpu" else [(True, True)] * 72)
    assert len(set(module.taken[1:])) <= 1, "memory grows from epoch to epoch"


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA, whose allocations torch records"
)
def test_a_snapshot_of_memory(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, row_limit=0, memory_snapshot=True)
    fit(
        Net(),
        batches(),
        "gpu",
        barebones=False,
        enable_checkpointing=False,
        profiler=profiler,
    )
    with open(tmp_path / "profile-rank0.pickle", "rb") as file:
        traces = pickle.load(file)["device_traces"][0]
    assert any(entry["action"] == "alloc" for entry in traces)
