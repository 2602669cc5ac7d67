"""Finds the loaders of an entry point, splits them over ranks, and moves their batches to the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any, Final, TypeAlias, cast

from lightning_utilities.core.overrides import is_overridden
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from trainer_kit.core.display import plural
from trainer_kit.core.errors import DataError
from trainer_kit.core.hooks import DataHooks
from trainer_kit.core.module import TrainModule
from trainer_kit.core.protocols import Group
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.types import DataModuleLike, Loaders
from trainer_kit.data import (
    CombinedLoader,
    EpochLength,
    Feed,
    epoch_length,
    is_tree,
    read_together,
)
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.strategy import Strategy
from trainer_kit.training.settings import Settings

__all__ = [
    "NAMES",
    "agreed_length",
    "evaluation_feeds",
    "find_loaders",
    "mover",
    "training_feed",
]

# Batches are the user's, of any type.
_Hook: TypeAlias = Callable[..., Any]

NAMES: Final = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""The names of the loaders and limits of each entry point."""


def find_loaders(
    stage: str, passed: Loaders | None, module: object, datamodule: object
) -> Loaders | None:
    """The loaders passed to the entry point, else the datamodule's, else the module's; None if there are none."""
    if passed is not None:
        return passed
    name = f"{NAMES[stage]}_dataloader"
    for source in (datamodule, module):
        if source is not None and (
            name in vars(source) or is_overridden(name, source, DataHooks)
        ):
            loaders: Loaders | None = getattr(source, name)()
            return loaders
    return None


def training_feed(
    loaders: Loaders,
    settings: Settings,
    group: Group,
    seed: int,
    window: int,
    agree: Callable[[list[float]], list[list[float]]] | None = None,
) -> tuple[Feed, EpochLength]:
    """This rank's share of the training data, and how many micro-batches of it form an epoch.

    Args:
        loaders: a loader or any pytree of loaders.
        settings: limits and batch sizes.
        group: the data ranks.
        seed: the seed of the data order.
        window: micro-batches per optimizer step, to divide a global batch size.
        agree: see `Feed`; None where the data are not read by all ranks.
    """
    batch_size = None
    # The samples of a step are the same on any number of ranks only if each rank has an equal share of them.
    if settings.global_batch_size is not None:
        batches_per_step = group.size * window
        if settings.global_batch_size % batches_per_step:
            raise DataError(
                "the global batch cannot be split evenly",
                found=f"global_batch_size={settings.global_batch_size} over "
                f"{plural(group.size, 'rank')} x {plural(window, 'batch')}",
                fix=f"use a multiple of {batches_per_step}",
            )
        batch_size = settings.global_batch_size // batches_per_step
    if settings.overfit:
        loaders = _unshuffled(loaders)
    feed = Feed(
        loaders,
        rank=group.rank,
        size=group.size,
        seed=seed,
        shard=settings.shard,
        batch_size=batch_size,
        reproducible=settings.reproducible,
        agree=agree,
    )
    name = "limit_train_batches"
    if settings.overfit:
        name = "overfit_batches"
    return feed, epoch_length(feed.length, feed.exact, settings.train_limit(), name)


def evaluation_feeds(
    loaders: Loaders, stage: str, settings: Settings, group: Group, seed: int
) -> tuple[list[Feed], list[EpochLength]]:
    """This rank's share of every evaluation loader, and how many micro-batches are read from each."""
    name = NAMES[stage]
    limit = settings.limits[name]
    # As in Lightning: overfitting validates on as many batches as it trains on.
    if settings.overfit and stage == "validate":
        limit = settings.overfit
    feeds = [
        Feed(
            loader,
            rank=group.rank,
            size=group.size,
            seed=seed,
            shard=settings.shard,
            reproducible=settings.reproducible,
            # Predictions are returned in the order of the dataset.
            ordered=True,
            agree=group.agree,
        )
        for loader in _list_loaders(loaders)
    ]
    argument = f"limit_{name}_batches"
    lengths = [epoch_length(feed.length, feed.exact, limit, argument) for feed in feeds]
    return feeds, lengths


