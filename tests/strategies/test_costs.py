"""What strategies say that a rank holds and sends, next to what ranks hold once they have trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import trainer_kit as tk
from trainer_kit.callbacks import ModelSummary
from trainer_kit.callbacks.model_summary import summarize
from trainer_kit.core.costs import Costs, cost_lines, optimizer_bytes, shard_bytes
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from trainer_kit.testing import run_distributed


class Odd(tk.TrainModule):
    """Sizes that two do not divide, a batch norm, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
            for _ in range(3)
        )
        self.head = nn.Linear(5, 9)
        self.embed.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), batch)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)

    def configure_parallel(self, mesh: Any) -> tk.ParallelPlan:
        return tk.ParallelPlan(tensor={"blocks.*.0": "colwise_rep"})

    def on_fit_start(self) -> None:
        """The engine has taken the module, and nothing was stepped."""
        trainer = self.trainer
        self.total = summarize(self).total
        self.expected = optimizer_bytes(trainer.optimizers, costs_of(trainer, self))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = shard_bytes(
            p.grad for p in self.parameters() if p.grad is not None
        )


BATCHES = [torch.arange(8)] * 4
PLAIN = torch.Size([9 * 5 + 3 * (5 * 8 + 8 + 8 + 8 + 8 * 5 + 5) + 5 * 9 + 9]).numel()


def trainer(strategy: Any, **options: Any) -> tk.Trainer:
    return tk.Trainer(**{
        "accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": 1, "barebones": True, **options
    })  # fmt: skip


def costs_of(made: tk.Trainer, module: nn.Module) -> Costs:
    costs: Costs = made.strategy.costs(module, made.precision_plugin, 2)
    return costs


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        shard_bytes(v for v in own.values() if isinstance(v, Tensor))
        for own in optimizer.state.values()
    )


def check_what_ranks_hold() -> None:
    for strategy in (
        "ddp",
        "fsdp",
        "fsdp_shard_grad_op",
        "hsdp",
        *(f"deepspeed_stage_{stage}" for stage in range(4)),
    ):
        torch.manual_seed(0)
        module, made = Odd(), trainer(strategy)
        made.strategy.start()
        told = costs_of(made, module)
        state = optimizer_bytes([module.configure_optimizers()], told)
        made.fit(module, BATCHES)
        assert state == module.expected == state_bytes(made.optimizers[0]), strategy
        assert module.total == PLAIN
        if strategy == "deepspeed_stage_3":
            assert told.parameters == sum(
                p.ds_tensor.numel() * 4 for p in module.parameters()
            )
        else:
            assert told.parameters == shard_bytes(module.parameters()), strategy
        if not strategy.startswith("deepspeed"):  # there they are the engine's
            assert told.gradients == module.gradients, strategy
        else:
            assert told.masters == sum(
                4 * x.numel()
                for x in {id(x): x for x in masters(made.strategy)}.values()
            )
        # Once more, of what is divided by now.
        again = costs_of(made, module)
        assert (again.parameters, again.gradients, again.masters) == (
            told.parameters,
            told.gradients,
            told.masters,
        )
        assert again.exchanges == told.exchanges, strategy
        assert optimizer_bytes(made.optimizers, again) == state


def masters(strategy: Any) -> list[Tensor]:
    return [piece.master for piece in strategy._flat_shards.values()]


def check_tensor_ranks() -> None:
    module = Odd()
    made = trainer(MeshStrategy(dp_shard=1, tp=2))
    before = costs_of(made, module)
    assert before.parameters is None
    assert "tensor ranks" in before.layout
    made.fit(module, BATCHES)
    told = costs_of(made, module)
    assert told.parameters == shard_bytes(module.parameters()) < PLAIN * 4
    assert told.gradients == module.gradients
    assert optimizer_bytes(made.optimizers, told) == state_bytes(made.optimizers[0])
    assert [exchange.split()[0] for exchange in told.exchanges] == ["activations"]


