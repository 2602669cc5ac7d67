"""The data of each rank in the plain loop of `verify`: loaders, feeds, and the environment that makes them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from trainer_kit.data import EMPTY, CombinedLoader, EpochLength, Feed, read_together
from trainer_kit.strategies.fake_world import fake_world
from trainer_kit.training.loaders import training_feed
from trainer_kit.training.session import Session

__all__ = [
    "Division",
    "Place",
    "Row",
    "divides_itself",
    "feeds_of",
    "place_loaders",
    "retarget_samplers",
    "rows_of",
]

_LAUNCHER: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
Row = list[tuple[Any, int, list[int] | None]]
"""A batch of each rank, its size and its indices in the dataset."""


@final
@dataclass(frozen=True)
class Division:
    """How the compared run divides its data.

    Attributes:
        places: ranks that divide it.
        seed: of the order.
        reseeds: of random layers.
        own_buffers: whether no rank sends its buffers.
        world: all ranks.
        synced: the names of batch norms that normalise the samples of all ranks together.
        ranks: the rank of each place; empty: the places are the ranks.
        grouped: whether ``setup`` and loaders are called inside a process group, which sends nothing.
        joined: whether ranks wait for each other in ``all_gather``.
        counts_windows: whether ``training_step`` gets the number of its window in place of that of its batch.
    """

    places: int
    seed: int
    reseeds: int
    own_buffers: bool = False
    world: int = 1
    synced: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    grouped: bool = False
    joined: bool = False
    counts_windows: bool = False

    @contextmanager
    def as_rank(self, place: int) -> Iterator[int]:
        """Inside, the environment is that of the first rank of a place, as a launcher sets it; yields this rank.

        Example:
            >>> with Division(2, 0, 0, world=2).as_rank(1) as rank:
            ...     rank, os.environ["RANK"], os.environ["WORLD_SIZE"]
            (1, '1', '2')
        """
        rank = self.ranks[place] if self.ranks else place
        if self.world == 1:
            yield rank
            return
        before = {name: os.environ.get(name) for name in _LAUNCHER}
        os.environ.update(dict.fromkeys(_LAUNCHER[:2], str(rank)))
        os.environ.update(dict.fromkeys(_LAUNCHER[2:], str(self.world)))
        try:
            with fake_world(self.world, rank) if self.grouped else nullcontext():
                yield rank
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@final
@dataclass
class Place:
    """A data rank: its number, and how many there are."""

    rank: int
    size: int


def rows_of(feeds: list[Feed], epoch: int) -> Iterator[Row]:
    """The batches of an epoch: a row has one of each place."""
    for feed in feeds:
        feed.record_indices()
    iterators = [feed.sized_epoch(epoch) for feed in feeds]
    while True:
        row: Row = []
        for feed, iterator in zip(feeds, iterators, strict=True):
            batch, size = next(iterator, (EMPTY, 0))
            row.append((batch, size, None if batch is EMPTY else feed.next_indices()))
        if all(batch is EMPTY for batch, _, _ in row):
            return
        yield row


def feeds_of(
    trainer: Session, loaders: Sequence[Any], division: Division
) -> tuple[list[Feed], EpochLength]:
    """The data of each place, and the micro-batches of an epoch.

    Args:
        trainer: has settings and accumulation.
        loaders: of each place, as `place_loaders` returns them.
        division: of the data.
    """
    loaders_of_rank = [
        training_feed(
            each,
            trainer.settings,
            Place(place, division.places),  # type: ignore[arg-type]
            division.seed,
            trainer.accumulation,
        )
        for place, each in enumerate(loaders)
    ]
    return [feed for feed, _ in loaders_of_rank], loaders_of_rank[0][1]


def place_loaders(
    loaders: Any,
    division: Division,
    shard: bool,
    make: Callable[[int], Any] | None = None,
) -> list[Any]:
    """The loaders of each place.

    Loaders that divide the data themselves are made again for each place, with the environment of its rank. Others are
    copies, whose samplers, generators and streams the reading of another place does not change.

    Args:
        loaders: of the first place.
        division: of the data.
        shard: whether the Trainer divides the data.
        make: calls ``train_dataloader`` for a place; None: the loaders were passed.
    """
    other_ranks = range(1, division.places)
    if make is not None and (not shard or divides_itself(loaders)):
        return [loaders, *(make(place) for place in other_ranks)]
    by_place = [loaders, *(_copy_loaders(loaders) for _ in other_ranks)]
    if make is None:
        for place, each in enumerate(by_place):
            retarget_samplers(each, place, division.places, division.world)
    return by_place


def divides_itself(loaders: Any) -> bool:
    """Whether a sampler of the loaders reads the share of one rank, as torch's `DistributedSampler` does.

    Example:
        >>> divides_itself(DataLoader(range(4)))
        False
        >>> divides_itself(DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)))
        True
    """
    return any(
        hasattr(inner, "num_replicas")
        for sampler in _samplers(loaders)
        for inner in _nested(sampler)
    )


def _samplers(loaders: Any) -> Iterator[Any]:
    loaders = read_together(loaders)
    if isinstance(loaders, CombinedLoader):
        for loader in loaders.flattened:
            yield from _samplers(loader)
    elif isinstance(loaders, DataLoader):
        yield loaders.sampler
        yield loaders.batch_sampler
        yield getattr(loaders.batch_sampler, "sampler", None)


def _nested(sampler: Any, depth: int = 3) -> Iterator[Any]:
    """A sampler, and those that it reads."""
    yield sampler
    for inner in (
        vars(sampler).values() if isinstance(sampler, Sampler) and depth else ()
    ):
        if isinstance(inner, Sampler):
            yield from _nested(inner, depth - 1)


def retarget_samplers(loaders: Any, rank: int, size: int, world: int) -> list[str]:
    """Let passed samplers of torch divide the data as under a launcher; returns a line for each that was changed.

    `verify` runs the script in a process without a launcher: a `DistributedSampler` made from ``WORLD_SIZE`` is there
    one for a single rank.

    Args:
        loaders: that the user has passed.
        rank: of the data ranks.
        size: number of data ranks.
        world: ranks of the run.

    Example:
        >>> loader = DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0, shuffle=False))
        >>> retarget_samplers(loader, 1, 2, 2)
        ['a DistributedSampler for rank 0 of 1']
        >>> list(loader.sampler)
        [1, 3]
    """
    changed = []
    for sampler in _samplers(loaders):
        if not isinstance(sampler, DistributedSampler) or (
            sampler.num_replicas,
            sampler.rank,
        ) == (
            size,
            rank,
        ):
            continue
        if sampler.num_replicas not in (1, size, world):
            continue  # it fits no launch of this configuration; the fit says so
        changed.append(
            f"a {type(sampler).__name__} for rank {sampler.rank} of {sampler.num_replicas}"
        )
        fresh: DistributedSampler[Any] = DistributedSampler(
            sampler.dataset,
            size,
            rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        vars(sampler).update(vars(fresh))
    return changed


def _copy_loaders(loaders: Any) -> Any:
    """A copy of the loaders, whose samplers, generators and streams another rank's reading does not change.

    What reads one sample at a time is shared, so that state between samples shows. Loaders that cannot be copied are
    shared too.
    """
    memo: dict[int, Any] = {}
    _share(read_together(loaders), memo, set())
    try:
        return copy.deepcopy(loaders, memo)
    except Exception:  # of any class: user code decides how a copy is made
        return loaders


def _share(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Let ``copy.deepcopy`` keep datasets, batches and functions as they are."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Sequence) or (
        isinstance(value, Dataset) and not isinstance(value, IterableDataset)
    ):
        memo[id(value)] = value
    elif isinstance(value, CombinedLoader):
        for attribute in value.flattened:
            _share(attribute, memo, seen)
    elif isinstance(value, (DataLoader, Sampler)):
        attributes = dict(vars(value))
        memo[id(attributes.pop("_iterator", None))] = (
            None  # it may have processes, and belongs to the user's loader
        )
        for name in (
            "collate_fn",
            "worker_init_fn",
            "_DataLoader__multiprocessing_context",
        ):
            memo[id(attributes.get(name))] = attributes.pop(name, None)
        for attribute in attributes.values():
            _share(attribute, memo, seen)
