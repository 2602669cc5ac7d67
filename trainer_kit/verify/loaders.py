"""The data of each rank in the plain loop of `verify`: loaders, feeds, and the environment that makes them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from trainer_kit.core.types import Batch, Loaders
from trainer_kit.data import EMPTY, CombinedLoader, EpochLength, Feed, read_together
from trainer_kit.data.torch_private import ITERATOR, MULTIPROCESSING_CONTEXT
from trainer_kit.strategies.fake_world import fake_world
from trainer_kit.training.loaders import training_feed
from trainer_kit.training.session import Session

__all__ = [
    "DataRank",
    "Division",
    "Row",
    "copy_loaders",
    "divides_itself",
    "feed_of_rank",
    "feeds_of",
    "loaders_by_rank",
    "retarget_samplers",
    "rows_of",
]

_LAUNCHER: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SHARED_ATTRIBUTES: Final = (
    "collate_fn",
    "worker_init_fn",
    MULTIPROCESSING_CONTEXT,
)
"""Attributes of a `DataLoader` that its copy shares: functions, and a multiprocessing context."""
Row = list[tuple[Batch, int, list[int] | None]]
"""A batch of each rank, its size and its indices in the dataset."""


@final
@dataclass(frozen=True)
class Division:
    """How the compared run divides its data.

    Attributes:
        data_ranks: number of ranks that divide it.
        seed: the seed of the data order.
        reseeds: the seed of random layers.
        own_buffers: whether no rank sends its buffers.
        world: number of all ranks.
        synced: the names of batch norms that normalize the samples of all ranks together.
        ranks: the rank of each data rank; empty: the data ranks are the ranks.
        grouped: whether ``setup`` and loaders are called inside a process group, which sends nothing.
        joined: whether ranks wait for each other in ``all_gather``.
        counts_windows: whether ``training_step`` gets the number of its window in place of that of its batch.
    """

    data_ranks: int
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
    def as_rank(self, data_rank: int) -> Iterator[int]:
        """Inside, the environment is that of the first rank of a data rank, as a launcher sets it; yields this rank.

        Example:
            >>> with Division(2, 0, 0, world=2).as_rank(1) as rank:
            ...     rank, os.environ["RANK"], os.environ["WORLD_SIZE"]
            (1, '1', '2')
        """
        rank = data_rank
        if self.ranks:
            rank = self.ranks[data_rank]
        if self.world == 1:
            yield rank
            return
        before = {name: os.environ.get(name) for name in _LAUNCHER}
        # The compared run has one node: rank and local rank are the same.
        os.environ.update(dict.fromkeys(_LAUNCHER[:2], str(rank)))
        os.environ.update(dict.fromkeys(_LAUNCHER[2:], str(self.world)))
        group: AbstractContextManager[object] = nullcontext()
        if self.grouped:
            group = fake_world(self.world, rank)
        try:
            with group:
                yield rank
        finally:
            # A variable that was not set is removed, and not set to an empty text: code
            # that looks for a launcher asks whether it exists.
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@final
@dataclass
class DataRank:
    """A data rank: its number, and how many there are."""

    rank: int
    size: int


def rows_of(feeds: list[Feed], epoch: int) -> Iterator[Row]:
    """The batches of an epoch: a row has one of each data rank."""
    for feed in feeds:
        feed.record_indices()
    iterators = [feed.sized_epoch(epoch) for feed in feeds]
    while True:
        row: Row = []
        for feed, iterator in zip(feeds, iterators, strict=True):
            # Data ranks may have unequally many batches: the row then has a gap, as the
            # run has a rank without a part in the step.
            batch, size = next(iterator, (EMPTY, 0))
            ids = None
            if batch is not EMPTY:
                ids = feed.next_indices()
            row.append((batch, size, ids))
        if all(batch is EMPTY for batch, _, _ in row):
            return
        yield row


def feeds_of(
    trainer: Session, loaders: Sequence[Loaders], division: Division
) -> tuple[list[Feed], EpochLength]:
    """The data of each data rank, and the micro-batches of an epoch.

    Args:
        trainer: has settings and accumulation.
        loaders: the loaders of each data rank, as `loaders_by_rank` returns them.
        division: how the run divides its data.
    """
    feeds: list[Feed] = []
    lengths: list[EpochLength] = []
    for rank, rank_loaders in enumerate(loaders):
        feed, length = feed_of_rank(
            trainer, rank_loaders, DataRank(rank, division.data_ranks), division.seed
        )
        feeds.append(feed)
        lengths.append(length)
    return feeds, lengths[0]


def feed_of_rank(
    trainer: Session,
    loaders: Loaders,
    data_rank: DataRank,
    seed: int,
    agree: Callable[[list[float]], list[list[float]]] | None = None,
) -> tuple[Feed, EpochLength]:
    """The data of one data rank, and the micro-batches of an epoch.

    Args:
        trainer: has settings and accumulation.
        loaders: of this rank.
        data_rank: the rank.
        seed: the seed of the data order.
        agree: see `Feed`.
    """
    # `training_feed` reads rank and size only: no process group exists here.
    group: Any = data_rank
    return training_feed(
        loaders,
        trainer.settings,
        group,
        seed,
        trainer.accumulation,
        agree,
    )


def loaders_by_rank(
    loaders: Loaders,
    division: Division,
    shard: bool,
    make: Callable[[int], Loaders] | None = None,
) -> list[Loaders]:
    """The loaders of each data rank.

    Loaders that divide the data themselves are created again for each data rank, with the environment of its rank.
    Others are copies, whose samplers, generators and streams the reading of another data rank does not change.

    Args:
        loaders: the loaders of the first data rank.
        division: how the run divides its data.
        shard: whether the Trainer divides the data.
        make: calls ``train_dataloader`` for a data rank; None: the loaders were passed.
    """
    other_ranks = range(1, division.data_ranks)
    if make is not None and (not shard or divides_itself(loaders)):
        return [loaders, *(make(data_rank) for data_rank in other_ranks)]
    rank_loaders = [loaders, *(_copy_or_share(loaders) for _ in other_ranks)]
    # Loaders that ``train_dataloader`` returns were made inside the environment of their
    # rank; passed ones were made by the script, which has no launcher.
    if make is None:
        for data_rank, each in enumerate(rank_loaders):
            retarget_samplers(each, data_rank, division.data_ranks, division.world)
    return rank_loaders


def divides_itself(loaders: Loaders) -> bool:
    """Whether a sampler of the loaders reads the share of one rank, as torch's `DistributedSampler` does.

    Example:
        >>> divides_itself(DataLoader(range(4)))
        False
        >>> divides_itself(DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)))
        True
    """
    return any(map(_is_divided, _samplers(loaders)))


def _is_divided(sampler: object) -> bool:
    # By the attribute, not by the class: samplers of other libraries that divide the data
    # need not derive from torch's.
    return any(hasattr(inner, "num_replicas") for inner in _nested(sampler))


def _samplers(loaders: Loaders) -> Iterator[object]:
    """The samplers and batch samplers of all loaders; None for what a loader does not have."""
    loaders = read_together(loaders)
    if isinstance(loaders, CombinedLoader):
        for loader in loaders.flattened:
            yield from _samplers(loader)
    elif isinstance(loaders, DataLoader):
        yield loaders.sampler
        yield loaders.batch_sampler
        yield getattr(loaders.batch_sampler, "sampler", None)


def _nested(sampler: object, depth: int = 3) -> Iterator[object]:
    """A sampler, and those that it reads."""
    yield sampler
    # The depth ends a cycle: two samplers may refer to each other.
    if not isinstance(sampler, Sampler) or not depth:
        return
    for inner in vars(sampler).values():
        if isinstance(inner, Sampler):
            yield from _nested(inner, depth - 1)


def retarget_samplers(loaders: Loaders, rank: int, size: int, world: int) -> list[str]:
    """Let passed samplers of torch divide the data as under a launcher; returns a line for each that was changed.

    `verify` runs the script in a process without a launcher: a `DistributedSampler` made from ``WORLD_SIZE`` is there
    one for a single rank.

    Args:
        loaders: the loaders that the user has passed.
        rank: this rank's number among the data ranks.
        size: number of data ranks.
        world: number of ranks of the run.

    Example:
        >>> loader = DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0, shuffle=False))
        >>> retarget_samplers(loader, 1, 2, 2)
        ['a DistributedSampler for rank 0 of 1']
        >>> list(loader.sampler)
        [1, 3]
    """
    changed = []
    for sampler in _samplers(loaders):
        if not isinstance(sampler, DistributedSampler):
            continue
        replicas = sampler.num_replicas
        if replicas == size and sampler.rank == rank:
            continue
        if replicas not in (1, size, world):
            # It fits no launch of this configuration: the fit itself reports that.
            continue
        sampler_class = type(sampler).__name__
        changed.append(f"a {sampler_class} for rank {sampler.rank} of {replicas}")
        # The constructor derives lengths from rank and size. The object stays the same,
        # because the loader, or a sampler around this one, refers to it.
        fresh: DistributedSampler[object] = DistributedSampler(
            sampler.dataset,
            size,
            rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            drop_last=sampler.drop_last,
        )
        vars(sampler).update(vars(fresh))
    return changed


def copy_loaders(loaders: Loaders) -> Loaders:
    """Return a copy of the loaders, whose samplers, generators and streams another reading does not change.

    What reads one sample at a time is shared, so that state between samples shows.

    Raises:
        Exception: of any class, where the loaders cannot be copied: user code decides how a copy is made.
    """
    memo: dict[int, object] = {}
    _share(read_together(loaders), memo, set())
    return copy.deepcopy(loaders, memo)


def _copy_or_share(loaders: Loaders) -> Loaders:
    """The same, but loaders that cannot be copied are shared."""
    try:
        return copy_loaders(loaders)
    except Exception:
        return loaders


def _share(value: object, memo: dict[int, object], seen: set[int]) -> None:
    """Let ``copy.deepcopy`` keep datasets, batches and functions as they are."""
    if id(value) in seen:
        return
    seen.add(id(value))
    # A stream has a position, which each rank needs for itself.
    is_map_style = isinstance(value, Dataset) and not isinstance(value, IterableDataset)
    if is_map_style or isinstance(value, Sequence):
        memo[id(value)] = value
    elif isinstance(value, CombinedLoader):
        for attribute in value.flattened:
            _share(attribute, memo, seen)
    elif isinstance(value, (DataLoader, Sampler)):
        attributes = dict(vars(value))
        # The iterator may have worker processes, which belong to the user's loader: the
        # copy makes its own.
        iterator = attributes.pop(ITERATOR, None)
        memo[id(iterator)] = None
        for name in _SHARED_ATTRIBUTES:
            shared = attributes.pop(name, None)
            memo[id(shared)] = shared
        for attribute in attributes.values():
            _share(attribute, memo, seen)
