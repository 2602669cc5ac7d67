"""Accumulating k micro-batches is training on one batch k times as large, whatever their sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    assert_changed,
    assert_close,
    assert_same,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)
from trainer_kit.callbacks import GradientAccumulation

SIZES = (5, 6, 3, 6, 1, 6, 2)


def uneven_batches() -> list[Batch]:
    return doubled(
        [make_batches(1, size=size, seed=i)[0] for i, size in enumerate(SIZES)]
    )


def windows(batches: list[Batch], length: int) -> list[Batch]:
    return [merged(batches[at : at + length]) for at in range(0, len(batches), length)]


def make_double() -> nn.Sequential:
    return make_net().double()


@pytest.mark.parametrize("length", [2, 3, 4, 7, 9])
def test_a_window_is_one_large_batch(length: int) -> None:
    batches, net, mine = uneven_batches(), make_double(), make_double()
    plain_loop(net, [windows(batches, length)] * 3, sgd(net))
    trainer = train(
        Classifier(mine), batches, max_epochs=3, accumulate_grad_batches=length
    )
    assert_close(mine, net)
    assert_changed(mine, make_double())
    assert trainer.global_step == 3 * -(-7 // length)
    assert (trainer.progress.batch, trainer.progress.samples) == (21, 3 * sum(SIZES))


def test_windows_of_equal_batches_scale_by_a_power_of_two_exactly() -> None:
    batches, net, mine = make_batches(4), make_net(), make_net()
    optimizer = sgd(net)
    for at in (0, 2):
        optimizer.zero_grad()
        for x, y in batches[at : at + 2]:
            (F.cross_entropy(net(x), y) / 2).backward()
        optimizer.step()
    train(Classifier(mine), batches, accumulate_grad_batches=2)
    assert_same(mine, net)


def test_clipping_and_schedulers_go_by_windows() -> None:
    def configure(net: nn.Module) -> Any:
        optimizer = sgd(net)
        return [optimizer], [
            {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}
        ]

    batches, net, mine = uneven_batches(), make_double(), make_double()
    (optimizer,), (config,) = configure(net)
    clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2)  # noqa: E731
    plain_loop(
        net,
        [windows(batches, 3)] * 2,
        optimizer,
        by_step=config["scheduler"],
        clip=clip,
    )
    train(
        Classifier(mine, configure),
        batches,
        max_epochs=2,
        accumulate_grad_batches=3,
        gradient_clip_val=0.2,
    )
    assert_close(mine, net)


@pytest.mark.parametrize("limit", [3, 5])
def test_windows_end_at_limit_train_batches(limit: int) -> None:
    batches, net, mine = uneven_batches(), make_double(), make_double()
    plain_loop(net, [windows(batches[:limit], 2)] * 2, sgd(net))
    train(
        Classifier(mine),
        batches,
        max_epochs=2,
        accumulate_grad_batches=2,
        limit_train_batches=limit,
    )
    assert_close(mine, net)


def test_max_steps_ends_with_a_whole_window() -> None:
    batches, net, mine = uneven_batches(), make_double(), make_double()
    plain_loop(net, [[*windows(batches, 3), *windows(batches, 3)][:5]], sgd(net))
    trainer = train(
        Classifier(mine), batches, max_steps=5, max_epochs=9, accumulate_grad_batches=3
    )
    assert_close(mine, net)
    assert trainer.progress.batch == 13


def test_dropout_draws_for_each_micro_batch() -> None:
    batches, net, mine = make_batches(4), make_net(dropout=0.3), make_net(dropout=0.3)
    torch.manual_seed(3)
    optimizer = sgd(net)
    for at in (0, 2):
        optimizer.zero_grad()
        for x, y in batches[at : at + 2]:
            (F.cross_entropy(net(x), y) * 0.5).backward()
        optimizer.step()
    torch.manual_seed(3)
    train(Classifier(mine), batches, accumulate_grad_batches=2)
    assert_same(mine, net)


class Tokens(tk.TrainModule):
    """The loss is a mean over unmasked targets (those that are not -1)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y, ignore_index=-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


class WeighedTokens(Tokens):
    def loss_weight(self, batch: Batch) -> Tensor:
        return (batch[1] >= 0).sum()


def padded_batches() -> list[Batch]:
    """Batches of 6 of which 6, 1, 4, 2 and 5 targets count."""
    batches = doubled(make_batches(5))
    for (_, y), kept in zip(batches, (6, 1, 4, 2, 5), strict=True):
        y[kept:] = -1
    return batches


def by_hand(module: Tokens, batches: list[Batch], length: int, epochs: int = 1) -> None:
    """Each window as one batch."""
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for window in windows(batches, length):
            optimizer.zero_grad()
            module.loss(window).backward()
            optimizer.step()


@pytest.mark.parametrize("length", [1, 2, 5])
def test_token_weights(length: int) -> None:
    plain, mine = Tokens(make_double()), WeighedTokens(make_double())
    by_hand(plain, padded_batches(), length, epochs=2)
    trainer = train(
        mine, padded_batches(), max_epochs=2, accumulate_grad_batches=length
    )
    assert_close(mine.net, plain.net)
    assert (trainer.progress.tokens, trainer.progress.samples) == (36, 60)


