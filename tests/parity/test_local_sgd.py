"""Ranks that step by themselves and average weights do what a loop written by hand does, also after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Classifier,
    adamw,
    case,
    ddp,
    doubled,
    make_batches,
    make_net,
    merged,
)
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import read_checkpoint
from trainer_kit.core.errors import StrategyError
from trainer_kit.precision.aliases import make_precision
from trainer_kit.strategies import DDPStrategy, PostLocalSGD
from trainer_kit.testing.conformance import run_checks


def double() -> nn.Sequential:
    return make_net().double()


def samples(count: int) -> tuple[Tensor, Tensor]:
    return merged(doubled(make_batches(1, size=count)))


def by_hand(
    count: int, size: int, length: int, period: int, warmup: int, clip: float
) -> tuple[nn.Module, list[float]]:
    """Both ranks in one process; returns the mean of their weights, and how far they were apart after each step."""
    nets = [double(), double()]
    optimizers, (x, y), distances = [adamw(net) for net in nets], samples(count), []
    for number, at in enumerate(range(0, count, 2 * size * length), 1):
        end = min(count, at + 2 * size * length)
        for net in nets:
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
        for i in range(at, end, 2 * size):
            middle, last = (
                i + (min(end, i + 2 * size) - i + 1) // 2,
                min(end, i + 2 * size),
            )
            for net, part in zip(
                nets, (slice(i, middle), slice(middle, last)), strict=True
            ):
                if len(y[part]):
                    (
                        F.cross_entropy(net(x[part]), y[part])
                        * (2 * len(y[part]) / (end - at))
                    ).backward()
        pairs = list(zip(*(net.parameters() for net in nets), strict=True))
        if number <= warmup:
            for one, other in pairs:
                mean = (one.grad + other.grad) / 2
                one.grad, other.grad = mean, mean.clone()
        for net, optimizer in zip(nets, optimizers, strict=True):
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        if number > warmup and (number - warmup) % period == 0:
            average(pairs)
        distances.append(
            max(float((one - other).detach().abs().max()) for one, other in pairs)
        )
    average(list(zip(*(net.parameters() for net in nets), strict=True)))
    return nets[0], distances


def average(pairs: list[Any]) -> None:
    with torch.no_grad():
        for one, other in pairs:
            mean = (one + other) / 2
            one.copy_(mean)
            other.copy_(mean)


class Watched(Classifier):
    """Remembers all its weights after each step, as they are on this rank, and in each validation."""

    def __init__(self) -> None:
        super().__init__(double(), adamw)
        self.own: list[Tensor] = []
        self.validated: list[Tensor] = []

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.own.append(self.weights())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.weights())


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count)), batch_size=3)


def same(one: nn.Module, other: nn.Module) -> None:
    for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_local_steps_are_those_of_a_loop_by_hand() -> None:
    # 36: whole windows. 39: two samples and one in the last window. 37: one and none.
    for count, length, period, warmup in [
        (36, 1, 2, 1),
        (39, 1, 3, 0),
        (37, 1, 4, 2),
        (36, 2, 2, 0),
        (36, 1, 2, 99),
    ]:
        with case(count=count, length=length, period=period, warmup=warmup):
            net, distances = by_hand(count, 3, length, period, warmup, 0.5)
            options: dict[str, Any] = {
                "accumulate_grad_batches": length,
                "gradient_clip_val": 0.5,
            }
            mine, strategy = (
                Watched(),
                DDPStrategy(local_sgd=PostLocalSGD(period, warmup)),
            )
            ddp(mine, loader(count), strategy=strategy, **options)
            same(mine.net, net)
            if count == 36 and length == 1:
                one, other = mine.trainer.strategy.world.all_gather(
                    torch.stack(mine.own)
                )
                found = (one - other).abs().amax(1)
                torch.testing.assert_close(
                    found, torch.tensor(distances).double(), rtol=0, atol=1e-7
                )
                assert (found.max() > 1e-4) == (warmup < 99)
    # Each loss is weighed over all ranks, so that a step of every rank is, to first order, one step on all batches.
    once = partial(DDPStrategy, local_sgd=PostLocalSGD(1))
    run_checks(once, ["frozen_parts", "token_weights", "evaluation"])


def run(strategy: Any, ckpt_path: str | None = None) -> Watched:
    """Two epochs of six steps, a validation after each; a new run saves each step in ``through``."""
    module = Watched()
    keeper = (
        [ModelCheckpoint("through", every_n_train_steps=1, save_top_k=-1)]
        if ckpt_path is None
        else []
    )
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    settings = {
        "max_epochs": 2,
        "callbacks": keeper,
        "enable_checkpointing": bool(keeper),
        "seed": 1,
        **quiet,
    }
    trainer = tk.Trainer(accelerator="cpu", devices=2, strategy=strategy, **settings)
    trainer.print = lambda *values, **said: None  # type: ignore[method-assign]
    trainer.fit(module, loader(36), loader(12), ckpt_path=ckpt_path)
    return module


def saved(step: int) -> str:
    return next(
        str(p)
        for p in Path("through").glob("*step*")
        if read_manifest(p)["info"]["step"] == step
    )


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_checkpoint_continues_bit_for_bit() -> None:
    strategy = partial(
        DDPStrategy, local_sgd=PostLocalSGD(3, 1)
    )  # averages after steps 4, 7, 10
    through = run(strategy())
    for step in [1, 3, 4, 8]:
        with case(step=step):
            resumed = run(strategy(), saved(step))
            assert len(resumed.own) == 12 - step
            for now, then in zip(resumed.own, through.own[step:], strict=True):
                assert torch.equal(now, then), (
                    "a weight of this rank differs after the resume"
                )
            for now, then in zip(
                resumed.parameters(), through.parameters(), strict=True
            ):
                assert torch.equal(now, then)
    means = [
        through.trainer.strategy.world.all_gather(own).mean(0) for own in through.own
    ]
    # What stands for all ranks is the mean of what they have: in validation, in a checkpoint's weights, at the end.
    for seen, step in (
        (through.validated[0], 6),
        (through.validated[-1], 12),
        (through.weights(), 12),
    ):
        torch.testing.assert_close(seen, means[step - 1], rtol=0, atol=1e-15)
    path = saved(8)
    model = read_checkpoint(path, parts=["model"])["model"]
    held = torch.cat(
        [model[name].reshape(-1) for name, _ in through.named_parameters()]
    )
    torch.testing.assert_close(held, means[7], rtol=0, atol=1e-15)
    # Every other layout goes on from that.
    other = run("ddp", path)
    assert len(other.own) == 4
    if dist.get_rank() == 0:
        alone = Watched()
        quietly = {
            "barebones": True,
            "accelerator": "cpu",
            "devices": 1,
            "seed": 1,
            "global_batch_size": 6,
        }
        trainer = tk.Trainer(max_epochs=2, **quietly)
        trainer.fit(alone, loader(36), ckpt_path=path)
        same(alone, other)


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(StrategyError, match="a positive period"):
        PostLocalSGD(0)
    with pytest.raises(StrategyError, match="static_graph=True"):
        DDPStrategy(static_graph=True, local_sgd=PostLocalSGD(2))
    strategy, module = DDPStrategy(local_sgd=PostLocalSGD(2)), double()
    with pytest.raises(StrategyError, match="manual optimization"):
        strategy.prepare_module(module, True, make_precision("32-true", "cpu"))
    with pytest.raises(StrategyError, match="16-mixed"):
        strategy.prepare_module(module, False, make_precision("16-mixed", "cpu"))
    with pytest.raises(StrategyError, match="not available in a custom training loop"):
        strategy.wrap_module(module, make_precision("32-true", "cpu"))


@pytest.mark.world_size(2)
def test_an_overridden_optimizer_step_steps_as_the_strategy_does() -> None:
    class Own(Classifier):
        def optimizer_step(
            self,
            epoch: int,
            batch_idx: int,
            optimizer: Any,
            optimizer_closure: Any = None,
        ) -> None:
            assert isinstance(optimizer, torch.optim.Optimizer)
            optimizer.step(closure=optimizer_closure)

    found = []
    for kind in (Own, Classifier):
        module, after = kind(make_net()), []
        noting = tk.callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_, kept=after: kept.append(
                module.net[0].weight.detach().clone()
            )
        )
        strategy = DDPStrategy(local_sgd=PostLocalSGD(period=2))
        ddp(
            module,
            make_batches(8),
            strategy=strategy,
            callbacks=[noting],
            barebones=False,
            logger=False,
        )
        found.append(after)
    assert all(map(torch.equal, *found))
    apart = DDPStrategy()
    apart.start()
    both = [apart.world.all_gather(weight) for weight in found[0]]
    assert [torch.equal(*weights) for weights in both] == [False, True, False, True]