class Blocks(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def check_stages() -> None:
    module, made = (
        Blocks(),
        trainer(MeshStrategy(dp_shard=1, pp=2), accumulate_grad_batches=2),
    )
    assert costs_of(made, module).parameters is None
    made.fit(module, [torch.ones(4, 6)] * 4)
    told = costs_of(made, module)
    assert (
        told.parameters == shard_bytes(module.parameters()) in (42 * 4, 84 * 4)
    )  # one block or two
    assert "pipeline ranks" in told.layout
    assert told.layout.endswith(
        f"this rank holds {told.parameters // 4} of 126 parameters"
    )
    assert [exchange.split()[0] for exchange in told.exchanges] == ["activations"]


def check_model_axes() -> None:
    check_tensor_ranks()
    check_stages()


@pytest.mark.slow
def test_reported_sizes_equal_the_memory_of_ranks() -> None:
    run_distributed(check_what_ranks_hold, 2, timeout=110)


@pytest.mark.slow
def test_tensor_ranks_hold_their_parts_and_pipeline_ranks_their_stages() -> None:
    run_distributed(check_model_axes, 2)


def sent(strategy: Any, ranks: int, module: nn.Module) -> list[str]:
    precision = tk.Trainer(
        accelerator="cpu", barebones=True, max_steps=1
    ).precision_plugin
    return list(strategy.costs(module, precision, ranks).exchanges)


def test_the_traffic_of_a_step_is_reported() -> None:
    blocks = nn.Sequential(
        nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False), nn.Flatten()
    )
    module = nn.Sequential(nn.Linear(16, 16, bias=False), blocks)
    assert sent(DDPStrategy(), 4, module) == ["gradients: all-reduce over 4 ranks"]
    assert sent(DDPStrategy(ddp_comm_hook="bf16"), 4, module) == [
        "gradients: bf16 communication hook over 4 ranks"
    ]
    assert sent(FSDPStrategy(), 4, module) == [
        "parameters: all-gather over 4 ranks for each forward, and again for backward",
        "gradients: reduce-scatter over 4 ranks",
    ]
    kept = sent(FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), 4, module)
    assert kept[0] == "parameters: all-gather over 4 ranks for each forward"
    assert (
        sent(FSDPStrategy(device_mesh=(2, 4)), 8, module)[2]
        == "their shards: all-reduce over 2 replicas"
    )
    assert sent(FSDPStrategy(ignored_modules="0"), 4, module)[2].startswith(
        "gradients of unsharded parameters"
    )
    assert sent(MeshStrategy(dp_shard=4), 4, module) == sent(FSDPStrategy(), 4, module)
    assert sent(DDPStrategy(), 1, module) == []


def test_copies_of_autocast_are_not_sharded() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))

    def shown(precision: Any, **options: Any) -> str:
        plugin = tk.Trainer(
            accelerator="cpu", barebones=True, max_steps=1, precision=precision
        ).precision_plugin
        return "\n".join(
            cost_lines(FSDPStrategy(**options).costs(module, plugin, 4), None)
        )

    copies = "             from forward to backward up to 8.19 kB of autocast's bfloat16 copies of all weights"
    assert copies in shown("bf16-mixed").splitlines()
    gathered = shown(
        "bf16-mixed", mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    reduced = shown(
        "bf16-mixed", mixed_precision=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    )
    assert "copies" not in gathered
    assert copies in reduced
    assert "copies" not in shown("32-true")


def test_lines() -> None:
    module = nn.Linear(16, 16, bias=False)
    costs = FSDPStrategy().costs(
        module, tk.Trainer(barebones=True, max_steps=1).precision_plugin, 2
    )
    shown = cost_lines(costs, [torch.optim.SGD(module.parameters(), lr=1.0)])
    assert (
        shown[1]
        == "per rank     512 B of parameters, 512 B of gradients, 0 B of optimizer state"
    )
    assert (
        shown[2] == "per step     parameters: all-gather over 2 ranks for each forward"
    )
    assert shown[3] == "             gradients: reduce-scatter over 2 ranks"
    assert "known only during the run: optimizer state" in cost_lines(costs, None)[1]


KINDS = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}],
    "AdamW": [{}, {"amsgrad": True}, {"foreach": False}],
    "Adamax": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Adadelta": [{}],
    "Adagrad": [{}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "ASGD": [{}],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_torchs_own_optimizers_is_known_before_their_first_step(
    kind: str, dtype: torch.dtype
) -> None:
    alone = Costs(layout="", parameters=0, gradients=0, stepped=list)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(
            torch.float64 if dtype is torch.float64 else torch.float32
        )
        for options in KINDS[kind]:
            layer = nn.Linear(4, 3, dtype=dtype)
            optimizer = getattr(torch.optim, kind)(layer.parameters(), **options)
            expected = optimizer_bytes([optimizer], alone)
            layer(torch.ones(4, dtype=dtype)).sum().backward()
            optimizer.step()
            assert (
                expected
                == state_bytes(optimizer)
                == optimizer_bytes([optimizer], alone)
            ), options
    finally:
        torch.set_default_dtype(before)


def test_nothing_of_the_users_optimizer_is_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The summary called ``step`` of a copy of it: a second time that it printed, drew a number or counted."""

    class Own(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Own.calls += 1
            self.state[self.param_groups[0]["params"][0]]["noise"] = torch.rand(3)
            return super().step(closure)

    class Module(Odd):
        def configure_optimizers(self) -> Any:
            return Own(self.head.parameters(), lr=0.1)

        def on_train_start(self) -> None:
            assert Own.calls == 0

    made = tk.Trainer(
        accelerator="cpu", max_steps=2, barebones=True, callbacks=ModelSummary()
    )
    made.fit(Module(), BATCHES)
    assert Own.calls == 2
    assert "known only during the run: optimizer state" in capsys.readouterr().err


def test_the_costs_of_a_data_dependent_optimizer_are_unknown() -> None:
    layer = nn.Linear(4, 4)
    alone = Costs(layout="", parameters=0, gradients=0, stepped=list)
    optimizers = [
        torch.optim.Adafactor(layer.parameters()),
        torch.optim.LBFGS(layer.parameters()),
    ]
    assert [optimizer_bytes([optimizer], alone) for optimizer in optimizers] == [
        None,
        None,
    ]
    layer(torch.ones(4)).sum().backward()
    optimizers[0].step()
    assert optimizer_bytes(optimizers[:1], alone) == state_bytes(optimizers[0]) > 0
