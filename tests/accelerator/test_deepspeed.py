"""An Accelerator on DeepSpeed: the loop of one process under every stage, its states, and its weights."""

from __future__ import annotations

import gc
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import case, make_batches, make_net, merged, sgd
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import ConfigurationError, RankError, StrategyError
from trainer_kit.testing.conformance import assert_same

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

SAMPLES = TensorDataset(*merged(make_batches(1, size=26)))
HOSTED: dict[str, Any] = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
ALL_HOSTED: dict[str, Any] = {
    "zero_stage": 3,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu",
}
LAYOUTS: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    HOSTED,
    ALL_HOSTED,
]


def made(plugin: dict[str, Any] | None = None, **options: Any) -> tk.Accelerator:
    gc.freeze()  # the engine collects garbage when it is made: seconds, for all that was imported
    options = {"gradient_accumulation_steps": 2, **options, "cpu": True, "seed": 0}
    if plugin is None:
        return tk.Accelerator(**options)
    return tk.Accelerator(deepspeed_plugin=tk.DeepSpeedPlugin(**plugin), **options)


def whole(accelerator: tk.Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """As they are now, on every process."""
    found = accelerator.world.broadcast(accelerator.get_state_dict(model))
    return {name: value.clone() for name, value in found.items()}


def prepared(
    accelerator: tk.Accelerator, net: nn.Module, size: int = 3
) -> tuple[Any, Any, Any, Any]:
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # Each by itself and out of order, but for the optimizer, which wants its model.
    loader = accelerator.prepare(DataLoader(SAMPLES, batch_size=size))
    scheduler_, net, optimizer_ = accelerator.prepare(scheduler, net, optimizer)
    return net, optimizer_, loader, scheduler_


def train(
    accelerator: tk.Accelerator,
    parts: tuple[Any, ...],
    epochs: int = 1,
    clip: float = 0.1,
) -> list[float]:
    """By hand, with accumulation and clipping; the norms of the gradients."""
    model, optimizer, loader, scheduler = parts
    norms: list[float] = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    norms.append(
                        float(accelerator.clip_grad_norm_(model.parameters(), clip))
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return norms


def by_weight(
    accelerator: tk.Accelerator, parts: tuple[float, ...] = (0.25, 0.75)
) -> dict[str, torch.Tensor]:
    """Sums with their weights, two backwards a batch, a look at the model between them, and a step given up."""
    net = make_net()
    model, optimizer, loader = accelerator.prepare(
        net, sgd(net), DataLoader(SAMPLES, batch_size=3)
    )
    with accelerator.accumulate(model):
        accelerator.backward(model(SAMPLES.tensors[0]).square().sum(), weight=1)
    accelerator.accumulation.reset()
    optimizer.zero_grad()
    for x, y in loader:
        with accelerator.accumulate(model):
            kept = int(y[0]) + 1
            halves = [
                F.cross_entropy(model(x)[:kept], y[:kept], reduction="sum") * part
                for part in parts
            ]
            for half in halves:
                accelerator.backward(half, weight=kept)
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            optimizer.step()
            optimizer.zero_grad()
    return whole(accelerator, model)


def trains_as_ddp(path: Path) -> None:
    theirs = made()
    parts = prepared(theirs, make_net())
    own_norms = train(theirs, parts, 2)
    expected = theirs.get_state_dict(parts[0])
    weighed = by_weight(made(), (1.0,))
    for number, plugin in enumerate(LAYOUTS):
        with case(**plugin):
            accelerator = made(plugin)
            mine = prepared(accelerator, make_net(seed=accelerator.process_index))
            norms = train(accelerator, mine, 2)
            assert norms == pytest.approx(own_norms, rel=1e-4)
            found = whole(accelerator, mine[0])
            assert_same(found, expected, 1e-6)
            assert mine[1].param_groups[0]["lr"] == pytest.approx(
                parts[1].param_groups[0]["lr"]
            )
            assert_same(by_weight(made(plugin)), weighed, 1e-6)
            saves(accelerator, mine, path / f"{number}", found)


def two_models_in_turn(
    plugins: list[dict[str, Any] | None],
) -> list[dict[str, torch.Tensor]]:
    """An Accelerator each, and the second model learns from what the first says."""
    accelerators = [made(plugin, gradient_accumulation_steps=1) for plugin in plugins]
    nets = [make_net(seed) for seed in range(2)]
    (first, first_step, loader), (second, second_step) = (
        accelerator.prepare(net, sgd(net), *others)
        for accelerator, net, others in zip(
            accelerators, nets, ([DataLoader(SAMPLES, batch_size=13)], []), strict=True
        )
    )
    for _ in range(3):
        for x, y in loader:
            accelerators[0].backward(F.cross_entropy(first(x), y))
            first_step.step()
            first_step.zero_grad()
            with torch.no_grad():
                wanted = first(x).softmax(-1)
            accelerators[1].backward(F.cross_entropy(second(x), wanted))
            second_step.step()
            second_step.zero_grad()
    return [
        whole(accelerator, net)
        for accelerator, net in zip(accelerators, (first, second), strict=True)
    ]


def saves(
    accelerator: tk.Accelerator,
    parts: tuple[Any, ...],
    path: Path,
    found: dict[str, torch.Tensor],
) -> None:
    """A state into the next layout and into DDP, and on; whole weights."""
    model = parts[0]
    accelerator.save_state(path)
    accelerator.save_model(model, f"{path}-model")
    assert_same(load_file(f"{path}-model/model.safetensors"), found, 0.0)
    assert isinstance(accelerator.unwrap_model(model), nn.Sequential)
    norms = train(accelerator, parts)
    went_on = whole(accelerator, model)
    accelerator.free_memory()
    for plugin in (LAYOUTS[int(path.name) - 1], None):
        other = made(plugin)
        theirs = prepared(other, make_net(seed=5))
        other.load_state(path)
        assert_same(whole(other, theirs[0]), found, 0.0)
        other.save_state(f"{path}-again")
        assert_same(
            read_checkpoint(Path(f"{path}-again"))["model"],
            read_checkpoint(path)["model"],
            0.0,
        )
        again = train(other, theirs)
        assert again == pytest.approx(norms, rel=1e-4)
        assert_same(whole(other, theirs[0]), went_on, 1e-6)
        other.free_memory()


def what_fails_on_one_process_ends_all(path: Path) -> None:
    """Behind it weights are put together from all processes' pieces."""

    class Fails(nn.Linear):
        fails = False

        def get_extra_state(self) -> Any:
            if self.fails:
                raise ValueError("of a user")
            return 0

        def set_extra_state(self, state: Any) -> None:
            self.get_extra_state()

    for stage in (1, 3):
        accelerator = made({"zero_stage": stage}, mixed_precision="bf16")
        net = nn.Sequential(nn.Linear(8, 4), Fails(4, 4))
        net, _ = accelerator.prepare(net, sgd(net))
        accelerator.save_state(path / f"{stage}")
        rank, Fails.fails = accelerator.process_index, accelerator.process_index == 1
        for act in (
            lambda a=accelerator, n=net: a.get_state_dict(n),
            lambda a=accelerator: a.save_state(path / "new"),
            lambda a=accelerator, s=stage: a.load_state(path / f"{s}"),
        ):
            with (
                case(stage=stage),
                pytest.raises(ValueError if rank else RankError, match="of a user"),
            ):
                act()
        Fails.fails = False
        accelerator.load_state(path / f"{stage}")
        accelerator.free_memory()


def test_options_of_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tk.DeepSpeedPlugin(
        {"zero_optimization": {"stage": "auto", "overlap_comm": True}, "train_micro_batch_size_per_gpu": "auto"},
        gradient_accumulation_steps=4, gradient_clipping=0.5, zero_stage=3, offload_param_device="cpu",
        transformer_moe_cls_names="Experts, Router",
    )  # fmt: skip
    assert plugin.deepspeed_config == {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {"device": "cpu"},
            "leaf_module": {"classes": ["Experts", "Router"]},
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": "auto",
    }
    assert plugin.get_value("zero_optimization.offload_param.device") == "cpu"
    assert (
        plugin.is_auto("train_micro_batch_size_per_gpu"),
        plugin.is_auto("train_batch_size"),
    ) == (True, False)
    assert (plugin.batch_size([2, 8]), plugin.batch_size([])) == (2, None)
    assert tk.DeepSpeedPlugin(is_train_batch_min=False).batch_size([2, 8]) == 8
    assert (
        tk.DeepSpeedPlugin({"train_micro_batch_size_per_gpu": 4}).batch_size([2, 4])
        == 4
    )
    for options, part in [
        (
            {"hf_ds_config": {"zero_optimization": {"stage": 1}}, "zero_stage": 2},
            "zero_optimization.stage: 1",
        ),
        (
            {
                "hf_ds_config": {"gradient_accumulation_steps": 2},
                "gradient_accumulation_steps": 4,
            },
            "2, and 4",
        ),
        (
            {"hf_ds_config": {"gradient_clipping": 2.0}, "gradient_clipping": 1.0},
            "gradient_clipping: 2.0",
        ),
        ({"offload_optimizer_device": "nvme"}, "NVMe"),
        ({"enable_msamp": True}, "MS-AMP"),
    ]:
        with pytest.raises(ConfigurationError, match=part):
            tk.DeepSpeedPlugin(**options)
    with pytest.raises(ConfigurationError, match="select_deepspeed_plugin"):
        plugin.select()
    # What is not given is what the launcher says.
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    for name, value in {
        "zero_stage": "1",
        "gradient_accumulation_steps": "3",
        "zero3_init_flag": "1",
    }.items():
        monkeypatch.setenv(f"TRAINER_KIT_{name.upper()}", value)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    told = tk.DeepSpeedPlugin(gradient_accumulation_steps=5)
    assert told.deepspeed_config["zero_optimization"] == {"stage": 1}
    assert told.accelerator_arguments() == {
        "gradient_accumulation_steps": 5,
        "mixed_precision": "bf16",
    }
    assert (told.zero3_init_flag, told.is_zero3_init_enabled()) == (True, False)


def gives_a_reason(accelerator: tk.Accelerator) -> None:
    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    net = make_net()
    with pytest.raises(StrategyError, match="none of this optimizer's parameters"):
        accelerator.prepare(optimizer(net))
    model = accelerator.prepare(net)
    with pytest.raises(
        StrategyError, match="created when model and optimizer are prepared"
    ):
        accelerator.backward(model(SAMPLES.tensors[0]).sum())
    with pytest.raises(StrategyError, match="DeepSpeed trains one model"):
        accelerator.prepare(make_net())
    teacher = make_net().requires_grad_(False)
    assert accelerator.prepare(teacher) is teacher
    stepper = accelerator.prepare(optimizer(net))
    with pytest.raises(StrategyError, match="steps one optimizer"):
        accelerator.prepare(optimizer(net))
    with pytest.raises(StrategyError, match="a group that is added later"):
        stepper.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    stepper.step()  # nothing has been asked for
    accelerator.backward(model(SAMPLES.tensors[0]).sum())
    for clip, part in [
        (
            lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0),
            "clips all gradients together",
        ),
        (
            lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
            "by the 2-norm only",
        ),
        (
            lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
            "by the 2-norm only",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=part):
            clip()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(
        StrategyError,
        match="backward was called between clipping and the optimizer step",
    ):
        accelerator.backward(model(SAMPLES.tensors[0]).sum())
    with pytest.raises(StrategyError, match="another DeepSpeed plugin"):
        accelerator.state.select_deepspeed_plugin("other")
    with pytest.raises(ConfigurationError, match="unknown DeepSpeed plugin 'third'"):
        accelerator.state.select_deepspeed_plugin("third")


def an_empty_group_is_refused_with_a_schedule() -> None:
    for schedules in (True, False):
        accelerator, net = (
            made({"zero_stage": 1}, gradient_accumulation_steps=1),
            make_net(),
        )
        optimizer = torch.optim.AdamW(
            [{"params": []}, {"params": list(net.parameters())}]
        )
        if schedules:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            with pytest.raises(StrategyError, match="group 0 of 2 of AdamW has none"):
                accelerator.prepare(net, optimizer, scheduler)
        else:
            accelerator.prepare(net, optimizer)
            assert len(optimizer.param_groups) == 1
        accelerator.free_memory()


def stand_ins() -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.8, 0.9]},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto"),
        },
    }
    accelerator, net, plain = (
        made({"hf_ds_config": config}, gradient_accumulation_steps=1),
        make_net(),
        make_net(),
    )
    optimizer = tk.DummyOptim(net.parameters(), lr=0.01, weight_decay=0.1)
    net, optimizer, scheduler = accelerator.prepare(
        net, optimizer, tk.DummyScheduler(optimizer, 8, 3)
    )
    theirs = torch.optim.AdamW(plain.parameters(), weight_decay=0.1, betas=(0.8, 0.9))
    for x, y in make_batches(4):
        theirs.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        theirs.zero_grad()
        for model, backward in [
            (plain, torch.Tensor.backward),
            (net, accelerator.backward),
        ]:
            backward(F.cross_entropy(model(x), y))
        theirs.step()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert_same(
        whole(accelerator, net), plain.state_dict(), 1e-4
    )  # Adam divides by what is nearly zero
    accelerator.free_memory()
    with pytest.raises(StrategyError, match="and the script define the optimizer"):
        accelerator.prepare(plain, theirs)
    with pytest.raises(
        ConfigurationError,
        match="DummyOptim is a placeholder for the optimizer in DeepSpeed's JSON",
    ):
        made({}).prepare(plain, tk.DummyOptim(plain.parameters()))


