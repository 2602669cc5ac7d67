"""Data that end early, late, or nowhere near evenly: every rank ends, and every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import trainer_kit as tk

# A rank that waits for another one would wait for ever.
pytestmark = pytest.mark.timeout(100)


class Claims(IterableDataset[Any]):
    """Has ``count`` samples, and a length that says otherwise."""

    def __init__(self, count: int, claimed: int | None = None) -> None:
        self.count, self.claimed = count, claimed

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.count).unsqueeze(1).float())

    def __len__(self) -> int:
        if self.claimed is None:
            raise TypeError
        return self.claimed


class Placed(Claims):
    """The same with a place that can be saved."""

    def __init__(self, count: int, claimed: int | None = None) -> None:
        super().__init__(count, claimed)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for i in range(start, self.count):
            self.at = i + 1
            yield torch.tensor([float(i)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Sees(tk.TrainModule):
    """Notes what it is given, by epoch and stage; no bias, so that a sample of 0 is not special."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.trained: dict[int, list[int]] = {}
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = torch.cat(batch) if isinstance(batch, (list, tuple)) else batch
        self.trained.setdefault(self.current_epoch, []).extend(
            batch.flatten().long().tolist()
        )
        return self.net(batch / 100).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.flatten().long().tolist()
        self.log("count", torch.tensor(float(len(batch))), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.flatten().long().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(dataset: Any) -> Any:
    return DataLoader(dataset, batch_size=2)


def stream(
    count: int, claimed: int | None = None, kind: Any = Claims
) -> Callable[[], Any]:
    return lambda: batches(kind(count, claimed))


def indexed(count: int) -> Callable[[], Any]:
    return lambda: batches(torch.arange(count).unsqueeze(1).float())


DATA: dict[str, tuple[Callable[[], Any], int]] = {
    "shorter than its length": (stream(7, 40), 7),
    "without a length": (stream(9), 9),
    "shorter, with a state": (stream(7, 40, Placed), 7),
    "one batch for all ranks": (stream(2), 2),
    "one sample for all ranks": (indexed(1), 1),
    "fewer samples than ranks": (indexed(2), 2),
    "a short last batch": (indexed(13), 13),
    "a list of fewer batches than ranks": (lambda: [torch.zeros(2, 1)], 2),
}


def check(make: Callable[[], Any], count: int, **options: Any) -> None:
    module = Sees()
    trainer = tk.Trainer(
        accelerator="cpu", strategy="ddp", barebones=True, max_epochs=2, **options
    )
    trainer.fit(module, make(), make())
    everyone: list[Any] = [None] * dist.get_world_size()
    mine = (
        module.trained,
        module.validated,
        trainer.global_step,
        trainer.current_epoch,
        module.net.weight.item(),
    )
    dist.all_gather_object(everyone, mine)
    for epoch in range(2):
        seen = sorted(
            sample for trained, *_ in everyone for sample in trained.get(epoch, ())
        )
        assert len(seen) == count
        assert seen == sorted(set(seen)) or len(set(seen)) == 1
    assert len({tuple(ends) for _, _, *ends in everyone}) == 1, everyone
    assert everyone[0][3] == 2
    assert sum(len(validated) for _, validated, *_ in everyone) == 2 * count
    (values,) = trainer.validate(module, make(), verbose=False)
    assert values["count"] == count
    predictions = trainer.predict(module, make())
    together = [sample for batch in predictions for sample in batch]
    assert together == sorted(together)
    assert len(together) == count


QUICK = ("shorter than its length", "one batch for all ranks")


def others(mark: pytest.MarkDecorator) -> list[Any]:
    return [
        *QUICK,
        *(pytest.param(name, marks=mark) for name in DATA if name not in QUICK),
    ]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("data", others(pytest.mark.slow))
def test_two_ranks(data: str) -> None:
    check(*DATA[data])
    check(*DATA[data], accumulate_grad_batches=3)


@pytest.mark.world_size(3)
@pytest.mark.slow
@pytest.mark.parametrize("data", others(pytest.mark.long))
def test_three_ranks(data: str) -> None:
    check(*DATA[data])
    check(*DATA[data], accumulate_grad_batches=2)


def own(counts: list[int], kind: Any = Claims) -> Any:
    return batches(kind(counts[dist.get_rank()], 40 if dist.get_rank() else None))


@pytest.mark.world_size(3)
@pytest.mark.slow
@pytest.mark.parametrize("counts", [[7, 1, 12], [0, 9, 2], [6, 0, 0]])
@pytest.mark.parametrize("kind", [Claims, Placed])
def test_each_rank_brings_its_own_stream(counts: list[int], kind: Any) -> None:
    for accumulate in (1, 2):
        module = Sees()
        trainer = tk.Trainer(
            accelerator="cpu", strategy="ddp", barebones=True, max_epochs=2, use_distributed_sampler=False,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        trainer.fit(module, own(counts, kind), own(counts, kind))
        mine = list(range(counts[dist.get_rank()]))
        assert module.trained == ({0: mine, 1: mine} if mine else {})
        assert module.validated == [*mine, *mine]
        most = -(-max(counts) // 2)
        assert trainer.global_step == 2 * -(-most // accumulate)
        (values,) = trainer.validate(module, own(counts), verbose=False)
        assert values["count"] == sum(counts)


@pytest.mark.world_size(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["min_size", "max_size", "max_size_cycle", "sequential"]
)
def test_several_loaders_of_uneven_length(mode: Any) -> None:
    def loader() -> Any:
        return tk.CombinedLoader(
            [batches(Claims(5, 40)), batches(torch.arange(11).unsqueeze(1).float())],
            mode,
        )

    class Together(Sees):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = (
                [part for part in batch if part is not None]
                if isinstance(batch, list)
                else batch
            )
            return super().training_step(parts, batch_idx)

    module = Together()
    trainer = tk.Trainer(
        accelerator="cpu", strategy="ddp", barebones=True, max_epochs=2
    )
    trainer.fit(module, loader())
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, (trainer.global_step, trainer.current_epoch))
    assert steps[0] == steps[1]
    assert steps[0][1] == 2
