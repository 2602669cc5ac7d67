"""Parameters that are frozen and unfrozen while training, in pipelines and on tensor ranks: as in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from tests.parity.language import make_language, make_texts
from tests.parity.plain import case, train
from tests.strategies.pipelines import stages, texts, words
from trainer_kit.core.errors import StrategyError
from trainer_kit.core.parallel import ParallelPlan
from trainer_kit.strategies import MeshStrategy
from trainer_kit.testing.conformance import whole

STEPS = 5
MICRO_BATCHES = 2

Flags = dict[str, bool]
"""Prefixes of names in the net, and whether the parameters are trained from now on."""


def frozen(*prefixes: str) -> Flags:
    return dict.fromkeys(prefixes, False)


def trained(*prefixes: str) -> Flags:
    return dict.fromkeys(prefixes, True)


ENDS = ("embedding", "head")
FIRST_STAGE = ("embedding", "positions", "layers.0", "layers.1")
LAST_STAGE = ("layers.2", "layers.3", "norm", "head")

TIED: dict[str, dict[int, Flags]] = {
    "unfrozen before the first step": {-1: frozen(*ENDS), 0: trained(*ENDS)},
    "unfrozen later": {-1: frozen(*ENDS), 2: trained(*ENDS)},
    "frozen later": {2: frozen(*ENDS)},
    "frozen and unfrozen": {
        -1: frozen(*ENDS),
        1: trained(*ENDS),
        2: frozen(*ENDS),
        4: trained(*ENDS),
    },
    "blocks in turn": {
        -1: frozen("layers"),
        1: trained("layers.3"),
        2: trained("layers"),
        3: frozen("layers.0"),
    },
    "first stage": {1: frozen("head", *FIRST_STAGE), 3: trained("head", *FIRST_STAGE)},
    "last stage": {
        -1: frozen("embedding", *LAST_STAGE),
        3: trained("embedding", *LAST_STAGE),
    },
    "only the tied ones": {
        -1: frozen("positions", "layers", "norm", "head.bias"),
        3: trained(""),
    },
    "swapped": {
        -1: frozen(*ENDS),
        1: {**trained(*ENDS), **frozen("layers")},
        3: {**trained("layers"), **frozen(*ENDS)},
    },
}

UNTIED: dict[str, dict[int, Flags]] = {
    **{name: changes for name, changes in TIED.items() if "tied" not in name},
    "embedding": {-1: frozen("embedding"), 2: trained("embedding")},
    "head": {1: frozen("head"), 3: trained("head")},
    "first stage alone": {-1: frozen(*FIRST_STAGE), 2: trained(*FIRST_STAGE)},
    "last stage alone": {1: frozen(*LAST_STAGE), 3: trained(*LAST_STAGE)},
}

TENSOR: dict[str, dict[int, Flags]] = {
    "unfrozen before the first step": {-1: frozen("layers"), 0: trained("layers")},
    "unfrozen later": {-1: frozen("layers"), 2: trained("layers")},
    "frozen later": {2: frozen("layers")},
    "frozen and unfrozen": {
        -1: frozen("layers.0"),
        1: trained("layers.0"),
        2: frozen("layers.0"),
        4: trained("layers.0"),
    },
    "norm": {-1: frozen("norm"), 2: trained("norm"), 4: frozen("norm")},
    "only the head": {1: {**frozen(""), **trained("lm_head")}, 3: trained("")},
    "ends": {-1: frozen("embed_tokens", "lm_head"), 3: trained("")},
    "all but a block": {-1: {**frozen(""), **trained("layers.1")}, 2: trained("")},
    "swapped": {
        -1: frozen("layers.0"),
        1: {**trained("layers.0"), **frozen("layers.1")},
        3: {**trained("layers.1"), **frozen("layers.0")},
    },
}


def apply_changes(net: nn.Module, changes: dict[int, Flags], step: int) -> None:
    for prefix, is_trained in changes.get(step, {}).items():
        parameters = [
            parameter
            for name, parameter in net.named_parameters(remove_duplicate=False)
            if name.startswith(prefix)
        ]
        for parameter in parameters:
            parameter.requires_grad_(is_trained)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), 0.02)


class Changing(tk.TrainModule):
    """Changes what is trained at the first micro-batch of a step."""

    def __init__(
        self, net: nn.Module, changes: dict[int, Flags], plan: ParallelPlan
    ) -> None:
        super().__init__()
        self.net = net
        self.changes, self.plan = changes, plan

    def configure_parallel(self, mesh: Any) -> ParallelPlan:
        return self.plan

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % MICRO_BATCHES == 0:
            apply_changes(self.net, self.changes, batch_idx // MICRO_BATCHES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self.net)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        logits = net(batch)["logits"]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    tokens, targets = batch
    return F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())


def train_plain(net: nn.Module, changes: dict[int, Flags], batches: Any) -> nn.Module:
    net = copy.deepcopy(net)
    apply_changes(net, changes, -1)
    optimizer = adam(net)
    for step in range(STEPS):
        apply_changes(net, changes, step)
        for batch in batches[MICRO_BATCHES * step :][:MICRO_BATCHES]:
            (loss_of(net, batch) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def fit(
    net: nn.Module,
    changes: dict[int, Flags],
    batches: Any,
    strategy: MeshStrategy,
    plan: ParallelPlan,
) -> nn.Module:
    net = copy.deepcopy(net)
    apply_changes(net, changes, -1)
    module = Changing(net, changes, plan)
    train(
        module,
        batches,
        strategy=strategy,
        devices=2,
        accumulate_grad_batches=MICRO_BATCHES,
    )
    return net


def compare(
    net: nn.Module,
    patterns: dict[str, dict[int, Flags]],
    batches: Any,
    make_strategy: Any,
    plan: ParallelPlan,
) -> None:
    for name, changes in patterns.items():
        with case(changes=name):
            expected = train_plain(net, changes, batches).state_dict()
            strategy = make_strategy()
            state = whole(fit(net, changes, batches, strategy, plan).state_dict())
            for key, value in state.items():
                torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-10)
            keys = strategy.world.all_gather_object(list(state))
            assert set(keys[0]) | set(keys[1]) == expected.keys()
            assert any(
                not torch.equal(net.state_dict()[key], expected[key]) for key in state
            )


def make_words(tied: str = "") -> nn.Module:
    return words(blocks=4, tied=tied)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("tied", ["ends", ""])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_train_what_is_trained_now(schedule: str, tied: str) -> None:
    compare(
        make_words(tied),
        TIED if tied else UNTIED,
        texts([4] * STEPS * MICRO_BATCHES),
        lambda: stages(schedule),
        ParallelPlan(),
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_tensor_ranks_train_what_is_trained_now() -> None:
    compare(
        make_language(),
        TENSOR,
        make_texts([3] * STEPS * MICRO_BATCHES),
        lambda: MeshStrategy(dp_shard=1, tp=2),
        ParallelPlan(tensor="llama"),
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_shared_parameter_that_is_frozen_under_one_name_only_is_refused(
    schedule: str,
) -> None:
    """In one process both names are one parameter; here the stages would wait for each other for ever."""
    for step, prefix in ((0, "embedding"), (1, "head.weight")):
        with (
            case(step=step, prefix=prefix),
            pytest.raises(
                StrategyError,
                match=r"net.embedding.weight and net.head.weight are one parameter, which is frozen under one name"
                r"(.|\n)*set requires_grad under all names",
            ),
        ):
            fit(
                make_words("ends"),
                {step: frozen(prefix)},
                texts([2] * STEPS * MICRO_BATCHES),
                stages(schedule),
                ParallelPlan(),
            )
