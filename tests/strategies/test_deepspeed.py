"""DeepSpeed's JSON, the strategy's arguments, and what is refused before the first step."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.plain import Classifier, make_batches, make_net, plain_loop, sgd
from trainer_kit.build import choose_strategy
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, PrecisionError, StrategyError
from trainer_kit.strategies import DeepSpeedStrategy
from trainer_kit.strategies.deepspeed.config import (
    RunFacts,
    fill_config,
    read_config,
    with_arguments,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "auto", "pin_memory": False},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "overlap_comm": "auto",
    },
}


def test_auto_takes_the_values_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(AUTO))
    config = with_arguments(read_config(path), 3, True, False)
    facts = RunFacts(
        world=4,
        precision="bf16-mixed",
        batch_size=2,
        accumulation=8,
        clip=(0.5, "norm"),
        hidden_size=32,
    )
    assert fill_config(config, facts) == {
        # The run owns windows and clipping: to the engine each step is one micro-batch.
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "reduce_bucket_size": 1024,
            "stage3_prefetch_bucket_size": 921,
            "stage3_param_persistence_threshold": 320,
            "stage3_max_live_parameters": 1e9,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    assert read_config(path) == AUTO


def test_numbers_that_agree_with_the_run_are_accepted() -> None:
    written = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 6,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    facts = RunFacts(
        world=2, precision="bf16-true", batch_size=4, accumulation=6, clip=(1.0, "norm")
    )
    made = fill_config(with_arguments(written, None, False, False), facts)
    assert (
        made["train_batch_size"],
        made["gradient_accumulation_steps"],
        made["gradient_clipping"],
    ) == (8, 1, 1.0)
    assert made["zero_optimization"] == {"stage": 2}


def test_contradictions_name_both_sides_and_all_of_them() -> None:
    written = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    facts = RunFacts(
        world=2, precision="32-true", batch_size=4, accumulation=2, clip=(0.5, "norm")
    )
    with pytest.raises(StrategyError) as caught:
        fill_config(with_arguments(written, 1, False, False), facts)
    for part in (
        "train_batch_size: 64, but samples of an optimizer step: 16",
        "train_micro_batch_size_per_gpu: 8, but the loader's batch_size: 4",
        "gradient_accumulation_steps: 4, but accumulate_grad_batches: 2",
        "gradient_clipping: 1.0, but gradient_clip_val: 0.5",
        "bf16.enabled: True, but precision: '32-true'",
        '"auto"',
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"stage": 4}, "0, 1, 2 or 3"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 3}}}, "zero_optimization.stage: 3"),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "none"}}}, "offload_optimizer": True},
         "offload_optimizer.device: 'none'"),
        ({"stage": 2, "offload_parameters": True}, "only stage 3 has parameters to offload"),
        ({"stage": 0, "offload_optimizer": True}, "stage 0 has nothing to offload"),
        ({"config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}, "NVMe"),
        ({"config": {"optimizer": {"type": "OneBitAdam"}}}, "names an optimizer that is not supported.*'OneBitAdam'"),
        ({"config": {"scheduler": {"type": "OneCycle"}}}, "JSON names a scheduler that is not supported"),
        ({"config": {"optimizer": {"type": "adamw", "params": {"lrr": 1}}}}, "params.lrr.*did you mean 'lr'"),
        ({"config": {"zero_optimization": True}}, "must be a JSON object"),
        ({"config": "nowhere.json"}, "nowhere.json: No such file"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){part}"):
        DeepSpeedStrategy(**options)


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    for text, part in [("{", "is not JSON"), ("[1]", "does not contain a JSON object")]:
        (tmp_path / "ds.json").write_text(text)
        with pytest.raises(ConfigurationError, match=part):
            read_config(tmp_path / "ds.json")


def test_words() -> None:
    for word, stage, line in [
        ("deepspeed", 2, "DeepSpeed ZeRO stage 2 on cpu"),
        ("deepspeed_stage_0", 0, "DeepSpeed ZeRO stage 0 on cpu"),
        ("deepspeed_stage_1", 1, "DeepSpeed ZeRO stage 1 on cpu"),
        ("deepspeed_stage_3", 3, "DeepSpeed ZeRO stage 3 on cpu"),
        (
            "deepspeed_stage_2_offload",
            2,
            "DeepSpeed ZeRO stage 2 on cpu, optimizer on the host",
        ),
        (
            "deepspeed_stage_3_offload",
            3,
            "DeepSpeed ZeRO stage 3 on cpu, optimizer and parameters on the host",
        ),
    ]:
        strategy, processes, start = choose_strategy(
            word, "cpu", 2, 1, Environment.detect()
        )
        assert isinstance(strategy, DeepSpeedStrategy)
        assert (strategy.stage, strategy.describe(), processes, start) == (
            stage,
            line,
            2,
            "agent",
        )


def test_options_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "distributed_type": "DEEPSPEED",
        "zero_stage": "3",
        "offload_param_device": "cpu",
        "gradient_clipping": "0.5",
        "deepspeed_moe_layer_cls_names": "Experts, Router",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"TRAINER_KIT_{name.upper()}", value)
    strategy = choose_strategy("auto", "cpu", 2, 1, Environment.detect())[0]
    assert isinstance(strategy, DeepSpeedStrategy)
    assert strategy.config == {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "leaf_module": {"classes": ["Experts", "Router"]},
        },
        "gradient_clipping": 0.5,
    }
    assert not isinstance(
        choose_strategy("ddp", "cpu", 2, 1, Environment.detect())[0], DeepSpeedStrategy
    )
    # The file, and what contradicts it.
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}'
    )
    monkeypatch.setenv("TRAINER_KIT_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    with pytest.raises(
        StrategyError,
        match=r"zero_optimization\.stage: 1, but DeepSpeedStrategy\(stage=\.\.\.\): 3",
    ):
        choose_strategy("auto", "cpu", 2, 1, Environment.detect())
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 1.0}')
    with pytest.raises(
        StrategyError, match=r"gradient_clipping: 1\.0, but the launcher: 0\.5"
    ):
        choose_strategy("auto", "cpu", 2, 1, Environment.detect())
    monkeypatch.delenv("TRAINER_KIT_DEEPSPEED_CONFIG_FILE")
    monkeypatch.setenv("TRAINER_KIT_OFFLOAD_OPTIMIZER_DEVICE", "nvme")
    with pytest.raises(StrategyError, match="NVMe"):
        choose_strategy("auto", "cpu", 2, 1, Environment.detect())


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__(make_net())
        self.automatic_optimization = False


class OwnStep(Classifier):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        optimizer.step(closure)


class OwnBackward(Classifier):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def two(net: nn.Module) -> Any:
    return {
        "a": torch.optim.SGD(net[0].parameters(), 0.1),
        "b": torch.optim.SGD(net[3].parameters(), 0.1),
    }


def with_empty_group(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": [], "weight_decay": 0.0}, {"params": list(net.parameters())}]
    )


def with_schedule(net: nn.Module) -> Any:
    optimizer = with_empty_group(net)
    return [optimizer], [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    ]


def low_bit(net: nn.Module) -> Any:
    return tk.optimizer("adamw8bit", net.parameters())


class Bare(Classifier):
    """Has no optimizer of its own."""

    configure_optimizers = tk.TrainModule.configure_optimizers


NAMED: dict[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": 8,
            "warmup_num_steps": 2,
            "warmup_max_lr": "auto",
            "warmup_type": "linear",
        },
    },
}


def the_json_names_what_the_module_does_not() -> None:
    def fit(module: Any, config: dict[str, Any]) -> Any:
        trainer = tk.Trainer(
            strategy=DeepSpeedStrategy(stage=1, config=config),
            devices=1,
            accelerator="cpu",
            barebones=True,
            max_epochs=1,
        )
        trainer.fit(module, make_batches(4))
        return trainer

    net, module = make_net(), Bare(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for rate, (x, y) in zip(
        [0.0, 0.0, 0.05, 0.1], make_batches(4), strict=True
    ):  # DeepSpeed's, in its first steps
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    trainer = fit(module, NAMED)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            module.net.state_dict()[name], value, rtol=0, atol=1e-6
        )
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 5 / 6)
    with pytest.raises(StrategyError, match="and the script define the optimizer"):
        fit(Classifier(make_net()), NAMED)
    with pytest.raises(
        StrategyError, match=r'"auto" has no value in .*\n.*optimizer\.params\.lr'
    ):
        fit(
            Bare(make_net()), {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
        )


@pytest.mark.slow
@pytest.mark.world_size(1, process_group=False)
def test_one_process_offloads_and_unsupported_options_are_refused() -> None:
    from deepspeed.accelerator import get_accelerator

    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]  # no launcher started this process
    options: dict[str, Any]
    net, module = make_net(), Classifier(make_net())
    plain_loop(net, [make_batches(4)], sgd(net))
    strategy = DeepSpeedStrategy(stage=2, offload_optimizer=True)
    tk.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", barebones=True, max_epochs=1
    ).fit(module, make_batches(4))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            module.net.state_dict()[name], value, rtol=0, atol=1e-6
        )
    the_json_names_what_the_module_does_not()
    for module, options, error, part in [
        (Manual(), {}, StrategyError, "manual optimization"),
        (OwnStep(make_net()), {}, StrategyError, "OwnStep.optimizer_step"),
        (OwnBackward(make_net()), {}, StrategyError, "backward is overridden"),
        (Classifier(make_net(), lambda net: torch.optim.Adagrad(net.parameters())), {}, StrategyError, "Adagrad"),
        (Classifier(make_net(), low_bit), {}, StrategyError, "AdamW8bit does not support sharded parameters"),
        (Classifier(make_net(), lambda net: None), {}, StrategyError, "DeepSpeed needs an optimizer"),
        (Classifier(make_net(), two), {}, StrategyError, "one loss and one optimizer"),
        (Classifier(make_net(), with_schedule), {}, StrategyError, "group 0 of 2 of AdamW has none"),
        (Classifier(make_net()), {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, StrategyError, "norm"),
        (Classifier(make_net()), {"precision": "16-mixed"}, PrecisionError, "cannot run float16"),
        (Classifier(make_net()), {"accumulate_grad_batches": 2}, StrategyError, "accumulate_grad_batches: 2"),
    ]:  # fmt: skip
        strategy = DeepSpeedStrategy(
            config={
                "gradient_accumulation_steps": 1
                if "accumulate_grad_batches" in options
                else "auto"
            }
        )
        trainer = tk.Trainer(
            strategy=strategy,
            devices=1,
            accelerator="cpu",
            barebones=True,
            max_epochs=1,
            **options,
        )
        # Some CPUs have float16, and DeepSpeed uses it there.
        no_float16 = mock.patch.object(
            get_accelerator(), "is_fp16_supported", return_value=False
        )
        with pytest.raises(error, match=part), no_float16:
            trainer.fit(module, make_batches(2))
        assert trainer.global_step == 0
