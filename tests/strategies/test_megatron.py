"""What Megatron is told and asked, by a recording stand-in: megatron-core needs CUDA. The real one where that is."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import make_batches, merged
from tests.strategies.megatron_stand_in import Model, Stepper, install
from trainer_kit.core.costs import optimizer_bytes
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.launch.options import SECTIONS
from trainer_kit.precision import make_precision
from trainer_kit.state.resume import read_state, resolve_source
from trainer_kit.strategies import MegatronStrategy
from trainer_kit.strategies.megatron.config import (
    KEYS,
    check_model,
    from_launcher,
    megatron_model,
    optimizer_options,
)
from trainer_kit.strategies.megatron.state import find_flat_shards, megatron_costs


class Task(tk.TrainModule):
    def __init__(self, configure: Any = None, **config: Any) -> None:
        super().__init__()
        self.config, self.configure = (
            config,
            configure or partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        )

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = Model(**self.config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = self.configure(self.parameters())
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
                "interval": "step",
            }
        ]


def train(
    strategy: Any, save: str | None = None, **options: Any
) -> tuple[tk.Trainer, dict[str, Tensor]]:
    """Five batches of six samples and one of five, of three on each rank: the last one has three and two."""
    path, module = options.pop("ckpt_path", None), options.pop("module", None) or Task()
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 2,
        "seed": 0,
        **options,
    }
    settings |= {
        "barebones": True,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
    }
    trainer = tk.Trainer(strategy=strategy, **settings)
    trainer.print = lambda *values, **said: None  # type: ignore[method-assign]
    x, y = merged(make_batches(1, size=35))
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=3), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer, module.state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name)
        )


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_megatron_gets_its_arguments_and_trains_like_ddp() -> None:
    _, expected = train("ddp", save="ddp", max_steps=2)
    _, to_the_end = train("ddp")
    calls = install()
    _, found = train(MegatronStrategy("cpu"), save="megatron", max_steps=2)
    same(found, expected)
    sizes = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "distributed_timeout_minutes": 30,
    }
    settings = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": False}
    config = {"use_distributed_optimizer": False, "lr": 0.1, "weight_decay": 0}
    assert calls[:4] == [
        ("initialize", sizes),
        "seed",
        ("wrap", settings, True),
        "broadcast_params",
    ]
    name, said, overrides = calls[4]
    assert (name, overrides) == ("optimizer", {})
    assert {**said, "clip_grad": 0.0} == {
        **config,
        "clip_grad": 0.0,
        "optimizer": "sgd",
        "sgd_momentum": 0.9,
    }
    two = {
        "num_microbatches": 2,
        "seq_length": 1,
        "micro_batch_size": 1,
        "forward_only": False,
    }
    groups = {"pg_collection": "groups", "force_all_reduce": False}
    step = [
        ("schedule", two),
        "forward",
        "zero_grad_buffer",
        "zero_grad",
        "forward",
        ("finalize", 1, None, groups),
    ]
    assert calls[5:] == [*step, ("step", 0.0, 0.1), *step, ("step", 0.0, 0.1)]
    # Momentum and all: checkpoints of one continue under the other, and the learning rate is followed.
    for path, strategy in (
        ("ddp", MegatronStrategy("cpu")),
        ("megatron", "ddp"),
        ("megatron", MegatronStrategy("cpu")),
    ):
        calls.clear()
        _, found = train(strategy, ckpt_path=path)
        same(found, to_the_end)
        if strategy != "ddp":
            assert calls[-1] == ("step", 0.0, 0.05)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_parts_of_tensor_ranks_are_put_together() -> None:
    install()
    rank, strategy, module, whole = (
        dist.get_rank(),
        MegatronStrategy("cpu", tensor_parallel=2),
        Task(),
        Task(),
    )
    strategy.start()
    module.net, whole.net = Model(), Model()
    for name, axis in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        layer, key = module.net.get_submodule(name.split(".")[0]), name.split(".")[1]
        part = nn.Parameter(whole.net.state_dict()[name].chunk(2, axis)[rank].clone())
        part.tensor_model_parallel, part.partition_dim = (
            True,
            axis,
        )  # as Megatron's layers have it
        setattr(layer, key, part)
    full = {
        name: dist_whole(value) for name, value in strategy.module_state(module).items()
    }
    assert {name: value.shape for name, value in full.items()} == {
        n: v.shape for n, v in whole.state_dict().items()
    }
    expected = {name: torch.randn_like(value) for name, value in full.items()}
    for value in expected.values():
        dist.broadcast(value, 0)
    strategy.load_module_state(module, expected, strict=True)
    torch.testing.assert_close(
        module.net.up.weight, expected["net.up.weight"].chunk(2, 0)[rank]
    )
    torch.testing.assert_close(
        module.net.down.weight, expected["net.down.weight"].chunk(2, 1)[rank]
    )
    # Moments, too; those of one optimizer into another one's.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    chunk = SimpleNamespace(parameters=module.parameters)
    config = SimpleNamespace(
        lr=0.1, sgd_momentum=0.9, weight_decay=0.0, optimizer="sgd"
    )
    strategy._optimizer = Stepper([], config, [chunk], {})
    strategy._flat_shards = find_flat_shards(
        strategy._optimizer, module.parameters(), distributed=False
    )
    inner = strategy._optimizer.optimizer.state
    for parameter in module.parameters():
        inner[parameter] = {"momentum_buffer": parameter.detach().clone()}
    _, state = strategy.optimizer_state(optimizer)
    moments = {
        parameter: {"momentum_buffer": dist_whole(own["momentum_buffer"]) * 2}
        for parameter, own in state.items()
    }
    assert moments[module.net.up.weight]["momentum_buffer"].shape == (16, 8)
    strategy.load_optimizer_state(optimizer, [{"lr": 0.3}], moments)
    for parameter in module.parameters():
        torch.testing.assert_close(
            inner[parameter]["momentum_buffer"], parameter.detach() * 2
        )


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-2, weight_decay=0.1)


class Overflowing(Task):
    """The gradients of the second window overflow in float16, and so do those of the third."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (
            1e8 if batch_idx in (3, 4) else 1.0
        )


