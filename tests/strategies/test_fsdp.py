"""FSDP: what is a unit, where weights come from, what is refused, and what is left on a module."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.parity.plain import Classifier, make_batches, make_net, sgd, train
from trainer_kit.build import choose_strategy
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, StrategyError
from trainer_kit.strategies import FSDPStrategy, MeshStrategy
from trainer_kit.strategies.gradients import (
    clip_sharded_gradients,
    spread_overflow,
    total_norm,
)
from trainer_kit.strategies.launcher_options import fsdp_from_launcher
from trainer_kit.strategies.rank_sync import InitialWeights
from trainer_kit.strategies.single import Alone
from trainer_kit.strategies.transforms.blocks import units
from trainer_kit.testing import conformance, run_distributed
from trainer_kit.testing.conformance import assert_same, whole


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        )
        self.head = nn.Linear(4, 9, bias=False)


def test_units_by_default_by_class_by_size_and_by_callables() -> None:
    deep = Deep()
    assert list(units(deep, None)) == [
        "layers.1",
        "layers.0",
    ]  # the outermost repeated ones
    assert list(units(deep, {"Linear"})) == [
        "head",
        "layers.1.1",
        "layers.1.0",
        "layers.0.1",
        "layers.0.0",
    ]
    assert list(units(deep, (nn.Embedding, "Sequential"))) == [
        "layers.1",
        "layers.0",
        "embed",
    ]
    assert list(units(deep, 36)) == ["head", "layers.1", "layers.0", "embed"]
    assert list(units(deep, lambda part: part is deep.head)) == ["head"]

    def torchs_own(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, nn.Embedding)

    assert list(units(deep, torchs_own)) == ["embed"]
    with pytest.raises(StrategyError, match="Lineal"):
        units(deep, "Lineal")


def test_words_and_options_that_mean_nothing() -> None:
    with pytest.raises(StrategyError, match="NO_SHARD"):
        FSDPStrategy(sharding_strategy="NO_SHARD")
    assert FSDPStrategy(sharding_strategy="hybrid_shard").hybrid
    alone = tk.Trainer(strategy="fsdp", devices=1, accelerator="cpu", barebones=True)
    assert alone.strategy.name == "single_device"  # nobody to divide with


class Tied(Classifier):
    """The last layer's weight is the first's, and one block is whole on every rank."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)),
                nn.Linear(8, 8),
            )
        )
        self.net[3].weight = self.net[0][0].weight


def test_whole_parameters_are_handed_out_in_place() -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    before, values = list(tied.parameters()), copy.deepcopy(tied.state_dict())
    # As far as a machine of one device shows it: another device than that which they are on, by its index.
    InitialWeights(tied, Alone()).distribute(
        tied, torch.device("cpu", 0), torch.device("cpu")
    )
    assert all(now is then for now, then in zip(tied.parameters(), before, strict=True))
    assert tied[1].weight is tied[0].weight
    assert_same(tied.state_dict(), values, 0.0)


class OnRankZero(tk.TrainModule):
    """Built in `configure_model`, with a buffer that no checkpoint holds."""

    def configure_model(self) -> None:
        self.net = make_net(seed=torch.distributed.get_rank(), norm=True)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.were_meta = self.net[0].weight.is_meta

    training_step = Classifier.training_step
    configure_optimizers = lambda self: sgd(self)  # noqa: E731


class SometimesNothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and torch.distributed.get_rank() == 1:
            return None
        return super().training_step(batch, batch_idx)


