"""Several ranks train as one process does on the same global batches."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    assert_changed,
    assert_close,
    case,
    ddp,
    doubled,
    make_batches,
    make_net,
    merged,
    plain_loop,
    sgd,
    train,
)
from trainer_kit.core.errors import NonFiniteError, RankError
from trainer_kit.strategies import DDPStrategy
from trainer_kit.strategies.ddp import register_comm_hook

PER_RANK = 3


def double(**options: Any) -> nn.Sequential:
    return make_net(**options).double()


def samples(count: int) -> TensorDataset:
    return TensorDataset(*merged(doubled(make_batches(1, size=count))))


def loader(count: int, size: int = PER_RANK, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=size, **options)


def whole(count: int, size: int) -> list[Batch]:
    return list(loader(count, size))


# 18: whole global batches. 20: one sample each at the end. 21: two and one. 19: nothing is left for the last rank.
COUNTS = [18, 20, 21, 19]


@pytest.mark.world_size(2)
def test_plain() -> None:
    for count in COUNTS:
        with case(count=count):
            net, mine = double(), double()
            plain_loop(net, [whole(count, 6)] * 2, sgd(net))
            trainer = ddp(Classifier(mine), loader(count), max_epochs=2)
            assert_close(mine, net)
            assert_changed(mine, double())
            assert (trainer.progress.samples, trainer.global_step) == (
                2 * count,
                2 * -(-count // 6),
            )


@pytest.mark.world_size(3)
def test_three_ranks() -> None:
    for count in [19, 20]:
        with case(count=count):
            net, mine = double(), double()
            plain_loop(net, [whole(count, 9)] * 2, sgd(net))
            ddp(Classifier(mine), loader(count), max_epochs=2)
            assert_close(mine, net)


@pytest.mark.world_size(2)
def test_accumulation_with_a_ragged_end() -> None:
    for count, limit in product([25, 31, 36], [None, 0.2]):
        with case(count=count, limit=limit):
            net, mine = double(), double()
            clipping = (
                None
                if limit is None
                else partial(nn.utils.clip_grad_norm_, max_norm=limit)
            )
            plain_loop(net, [whole(count, 18)] * 2, sgd(net), clip=clipping)
            ddp(
                Classifier(mine),
                loader(count),
                max_epochs=2,
                accumulate_grad_batches=3,
                gradient_clip_val=limit,
            )
            assert_close(mine, net)


@pytest.mark.world_size(2)
def test_clipping_by_value_and_a_scheduler() -> None:
    def configure(net: nn.Module) -> Any:
        optimizer = sgd(net)
        return [optimizer], [
            {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}
        ]

    net, mine = double(), double()
    (optimizer,), (config,) = configure(net)
    clip = lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02)  # noqa: E731
    plain_loop(
        net, [whole(20, 6)] * 2, optimizer, by_step=config["scheduler"], clip=clip
    )
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    ddp(Classifier(mine, configure), loader(20), max_epochs=2, **options)
    assert_close(mine, net)


@pytest.mark.world_size(2)
def test_the_shuffled_order_is_that_of_one_process() -> None:
    one, mine = Classifier(double()), Classifier(double())
    train(one, loader(20, 6, shuffle=True), max_epochs=2, seed=3)
    ddp(mine, loader(20, 3, shuffle=True), max_epochs=2, seed=3)
    assert_close(mine.net, one.net)


@pytest.mark.world_size(2)
def test_every_rank_starts_from_the_weights_of_rank_0() -> None:
    net, mine = double(), double(seed=dist.get_rank())
    plain_loop(net, [whole(18, 6)], sgd(net))
    ddp(Classifier(mine), loader(18))
    assert_close(mine, net)


@pytest.mark.world_size(2)
def test_a_list_of_batches() -> None:
    for count, length in product([5, 6], [1, 2]):
        with case(count=count, length=length):
            batches = [
                doubled(make_batches(1, size=2 + i, seed=i))[0] for i in range(count)
            ]
            net, mine = double(), double()
            step = 2 * length
            plain_loop(
                net,
                [[merged(batches[i : i + step]) for i in range(0, count, step)]] * 2,
                sgd(net),
            )
            ddp(Classifier(mine), batches, max_epochs=2, accumulate_grad_batches=length)
            assert_close(mine, net)


class Stream(IterableDataset[Batch]):
    """So many samples on each rank, and different ones."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def of(self, rank: int) -> list[Batch]:
        at = sum(self.counts[:rank])
        return [samples(sum(self.counts))[i] for i in range(at, at + self.counts[rank])]

    def __iter__(self) -> Any:
        yield from self.of(dist.get_rank())


