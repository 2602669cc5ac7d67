"""Decide how a loader is divided over the processes: who reads, what each reader gets, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.split_batches import split_loader
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.types import Batch, Loaders
from trainer_kit.data import Feed
from trainer_kit.data.combined import CombinedLoader, read_together
from trainer_kit.data.division import check_division, divide_by_itself
from trainer_kit.options.records import DataLoaderConfiguration

__all__ = ["prepare_loader"]


def prepare_loader(
    loader: Loaders,
    group: Group,
    world: Group,
    device: torch.device | None,
    window: Accumulation,
    config: DataLoaderConfiguration,
    seed: int,
    shard: Callable[[Batch], Batch] | None = None,
    end: Callable[[], None] | None = None,
    before_epoch: Callable[[], None] | None = None,
    interleave: bool = False,
) -> PreparedLoader:
    """Shard a loader over processes.

    Args:
        loader: a DataLoader or any iterable of batches.
        group: the processes over which data are sharded.
        world: all processes: those with the same batches get them from one reader.
        device: the device of batches; None: batches are not moved.
        window: records which loader is read.
        config: how the loader is sharded.
        seed: of the data order, the same on every process.
        shard: selects the part of a batch that a process computes; None: all of it.
        end: called when the loop has finished a batch outside a window.
        before_epoch: called before the first batch of an epoch.
        interleave: divide samples as torch's ``DistributedSampler``, with as few repeated samples.

    Raises:
        ConfigurationError: ``split_batches`` with a batch size that is not divisible by the number of processes.
    """
    batch_size = None
    source = loader
    if config.split_batches:
        batch_size, source = split_loader(loader, group.size)
    # Data that have no index are a stream: only reading it shows how many samples there are.
    is_stream = not Feed(source, seed=seed).indexed
    dispatches = config.dispatch_batches
    divides_itself = False
    if is_stream and group.size > 1:
        divides_itself = _has_own_division(loader, group, bool(dispatches))
    # A stream shuffled during reading has a different order on each process, unless one process reads for all.
    has_several_loaders = False
    if is_stream and not dispatches:
        has_several_loaders = isinstance(read_together(source), CombinedLoader)
    if dispatches is None:
        dispatches = is_stream
    dispatch = None
    if dispatches and world.size > 1 and not (divides_itself or has_several_loaders):
        dispatch = world
    rank = group.rank
    size = group.size
    turn = 1
    if dispatch is not None or (is_stream and not has_several_loaders):
        # One reader reads the batches of all processes, in turns.
        rank = 0
        size = 1
        turn = group.size
    # Several loaders are divided by the feed, whose processes must agree on which of them has ended.
    agree = None
    if has_several_loaders and group.size > 1:
        agree = group.agree
    prepared = PreparedLoader(
        loader,
        # It can be pickled, unlike a closure.
        partial(
            _make_feed,
            source,
            rank,
            size,
            batch_size,
            turn,
            agree=agree,
            interleave=interleave,
        ),
        group,
        device,
        window,
        seed=seed,
        even=config.even_batches,
        dispatch=dispatch,
        non_blocking=config.non_blocking,
        shard=shard,
        end=end,
        before_epoch=before_epoch,
    )
    # Attributes of a stream do not always show that it divides the data itself; its first batches do. With an explicit
    # dispatch_batches=True the user has decided.
    if is_stream and not config.dispatch_batches:
        prepared.compare_first()
    return prepared


def _has_own_division(loader: Loaders, group: Group, dispatches: bool) -> bool:
    """Whether attributes of a stream show that it divides the data among the processes by itself.

    Raises:
        ConfigurationError: it divides the data for other processes, or the main process is to read for all.
    """
    division = divide_by_itself(loader)
    if division is None:
        return False
    check_division(division, group.rank, group.size)
    if dispatches:
        raise ConfigurationError(
            "dispatch_batches=True reads on the main process only, but this loader yields only that process's part",
            found=f"a {type(division.part).__name__} that shards the data for {plural(division.ranks, 'process')}",
            fix="leave dispatch_batches out, or do not shard the data in the loader",
        )
    return True


def _make_feed(
    loader: Loaders,
    rank: int,
    size: int,
    batch_size: int | None,
    turn: int,
    even: bool,
    seed: int,
    agree: Callable[[list[float]], list[list[float]]] | None = None,
    interleave: bool = False,
) -> Feed:
    return Feed(
        loader,
        rank=rank,
        size=size,
        seed=seed,
        batch_size=batch_size,
        pad=even and size > 1,
        interleave=interleave,
        agree=agree,
        turn=turn,
    )