def whole_run(path: str) -> dict[str, Any]:
    state = read_state(resolve_source(Path(path)), False)
    return {
        "model": state["state_dict"],
        "moments": state["optimizer_states"][0]["state"],
        **state["precision"],
    }


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_distributed_optimizer_is_the_same_training() -> None:
    """Its pieces are stepped by an optimizer that counts steps by group, as the fused ones do."""
    _, _ = train("ddp", module=Task(adam), save="ddp", max_steps=2)
    _, expected = train("ddp", module=Task(adam), save="ddp-3")
    calls = install()
    distributed = partial(MegatronStrategy, "cpu", distributed_optimizer=True)
    trainer, _ = train(distributed(), module=Task(adam), save="divided", max_steps=2)
    assert calls[2] == (
        "wrap",
        {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True},
        True,
    )
    assert calls[4][1]["use_distributed_optimizer"] is True
    assert "distributed optimizer" in trainer.strategy.describe()
    train(MegatronStrategy("cpu"), module=Task(adam), save="whole", max_steps=2)
    for path, strategy in (
        ("divided", distributed()), ("divided", "ddp"), ("divided", MegatronStrategy("cpu")), ("ddp", distributed()),
        ("whole", distributed()), (None, distributed()),
    ):  # fmt: skip
        _, found = train(strategy, module=Task(adam), ckpt_path=path, save="again")
        same(found, expected)
        reference = whole_run("ddp-3")
        for name, moments in whole_run("again")["moments"].items():
            assert moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
            torch.testing.assert_close(
                moments, reference["moments"][name], rtol=1e-4, atol=1e-7
            )
    # Masters are what a checkpoint has of weights in half precision: runs go on in every bit, and elsewhere.
    for precision, half, optimized in (
        ("bf16-mixed", "bf16", True),
        ("bf16-mixed", "bf16", False),
    ):
        task = partial(Task, adam, **{half: True})
        strategy = distributed if optimized else partial(MegatronStrategy, "cpu")
        train(strategy(), module=task(), precision=precision, save="half", max_steps=2)
        weights = whole_run("half")["model"]
        assert all(value.dtype == torch.float32 for value in weights.values())
        assert any(
            (value != value.bfloat16().float()).any() for value in weights.values()
        )
        train(strategy(), module=task(), precision=precision, save="straight")
        _, found = train(
            strategy(),
            module=task(),
            precision=precision,
            save="resumed",
            ckpt_path="half",
        )
        assert found["net.up.weight"].dtype == torch.bfloat16
        torch.testing.assert_close(
            whole_run("resumed"), whole_run("straight"), rtol=0, atol=0
        )
        _, found = train("ddp", module=Task(adam), ckpt_path="half")
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)
    # Steps that it skips are the run's, and none of the schedule's; the scale is in checkpoints.
    module, sixteen = Overflowing(adam, fp16=True), {"precision": "16-mixed"}
    trainer, _ = train(distributed(), module=module, save="scaled", **sixteen)
    assert trainer.global_step == 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05, (
        "two of three steps were skipped, the next halves it"
    )
    scale = whole_run("scaled")
    assert (scale["scale"], scale["_growth_tracker"], scale["megatron"]) == (
        2.0**19,
        0,
        {"hysteresis_tracker": 0},
    )
    other = Overflowing(adam, fp16=True)
    trainer, _ = train(
        distributed(),
        module=other,
        ckpt_path="scaled",
        max_epochs=2,
        max_steps=4,
        **sixteen,
    )
    assert trainer.precision_plugin.state_dict()["scale"] == 2.0**19
    assert trainer.precision_plugin.state_dict()["_growth_tracker"] == 1
    with pytest.raises(
        StrategyError, match="distributed optimizer does not support SGD"
    ):
        train(distributed())


