"""Checkpoints from the device: copied into pinned memory, complete, and gone on from in every bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_kit as tk
from tests.gpu.devices import Net, assert_same, batches, device_of, fit, on_each_device
from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.core.devices import device_memory, free_memory
from trainer_kit.core.seed import rng_state


class Large(Net):
    """With something that a copy on the device would show."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("large", torch.ones(1 << (10 if kind == "cpu" else 24)))


class Peaks(tk.Callback):
    """The most device memory of each step and of what came before it: a save, for those after an even one."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if module.device.type != "cpu":
            self.bytes.append(torch.accelerator.max_memory_allocated())
            torch.accelerator.reset_peak_memory_stats()


@on_each_device
def test_a_resumed_run_is_the_same_in_every_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, pinned = device_of(kind), set()
    real = HostBuffers.copy

    def copy(self: HostBuffers, name: str, tensor: torch.Tensor) -> torch.Tensor:
        made = real(self, name, tensor)
        assert made.device.type == "cpu"
        pinned.add((tensor.device.type, made.is_pinned() if kind != "cpu" else False))
        return made

    monkeypatch.setattr(HostBuffers, "copy", copy)
    whole, peaks = Large(kind), Peaks()
    kept = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"deterministic": True, "barebones": False}
    fit(
        whole, batches(), kind, callbacks=[kept, peaks], **options
    )  # 8 steps, the last two of each epoch ragged
    noise = rng_state(device)
    assert (
        pinned == {("cpu", False)}
        if kind == "cpu"
        else pinned == {("cpu", False), (kind, True)}
    )
    # The first step makes the optimizer's state. A save adds nothing: a copy of the buffer would be 64 MB.
    assert max(peaks.bytes[2::2], default=0) < max(peaks.bytes[1::2], default=1) + (
        8 << 20
    )

    for step in (2, 6):
        again = Large(kind)
        start = tmp_path / f"step-{step:08d}"
        trainer = fit(
            again,
            batches(),
            kind,
            ckpt_path=start,
            seed_device=77,
            enable_checkpointing=False,
            **options,
        )
        assert trainer.global_step == 8
        assert_same(again, whole)
        assert all(
            str(value) == str(noise[name])
            for name, value in rng_state(device).items()
            if name != "python"
        )
        for name in {"torch", "device"} & noise.keys():
            assert noise[name].equal(rng_state(device)[name])


@on_each_device
def test_memory_is_reported_and_released(kind: str) -> None:
    device = device_of(kind)
    accelerator = tk.Accelerator(cpu=kind == "cpu")
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(8, 64, device=device)).mean())
    optimizer.step()
    whole, free = device_memory(device, 1), free_memory(device)
    assert whole is None or free is None or 0 < free <= whole
    before = 0 if kind == "cpu" else torch.accelerator.memory_allocated()
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    gc.collect()
    assert kind == "cpu" or torch.accelerator.memory_allocated() < before
