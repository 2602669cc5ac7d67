"""The data ranks that `check_loader` reads with: one after the other in this process, or each in its own process."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias, TypeVar, final

import torch
from torch.utils.data import DataLoader

from trainer_kit.checkpoint.encoding import (
    decode,
    encode,
)
from trainer_kit.core.seed import (
    preserved_rng,
    restore_rng,
    rng_state,
)
from trainer_kit.core.types import (
    Batch,
    SavedState,
    StateDict,
)
from trainer_kit.data import (
    EMPTY,
    Feed,
)
from trainer_kit.data.division import fingerprint
from trainer_kit.data.order import seed_globals
from trainer_kit.data.sources import has_state

__all__ = [
    "Agree",
    "Identify",
    "LocalRanks",
    "ProcessRanks",
    "RankPass",
    "RankReader",
    "Ranks",
    "SavedPosition",
]

Agree: TypeAlias = Callable[[list[float]], list[list[float]]]
"""Exchanges a few numbers of every rank."""
Identify: TypeAlias = Callable[[Batch], Iterable[Hashable]]
"""Returns a value for each sample of a batch."""
_Value = TypeVar("_Value")
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK")
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@final
@dataclass(frozen=True)
class SavedPosition:
    """What a checkpoint holds of one rank's loader.

    Attributes:
        loader: the state of the loader, after it went through the format of a checkpoint.
        generators: the state of the process's global generators.
    """

    loader: SavedState
    generators: StateDict


@final
@dataclass
class RankPass:
    """The batches that one rank read in one pass.

    Attributes:
        batches: a number for the content of each batch.
        samples: the samples of each batch.
        positions: by number of batches of the epoch, what a checkpoint after them holds.
        unsteady: a number of batches after which two requests for the state gave two states; None without one.
    """

    batches: list[int] = field(default_factory=list)
    samples: list[list[Hashable]] = field(default_factory=list)
    positions: dict[int, SavedPosition] = field(default_factory=dict)
    unsteady: int | None = None

    def add(self, batch: int, samples: list[Hashable]) -> None:
        """Add the next batch."""
        self.batches.append(batch)
        self.samples.append(samples)

    def mark_unsteady(self, position: int) -> None:
        """Record that the state after this number of batches changes when it is requested."""
        self.unsteady = position


class Ranks(ABC):
    """The data ranks of one run.

    Attributes:
        size: number of ranks.
        local: the ranks that this process reads for.
    """

    size: int
    local: list[int]

    @abstractmethod
    def gather(self, values: list[_Value]) -> list[_Value]:
        """Return one value of each rank, from those of the local ranks."""

    @abstractmethod
    def meet(self, open_feed: Callable[[int, Agree], Feed]) -> None:
        """Prepare `agreement` for loaders that compare their first batches."""

    @abstractmethod
    def agreement(self, rank: int) -> Agree:
        """Return the exchange of numbers for one new loader of a rank."""

    @abstractmethod
    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        """Inside, the environment variables are those that a launcher sets for a rank."""


@final
class LocalRanks(Ranks):
    """All ranks in this process, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = list(range(size))
        self._rounds: list[list[list[float]]] = []

    def gather(self, values: list[_Value]) -> list[_Value]:
        return values

    def meet(self, open_feed: Callable[[int, Agree], Feed]) -> None:
        calls = []
        for rank in self.local:
            recorder = _Recorder()
            feed = open_feed(rank, recorder)
            with self.as_rank(rank):
                # A stream compares its first batch, once.
                next(iter(feed.epoch(0)), None)
            feed.close()
            calls.append(recorder.calls)
        self._rounds = [
            list(numbers)
            for numbers in zip(
                *calls,
                strict=True,
            )
        ]

    def agreement(self, rank: int) -> Agree:
        remaining = iter(self._rounds)
        return lambda numbers: next(remaining)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        names = (*_RANK_VARIABLES, *_SIZE_VARIABLES)
        before = {name: os.environ.get(name) for name in names}
        if self.size > 1:
            os.environ.update(dict.fromkeys(_RANK_VARIABLES, str(rank)))
            os.environ.update(dict.fromkeys(_SIZE_VARIABLES, str(self.size)))
        try:
            yield
        finally:
            for name, value in before.items():
                # A variable that was not set is removed: code that looks for a launcher asks whether it exists.
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@final
class _Recorder:
    """Records the numbers that one rank sends, while no other rank is there."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []

    def __call__(self, numbers: list[float]) -> list[list[float]]:
        self.calls.append(numbers)
        return [numbers]


@final
class ProcessRanks(Ranks):
    """The rank of this process in its process group."""

    def __init__(self) -> None:
        self.size = torch.distributed.get_world_size()
        self.local = [torch.distributed.get_rank()]

    def gather(self, values: list[_Value]) -> list[_Value]:
        gathered: list[list[_Value]] = [[] for _ in range(self.size)]
        torch.distributed.all_gather_object(gathered, values)
        return [rank_values[0] for rank_values in gathered]

    def meet(self, open_feed: Callable[[int, Agree], Feed]) -> None:
        """Nothing to prepare: the other ranks are there."""

    def agreement(self, rank: int) -> Agree:
        return lambda numbers: self.gather([numbers])

    def as_rank(self, rank: int) -> AbstractContextManager[None]:
        # The launcher has set the environment.
        return nullcontext()


@final
class RankReader:
    """Reads one rank's part of a loader as a training loop does, and saves its positions.

    Args:
        feed: of the rank.
        rank: this rank.
        ranks: all ranks.
        identify: returns a value for each sample of a batch.
        saved: the position from which it continues; None: the beginning.
        seed: of the generators of a new run.
    """

    def __init__(
        self,
        feed: Feed,
        rank: int,
        ranks: Ranks,
        identify: Identify,
        saved: SavedPosition | None,
        seed: int,
    ) -> None:
        self.feed = feed
        self._rank = rank
        self._ranks = ranks
        self._identify = identify
        # Ranks in one process share the global generators: each reader has a state of its own.
        if saved is not None:
            self._generators = saved.generators
        else:
            with preserved_rng():
                seed_globals(seed)
                self._generators = rng_state()

    def read(
        self,
        epoch: int,
        start: int = 0,
        stop: int | None = None,
        *,
        earlier: int = 0,
        saved_at: Container[int] | None = None,
    ) -> RankPass:
        """Read an epoch from batch ``start`` up to ``stop``.

        Args:
            epoch: from 0.
            start: the first batch.
            stop: the number of batches after which the epoch is ended early; None: it is read to its end.
            earlier: number of batches in earlier epochs.
            saved_at: save the position after every batch, and keep those after these numbers of batches, since a state
                may be large; None: save none.
        """
        result = RankPass()
        with self._ranks.as_rank(self._rank), preserved_rng():
            restore_rng(self._generators)
            batches = self.feed.epoch(epoch, start)
            if stop is not None:
                batches = islice(batches, stop - start)
            for position, batch in enumerate(batches, start + 1):
                result.add(fingerprint(batch), self._samples(batch))
                if saved_at is None:
                    continue
                self.feed.loader_state.forget(position - 1)
                saved = self._save_within(
                    result,
                    epoch,
                    position,
                    earlier + position,
                )
                if position in saved_at:
                    result.positions[position] = saved
            self._generators = rng_state()
        return result

    def _samples(self, batch: Batch) -> list[Hashable]:
        # A rank without a share of the last global micro-batch has no sample.
        if batch is EMPTY:
            return []
        return list(self._identify(batch))

    def _save_within(
        self,
        result: RankPass,
        epoch: int,
        position: int,
        total: int,
    ) -> SavedPosition:
        first, second = (self._ask_loader() for _ in range(2))
        if fingerprint(first) != fingerprint(second):
            result.mark_unsteady(position)
        state = self._loader_state(
            epoch,
            position,
            total,
        )
        return SavedPosition(state, rng_state())

    def _ask_loader(self) -> SavedState | None:
        """Return the state of the user's object, which the feed asks once after each batch."""
        loader = self.feed.loader
        if isinstance(loader, DataLoader):
            # A loader with a state of its own is read as a copy, and may ask its dataset in another way.
            if has_state(loader):
                return None
            # The states of copies in workers cannot be asked for from here.
            if loader.num_workers:
                return None
            loader = loader.dataset
        if not has_state(loader):
            return None
        state: SavedState = copy.deepcopy(loader.state_dict())
        return state

    def save(
        self,
        epoch: int,
        batch: int,
        total: int,
    ) -> SavedPosition:
        """Return the position, after ``total`` batches in all epochs."""
        loader = self._loader_state(
            epoch,
            batch,
            total,
        )
        return SavedPosition(loader, self._generators)

    def _loader_state(
        self,
        epoch: int,
        batch: int,
        total: int,
    ) -> SavedState:
        tensors: dict[str, torch.Tensor] = {}
        state = self.feed.loader_state.state_dict(
            epoch,
            batch,
            total,
        )
        tree = encode(state, tensors)
        decoded: SavedState = decode(tree, tensors)
        return decoded