class LeavesEarly(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def fsdp(module: tk.TrainModule, batches: Any, **options: Any) -> tk.Trainer:
    return train(module, batches, **{"strategy": "fsdp", "devices": 2, **options})


def check_tied_weights_stay_one() -> None:
    torch.manual_seed(0)
    mine, theirs = Tied(), Tied()
    theirs.load_state_dict(mine.state_dict())
    fsdp(mine, make_batches(4))
    train(theirs, make_batches(4), strategy="ddp", devices=2)
    assert mine.net[3].weight is mine.net[0][0].weight
    assert_same(whole(mine.state_dict()), theirs.state_dict(), 1e-6)


def check_rank_zero_builds() -> None:
    rank = torch.distributed.get_rank()
    module = OnRankZero()
    torch.manual_seed(5)
    trainer = fsdp(module, make_batches(4), max_steps=0)
    assert module.were_meta == (rank == 1)
    assert module.scale.tolist() == [2.0] * 3
    first = module.net[0].weight
    assert isinstance(first, DTensor)
    assert first.to_local().shape[0] == first.shape[0] // 2
    expected = make_net(seed=0, norm=True).state_dict()
    assert_same(whole(module.net.state_dict()), expected, 0.0)
    # What everybody draws after it is the same: random splits, for instance.
    torch.manual_seed(5)
    one = OnRankZero()
    with trainer.strategy.init_context():
        one.configure_model()
    draws = trainer.strategy.world.all_gather(torch.rand(3))
    assert torch.equal(draws[0], draws[1])


def check_nothing_stays_on_the_module() -> None:
    module = Classifier(make_net())
    fsdp(module, make_batches(2))
    assert not {"training_step", "_step", "forward"} & vars(module).keys()
    fsdp(module, make_batches(2))  # it is divided already
    assert all(isinstance(p, DTensor) for p in module.parameters())


def check_an_abandoned_window_adds_nothing() -> None:
    mine, theirs = LeavesEarly(make_net()), LeavesEarly(make_net())
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    fsdp(mine, make_batches(8), **options)
    train(theirs, make_batches(8), strategy="ddp", devices=2, **options)
    assert_same(whole(mine.state_dict()), theirs.state_dict(), 1e-6)


def without_a_loss() -> None:
    fsdp(SometimesNothing(make_net()), make_batches(4))


def check_an_optimizer_of_before_steps_the_parts() -> None:
    strategy = FSDPStrategy()
    strategy.start()
    net = make_net()
    optimizer, stepped = sgd(net), sgd(net)
    stepped.state[net[0].weight]["momentum_buffer"] = torch.ones_like(net[0].weight)
    made = strategy.wrap_module(
        net, tk.Trainer(barebones=True, accelerator="cpu").precision_plugin
    )
    assert made is net
    strategy.prepare_optimizer(optimizer)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in net.parameters()
    }
    with pytest.raises(
        StrategyError, match="was used before its parameters were sharded"
    ):
        strategy.prepare_optimizer(stepped)


def check_a_fit_keeps_no_other_fits_weights() -> None:
    trainer = tk.Trainer(
        strategy="fsdp", devices=2, max_epochs=1, barebones=True, accelerator="cpu"
    )
    module = Classifier(make_net())
    trainer.fit(module, make_batches(2))
    held = [weakref.ref(p) for p in module.parameters()]
    del module
    trainer.fit(Classifier(make_net()), make_batches(2))
    gc.collect()
    gc.collect()  # graphs hold what the first pass finalizes
    assert [one() for one in held] == [None] * 4


def check_clipping_over_a_mix() -> None:
    row, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    torch.manual_seed(3)
    values = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2), torch.randn(1)]
    kept = [nn.Parameter(value.clone()) for value in values]
    mixed = [
        nn.Parameter(distribute_tensor(values[0], row, [Shard(0)])),
        nn.Parameter(distribute_tensor(values[1], other, [Shard(0), Shard(0)])),
        nn.Parameter(values[2].clone()),
        nn.Parameter(
            distribute_tensor(values[3], row, [Shard(0)])
        ),  # the other rank has nothing of it
    ]
    for norm_type in (2.0, 1.0, 3.5, torch.inf):
        for parameter in [*kept, *mixed]:
            parameter.grad = parameter.detach() * 2
        norm = nn.utils.clip_grad_norm_(kept, 0.5, norm_type)
        assert torch.allclose(total_norm([p.grad for p in mixed], norm_type), norm)
        found = clip_sharded_gradients(mixed, 0.5, "norm", norm_type)
        assert found is not None
        assert torch.allclose(found, norm)
        for one, other_one in zip(mixed, kept, strict=True):
            gradient: Tensor = (
                one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            )
            assert torch.allclose(gradient, other_one.grad)
    with pytest.raises(ConfigurationError, match="norm_type=0"):
        clip_sharded_gradients(mixed, 0.5, "norm", 0.0)
    half = distribute_tensor(torch.full((2, 3), 2e4).half(), row, [Shard(0)])
    torch.testing.assert_close(
        total_norm([half]), half.full_tensor().norm()
    )  # no square overflows
    bad = DTensor.from_local(
        torch.full((2,), torch.nan if dist.get_rank() else 1.0), row, [Shard(0)]
    )
    assert total_norm([bad], torch.inf).isnan()
    empty = distribute_tensor(values[3].clone(), row, [Shard(0)])
    spread_overflow([bad, empty], row.get_group())
    assert empty.full_tensor().isnan()


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_on_two_ranks() -> None:
    check_tied_weights_stay_one()
    check_rank_zero_builds()
    check_nothing_stays_on_the_module()
    check_an_abandoned_window_adds_nothing()
    check_an_optimizer_of_before_steps_the_parts()
    check_clipping_over_a_mix()
    check_a_fit_keeps_no_other_fits_weights()
    with pytest.raises(StrategyError, match="size of the mesh differs"):
        FSDPStrategy(device_mesh=(3,)).start()
    with pytest.raises(StrategyError, match="size of the mesh differs"):
        FSDPStrategy(
            device_mesh=DeviceMesh("cpu", [0])
        ).start()  # it would leave a rank out


