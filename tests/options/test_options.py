"""Option records, arguments and setters of an `Accelerator` refuse in words what they do not take."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.options.fp8 import AORecipeKwargs
from trainer_kit.options.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from trainer_kit.options.records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, MeshStrategy


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        (
            InitProcessGroupKwargs,
            {"timeout": 1800},
            r"timeout=1800.*timeout=timedelta\(seconds=1800\)",
        ),
        (InitProcessGroupKwargs, {"timeout": "30m"}, "timeout='30m'.*takes timedelta"),
        (InitProcessGroupKwargs, {"timeout": timedelta(0)}, "above zero"),
        (InitProcessGroupKwargs, {"backend": 3}, "backend=3.*takes str"),
        (
            ProfileKwargs,
            {"activities": ["gpu"]},
            "unknown profiler activity.*'gpu'.*cpu, .*cuda",
        ),
        (ProfileKwargs, {"activities": "cpu"}, "activities='cpu'.*takes list"),
        (ProfileKwargs, {"activities": [1]}, r"activities=\[1\]"),
        (
            ProfileKwargs,
            {"schedule_option": {"often": 1}},
            "invalid profiler schedule.*often",
        ),
        (
            ProfileKwargs,
            {"schedule_option": {"wait": 1, "warmup": 1, "active": 0}},
            "invalid profiler schedule",
        ),
        (ProfileKwargs, {"on_trace_ready": "file"}, "on_trace_ready='file'"),
        (ProfileKwargs, {"record_shapes": "yes"}, "record_shapes='yes'.*takes bool"),
        (ProfileKwargs, {"output_trace_dir": 3}, "output_trace_dir=3"),
        (AutocastKwargs, {"enabled": "false"}, "enabled='false'"),
        (
            DistributedDataParallelKwargs,
            {"find_unused_parameters": "false"},
            "find_unused_parameters='false'",
        ),
        (
            DistributedDataParallelKwargs,
            {"bucket_cap_mb": 0},
            "bucket_cap_mb is above zero",
        ),
        (GradScalerKwargs, {"growth_factor": 1.0}, "above 1.*growth_factor=1.0"),
        (GradScalerKwargs, {"init_scale": -1.0}, "init_scale is above zero"),
        (DataLoaderConfiguration, {"split_batches": "false"}, "split_batches='false'"),
        (DataLoaderConfiguration, {"data_seed": "seven"}, "data_seed='seven'"),
        (ProjectConfiguration, {"project_dir": 3}, "project_dir=3"),
        (ProjectConfiguration, {"total_limit": "3"}, "total_limit='3'"),
        (ProjectConfiguration, {"total_limit": -1}, "total_limit is above zero"),
        (
            FullyShardedDataParallelPlugin,
            {"min_num_params": "many"},
            "min_num_params='many'",
        ),
        (
            GradientAccumulationPlugin,
            {"num_steps": 0},
            "at least one micro-batch.*0 for",
        ),
        (GradientAccumulationPlugin, {"num_steps": [4]}, r"num_steps=\[4\]"),
        (TorchDynamoPlugin, {"backend": 1}, "backend=1"),
        (ParallelismConfig, {"tp_size": 1.5}, "tp_size=1.5"),
        (ParallelismConfig, {"tp_handler": "on"}, "tp_handler='on'"),
        (TorchTensorParallelPlugin, {"tp_size": [2]}, r"tp_size=\[2\]"),
        (AORecipeKwargs, {"module_filter_func": "all"}, "module_filter_func='all'"),
        (
            tk.DeepSpeedPlugin,
            {"gradient_clipping": "hard"},
            "gradient_clipping is a number",
        ),
        (tk.DeepSpeedPlugin, {"zero_stage": "two"}, "zero_stage is a number"),
        (
            tk.DeepSpeedPlugin,
            {"gradient_accumulation_steps": "some"},
            "at least one micro-batch.*'some'",
        ),
        (tk.DeepSpeedPlugin, {"hf_ds_config": 3}, "a path or a dict.*config=3"),
        (
            tk.DeepSpeedPlugin,
            {"transformer_moe_cls_names": ["Block"]},
            r"comma-separated.*\['Block'\]",
        ),
    ],
)
def test_a_record_refuses_invalid_values(record, options, words):
    with pytest.raises(ConfigurationError, match=f"(?s){words}"):
        record(**options)


def test_records_accept_equivalent_values(tmp_path):
    assert InitProcessGroupKwargs(timeout=timedelta(minutes=5)).timeout == timedelta(
        minutes=5
    )
    assert (
        GradScalerKwargs(init_scale=1024, growth_interval=np.int64(10)).init_scale
        == 1024
    )
    assert ProjectConfiguration(Path(tmp_path), total_limit=1).project_dir == tmp_path
    assert DataLoaderConfiguration(split_batches=1).split_batches
    assert ProfileKwargs(activities=("cpu", "CUDA")).torch_activities() == [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]
    assert FullyShardedDataParallelPlugin(
        transformer_cls_names_to_wrap={"Block"}
    ).transformer_cls_names_to_wrap


@pytest.mark.parametrize(
    ("option", "same"),
    [
        ({"fsdp_version": 1}, {"fsdp_version": 2}),
        ({"backward_prefetch": "BACKWARD_POST"}, {"backward_prefetch": None}),
        ({"forward_prefetch": True}, {"forward_prefetch": False}),
        ({"limit_all_gathers": False}, {"limit_all_gathers": True}),
        ({"use_orig_params": False}, {"use_orig_params": True}),
        ({"param_init_fn": print}, {"cpu_ram_efficient_loading": True}),
        ({"sync_module_states": False}, {"sync_module_states": True}),
        (
            {"state_dict_config": {"offload_to_cpu": True}},
            {"state_dict_type": "FULL_STATE_DICT"},
        ),
    ],
)
def test_options_of_fsdp1_without_effect_are_named_with_what_to_do(option, same):
    with pytest.warns(
        UserWarning,
        match=rf"FullyShardedDataParallelPlugin\({min(option)}=.* has no effect: .+; ",
    ):
        FullyShardedDataParallelPlugin(**option)
    FullyShardedDataParallelPlugin(
        **same
    )  # what FSDP2 does anyway: warnings are errors here


def test_a_field_that_was_set_later_is_looked_at_too():
    handler, loaders = InitProcessGroupKwargs(), DataLoaderConfiguration()
    handler.timeout, loaders.even_batches = 60, "no"
    with pytest.raises(ConfigurationError, match="timeout=60"):
        tk.Accelerator(cpu=True, kwargs_handlers=[handler])
    with pytest.raises(ConfigurationError, match="even_batches='no'"):
        tk.Accelerator(cpu=True, dataloader_config=loaders)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"dataloader_config": {"split_batches": True}},
            "takes a DataLoaderConfiguration",
        ),
        ({"project_config": "runs"}, "takes a ProjectConfiguration"),
        ({"gradient_accumulation_plugin": 4}, "takes a GradientAccumulationPlugin"),
        ({"fsdp_plugin": "fsdp"}, "takes a FullyShardedDataParallelPlugin"),
        ({"megatron_lm_plugin": {}}, "takes a MegatronLMPlugin"),
        ({"parallelism_config": {"tp": 2}}, "takes a ParallelismConfig"),
        ({"torch_tp_plugin": 2}, "takes a TorchTensorParallelPlugin"),
        ({"cpu": "false"}, "cpu is True or False"),
        (
            {"step_scheduler_with_optimizer": None, "split_batches": "no"},
            "split_batches is True or False",
        ),
        ({"seed": "seven"}, "seed must be an integer ≥ 0"),
        ({"seed": -1}, "seed must be an integer ≥ 0"),
        ({"rng_types": 3}, "unknown kind of generator '3'"),
        ({"rng_types": ["tor"]}, "unknown kind of generator 'tor'"),
        ({"log_with": 3}, "log_with= takes names of trackers"),
        ({"log_with": ["csv", object()]}, "log_with= takes names of trackers"),
        (
            {"gradient_accumulation_steps": 1.5},
            "gradient_accumulation_steps must be an integer",
        ),
        (
            {"gradient_accumulation_steps": [2]},
            "gradient_accumulation_steps must be an integer",
        ),
    ],
)
def test_an_accelerator_refuses_invalid_argument_values(options, words):
    with pytest.raises(ConfigurationError, match=words):
        tk.Accelerator(**{"cpu": True, **options})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("gradient_accumulation_steps", 0, "at least one micro-batch"),
        ("gradient_accumulation_steps", "4", "at least one micro-batch"),
        ("even_batches", "no", "even_batches='no'"),
        ("sync_gradients", "no", "sync_gradients is True or False"),
    ],
)
def test_a_setter_refuses_an_invalid_value_and_keeps_the_old_one(name, value, words):
    accelerator = tk.Accelerator(cpu=True, gradient_accumulation_steps=2)
    before = getattr(accelerator, name)
    with pytest.raises(ConfigurationError, match=words):
        setattr(accelerator, name, value)
    assert getattr(accelerator, name) == before


def test_a_backend_that_torch_compile_does_not_know():
    accelerator = tk.Accelerator(cpu=True, dynamo_backend="inductr")
    with pytest.raises(
        ConfigurationError, match=r"(?s)torch.compile rejects these options.*inductr"
    ):
        accelerator.prepare(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, MeshStrategy])
def test_a_strategy_refuses_a_timeout_without_a_unit(strategy):
    with pytest.raises(
        ConfigurationError,
        match=rf"(?s)timeout of {strategy.__name__}.*timedelta\(seconds=600\)",
    ):
        strategy(timeout=600)


def test_a_profile_of_known_activities_runs():
    accelerator = tk.Accelerator(cpu=True)
    handler = ProfileKwargs(activities=["cpu"])
    with accelerator.profile(handler) as profiler:
        torch.ones(4).sum()
    assert any("sum" in row.key for row in profiler.key_averages())
    assert callable(
        ProfileKwargs(
            schedule_option={"wait": 0, "warmup": 1, "active": 1}
        ).torch_schedule()
    )
    handler.activities = ["nvidia"]
    with (
        pytest.raises(ConfigurationError, match="unknown profiler activity"),
        accelerator.profile(handler),
    ):
        pass


def test_a_prepared_loader_knows_its_remainder():
    accelerator = tk.Accelerator(cpu=True)
    loaders = [
        torch.utils.data.DataLoader(torch.arange(n), batch_size=4) for n in (8, 10)
    ]
    assert [loader.remainder for loader in accelerator.prepare(*loaders)] == [0, 2]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(5))

    assert (
        accelerator.prepare(
            torch.utils.data.DataLoader(Stream(), batch_size=4)
        ).remainder
        == -1
    )


def test_released_objects_are_collected():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    model, other = tk.release_memory(model, other)
    gc.collect()
    assert model is other is gone() is None
