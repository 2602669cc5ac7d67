"""Streams whose place can be saved, as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Counting:
    """torchdata's protocol over one number."""

    def __init__(self, count: int = 10) -> None:
        self.count, self.i = count, 0

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.i = state["i"]


class Rewinding(Counting):
    """Starts again with each epoch, unless a state was loaded: then it goes on from there, once."""

    loaded = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True

    def __iter__(self) -> Iterator[Any]:
        start = self.i if self.loaded else 0
        self.loaded = False
        for i in range(start, self.count):
            self.i = i + 1
            yield torch.tensor([i])


class Resetting(Counting):
    """Goes on from where it was cut, and starts again once it has ended."""

    def __iter__(self) -> Iterator[Any]:
        while self.i < self.count:
            self.i += 1
            yield torch.tensor([self.i - 1])
        self.i = 0


class Endless(Counting):
    """Its own iterator, without an end: only a limit makes epochs of it."""

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> Any:
        self.i += 1
        return torch.tensor([self.i - 1])


class Sharded(IterableDataset[Any]):
    """Every worker reads its share of 0 to ``count`` - 1, and starts again with each epoch."""

    def __init__(self, count: int = 20, rolls: bool = False) -> None:
        self.count, self.rolls, self.i, self.loaded = count, rolls, 0, False

    def __iter__(self) -> Iterator[Any]:
        # Not in the generator: its state is asked for before that is begun.
        if not self.loaded and not (self.rolls and self.i < self.count):
            self.i = 0
        self.loaded = False
        return self._read()

    def _read(self) -> Iterator[Any]:
        worker = get_worker_info()
        parts, part = (worker.num_workers, worker.id) if worker else (1, 0)
        while self.i < self.count:
            self.i += 1
            if (self.i - 1) % parts == part:
                yield self.i - 1

    def state_dict(self) -> dict[str, Any]:
        return {"i": self.i, "seen": torch.arange(self.i)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["seen"]) == state["i"]
        self.i, self.loaded = state["i"], True
