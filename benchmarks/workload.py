"""What every loop of `overhead.py` trains on, and how its steps are timed: the same for all of them."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "ACCUMULATION",
    "BATCH",
    "CLIP",
    "FROM_LOADER",
    "LOG_EVERY",
    "Batches",
    "Clock",
    "Samples",
    "Work",
    "make_model",
    "make_optimizer",
]

BATCH, ACCUMULATION, CLIP, LOG_EVERY = 32, 4, 1.0, 10
FROM_LOADER = frozenset({"eval_loader", "mean_loader", "predict"})


def make_model() -> nn.Module:
    """The MLP 32→64→10, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Clock:
    """Times, or counts, what lies between two visits of a loop to the same place.

    A loop calls ``tick`` once a step, from where its user's code runs, and `hit` where the result is in ``points``:
    30 ns that every loop pays alike. Without a ``last`` point, the end is when `stop` is called.

    Args:
        first: the step at which to start, so that what is slow once has happened.
        last: the step at which to stop, or None for the end of everything.
        counting: count Python calls on this thread instead of its CPU time.
    """

    def __init__(self, first: int, last: int | None, counting: bool = False) -> None:
        self.tick = itertools.count().__next__
        self.first, self.last, self.counting = first, last, counting
        self.points = frozenset({first} if last is None else {first, last})
        self.calls, self.seconds, self.began, self.running = 0, 0.0, 0.0, False

    def hit(self, step: int) -> None:
        if step != self.first:
            self.stop()
            return
        self.running = True
        if self.counting:
            sys.setprofile(self._count)
        else:
            self.began = time.thread_time()

    def stop(self) -> None:
        if self.running and self.counting:
            sys.setprofile(None)
            self.calls -= 1 if self.last is None else 2  # the clock's own
        elif self.running:
            self.seconds = time.thread_time() - self.began
        self.running = False

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.calls += 1


class Batches:
    """A loader over ready-made batches; a bare list would be a list of loaders to some libraries."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Samples(Dataset[Any]):
    """Ready-made batches as a dataset of samples, so that a `DataLoader` costs what its machinery costs, no more."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) * BATCH

    def __getitem__(self, index: int) -> Any:
        x, y = self.batches[index // BATCH]
        return x[index % BATCH], y[index % BATCH]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.batches[indices[0] // BATCH]

    def loader(self) -> DataLoader[Any]:
        """All of it, in order: for libraries that give each rank its part."""
        return DataLoader(self, batch_size=BATCH, collate_fn=_as_it_is)

    def shard(self, rank: int, world: int) -> DataLoader[Any]:
        """Every ``world``-th batch, for loops whose user does that."""
        numbers = range(rank, len(self.batches), world)
        mine = [list(range(number * BATCH, (number + 1) * BATCH)) for number in numbers]
        return DataLoader(self, batch_sampler=mine, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


@dataclass
class Work:
    """One run of one loop.

    Attributes:
        case: which of the cases of `overhead.py`.
        batches: yields (inputs (32, 32), targets (32,)), a few tensors over and over.
        clock: what the loop reports to.
        directory: where it may write.
        idle: callbacks that override nothing, to be added.
        logs: scalars to log in each step.
    """

    case: str
    batches: Any
    clock: Clock
    directory: str
    idle: int = 0
    logs: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> bool:
        """Whether evaluation ends with the mean of the loss."""
        return self.case in ("eval_metric", "mean_loader")

    @property
    def evaluates(self) -> bool:
        """Whether a batch is evaluated, and nothing is trained."""
        return self.case.startswith("eval") or self.mean
