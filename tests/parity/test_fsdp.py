"""Sharded ranks train as one process does on the same global batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_kit as tk
from tests.parity.plain import Classifier, case, make_batches, make_net, merged, train
from trainer_kit.strategies import FSDPStrategy
from trainer_kit.testing.conformance import Net, assert_same, run_checks, whole


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_every_check_on_two_ranks() -> None:
    run_checks(FSDPStrategy)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_every_way_to_shard() -> None:
    few = ["accumulation_and_clipping", "manual_optimization"]
    for options in (
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"cpu_offload": True},
        {"activation_checkpointing_policy": True, "auto_wrap_policy": "_Block"},
        {"auto_wrap_policy": 100},
        {"auto_wrap_policy": lambda part: isinstance(part, nn.Linear)},
        {"ignored_modules": r"net\.first|net\.blocks\.0\.norm|left\.last"},
    ):
        with case(**options):
            run_checks(partial(FSDPStrategy, **options), few)


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_replicas_and_shards_on_four_ranks() -> None:
    run_checks(partial(FSDPStrategy, sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)))
    run_checks(partial(FSDPStrategy, reshard_after_forward=2), ["accumulation_and_clipping", "manual_optimization"])


def norms() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def fsdp(module: tk.TrainModule, size: int = 3, **options: Any) -> tk.Trainer:
    batches = merged(make_batches(1, size=24))
    data = DataLoader(list(zip(*batches, strict=True)), batch_size=size)
    return train(module, data, max_epochs=2, **options)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_mixed_and_half_precision() -> None:
    for precision, tolerance in (("bf16-mixed", 1e-2), ("16-mixed", 1e-2), ("bf16-true", 5e-2)):
        with case(precision=precision):
            one, mine = Classifier(norms()), Classifier(norms())
            fsdp(one, 6, precision=precision)
            trainer = fsdp(mine, strategy="fsdp", devices=2, precision=precision)
            found = whole(mine.state_dict())
            assert_same(found, one.state_dict(), tolerance)
            rows = trainer.strategy.world.all_gather(torch.cat([v.flatten().float() for v in found.values()]))
            assert torch.equal(rows[0], rows[1])


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    class Overflows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            first = self.trainer.strategy.world.rank == 0 and self.global_step == 1
            return loss * float("inf") if first else loss

    module = Overflows(make_net())
    trainer = fsdp(module, strategy="fsdp", devices=2, precision="16-mixed")
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**15
    assert all(value.isfinite().all() for value in whole(module.state_dict()).values())