@pytest.mark.world_size(2)
def test_streams_of_uneven_length() -> None:
    for counts, length in product([(6, 6), (13, 4), (2, 9), (7, 0)], [1, 2]):
        with case(counts=counts, length=length):
            net, mine, size = double(), double(), PER_RANK * length
            stream = Stream(counts)
            windows = []
            for at in range(0, max(counts), size):
                part = [
                    sample
                    for rank in range(2)
                    for sample in stream.of(rank)[at : at + size]
                ]
                windows.append(
                    (
                        torch.stack([x for x, _ in part]),
                        torch.stack([y for _, y in part]),
                    )
                )
            plain_loop(net, [windows] * 2, sgd(net))
            options = {
                "max_epochs": 2,
                "use_distributed_sampler": False,
                "accumulate_grad_batches": length,
            }
            trainer = ddp(
                Classifier(mine), DataLoader(stream, batch_size=PER_RANK), **options
            )
            assert_close(mine, net)
            assert trainer.progress.samples == 2 * sum(counts)


class Tokens(Classifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=-1)

    def loss_weight(self, batch: Batch) -> Tensor:
        return (batch[1] >= 0).sum()


@pytest.mark.world_size(2)
def test_token_weights() -> None:
    for length in [1, 2]:
        with case(length=length):
            batches = doubled(make_batches(5, size=6))
            for (_, y), kept in zip(batches, (6, 1, 4, 2, 5), strict=True):
                y[kept:] = -1
            plain, mine = Tokens(double()), Tokens(double())
            optimizer, step = sgd(plain.net), 2 * length
            for i in range(0, 5, step):
                optimizer.zero_grad()
                plain.training_step(merged(batches[i : i + step]), 0).backward()
                optimizer.step()
            trainer = ddp(mine, batches, accumulate_grad_batches=length)
            assert_close(mine.net, plain.net)
            assert trainer.progress.tokens == 18


@pytest.mark.world_size(2)
def test_loss_weighting_off_is_the_mean_over_ranks_and_micro_batches() -> None:
    batches = [doubled(make_batches(1, size=2 + i, seed=i))[0] for i in range(4)]
    net, mine = double(), double()
    optimizer = sgd(net)
    torch.stack([F.cross_entropy(net(x), y) for x, y in batches]).mean().backward()
    optimizer.step()
    trainer = ddp(
        Tokens(mine), batches, accumulate_grad_batches=2, loss_weighting=False
    )
    assert_close(mine, net)
    assert trainer.progress.tokens == 2 + 3 + 4 + 5


