"""Optimizers that update a matrix as a whole: they train as in one process, or are refused before the first step."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.plain import (
    Classifier,
    assert_close,
    case,
    doubled,
    make_batches,
    make_net,
    train,
)
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    MeshStrategy,
)

REFUSAL = (
    r"does not support sharded parameters\n  found: it updates a matrix as a whole"
)


def adafactor(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(net.parameters(), lr=0.05)


class Adafactor(torch.optim.SGD):
    """Stands in for the class of transformers, which is known by its name too."""


def named_adafactor(net: nn.Module) -> torch.optim.Optimizer:
    return Adafactor(net.parameters(), lr=0.05)


def muon(net: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.05)


def halves(batches: Any) -> list[Any]:
    return [(x[rank::2], y[rank::2]) for x, y in batches for rank in (0, 1)]


@pytest.mark.world_size(2)
def test_adafactor_trains_as_in_one_process_or_is_refused() -> None:
    batches = doubled(make_batches(4))
    alone = Classifier(make_net().double(), adafactor)
    train(alone, batches)
    replicated = Classifier(make_net().double(), adafactor)
    train(replicated, halves(batches), strategy=DDPStrategy(), devices=2)
    assert_close(replicated.net, alone.net)
    for strategy in (FSDPStrategy(), MeshStrategy(dp_shard=2)):
        for configure in (adafactor, named_adafactor):
            module = Classifier(make_net().double(), configure)
            with (
                case(strategy=strategy.name, optimizer=configure.__name__),
                pytest.raises(StrategyError, match=f"Adafactor {REFUSAL}"),
            ):
                train(module, halves(batches), strategy=strategy, devices=2)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
@pytest.mark.world_size(2)
def test_flat_masters_are_refused_where_a_matrix_is_needed() -> None:
    batches = make_batches(4)
    for configure in (adafactor, muon):
        alone = Classifier(make_net(), configure)
        train(alone, batches)
        for stage in (0, 1, 3):
            with case(stage=stage, optimizer=configure.__name__):
                module = Classifier(make_net(), configure)
                options: Any = {
                    "strategy": DeepSpeedStrategy(stage=stage),
                    "devices": 2,
                }
                if stage == 0:
                    train(module, halves(batches), **options)
                    # Muon rounds to bfloat16, so that the order of a sum may show.
                    tolerance = 1e-5 if configure is adafactor else 5e-2
                    torch.testing.assert_close(
                        module.net.state_dict(),
                        alone.net.state_dict(),
                        rtol=0,
                        atol=tolerance,
                    )
                    continue
                with pytest.raises(StrategyError, match=REFUSAL):
                    train(module, halves(batches), **options)
