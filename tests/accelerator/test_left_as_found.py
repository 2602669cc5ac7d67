"""What a fit or a custom loop changes in the process and in the user's objects is as before when it is over."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import trainer_kit as tk
from trainer_kit import Accelerator
from trainer_kit.testing import TinyModule

# torch wraps the step of an optimizer class when the first is created.
torch.optim.SGD([torch.zeros(1)], 0.1)

BY_TORCH = {
    # torch replaces it as long as there is a process group, and imports its compiler with the first optimizer.
    "excepthook",
    "TORCHINDUCTOR_CACHE_DIR",
}


# torch's compiler leaves it on the parameters of what it has compiled.
MARKS_BY_TORCH = {"_dynamo_static_input_type"}

OURS = {"._trainer", "._built", "._trained_parameters"}
"""Attributes that a `TrainModule` keeps: `self.trainer`, and what the next fit needs to know of this one."""


def backend_switches() -> dict[str, object]:
    switches: dict[str, object] = {}
    for kind, module in vars(torch.backends).items():
        names = dir(module) if isinstance(module, ModuleType) else []
        for name in names:
            # Some need a device, and some are deprecated.
            with warnings.catch_warnings(), suppress(Exception):
                value = getattr(module, name)
                if isinstance(value, (bool, int, str)):
                    switches[f"backends.{kind}.{name}"] = value
    return switches


def process_settings() -> dict[str, object]:
    """Settings of the process, by name."""
    settings: dict[str, object] = dict(os.environ)
    for number in signal.valid_signals():
        settings[f"signal {number}"] = signal.getsignal(number)
    for name in (None, "torch", "lightning_utilities", "py.warnings"):
        logger = logging.getLogger(name)
        settings[f"logger {name}"] = (logger.level, list(logger.handlers))
    settings |= backend_switches()
    # Methods that libraries replace.
    for patched in (nn.Module, torch.optim.SGD, torch.utils.data.DataLoader):
        settings[f"methods of {patched.__name__}"] = {
            name: value for name, value in vars(patched).items() if callable(value)
        }
    backends = torch.backends
    settings |= {
        "warning filters": list(warnings.filters),
        "import paths": list(sys.path),
        "tracebacks of crashes": faulthandler.is_enabled(),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.getprofile()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "when garbage is collected": (gc.get_threshold(), list(gc.callbacks)),
        "numpy errors": np.geterr(),
        "printed tensors": vars(torch._tensor_str.PRINT_OPTS).copy(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
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
            sorted(vars(parameter).keys() - MARKS_BY_TORCH),
        )
    return settings


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


class InBlocks(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = blocks()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_blocks_are_compiled_for_one_fit_only() -> None:
    """The next fit may ask for none, or for another backend."""
    module = InBlocks()
    # The user's own, which stays.
    module.layer[1].compile(backend="eager")
    before = module_settings(module)
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append("a block")
        return graph.forward

    for options in (
        {"compile": {"regional": True, "backend": "eager"}},
        {"compile": {"regional": True, "backend": backend}},
    ):
        assert not compiled
        trainer = tk.Trainer(max_steps=2, accelerator="cpu", barebones=True, **options)
        trainer.fit(module, list(torch.randn(4, 4, 32)))
        changed = differences(before, module_settings(module))
        assert changed.keys() <= OURS, changed
    assert compiled


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
    "profiled": {"profiler": "advanced", "seed": 3},
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


class Failing(Model):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise self.error


def test_a_fit_that_fails_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    for error in (ValueError("of the step"), KeyboardInterrupt()):
        module = Failing(error)
        trainer = tk.Trainer(
            accelerator="cpu", default_root_dir=tmp_path, precision="bf16-mixed"
        )
        before = process_settings()
        module_before = module_settings(module)
        with pytest.raises(type(error)):
            trainer.fit(module, list(torch.randn(4, 4, 32)))
        assert differences(before, process_settings()) == {}
        assert differences(module_before, module_settings(module)).keys() <= OURS


ENTRY_POINTS: dict[str, Callable[[tk.Trainer, Model, Any], object]] = {
    "validate": lambda trainer, module, data: trainer.validate(module, data),
    "predict": lambda trainer, module, data: trainer.predict(module, data),
    "explain": lambda trainer, module, data: trainer.explain(module, data),
    "verify": lambda trainer, module, data: trainer.verify(module, data),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_other_entry_points_leave_the_process_as_it_was(
    tmp_path: Path, entry_point: Callable[[tk.Trainer, Model, Any], object]
) -> None:
    module = Model()
    data = torch.utils.data.DataLoader(torch.randn(16, 32), 4)  # type: ignore[arg-type]
    trainer = tk.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False)
    before = process_settings()
    module_before = module_settings(module)
    entry_point(trainer, module, data)
    assert differences(before, process_settings()) == {}
    assert differences(module_before, module_settings(module)).keys() <= OURS


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_transformers_model_has_its_cache_back_after_recomputation() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from trainer_kit.strategies import FSDPStrategy

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    words = torch.randint(50, (2, 8))

    class Writing(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = GPT2LMHeadModel(config)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            assert not self.layer.config.use_cache
            return self.layer(input_ids=batch, labels=batch).loss

    before = repr(config)
    module = Writing()
    layers_before = module_settings(module)
    trainer = tk.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=2,
        barebones=True,
        strategy="ddp",
        activation_checkpointing=True,
    )
    with pytest.warns(UserWarning, match="use_cache is False"):
        trainer.fit(module, [words, words])
    assert repr(module.layer.config) == before
    assert differences(layers_before, module_settings(module)).keys() <= OURS

    strategy = FSDPStrategy(activation_checkpointing_policy=True)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = GPT2LMHeadModel(config)
    with pytest.warns(UserWarning, match="use_cache is False"):
        prepared = accelerator.prepare_model(model)
    accelerator.backward(prepared(input_ids=words, labels=words).loss)
    assert not model.config.use_cache
    accelerator.free_memory()
    assert repr(model.config) == before


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_free_memory_restores_models_for_evaluation_and_compiled_blocks() -> None:
    student, teacher = blocks(), blocks()
    before = [module_settings(model) for model in (student, teacher)]
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        dynamo_plugin=tk.TorchDynamoPlugin(
            backend="eager", use_regional_compilation=True
        ),
    )
    models = (
        accelerator.prepare_model(student),
        accelerator.prepare_model(teacher, evaluation_mode=True),
    )
    accelerator.backward(
        (models[0](torch.randn(4, 32)) - models[1](torch.randn(4, 32))).sum()
    )
    accelerator.free_memory()
    after = [module_settings(model) for model in (student, teacher)]
    assert [differences(*pair) for pair in zip(before, after, strict=True)] == [{}, {}]
    assert "forward" not in vars(student) | vars(teacher)
