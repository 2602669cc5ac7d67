"""Which strategy a Trainer gets, on how many processes, and what is refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, RegistryError, StrategyError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from trainer_kit.strategies.single import Alone
from trainer_kit.testing import TinyModule
from trainer_kit.training.entry_points import _sync_batchnorm

DATA = [
    torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)
]


def made(**options: Any) -> tk.Trainer:
    return tk.Trainer(
        **{"accelerator": "cpu", "barebones": True, "max_epochs": 1, **options}
    )


def wrapped(**options: Any) -> dict[str, Any]:
    """What a strategy's word says about torch's wrapper."""
    strategy = made(**options).strategy
    assert isinstance(strategy, DDPStrategy)
    return {
        name: value for name, value in strategy.wrapper_options.items() if value is True
    }


VIEWS = {"gradient_as_bucket_view": True, "broadcast_buffers": True}


def test_one_process_needs_no_group() -> None:
    for options in (
        {},
        {"devices": 1},
        {"strategy": "auto"},
        {"strategy": "single_device"},
        {"devices": "auto"},
    ):
        strategy = made(**options).strategy
        assert isinstance(strategy, SingleDeviceStrategy)
        assert (strategy.world.size, strategy.data.size, strategy.gradient_divisor) == (
            1,
            1,
            1,
        )
        assert strategy.device == torch.device("cpu")


def test_words_for_data_parallel_training() -> None:
    assert wrapped(devices=2) == VIEWS
    assert wrapped(devices=2, strategy="ddp") == VIEWS
    assert wrapped(devices=2, strategy="ddp_notebook") == VIEWS
    assert wrapped(devices=2, strategy="ddp_find_unused_parameters_true") == {
        **VIEWS,
        "find_unused_parameters": True,
    }
    assert wrapped(devices=2, strategy="ddp_find_unused_parameters_false") == VIEWS
    assert wrapped(devices=2, strategy="ddp_static_graph") == {
        **VIEWS,
        "static_graph": True,
    }


def test_an_object_instead_of_a_word() -> None:
    strategy = DDPStrategy(find_unused_parameters=True, bucket_cap_mb=1)
    assert made(devices=2, strategy=strategy).strategy is strategy
    alone = SingleDeviceStrategy()
    assert made(strategy=alone).strategy is alone


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp_find_unused_parameters_true", DDPStrategy(static_graph=True)],
)
def test_data_parallel_on_one_device_is_that_device(strategy: Any) -> None:
    trainer, module, other = (
        made(devices=1, strategy=strategy),
        TinyModule(),
        TinyModule(),
    )
    other.load_state_dict(module.state_dict())
    trainer.fit(module, DATA)
    made().fit(other, DATA)
    assert torch.equal(module.layer.weight, other.layer.weight)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("dpp", "did you mean 'ddp'"),
        ("ddpp", "did you mean 'ddp'"),
        ("ddp_static", "did you mean 'ddp_static_graph'"),
        ("zebra", "use one of:.*ddp"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(word: str, told: str) -> None:
    with pytest.raises(
        RegistryError, match=f"no strategy is called '{word}'(.|\n)*{told}"
    ):
        made(strategy=word)


def test_objects_that_are_not_strategies_are_refused() -> None:
    for strategy in (5, None, object(), torch.nn.Linear(1, 1)):
        with pytest.raises(StrategyError, match="this is not a strategy"):
            made(strategy=strategy)


def test_one_device_cannot_hold_several_processes() -> None:
    with pytest.raises(
        StrategyError,
        match="one device cannot hold several processes\n  found: 2 processes",
    ):
        made(devices=2, strategy="single_device")
    with pytest.raises(StrategyError, match="one device cannot hold several processes"):
        made(devices=2, strategy=SingleDeviceStrategy())


@pytest.mark.parametrize("devices", [0, -2, "two", [], [0, 0], 1.5, None, True, [0, 1]])
def test_devices_that_cannot_be_read(devices: Any) -> None:
    with pytest.raises(
        StrategyError, match=r"devices= is not understood|single CPU cores"
    ):
        made(devices=devices)


@pytest.mark.parametrize("accelerator", ["cdua", "quantum"])
def test_an_accelerator_that_is_not_here(accelerator: str) -> None:
    with pytest.raises(
        StrategyError, match=f"accelerator='{accelerator}' is not available"
    ):
        made(accelerator=accelerator)


def test_several_machines_need_a_launcher() -> None:
    with pytest.raises(
        StrategyError,
        match=r"several machines needs a launcher(.|\n)*torchrun --nnodes 2",
    ):
        made(devices=2, num_nodes=2)


def as_launched(patch: pytest.MonkeyPatch, world: int, rank: int = 0) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    for name, value in {
        **place,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29400,
    }.items():
        patch.setenv(name, str(value))


def test_a_launched_world_decides_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    as_launched(monkeypatch, 4, rank=2)
    for options in (
        {},
        {"devices": "auto"},
        {"devices": 4},
        {"devices": -1},
        {"devices": 4, "strategy": "ddp"},
    ):
        trainer = made(**options)
        assert isinstance(trainer.strategy, DDPStrategy)
        assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (
            4,
            2,
            2,
        )


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_another_number_than_was_launched_is_refused(
    monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    as_launched(monkeypatch, 4)
    with pytest.raises(
        StrategyError,
        match=f"not the requested number(.|\n)*found: 4 .torchrun., devices={devices}(.|\n)*devices=4",
    ):
        made(devices=devices)


def test_one_device_inside_a_world_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    as_launched(monkeypatch, 4, rank=2)
    for strategy in ("auto", "ddp", "single_device", DDPStrategy()):
        trainer = made(devices=1, strategy=strategy)
        assert isinstance(trainer.strategy, SingleDeviceStrategy)
        assert (trainer.world_size, trainer.global_rank) == (1, 0)
        assert trainer.is_global_zero
        trainer.fit(TinyModule(), DATA)
        assert trainer.global_step == 4


def test_launched_on_several_with_one_device_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_launched(monkeypatch, 2)
    with pytest.raises(StrategyError, match="one device cannot hold several processes"):
        made(strategy="single_device")


def test_a_registered_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STRATEGIES, "_targets", dict(STRATEGIES._targets))
    STRATEGIES.register("mine", SingleDeviceStrategy)
    trainer = made(strategy="mine")
    trainer.fit(TinyModule(), DATA)
    assert trainer.global_step == 4


def test_a_registered_class_without_a_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(Strategy):
        name = "plain"

        def start(self) -> None:
            self.world = self.data = self.losses = self.reports = Alone()

        def describe(self) -> str:
            return "plain"

    monkeypatch.setattr(STRATEGIES, "_targets", dict(STRATEGIES._targets))
    STRATEGIES.register("plain", Plain)
    trainer = made(strategy="plain")
    trainer.fit(TinyModule(), DATA)
    assert trainer.global_step == 4
    assert trainer.strategy.device == torch.device("cpu")


def test_an_unknown_communication_hook() -> None:
    with pytest.raises(
        StrategyError, match="unknown communication hook\n  found: 'fp8'"
    ):
        DDPStrategy(ddp_comm_hook="fp8")


def test_a_sync_batch_norm_needs_an_accelerator() -> None:
    with pytest.raises(
        ConfigurationError, match="SyncBatchNorm does not run on the CPU"
    ):
        made(sync_batchnorm=True).fit(TinyModule(), DATA)
    module = TinyModule()
    module.norms = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    weight = module.norms[0].weight
    accelerated = SimpleNamespace(device=torch.device("cuda"))
    assert _sync_batchnorm(module, accelerated) is module
    assert isinstance(module.norms[0], torch.nn.SyncBatchNorm)
    assert module.norms[0].weight is weight


def test_strategies_describe_themselves() -> None:
    assert SingleDeviceStrategy("cpu").describe() == "single device: cpu"
    told = DDPStrategy(find_unused_parameters=True).describe()
    assert told.startswith("DistributedDataParallel on cpu")
    assert "find_unused_parameters" in told
    assert "static_graph" not in told