# -- the wrapper's options ------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_communication_hooks() -> None:
    for hook in ["fp16", "bf16", "powersgd", "batched_powersgd"]:
        with case(hook=hook):
            net, mine = make_net(), make_net()
            data = [(x.float(), y) for x, y in whole(19, 3)]
            plain_loop(net, [[(x.float(), y) for x, y in whole(19, 6)[:3]]], sgd(net))
            strategy = DDPStrategy(ddp_comm_hook=hook)
            ddp(Classifier(mine), data, strategy=strategy, limit_train_batches=3)
            assert_changed(mine, make_net())
            for one, other in zip(mine.parameters(), net.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.world_size(2, timeout=60)
def test_powersgd_of_several_buckets_does_not_hang() -> None:
    """Its exchanges wait for each other in gloo's two threads."""
    net, mine = make_net(), make_net()
    data = [(x.float(), y) for x, y in whole(19, 3)]
    state = {"matrix_approximation_rank": 8, "start_powerSGD_iter": 2}
    options: dict[str, Any] = {"ddp_comm_state": state, "bucket_cap_mb": 0.0001}
    plain_loop(net, [[(x.float(), y) for x, y in whole(19, 6)[:3]]], sgd(net))
    strategy = DDPStrategy(ddp_comm_hook="batched_powersgd", **options)
    ddp(Classifier(mine), data, strategy=strategy, limit_train_batches=3)
    for one, other in zip(mine.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.world_size(2)
def test_batched_powersgd_is_exact_for_gradients_of_low_rank() -> None:
    # One sample on each of two ranks: the gradient has rank 2, and three columns hold it.
    net, rank = nn.Linear(30, 30, bias=False, dtype=torch.float64), dist.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(net)
    state = PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
    register_comm_hook(wrapped, "batched_powersgd", state)
    for step in range(5):
        samples = torch.randn(
            2, 30, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        net.zero_grad()
        wrapped(samples[rank]).square().sum().backward()
        (expected,) = torch.autograd.grad(
            nn.functional.linear(samples, net.weight).square().sum() / 2, net.weight
        )
        torch.testing.assert_close(net.weight.grad, expected, rtol=1e-9, atol=1e-9)
    assert (
        state.total_numel_after_compression
        < state.total_numel_before_compression
        == 3 * 900
    )


def recording(group: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
    group.append(bucket.buffer().numel())
    future = dist.all_reduce(
        bucket.buffer().div_(dist.get_world_size()), async_op=True
    ).get_future()
    return future.then(lambda done: done.value()[0])


@pytest.mark.world_size(2)
def test_gradients_travel_once_a_window() -> None:
    for count in [36, 31, 25]:
        with case(count=count):
            net, mine, seen = double(), double(), []
            plain_loop(net, [whole(count, 18)] * 2, sgd(net))
            strategy = DDPStrategy(ddp_comm_hook=recording, ddp_comm_state=seen)
            trainer = ddp(
                Classifier(mine),
                loader(count),
                strategy=strategy,
                max_epochs=2,
                accumulate_grad_batches=3,
            )
            assert_close(mine, net)
            assert sum(seen) == trainer.global_step * sum(
                p.numel() for p in mine.parameters()
            )


class Forked(Classifier):
    """Uses one of two heads, by the batch's index; twice if it is told so."""

    def __init__(self, twice: bool = False, fixed: bool = False) -> None:
        super().__init__(double())
        self.heads = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))
        for i, head in enumerate(self.heads):
            nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(i))
            nn.init.zeros_(head.bias)
        self.twice, self.fixed = twice, fixed

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        head = self.heads[0 if self.fixed else batch_idx % 2]
        out = head(self.net(batch[0]))
        return F.cross_entropy(head(out) if self.twice else out, batch[1])

    def configure_optimizers(self) -> Any:
        return sgd(self)


def forked_by_hand(module: Forked, windows: list[list[Batch]]) -> None:
    optimizer, at = sgd(module), 0
    for window in windows:
        optimizer.zero_grad()
        total = sum(len(y) for _, y in window)
        for batch in window:
            (module.training_step(batch, at) * (len(batch[1]) / total)).backward()
            at += 1
        optimizer.step()


@pytest.mark.world_size(2)
def test_unused_parameters() -> None:
    for count, length, by_word in product([18, 19], [1, 2], [False, True]):
        with case(count=count, length=length, by_word=by_word):
            plain, mine, batches = Forked(), Forked(), whole(count, 6)
            forked_by_hand(
                plain, [batches[i : i + length] for i in range(0, len(batches), length)]
            )
            chosen: Any = (
                "ddp_find_unused_parameters_true"
                if by_word
                else DDPStrategy(find_unused_parameters=True)
            )
            ddp(mine, loader(count), strategy=chosen, accumulate_grad_batches=length)
            assert_close(mine, plain)


@pytest.mark.world_size(2)
def test_static_graph() -> None:
    for count, length, twice in product([18, 19], [1, 2], [False, True]):
        with case(count=count, length=length, twice=twice):
            plain, mine, batches = (
                Forked(twice, fixed=True),
                Forked(twice, fixed=True),
                whole(count, 6),
            )
            for module in (plain, mine):
                module.heads[1].requires_grad_(False)
            forked_by_hand(
                plain,
                [batches[i : i + length] for i in range(0, len(batches), length)] * 2,
            )
            ddp(
                mine,
                loader(count),
                strategy="ddp_static_graph",
                accumulate_grad_batches=length,
                max_epochs=2,
            )
            assert_close(mine, plain)


class Kept(tk.Callback):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(module.net[0].weight.grad is not None)


@pytest.mark.world_size(2)
def test_gradients_are_dropped_and_live_until_the_next_window() -> None:
    for bucket_view in [False, True]:
        with case(bucket_view=bucket_view):
            net, mine, kept = double(), double(), Kept()
            plain_loop(net, [whole(18, 6)] * 2, sgd(net))
            strategy = DDPStrategy(
                gradient_as_bucket_view=bucket_view, bucket_cap_mb=0.0001
            )
            ddp(
                Classifier(mine),
                loader(18),
                strategy=strategy,
                max_epochs=2,
                callbacks=[kept],
            )
            assert_close(mine, net)
            assert kept.seen == [True] * 6


@pytest.mark.world_size(2)
def test_frozen_parameters_stay() -> None:
    net, mine = double(), double()
    for one in (net, mine):
        one[0].requires_grad_(False)
    plain_loop(net, [whole(19, 6)] * 2, torch.optim.SGD(net[3].parameters(), lr=0.1))
    ddp(
        Classifier(mine, lambda net: torch.optim.SGD(net[3].parameters(), lr=0.1)),
        loader(19),
        max_epochs=2,
    )
    assert_close(mine, net)
    assert torch.equal(mine[0].weight, double()[0].weight)
    check_thawed_parameters()


def check_thawed_parameters() -> None:
    """What was frozen when the module was wrapped is averaged, too, once it is trained."""

    def made(net: nn.Module) -> torch.optim.Optimizer:
        net[0].requires_grad_(False)
        return torch.optim.SGD(net[3].parameters(), lr=0.1)

    def thaw(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[0].parameters())})

    class Thaws(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                thaw(self.net, self.optimizers())

    class ByHand(Thaws):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    net = double()
    optimizer = made(net)
    plain_loop(net, [whole(19, 6)], optimizer)
    thaw(net, optimizer)
    plain_loop(net, [whole(19, 6)], optimizer)
    for kind in (Thaws, ByHand):
        with case(kind=kind.__name__):
            mine = double()
            made(mine)
            ddp(kind(mine, made), loader(19), max_epochs=2)
            assert_close(mine, net)
            assert not torch.equal(mine[0].weight, double()[0].weight)


# -- losses that are missing, several, or not finite -----------------------------------------------------------------


class Skipping(Classifier):
    """Returns None at some (rank, batch) or on all ranks where the rank is None."""

    def __init__(self, net: nn.Module, at: int, rank: int | None = None) -> None:
        super().__init__(net)
        self.at, self.rank = at, rank

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        if batch_idx == self.at and self.rank in (None, dist.get_rank()):
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(2)
def test_none_on_all_ranks_skips_the_step() -> None:
    for at in [0, 1, 2]:
        with case(at=at):
            net, mine = double(), double()
            plain_loop(
                net,
                [[batch for i, batch in enumerate(whole(18, 6)) if i != at]] * 2,
                sgd(net),
            )
            ddp(Skipping(mine, at), loader(18), max_epochs=2)
            assert_close(mine, net)


@pytest.mark.world_size(2)
def test_none_for_a_part_of_a_window_keeps_its_weight() -> None:
    for at in [0, 1, 2]:
        with case(at=at):
            net, mine = double(), double()
            optimizer = sgd(net)
            for i, (x, y) in enumerate(whole(18, 6)):
                if i != at:
                    (F.cross_entropy(net(x), y) / 3).backward()
            optimizer.step()
            ddp(Skipping(mine, at), loader(18), accumulate_grad_batches=3)
            assert_close(mine, net)


@pytest.mark.world_size(2)
def test_none_for_a_batch_that_only_some_ranks_have_a_part_of() -> None:
    """19 samples: nothing of the last batch is left for the last rank, and the first one skips its sample."""
    for length in [1, 4]:
        with case(length=length):
            net, mine = double(), double()
            batches = whole(19, 6)
            optimizer = sgd(net)
            for _ in range(2):
                for first in range(0, 3, length):
                    optimizer.zero_grad()
                    window = batches[:3][first : first + length]
                    weight = 19 if length == 4 else sum(len(x) for x, _ in window)
                    for x, y in window:
                        (F.cross_entropy(net(x), y) * len(x) / weight).backward()
                    optimizer.step()
            ddp(
                Skipping(mine, 3),
                loader(19),
                max_epochs=2,
                accumulate_grad_batches=length,
            )
            assert_close(mine, net)


@pytest.mark.world_size(2)
def test_none_on_one_rank_is_an_error_on_all() -> None:
    for rank, length in product([0, 1], [1, 2]):
        with case(rank=rank, length=length):
            with pytest.raises(
                RankError, match=f"on some ranks only\n  found:.*rank {rank}: 1 time"
            ):
                ddp(
                    Skipping(double(), 1, rank),
                    loader(36),
                    accumulate_grad_batches=length,
                )
            dist.barrier()


@pytest.mark.world_size(2)
def test_a_loss_that_is_not_finite_on_one_rank_ends_all() -> None:
    for every in [1, 4, 50]:
        with case(every=every):

            class Spoiled(Classifier):
                def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
                    loss: Tensor = super().training_step(batch, batch_idx)
                    return (
                        loss * float("nan")
                        if batch_idx == 3 and dist.get_rank() == 1
                        else loss
                    )

            with pytest.raises(
                NonFiniteError,
                match=r"(?s)not finite at step 4\n.*batch 3 of epoch 0 \(samples .*, on rank 1",
            ):
                ddp(Spoiled(double()), loader(24), log_every_n_steps=every)
            dist.barrier()


@pytest.mark.world_size(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    batches = make_batches(8)
    batches[5] = (batches[5][0] * 1e6, batches[5][1])
    mine, start = make_net(), make_net()
    trainer = ddp(Classifier(mine), batches, precision="16-mixed", max_epochs=2)
    assert trainer.precision_plugin.scaler.get_scale() == 65536.0 / 4
    assert_changed(mine, start)
    assert all(p.isfinite().all() for p in mine.parameters())


@pytest.mark.world_size(2)
def test_precisions() -> None:
    for precision in ["bf16-mixed", "bf16-true", "64-true"]:
        with case(precision=precision):
            mine = make_net()
            ddp(
                Classifier(mine),
                make_batches(5),
                precision=precision,
                accumulate_grad_batches=2,
            )
            assert_changed(mine.double(), double())


class Pair(tk.TrainModule):
    """Two parts with an optimizer each; the second's loss looks through the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(8, 6).double(), nn.Linear(6, 4).double()

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.first(batch[0])
        return hidden.pow(2).mean() + self.second(hidden).pow(
            2
        ).mean(), F.cross_entropy(self.second(hidden), batch[1])

    def make(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return sgd(self.first), torch.optim.SGD(self.second.parameters(), lr=0.05)

    def by_hand(self, windows: list[Batch]) -> None:
        first, second = self.make()
        for batch in windows:
            one, two = self.losses(batch)
            grads = torch.autograd.grad(
                one, list(self.first.parameters()), retain_graph=True
            )
            others = torch.autograd.grad(two, list(self.second.parameters()))
            for parameter, grad in zip(
                [*self.first.parameters(), *self.second.parameters()],
                [*grads, *others],
                strict=True,
            ):
                parameter.grad = grad
            first.step()
            second.step()


class Named(Pair):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        one, two = self.losses(batch)
        return {"one": one, "two": two}

    def configure_optimizers(self) -> Any:
        return dict(zip(("one", "two"), self.make(), strict=True))


@pytest.mark.world_size(2)
def test_named_losses() -> None:
    for count, length in product([18, 19], [1, 2]):
        with case(count=count, length=length):
            plain, mine, alone = Pair(), Named(), Named()
            plain.by_hand(whole(count, 6 * length) * 2)
            ddp(mine, loader(count), max_epochs=2, accumulate_grad_batches=length)
            assert_close(mine, plain)
            train(alone, loader(count, 6), max_epochs=2, accumulate_grad_batches=length)
            assert_close(alone, plain)


class Manual(Pair):
    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.losses(batch)[0 if name == "first" else 1])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return list(self.make())


@pytest.mark.world_size(2)
def test_manual_optimization() -> None:
    for count in COUNTS:
        with case(count=count):
            plain, mine = Manual(), Manual()
            train(plain, whole(count, 6), max_epochs=2)
            trainer = ddp(mine, loader(count), max_epochs=2)
            assert_close(mine, plain)
            assert trainer.global_step == 2 * -(-count // 6)


class ManualWindows(Classifier):
    """Accumulates two batches by itself."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.2)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.world_size(2)
def test_manual_accumulation_and_clipping() -> None:
    plain, mine = ManualWindows(double()), ManualWindows(double())
    train(plain, whole(24, 6), max_epochs=2)
    ddp(mine, loader(24), max_epochs=2)
    assert_close(mine, plain)
