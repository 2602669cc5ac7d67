"""Where an Accelerator's options come from."""

from __future__ import annotations

import pytest
import torch

from trainer_kit import Accelerator
from trainer_kit.core.errors import ConfigurationError


def rows(accelerator: Accelerator) -> dict[str, list[str]]:
    return {line.split()[0]: line.split(maxsplit=2)[1:] for line in accelerator.explain().splitlines()}


def test_argument_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(Accelerator(cpu=True, mixed_precision="bf16"))
    assert found["use_cpu"] == ["true", "argument"]
    assert found["mixed_precision"] == ["bf16", "argument"]
    assert found["gradient_accumulation_steps"] == ["1", "default"]
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("TRAINER_KIT_ORIGINS", '{"mixed_precision": "flag --mixed_precision", "use_cpu": "a.yaml:7"}')
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    found = rows(accelerator)
    assert found["use_cpu"] == ["true", "a.yaml:7"]
    assert found["mixed_precision"] == ["bf16", "flag --mixed_precision"]
    assert found["gradient_accumulation_steps"] == ["2", "argument"]
    assert rows(Accelerator())["gradient_accumulation_steps"] == [
        "4",
        "environment TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS",
    ]


def test_torch_compile_as_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("TRAINER_KIT_DYNAMO_USE_FULLGRAPH", "1")
    plugin = Accelerator(cpu=True).dynamo_plugin
    assert (plugin.backend, plugin.fullgraph, plugin.dynamic) == ("eager", True, None)
    assert Accelerator(cpu=True, dynamo_backend="no").dynamo_plugin.backend == "no"
    assert not isinstance(Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1)), torch.nn.Linear)


def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigurationError, match="whole number"):
        Accelerator(cpu=True)
