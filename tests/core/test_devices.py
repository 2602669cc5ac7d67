"""Which device is the current one, and asking for one without using it; by stand-ins, for there is none here."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit.core import environment
from trainer_kit.core.devices import make_current, present_accelerator
from trainer_kit.strategies import SingleDeviceStrategy, process_group
from trainer_kit.testing import TinyModule

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of torch, which shows two CUDA devices, of which the first is the current one."""
    made: list[Any] = []

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    # What torch.accelerator asks would initialize CUDA; `torch.cuda` asks NVML.
    monkeypatch.setattr(
        torch.accelerator, "device_count", lambda: made.append("initialized")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: made.append(("current", index)),
    )
    return made


def test_looking_for_a_device_leaves_the_process_fit_to_fork(calls: list[Any]) -> None:
    assert environment.pick_device("gpu", 1) == torch.device("cuda", 1)
    assert environment.list_devices("auto", "gpu") == [0, 1]
    assert present_accelerator() == torch.device("cuda")
    assert calls == []


def test_a_rank_computes_on_its_own_device(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cpu", "meta", "cuda", "cuda:0"):
        make_current(torch.device(device))
    assert calls == []
    SingleDeviceStrategy(torch.device("cuda", 1)).start()
    assert calls == [("current", 1)]

    calls.clear()
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        process_group.dist,
        "init_process_group",
        lambda backend, **_: calls.append(("joins", backend)),
    )
    monkeypatch.setattr(process_group, "ProcessGroup", lambda device, timeout: device)
    monkeypatch.setattr(process_group.atexit, "register", lambda _: None)
    for backend in (None, "nccl", "gloo", "cuda:nccl"):
        process_group.join_world(
            torch.device("cuda", 1), backend, timedelta(seconds=1), alone=True
        )
    process_group.join_world(
        torch.device("cpu"), "mpi", timedelta(seconds=1), alone=True
    )
    joined = [
        ("joins", backend)
        for backend in (None, "cpu:gloo,cuda:nccl", "gloo", "cuda:nccl")
    ]
    # Ahead of joining: a process that joins on another one's device stays there.
    assert calls == [each for one in joined for each in (("current", 1), one)] + [
        ("joins", "mpi")
    ]


def test_deterministic_products_are_allowed_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    class Looks(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(os.environ.get(WORKSPACE))
            return super().training_step(batch, batch_idx)

    def fit(**options: Any) -> None:
        trainer = tk.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, barebones=True, **options
        )
        trainer.fit(Looks(), [torch.ones(2, 32)])

    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    fit(deterministic=True)
    assert WORKSPACE not in os.environ
    fit()
    monkeypatch.setenv(WORKSPACE, ":16:8")
    fit(deterministic=True)
    assert (seen, os.environ[WORKSPACE]) == ([":4096:8", None, ":16:8"], ":16:8")
