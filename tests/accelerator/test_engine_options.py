"""What an Accelerator says about its engine is what runs; and models that DeepSpeed leaves whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import trainer_kit as tk
from trainer_kit import Accelerator
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, MeshStrategy


def told(accelerator: Accelerator) -> list[bool]:
    state = accelerator.state
    plugins = (
        state.fsdp_plugin,
        state.megatron_lm_plugin,
        state.torch_tp_plugin,
        state.deepspeed_plugin,
    )
    return [state.is_fsdp2, *(plugin is not None for plugin in plugins)]


@pytest.mark.world_size(2)
def test_plugins_are_those_of_the_engine_that_runs() -> None:
    fsdp = tk.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp)
    accelerator.prepare(nn.Linear(2, 2))
    assert accelerator.state.fsdp_plugin is fsdp
    assert told(accelerator) == [True, True, False, False, False]
    on_mesh = Accelerator(
        cpu=True,
        fsdp_plugin=fsdp,
        parallelism_config=tk.ParallelismConfig(dp_shard_size=2),
    )
    assert told(on_mesh) == [True, True, False, False, False]
    tensor = tk.TorchTensorParallelPlugin(tp_size=2)
    assert told(Accelerator(cpu=True, torch_tp_plugin=tensor)) == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert told(Accelerator(cpu=True)) == [False] * 5
    if importlib.util.find_spec("megatron") is not None:
        megatron = tk.MegatronLMPlugin(tp_degree=1, pp_degree=1, num_micro_batches=1)
        assert told(Accelerator(cpu=True, megatron_lm_plugin=megatron)) == [
            False,
            False,
            True,
            False,
            False,
        ]


@pytest.mark.world_size(2)
def test_plugins_describe_an_engine_that_was_given_as_an_object() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = Accelerator(
        cpu=True,
        strategy=FSDPStrategy(
            sharding_strategy="SHARD_GRAD_OP",
            auto_wrap_policy=[nn.Linear],
            activation_checkpointing_policy=True,
            mixed_precision=policy,
        ),
    )
    assert told(sharded) == [True, True, False, False, False]
    fsdp = sharded.state.fsdp_plugin
    assert (fsdp.sharding_strategy, fsdp.fsdp_version) == ("SHARD_GRAD_OP", 2)
    assert fsdp.transformer_cls_names_to_wrap == ["Linear"]
    assert fsdp.mixed_precision_policy is policy
    assert (fsdp.activation_checkpointing, fsdp.cpu_offload) == (True, False)
    # The plugin makes the same strategy again.
    remade = fsdp.make_strategy()
    assert remade.options["auto_wrap_policy"] == ["Linear"]
    assert remade.options["sharding_strategy"] == "SHARD_GRAD_OP"

    tensor = Accelerator(cpu=True, strategy=MeshStrategy(tp=2))
    assert told(tensor) == [False, False, False, True, False]
    assert tensor.state.torch_tp_plugin.tp_size == 2

    mesh = MeshStrategy(dp_shard=2, fsdp={"auto_wrap_policy": 1000})
    on_mesh = Accelerator(cpu=True, strategy=mesh)
    assert told(on_mesh) == [True, True, False, False, False]
    fsdp = on_mesh.state.fsdp_plugin
    assert (fsdp.auto_wrap_policy, fsdp.min_num_params) == ("size_based_wrap", 1000)
    assert told(Accelerator(cpu=True, strategy=DDPStrategy())) == [False] * 5


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_plugin_of_a_deepspeed_object_is_the_running_configuration() -> None:
    pytest.importorskip("deepspeed")
    clipping = {"gradient_clipping": 0.5}
    strategy = tk.strategies.DeepSpeedStrategy(stage=1, config=clipping)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    assert told(accelerator) == [False, False, False, False, True]
    plugin = accelerator.state.deepspeed_plugin
    assert (plugin.zero_stage, plugin.offload_optimizer_device) == (1, "none")
    assert (plugin.gradient_clipping, plugin.selected) == (0.5, True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1)
    )
    accelerator.backward(model(torch.ones(4, 2)).mean())
    optimizer.step()
    assert plugin.deepspeed_config is strategy.config
    assert plugin.get_value("zero_optimization.stage") == 1


@pytest.mark.world_size(2)
def test_the_trigger_is_a_flag() -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.set_trigger()
    assert accelerator.flag_tensor.item() == int(accelerator.is_main_process)
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor.item() == 0


def test_zero3_init_is_switched_off_in_a_context() -> None:
    pytest.importorskip("transformers")
    from transformers.integrations import is_deepspeed_zero3_enabled

    plugin = tk.DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    assert is_deepspeed_zero3_enabled()
    with plugin.zero3_init_context_manager(enable=False):
        assert not is_deepspeed_zero3_enabled()
        assert not plugin.is_zero3_init_enabled()
    assert is_deepspeed_zero3_enabled()
    with plugin.zero3_init_context_manager(enable=True):
        assert is_deepspeed_zero3_enabled()
    with (
        pytest.raises(ValueError, match="stop"),
        plugin.zero3_init_context_manager(enable=False),
    ):
        raise ValueError("stop")
    assert is_deepspeed_zero3_enabled()
    off = tk.DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    del plugin
    with off.zero3_init_context_manager(enable=True):
        assert is_deepspeed_zero3_enabled()
    assert not is_deepspeed_zero3_enabled()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_frozen_model_stays_whole_under_zero3(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    plugin = tk.DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.BertConfig(vocab_size=32, intermediate_size=32, **sizes)
    with plugin.zero3_init_context_manager(enable=False):
        directory = accelerator.world.broadcast(str(tmp_path))
        if accelerator.is_main_process:
            transformers.BertModel(config).save_pretrained(directory)
        accelerator.wait_for_everyone()
        frozen = transformers.BertModel.from_pretrained(directory).eval()
    assert all(parameter.numel() for parameter in frozen.parameters())
    with torch.no_grad():
        assert frozen(torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 16)
