"""What a fit or a custom loop changes in the process and in the user's objects is as before when it is over."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainer_kit as tk
from trainer_kit import Accelerator
from trainer_kit.testing import TinyModule

BY_TORCH = {
    # torch replaces it as long as there is a process group, and imports its compiler with the first optimizer.
    "excepthook",
    "TORCHINDUCTOR_CACHE_DIR",
}


OURS = {"._trainer", "._built", "._trained_parameters"}
"""Attributes that a `TrainModule` keeps: `self.trainer`, and what the next fit needs to know of this one."""


def process_settings() -> dict[str, object]:
    """Settings of the process, by name."""
    settings: dict[str, object] = dict(os.environ)
    for number in signal.valid_signals():
        settings[f"signal {number}"] = signal.getsignal(number)
    backends = torch.backends
    settings |= {
        "directory": os.getcwd(),
        "arguments": list(sys.argv),
        "excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "unraisablehook": sys.unraisablehook,
        "displayhook": sys.displayhook,
        "showwarning": warnings.showwarning,
        "stdout": sys.stdout,
        "stderr": sys.stderr,
        "collects garbage": gc.isenabled(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "benchmark": backends.cudnn.benchmark,
        "cudnn deterministic": backends.cudnn.deterministic,
        "mha": backends.mha.get_fastpath_enabled(),
        "flash": backends.cuda.flash_sdp_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "swaps": torch.__future__.get_swap_module_params_on_conversion(),
    }
    return settings


def module_settings(module: nn.Module) -> dict[str, object]:
    """What a training step does not change: hooks, flags, dtypes, and the attributes of each layer."""
    settings: dict[str, object] = {}
    for name, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            is_hooks = isinstance(value, dict) and attribute.endswith("hooks")
            settings[f"{name}.{attribute}"] = len(value) if is_hooks else type(value)
        settings[f"{name} trains"] = layer.training
    for name, parameter in module.named_parameters():
        settings[name] = (
            parameter.requires_grad,
            parameter.dtype,
            type(parameter),
            len(parameter._backward_hooks or ()),  # type: ignore[attr-defined]
            len(parameter._post_accumulate_grad_hooks or ()),  # type: ignore[attr-defined]
            sorted(vars(parameter)),
        )
    return settings


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {
        name: len(value) for name, value in vars(optimizer).items() if "hook" in name
    }


def differences(before: dict[str, object], after: dict[str, object]) -> dict[str, Any]:
    names = (before.keys() | after.keys()) - BY_TORCH
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(names)
        if before.get(name) != after.get(name)
    }


def network() -> nn.Sequential:
    layers = nn.Sequential(
        nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)
    )
    layers[1].eval()
    return layers


class Model(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = network()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("score", self.layer(batch).mean())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "switches": {
        "precision": "bf16-mixed",
        "deterministic": True,
        "benchmark": True,
        "detect_anomaly": True,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 2,
    },
}


def fit_and_compare(root: Path, options: dict[str, Any], devices: int) -> None:
    module = Model()
    data = torch.utils.data.DataLoader(torch.randn(32, 32), 4, shuffle=True)  # type: ignore[arg-type]
    for _ in range(2):
        trainer = tk.Trainer(
            max_steps=2,
            accelerator="cpu",
            devices=devices,
            default_root_dir=root,
            enable_progress_bar=False,
            **options,
        )
        before = process_settings()
        module_before = module_settings(module)
        trainer.fit(module, data, data)
        changed = differences(before, process_settings())
        assert changed == {}
        changed = differences(module_before, module_settings(module))
        assert changed.keys() <= OURS, changed
        assert not any(optimizer_hooks(trainer.optimizers[0]).values())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_fit_leaves_the_process_and_the_module_as_they_were(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    fit_and_compare(tmp_path, options, 1)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_fit_of_two_processes_leaves_them_as_they_were(tmp_path: Path) -> None:
    fit_and_compare(tmp_path, {}, 2)


def loop_and_compare(options: dict[str, Any]) -> None:
    model = network()
    layer = model[3]
    own_forward = layer.forward
    # A forward of the instance, as peft and others set it.
    layer.forward = lambda inputs: own_forward(inputs) * 2  # type: ignore[method-assign]
    expected = layer.forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(16, 32), 4, shuffle=True)  # type: ignore[arg-type]
    before = process_settings()
    model_before = module_settings(model)
    accelerator = Accelerator(cpu=True, **options)
    prepared, stepping, batches = accelerator.prepare(model, optimizer, loader)
    head = accelerator.prepare_model(layer)
    for batch in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            stepping.step()
            stepping.zero_grad()
    prepared, stepping, batches, head = accelerator.free_memory(
        prepared, stepping, batches, head
    )
    accelerator.end_training()
    assert differences(before, process_settings()) == {}
    assert differences(model_before, module_settings(model)) == {}
    assert "forward" not in vars(model)
    assert layer.forward is expected
    assert not any(optimizer_hooks(optimizer).values())


@pytest.mark.parametrize(
    "options",
    [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}],
    ids=["plain", "bf16"],
)
def test_a_loop_leaves_the_process_and_the_objects_as_they_were(
    options: dict[str, Any],
) -> None:
    loop_and_compare(options)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_loop_of_two_processes_leaves_them_as_they_were() -> None:
    assert dist.is_initialized()
    loop_and_compare({"mixed_precision": "bf16"})
    gc.collect()
    watching = [thread for thread in threading.enumerate() if "guard" in thread.name]
    for thread in watching:
        thread.join(30)
        assert not thread.is_alive()