def test_without_loss_weight_batches_count_by_samples() -> None:
    plain, mine = Tokens(make_double()), Tokens(make_double())
    by_hand(plain, padded_batches(), 2)
    train(mine, padded_batches(), accumulate_grad_batches=2)
    assert not torch.allclose(mine.net[0].weight, plain.net[0].weight, rtol=1e-6)


@pytest.mark.parametrize("kind", [Tokens, WeighedTokens])
def test_loss_weighting_off_is_the_mean_of_means(kind: type[Tokens]) -> None:
    batches = padded_batches()
    batches[1] = (batches[1][0][:3], batches[1][1][:3])
    plain, mine = Tokens(make_double()), kind(make_double())
    optimizer = plain.configure_optimizers()
    for at in (0, 3):
        optimizer.zero_grad()
        window = batches[at : at + 3]
        torch.stack([plain.loss(batch) for batch in window]).mean().backward()
        optimizer.step()
    train(mine, batches, accumulate_grad_batches=3, loss_weighting=False)
    assert_close(mine.net, plain.net)


def test_schedule_by_epoch() -> None:
    batches, net, mine = uneven_batches(), make_double(), make_double()
    plain_loop(
        net,
        [batches, windows(batches, 2), windows(batches, 2), windows(batches, 4)],
        sgd(net),
    )
    trainer = train(
        Classifier(mine),
        batches,
        max_epochs=4,
        accumulate_grad_batches={0: 1, 1: 2, 3: 4},
    )
    assert_close(mine, net)
    assert trainer.global_step == 7 + 4 + 4 + 2


def loader(size: int, count: int = 26) -> DataLoader[Any]:
    x, y = merged(doubled(make_batches(1, size=count)))
    return DataLoader(TensorDataset(x, y), batch_size=size)


def test_sample_target() -> None:
    net, mine = make_double(), make_double()
    plain_loop(net, [list(loader(12))] * 2, sgd(net))
    trainer = train(
        Classifier(mine), loader(4), max_epochs=2, accumulate_grad_batches="12sp"
    )
    assert trainer.global_step == 6
    assert_close(mine, net)


def test_token_target() -> None:
    batches = padded_batches()[2:3] * 6
    plain, mine = Tokens(make_double()), WeighedTokens(make_double())
    by_hand(plain, batches, 2)
    trainer = train(mine, batches, accumulate_grad_batches="8tok")
    assert trainer.progress.tokens == 24
    assert trainer.global_step == 3
    assert_close(mine.net, plain.net)


def test_global_batch_size_is_that_of_a_step() -> None:
    net, mine = make_double(), make_double()
    plain_loop(net, [list(loader(12))], sgd(net))
    trainer = train(
        Classifier(mine), loader(5), global_batch_size=12, accumulate_grad_batches=3
    )
    assert trainer.progress.batch == 7
    assert_close(mine, net)


class Lengths(tk.TrainModule):
    """Notes how many samples and tokens each step has; a token is a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.steps: list[tuple[int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).pow(2).mean()

    def on_train_step_end(self) -> None:
        progress = self.trainer.progress
        self.steps.append((progress.samples, progress.tokens))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class CountsTokens(Lengths):
    def loss_weight(self, batch: Tensor) -> Tensor:
        return (batch > 0).sum()


def by_target(
    target: str, data: Any, module: Any = None, **options: Any
) -> list[tuple[int, int]]:
    module = module or CountsTokens()
    train(
        module,
        data,
        callbacks=[GradientAccumulation(target)],
        barebones=False,
        logger=False,
        **options,
    )
    return [
        (now[0] - then[0], now[1] - then[1])
        for then, now in pairwise([(0, 0), *module.steps])
    ]


QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def test_the_first_window_of_a_target_in_tokens_is_as_long_as_the_others() -> None:
    data = [torch.ones(2, 4)] * 16  # 8 tokens each
    assert by_target("64tok", data, **QUIET) == [(16, 64)] * 2
    assert (
        by_target("64tok", DataLoader(torch.ones(32, 4), 2), **QUIET) == [(16, 64)] * 2
    )
    assert (
        by_target("8sp", iter(data), Lengths(), **QUIET) == [(8, 0)] * 4
    )  # nobody knows sizes ahead of a stream
    assert by_target("64tok", data, loss_weighting=False, **QUIET) == [(16, 64)] * 2


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_the_first_window_of_a_target_counts_all_ranks() -> None:
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, **QUIET}
    assert by_target("64tok", [torch.ones(2, 4)] * 16, **options) == [(16, 64)] * 2
    assert (
        by_target("64tok", [torch.ones(2, 4)] * 16, loss_weighting=False, **options)
        == [(16, 64)] * 2
    )
    assert (
        by_target("8sp", iter([torch.ones(2, 4)] * 16), Lengths(), **options)
        == [(8, 0)] * 4
    )