def agreed_length(length: EpochLength, group: Group) -> EpochLength:
    """The largest length of any rank; it is certain if it is certain on every rank.

    Ranks may have loaders of different length (``use_distributed_sampler=False``), but intervals and the end of an
    epoch must fall on the same step on every rank.
    """
    if group.size == 1:
        return length
    numbers = [_count(length.expected), _count(length.limit), not length.certain]
    expected, limit, uncertain = map(max, zip(*group.agree(numbers), strict=True))
    return EpochLength(
        expected=_known_count(expected),
        limit=_known_count(limit),
        certain=not uncertain,
    )


def _count(batches: int | None) -> float:
    """A number of batches as ranks exchange it: infinite if it is unknown."""
    if batches is None:
        return math.inf
    return batches


def _known_count(batches: float) -> int | None:
    """The inverse of `_count`."""
    if math.isinf(batches):
        return None
    return int(batches)


def _list_loaders(loaders: Loaders) -> list[Loaders]:
    """The loaders of an evaluation, as a list: the contents of a container or a sequential `CombinedLoader`."""
    if is_tree(loaders):
        loaders = CombinedLoader(loaders, "sequential")
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    return [loaders]


def _unshuffled(loaders: Loaders) -> Loaders:
    """The same loader in dataset order: overfitting repeats the same batches."""
    loaders = read_together(loaders)
    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(
            loaders.join(map(_unshuffled, loaders.flattened)), loaders.mode
        )
    if not isinstance(loaders, DataLoader) or not isinstance(
        loaders.sampler, RandomSampler
    ):
        return loaders
    clone = copy.copy(loaders)
    sampler = SequentialSampler(cast("Sized", loaders.dataset))
    # Past `DataLoader.__setattr__`, which refuses another sampler after construction.
    vars(clone)["sampler"] = sampler
    if loaders.batch_size is not None:
        vars(clone)["batch_sampler"] = BatchSampler(
            sampler, loaders.batch_size, loaders.drop_last
        )
    return clone


def mover(
    module: TrainModule,
    datamodule: DataModuleLike,
    strategy: Strategy,
    precision: Precision,
    whole_batches: bool = False,
) -> tuple[_Hook | None, bool]:
    """The function that moves a batch to the device, or None if it has nothing to do; and whether it may prefetch.

    ``whole_batches``: do not split the batch among ranks that share it.
    """
    owners = [owner for owner in (datamodule, module) if owner is not None]
    before = _overridden_hook("on_before_batch_transfer", owners)
    transfer = _overridden_hook("transfer_batch_to_device", owners)
    after = _overridden_hook("on_after_batch_transfer", owners)
    has_hooks = before is not None or transfer is not None or after is not None
    device = strategy.device
    moves = device.type != "cpu"
    shard = None
    if not whole_batches:
        shard = strategy.shard_batch
    convert = None
    if precision.converts_batch:
        convert = precision.convert_batch
    if not has_hooks and not moves and convert is None and shard is None:
        return None, False

    def move(batch: Any, loader: int = 0) -> Any:
        if before is not None:
            batch = before(batch, loader)
        if transfer is not None:
            batch = transfer(batch, device, loader)
        elif moves:
            batch = move_to_device(batch, device)
        if convert is not None:
            batch = convert(batch)
        if after is not None:
            batch = after(batch, loader)
        # Last, so that hooks see whole samples.
        if shard is not None:
            batch = shard(batch)
        return batch

    # Hooks of users run when their batch is due, not ahead of it.
    return move, moves and not has_hooks


def _overridden_hook(name: str, owners: Sequence[object]) -> _Hook | None:
    """The hook of the first owner that overrides it, or None."""
    for owner in owners:
        if is_overridden(name, owner, DataHooks):
            return cast("_Hook", getattr(owner, name))
    return None
