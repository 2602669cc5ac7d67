"""Sharded ranks train as one process does on the same global batches."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk
from tests.parity.plain import Classifier, case, make_batches, make_net, merged, train
from trainer_kit.strategies import FSDPStrategy
from trainer_kit.testing.conformance import Net, assert_same, run_checks, whole


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_every_way_to_shard() -> None:
    few = ["accumulation_and_clipping", "manual_optimization"]
    for options in (
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"cpu_offload": True},
        {"activation_checkpointing_policy": True, "auto_wrap_policy": "_Block"},
        {"activation_checkpointing_policy": True, "offload_activations": True},
        {"auto_wrap_policy": 100},
        {"auto_wrap_policy": lambda part: isinstance(part, nn.Linear)},
        {"ignored_modules": r"net\.first|net\.blocks\.0\.norm|left\.last"},
    ):
        with case(**options):
            run_checks(partial(FSDPStrategy, **options), few)
    check_what_travels_and_is_computed_again()


class Calls(Classifier):
    """Counts how often a block computes."""

    def __init__(self) -> None:
        super().__init__(norms())
        self.calls = 0
        self.net.blocks[0].up.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def watched(*names: str) -> Any:
    name = next(
        name for name in names if hasattr(dist, name)
    )  # torch 2.13 has another one
    return mock.patch.object(dist, name, wraps=getattr(dist, name))


def check_what_travels_and_is_computed_again() -> None:
    """In a window of two: three units, of which the root stays gathered for its backward."""
    for options, gathered, calls in (
        ({}, 2 * (3 + 2), 2),
        ({"reshard_after_forward": False}, 2 * 3, 2),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 2 * 3, 2),
        ({"activation_checkpointing_policy": True}, 2 * (3 + 2), 4),
    ):
        reducing = watched("reduce_scatter_single", "reduce_scatter_tensor")
        with (
            case(**options),
            watched("all_gather_single", "all_gather_into_tensor") as gathers,
            reducing as reduces,
        ):
            module = Calls()
            fsdp(
                module,
                6,
                strategy=FSDPStrategy(**options),
                devices=2,
                accumulate_grad_batches=2,
                max_steps=1,
            )
        assert (gathers.call_count, module.calls) == (gathered, calls), options
        assert reduces.call_count == 3, "gradients travel once a window"


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_gathered_again_over_two_of_four_ranks() -> None:
    run_checks(
        partial(FSDPStrategy, reshard_after_forward=2),
        ["accumulation_and_clipping", "manual_optimization"],
    )


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
    for precision, tolerance in (
        ("bf16-mixed", 1e-2),
        ("16-mixed", 1e-2),
        ("bf16-true", 5e-2),
    ):
        with case(precision=precision):
            one, mine = Classifier(norms()), Classifier(norms())
            fsdp(one, 6, precision=precision)
            trainer = fsdp(mine, strategy="fsdp", devices=2, precision=precision)
            found = whole(mine.state_dict())
            assert_same(found, one.state_dict(), tolerance)
            rows = trainer.strategy.world.all_gather(
                torch.cat([v.flatten().float() for v in found.values()])
            )
            assert torch.equal(rows[0], rows[1])
    recomputed = FSDPStrategy(activation_checkpointing_policy="_Block")
    module = Classifier(norms())
    fsdp(module, strategy=recomputed, devices=2)
    assert not any(
        "forward" in vars(part) for part in module.modules()
    )  # a later Trainer has not asked for it


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


class Thaws(Classifier):
    """A layer and a factor are frozen in the first epoch; all weights are read between a backward and its step."""

    def __init__(self, manual: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        )
        self.factor = nn.Parameter(torch.ones(4))
        self.automatic_optimization = not manual
        self.thaw(False)

    def thaw(self, thawed: bool) -> None:
        self.net[2].requires_grad_(thawed)
        self.factor.requires_grad_(thawed)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]) * self.factor, batch[1])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def on_train_epoch_start(self) -> None:
        self.thaw(self.current_epoch > 0)

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self(torch.ones(1, 8))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.on_after_backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=True)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_frozen_ignored_and_inspected_parameters_train_as_one_process() -> None:
    for manual in (False, True):
        one = Thaws(manual)
        fsdp(one, 6)
        for options in ({"auto_wrap_policy": 10**6}, {"ignored_modules": r"net\.2"}):
            with case(manual=manual, **options):
                mine = Thaws(manual)
                fsdp(mine, strategy=FSDPStrategy(**options), devices=2)
                assert_same(whole(mine.state_dict()), one.state_dict(), 2e-6)


class Stream(IterableDataset[Any]):
    """So many samples on each rank."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        at = sum(self.counts[:rank])
        inputs, labels = merged(make_batches(1, size=sum(self.counts)))
        yield from ((inputs[i], labels[i]) for i in range(at, at + self.counts[rank]))


class Hears(tk.Callback):
    """What a rank hears of batches, backwards and their gradients."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.heard.append(f"start {len(batch[0])}")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.heard.append("before")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.heard.append("after")

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.heard.append("end")

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.heard.append(f"validated {len(batch[0])}")


class Counts(Classifier):
    """Keeps what Python programs keep, draws, and has a running statistic."""

    def __init__(self) -> None:
        super().__init__(make_net(norm=True, dropout=0.1))
        self.seen: list[int] = []
        self.by_kind: dict[str, list[int]] = {"val": []}
        self.total = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch[0]))
        self.total += len(batch[0])
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.by_kind["val"].append(len(batch[0]))
        self.log("val", super().training_step(batch, batch_idx))


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(
    "ignore:the first batch of this DataLoader differs from rank to rank"
)
def test_padding_batches_have_no_side_effects() -> None:
    """Uneven streams: rank 1 has two batches less; a validation of one sample gives it none at all."""
    results = []
    for strategy in ("ddp", FSDPStrategy()):
        torch.manual_seed(torch.distributed.get_rank())
        module, hears = Counts(), Hears()
        one = DataLoader(
            [tuple(part[0] for part in merged(make_batches(1)))], batch_size=2
        )
        data = DataLoader(Stream((10, 6)), batch_size=2)
        options: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        options |= {
            "enable_model_summary": False,
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 2,
        }
        trainer = tk.Trainer(strategy=strategy, callbacks=[hears], **options)
        trainer.fit(module, data, one)
        values = {
            name: float(value) for name, value in trainer.callback_metrics.items()
        }
        (validated,) = trainer.validate(
            module, DataLoader(Stream((6, 10)), batch_size=2), verbose=False
        )
        kept = module.seen, module.by_kind, module.total, hears.heard
        weights = {
            name: value
            for name, value in whole(module.state_dict()).items()
            if "running" not in name
        }
        results.append((weights, values, validated, kept, torch.rand(2)))
    (
        (weights, values, validated, kept, drawn),
        (mine, own_values, own_validated, own_kept, own_drawn),
    ) = results
    assert own_kept == kept
    assert_same(mine, weights, 1e-5)
    assert own_values == pytest.approx(values, rel=1e-4)
    assert own_validated == pytest.approx(validated, rel=1e-4)
    assert torch.equal(drawn, own_drawn)
