"""A world of thousands of ranks in one process: `docs/generate_scale.py` and tests count with it what ranks exchange.

The process takes part as one rank, in a process group that sends nothing: it notes every exchange, and each of the
other ranks answers with what this rank has sent. The library's own code runs on it as it is. How many messages an
exchange takes is computed from the algorithms of gloo, by which the CPUs of ranks exchange all that is counted here.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# A group counts as one of the CPU if the word gloo is in the name of its backend.
BACKEND = "recorded_gloo"
PATTERNS = {
    "all_gather": "all to all",
    "all_reduce": "sum over all",
    "barrier": "barrier",
    "broadcast": "rank 0 to all",
    "gather": "all to rank 0",
    "scatter": "a part to each",
}


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes, sent and received."""

    messages: int = 0
    size: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.size + other.size)


@dataclass(frozen=True)
class Exchange:
    """One collective call.

    Attributes:
        kind: its name in torch.
        size: the bytes that one rank passes to it.
        elements: how many numbers these are.
        ranks: that take part.
    """

    kind: str
    size: int
    elements: int
    ranks: int

    @property
    def total(self) -> Traffic:
        """What all ranks send."""
        others = self.ranks - 1
        if self.kind == "all_gather":
            # Around a ring; each block in two halves.
            return Traffic(2 * others * self.ranks, others * self.ranks * self.size)
        if self.kind == "all_reduce":
            segments = min(self.elements, 2 * self.ranks)
            return Traffic(2 * others * segments, 2 * others * self.size)
        if self.kind == "barrier":
            return Traffic(self.ranks * _levels(self.ranks), 0)
        return Traffic(others, others * self.size)

    @property
    def of_rank_zero(self) -> Traffic:
        """What rank 0 sends and receives."""
        if self.kind == "broadcast":
            # A tree: rank 0 sends to half of the ranks by way of others.
            levels = _levels(self.ranks)
            return Traffic(levels, levels * self.size)
        if self.kind in ("gather", "scatter"):
            return self.total
        return self._share

    @property
    def of_another_rank(self) -> Traffic:
        """What the busiest of the other ranks sends and receives."""
        if self.kind == "broadcast":
            levels = _levels(self.ranks)
            return Traffic(levels, levels * self.size)
        if self.kind in ("gather", "scatter"):
            return Traffic(1, self.size)
        return self._share

    @property
    def _share(self) -> Traffic:
        """What one rank sends and receives where all of them do the same."""
        messages = math.ceil(2 * self.total.messages / self.ranks)
        return Traffic(messages, math.ceil(2 * self.total.size / self.ranks))


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


def total(exchanges: Iterable[Exchange]) -> Traffic:
    """What all ranks send in these exchanges."""
    return sum((exchange.total for exchange in exchanges), Traffic())


def busiest(exchanges: Iterable[Exchange]) -> Traffic:
    """What the busiest rank sends and receives in these exchanges."""
    exchanges = list(exchanges)
    of_zero = sum((exchange.of_rank_zero for exchange in exchanges), Traffic())
    of_another = sum((exchange.of_another_rank for exchange in exchanges), Traffic())
    return Traffic(
        max(of_zero.messages, of_another.messages), max(of_zero.size, of_another.size)
    )


def patterns(exchanges: Iterable[Exchange]) -> str:
    """How often each pattern occurs, such as ``2 × all to rank 0, 1 × barrier``."""
    counts = Counter(PATTERNS[exchange.kind] for exchange in exchanges)
    return ", ".join(f"{counts[name]} × {name}" for name in sorted(counts))


class _Done(dist.Work):
    """An exchange that has ended."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self._future


class RecordedGroup(dist.ProcessGroup):
    """A process group whose other ranks answer with what this rank has sent."""

    def __init__(self, rank: int, size: int, exchanges: list[Exchange]) -> None:
        super().__init__(rank, size)
        self._ranks = size
        self._exchanges = exchanges

    def getBackendName(self) -> str:
        return BACKEND

    def _note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        size = 0
        elements = 0
        for tensor in tensors:
            size += tensor.numel() * tensor.element_size()
            elements += tensor.numel()
        self._exchanges.append(Exchange(kind, size, elements, self._ranks))

    def allgather(self, outputs: Any, inputs: Any, opts: object = None) -> _Done:
        self._note("all_gather", inputs)
        _answer(outputs, inputs)
        return _Done(outputs)

    def allreduce(self, tensors: Any, opts: object = None) -> _Done:
        self._note("all_reduce", tensors)
        return _Done(tensors)

    def broadcast(self, tensors: Any, opts: object = None) -> _Done:
        self._note("broadcast", tensors)
        return _Done(tensors)

    def gather(self, outputs: Any, inputs: Any, opts: object = None) -> _Done:
        self._note("gather", inputs)
        _answer(outputs, inputs)
        return _Done(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: object = None) -> _Done:
        self._note("scatter", outputs)
        for output, rows in zip(outputs, inputs, strict=False):
            output.copy_(rows[dist.get_rank(self)])
        return _Done(outputs)

    def barrier(self, opts: object = None) -> _Done:
        self._note("barrier", [])
        return _Done([])


def _answer(outputs: Any, inputs: Any) -> None:
    for rows, sent in zip(outputs, inputs, strict=False):
        for row in rows:
            row.copy_(sent)


@dataclass
class RecordingWorld:
    """What the ranks of a world have exchanged.

    Attributes:
        ranks: their number.
        exchanges: all of them, in order.
    """

    ranks: int
    exchanges: list[Exchange] = field(default_factory=list)

    def new(self) -> list[Exchange]:
        """The exchanges since the last call."""
        recent = list(self.exchanges)
        self.exchanges.clear()
        return recent


@contextmanager
def recording_world(ranks: int) -> Iterator[RecordingWorld]:
    """Inside, torch's default process group is one of so many ranks, and this process is rank 0 of it."""
    world = RecordingWorld(ranks)

    def create(store: object, rank: int, size: int, timeout: object) -> RecordedGroup:
        return RecordedGroup(rank, size, world.exchanges)

    def new_group(members: Any = None, *arguments: Any, **options: Any) -> Any:
        options["backend"] = BACKEND
        return create_group(members, *arguments[:1], **options)

    create_group = dist.new_group
    backends = dist.Backend.backend_list
    if BACKEND in backends:
        backends.remove(BACKEND)
    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    variables = {
        "RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with mock.patch.dict(os.environ, variables):
        dist.init_process_group(
            BACKEND, store=dist.HashStore(), rank=0, world_size=ranks
        )
        try:
            with mock.patch.object(dist, "new_group", new_group):
                yield world
        finally:
            dist.destroy_process_group()
