"""Where an Accelerator's options come from."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import trainer_kit as tk
from trainer_kit import Accelerator
from trainer_kit.accelerator.composition import chosen_strategy, plugins
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.options.deepspeed import named_plugins
from trainer_kit.options.records import by_kind


def rows(accelerator: Accelerator) -> dict[str, list[str]]:
    return {
        line.split()[0]: line.split(maxsplit=2)[1:]
        for line in accelerator.explain().splitlines()
    }


def test_argument_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rows(Accelerator(cpu=True, mixed_precision="bf16"))
    assert found["use_cpu"] == ["true", "argument"]
    assert found["mixed_precision"] == ["bf16", "argument"]
    assert found["gradient_accumulation_steps"] == ["1", "default"]
    monkeypatch.setenv("TRAINER_KIT_USE_CPU", "1")
    monkeypatch.setenv("TRAINER_KIT_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv(
        "TRAINER_KIT_ORIGINS",
        '{"mixed_precision": "flag --mixed_precision", "use_cpu": "a.yaml:7"}',
    )
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == (
        "bf16",
        2,
    )
    found = rows(accelerator)
    assert found["use_cpu"] == ["true", "a.yaml:7"]
    assert found["mixed_precision"] == ["bf16", "flag --mixed_precision"]
    assert found["gradient_accumulation_steps"] == ["2", "argument"]
    assert rows(Accelerator())["gradient_accumulation_steps"] == [
        "4",
        "environment TRAINER_KIT_GRADIENT_ACCUMULATION_STEPS",
    ]


def test_the_launchers_torch_compile_options_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_KIT_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("TRAINER_KIT_DYNAMO_USE_FULLGRAPH", "1")
    plugin = Accelerator(cpu=True).dynamo_plugin
    assert (plugin.backend, plugin.fullgraph, plugin.dynamic) == ("eager", True, None)
    assert Accelerator(cpu=True, dynamo_backend="no").dynamo_plugin.backend == "no"
    assert not isinstance(
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1)), torch.nn.Linear
    )


def test_a_number_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigurationError, match="an integer"):
        Accelerator(cpu=True)


def strategy(*handlers: Any, **engines: Any) -> Any:
    options = {**plugins(engines, named_plugins(engines)), **by_kind(handlers)}
    return chosen_strategy(
        options, Environment(world_size=4, local_world_size=4, source="torchrun")
    )


def test_an_option_in_the_script_does_not_replace_the_launchers_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = tk.InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    assert strategy(patience).name == "ddp"
    monkeypatch.setenv("TRAINER_KIT_DISTRIBUTED_TYPE", "FSDP")
    monkeypatch.setenv("TRAINER_KIT_FSDP_OFFLOAD_PARAMS", "1")
    monkeypatch.setenv("TRAINER_KIT_FSDP_ACTIVATION_CHECKPOINTING", "1")
    for handlers in (
        [patience],
        [patience, tk.DistributedDataParallelKwargs(find_unused_parameters=True)],
    ):
        made = strategy(*handlers)
        assert (made.name, made.timeout, made.cpu_offload) == (
            "fsdp",
            timedelta(seconds=77),
            True,
        )
    own = tk.FullyShardedDataParallelPlugin(
        cpu_offload=False, min_num_params=10, auto_wrap_policy="size_based_wrap"
    )
    assert own.arguments() == {
        "cpu_offload": False, "activation_checkpointing_policy": True, "auto_wrap_policy": 10
    }  # fmt: skip
    mesh = strategy(parallelism_config=tk.ParallelismConfig(dp_shard_size=4))
    assert (mesh.name, mesh._sharding_options, mesh._checkpointing_policy) == (
        "mesh",
        {"cpu_offload": True},
        True,
    )
    monkeypatch.setenv("TRAINER_KIT_PARALLELISM_CONFIG_TP_SIZE", "2")
    monkeypatch.setenv("TRAINER_KIT_PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    for asked in ({}, {"fsdp_plugin": own}):
        made = strategy(patience, **asked)
        assert (made.name, made.sizes["tp"], made.timeout) == (
            "mesh",
            2,
            timedelta(seconds=77),
        )
        assert made._sharding_options["cpu_offload"] is not bool(asked)
    for engine in ("DEEPSPEED", "MEGATRON_LM"):
        monkeypatch.setenv("TRAINER_KIT_DISTRIBUTED_TYPE", engine)
        with pytest.raises(
            ConfigurationError, match="only FSDP shards parameters on a mesh"
        ):
            strategy(
                parallelism_config=tk.ParallelismConfig(tp_size=2, dp_shard_size=2)
            )


def test_powersgd_by_accelerates_word() -> None:
    options = {
        tk.DistributedDataParallelKwargs: tk.DistributedDataParallelKwargs(
            comm_hook="power_sgd"
        )
    }
    made = chosen_strategy(options, Environment(world_size=2, source="torchrun"))
    assert made.comm_hook == "powersgd"