@pytest.mark.slow
def test_a_step_without_a_loss_is_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"(?s)returned None.*rank 1.*multiplied by 0"
    ):
        run_distributed(without_a_loss, 2)


def test_options_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "distributed_type": "FSDP",
        "fsdp_version": "1",
        "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2",
        "fsdp_offload_params": "1",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": "2000",
        "fsdp_activation_checkpointing": "1",
        "fsdp_use_orig_params": "0",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"TRAINER_KIT_{name.upper()}", value)
    strategy, processes, start = choose_strategy(
        "auto", "cpu", 2, 1, Environment.detect()
    )
    assert isinstance(strategy, FSDPStrategy)
    assert (strategy.hybrid, strategy.cpu_offload, processes, start) == (
        True,
        True,
        2,
        "agent",
    )
    assert fsdp_from_launcher(told) == {
        "sharding_strategy": "HYBRID_SHARD_ZERO2",
        "cpu_offload": True,
        "auto_wrap_policy": 2000,
        "activation_checkpointing_policy": True,
    }
    assert choose_strategy("ddp", "cpu", 2, 1, Environment.detect())[0].name == "ddp"
    assert (
        choose_strategy("auto", "cpu", 1, 1, Environment.detect())[0].name
        == "single_device"
    )
    assert fsdp_from_launcher(
        {"fsdp_reshard_after_forward": "false", "fsdp_ignored_modules": "head.*"}
    ) == {
        "reshard_after_forward": False,
        "ignored_modules": "head.*",
    }
    assert (
        units(
            Deep(),
            fsdp_from_launcher({"fsdp_auto_wrap_policy": "NO_WRAP"})[
                "auto_wrap_policy"
            ],
        )
        == {}
    )
    offloads = {"fsdp_activation_checkpointing_offload": "true"}
    assert fsdp_from_launcher(offloads) == {"offload_activations": True}
    for make in (FSDPStrategy, lambda **options: MeshStrategy(fsdp=options)):
        with pytest.raises(
            StrategyError, match="activation offload needs activation checkpointing"
        ):
            make(**fsdp_from_launcher(offloads))


@pytest.mark.slow
@pytest.mark.world_size(1, process_group=False)
def test_one_process_alone_offloads_and_recomputes() -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        del os.environ[name]  # nobody launched this process
    made: list[Any] = []
    for strategy in (
        "auto",
        FSDPStrategy(),
        FSDPStrategy(cpu_offload=True),
        "fsdp_cpu_offload",
    ):
        torch.manual_seed(7)
        module = conformance.Classifier()
        trainer = tk.Trainer(
            strategy=strategy,
            devices=1,
            accelerator="cpu",
            barebones=True,
            max_epochs=1,
            precision="64-true",
        )
        data = DataLoader(conformance._samples(12), batch_size=3)
        module.validation_step = module.training_step  # type: ignore[attr-defined]
        trainer.validate(module, data)  # what it gathers there is trained with
        trainer.fit(module, data)
        made.append(
            (trainer.strategy.name, whole(trainer.strategy.module_state(module)))
        )
    assert [name for name, _ in made] == [
        "single_device",
        "single_device",
        "fsdp",
        "fsdp",
    ]
    for _, weights in made[1:]:
        assert_same(weights, made[0][1])