def check_schedules_of_the_json() -> None:
    """Accelerate divides their length by the number of processes; they advance once a step."""
    params = dict.fromkeys(
        ("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )
    config = {
        "zero_optimization": {"stage": 0},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    for options, total in (({}, 4), ({"scheduler_steps_per_process": False}, 8)):
        accelerator, net = (
            made({"hf_ds_config": config}, gradient_accumulation_steps=1, **options),
            make_net(),
        )
        optimizer = sgd(net)
        net, optimizer, scheduler = accelerator.prepare(
            net, optimizer, tk.DummyScheduler(optimizer, 8, 2)
        )
        assert scheduler.total_num_steps == total
        assert scheduler.times == 1
        accelerator.free_memory()


@pytest.mark.slow
@pytest.mark.world_size(1, process_group=False)
def test_one_process_trains_and_unsupported_options_are_refused() -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]  # nobody launched this process
    stand_ins()
    an_empty_group_is_refused_with_a_schedule()
    several = {
        name: tk.DeepSpeedPlugin(zero_stage=stage)
        for name, stage in [("one", 1), ("other", 3)]
    }
    accelerator = tk.Accelerator(cpu=True, deepspeed_plugins=several)
    assert accelerator.distributed_type == "DEEPSPEED"
    assert (accelerator.state.deepspeed_plugin, several["one"].selected) == (
        several["one"],
        True,
    )
    accelerator.state.select_deepspeed_plugin("other")
    assert (
        accelerator.strategy.describe() == "DeepSpeed ZeRO stage 3 over 1 rank on cpu"
    )
    gives_a_reason(accelerator)
    with pytest.raises(
        StrategyError, match=r"bf16\.enabled: True, but precision: '32-true'"
    ):
        made({"hf_ds_config": {"bf16": {"enabled": True}}}, mixed_precision="no")
    with pytest.raises(
        StrategyError,
        match="gradient_accumulation_steps: 4, but accumulate_grad_batches: 2",
    ):
        made({"gradient_accumulation_steps": 4}, gradient_accumulation_steps=2)
    assert (
        made(
            {"gradient_accumulation_steps": 4}, gradient_accumulation_steps=None
        ).gradient_accumulation_steps
        == 4
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.world_size(2, timeout=200)
def test_it_trains_and_saves_as_one_process(tmp_path: Path) -> None:
    what_fails_on_one_process_ends_all(tmp_path / "fails")
    check_schedules_of_the_json()
    trains_as_ddp(tmp_path)
    expected = two_models_in_turn([None, None])
    for found, wanted in zip(
        two_models_in_turn([{"zero_stage": 2}, {"zero_stage": 3}]),
        expected,
        strict=True,
    ):
        assert_same(found, wanted, 1e-6)