def dist_whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_unsupported_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(StrategyError, match="pip install"):
        MegatronStrategy()
    installed = ModuleType("megatron")
    installed.__spec__ = importlib.util.spec_from_loader("megatron", None)
    monkeypatch.setitem(sys.modules, "megatron", installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    strategy = MegatronStrategy(tensor_parallel=2)
    with pytest.raises(StrategyError, match="runs on CUDA only"):
        strategy.start()
    with pytest.raises(StrategyError, match="3 processes are not a multiple of 2"):
        strategy.places(3)
    sizes = {"tensor_model_parallel_size": 2}
    for config, precision, told in (
        ({}, "32-true", "tensor_model_parallel_size=1, but this run needs 2"),
        ({"bf16": True, **sizes}, "32-true", "bf16=True, but this run needs False"),
        (sizes, "bf16-mixed", "bf16=False, but this run needs True"),
        (
            {"num_moe_experts": 4, **sizes},
            "32-true",
            "num_moe_experts is not supported yet",
        ),
        ({"gated_linear_unit": True, **sizes}, "32-true", "gated layers"),
    ):
        with pytest.raises(StrategyError, match=told):
            check_model(Model(**config).config, sizes, precision)
    module = tk.TrainModule()
    module.head = nn.Linear(1, 1)
    with pytest.raises(StrategyError, match="0 in TrainModule"):
        megatron_model(module)
    weights = [nn.Parameter(torch.zeros(2))]
    for optimizer, told in (
        (torch.optim.Adagrad(weights), "found: Adagrad"),
        (torch.optim.AdamW(weights, amsgrad=True), "AdamW with amsgrad"),
        (
            torch.optim.SGD(
                [{"params": weights}, {"params": [nn.Parameter(torch.zeros(1))]}], lr=1
            ),
            "2 groups",
        ),
    ):
        with pytest.raises(StrategyError, match=told.replace("found: ", "")):
            optimizer_options(optimizer)
    adam = optimizer_options(
        torch.optim.AdamW(weights, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    )
    assert adam == {
        "lr": 0.1,
        "weight_decay": 0.2,
        "optimizer": "adam",
        "decoupled_weight_decay": True,
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-8,
    }


def test_every_key_of_accelerates_is_taken_or_refused() -> None:
    assert set(KEYS) == set(SECTIONS["megatron_lm_config"])
    told = {
        "megatron_lm_tp_degree": "4",
        "megatron_lm_sequence_parallelism": "True",
        "megatron_lm_pp_degree": "1",
    }
    told["megatron_lm_use_distributed_optimizer"] = "true"
    assert from_launcher(told) == {
        "tensor_parallel": 4,
        "sequence_parallel": True,
        "distributed_optimizer": True,
        "gradient_clipping": 1.0,
    }
    for key, value in (
        ("pp_degree", "2"),
        ("recompute_activations", "true"),
        ("context_parallel_size", "2"),
    ):
        with pytest.raises(
            ConfigurationError,
            match=f"megatron_lm_{key} is not an option of MegatronStrategy",
        ):
            from_launcher({f"megatron_lm_{key}": value})


def test_the_memory_and_traffic_of_a_rank_are_reported() -> None:
    module = Model()  # 212 parameters
    optimizer = torch.optim.Adam(module.parameters())
    strategy = object.__new__(MegatronStrategy)
    strategy.tensor_parallel, strategy.distributed_optimizer = 2, False
    costs = strategy.costs(module, make_precision("bf16-mixed", "cpu"), 8)
    assert (costs.parameters, costs.gradients, costs.masters) == (
        212 * 2,
        212 * 4,
        212 * 4,
    )
    assert (
        optimizer_bytes([optimizer], costs) == 2 * 212 * 4 + 4 * 4
    )  # moments in full precision, and steps
    assert [sent.partition(":")[0] for sent in costs.exchanges] == [
        "gradients",
        "activations",
    ]
    assert "4 data ranks; each of 2 tensor ranks" in costs.layout
    assert megatron_costs(module, "32-true", 2, 1).exchanges == [
        "gradients: all-reduce over 2 data ranks"
    ]
    strategy.distributed_optimizer = True
    costs = strategy.costs(module, make_precision("bf16-mixed", "cpu"), 8)
    assert (costs.parameters, costs.gradients, costs.masters) == (
        212 * 2,
        212 * 4,
        53 * 4,
    )
    assert optimizer_bytes([optimizer], costs) == 2 * 53 * 4 + 4
    assert [sent.partition(" over")[0] for sent in costs.exchanges] == [
        "gradients: reduce-scatter",
        "stepped parameters: all-gather",
        "activations: all-reduce",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("megatron") is None,
    reason="needs CUDA and megatron-core",
)
@pytest.mark.world_size(1)
def test_the_real_one() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    class Language(tk.TrainModule):
        def configure_model(self) -> None:
            sizes = {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "attention_dropout": 0.0,
            }
            config = TransformerConfig(
                **sizes, hidden_dropout=0.0, pipeline_dtype=torch.float32
            )
            self.net = GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=64,
                max_sequence_length=16,
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (tokens,) = batch
            places = torch.arange(8, device=self.device).expand(len(tokens), -1)
            mask = torch.triu(
                torch.ones(8, 8, dtype=torch.bool, device=self.device), 1
            )[None, None]
            loss = self.net(tokens, places, mask, labels=tokens.roll(-1, 1)).mean()
            losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = DataLoader(TensorDataset(torch.arange(8).repeat(12, 1)), batch_size=3)
    found = []
    for distributed in (False, True):
        losses: list[float] = []
        strategy = MegatronStrategy(distributed_optimizer=distributed)
        trainer = tk.Trainer(
            accelerator="cuda",
            devices=1,
            strategy=strategy,
            max_epochs=5,
            barebones=True,
            seed=0,
        )
        trainer.fit(Language(), data)
        assert losses[-1] < losses[0] / 2
        trainer.save_checkpoint(f"{distributed}")
        found.append(
            read_state(resolve_source(Path(f"{distributed}")), False)[
                "optimizer_states"
            ][0]["state"]
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
