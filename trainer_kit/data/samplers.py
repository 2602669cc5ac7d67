"""Samplers of users: what they draw, whether they divide their samples over ranks, and how they are undone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from trainer_kit.core.types import Batch
from trainer_kit.data.division import Division
from trainer_kit.data.source import kind_of

__all__ = [
    "Sampler",
    "counts_exactly",
    "divided_by_one",
    "is_batched_by_user",
    "regular_batches",
    "reseeded",
    "undivided",
]

Sampler: TypeAlias = Any
"""A sampler or batch sampler: any iterable, with the attributes that its class has."""


def divided_by_one(order: Sampler) -> Division | None:
    """Return the division of a sampler that was created for one rank, by the attributes of torch's."""
    # The second one is inside a batch sampler.
    samplers: tuple[Sampler, ...] = (order, getattr(order, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return Division(sampler, sampler.num_replicas, sampler.rank)
    return None


def counts_exactly(order: Sampler) -> bool:
    """Whether the length of a sampler or batch sampler is the number of its items: torch's own are known to be so."""
    if type(order) is BatchSampler:
        return counts_exactly(order.sampler)
    if isinstance(order, Sequence):
        return True
    return type(order).__module__.startswith(("torch.utils.data.", "trainer_kit."))


def is_batched_by_user(loader: DataLoader[Batch]) -> bool:
    """Whether batches are not made from ``batch_size`` and the sampler."""
    if loader.batch_size is None:
        return True
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler):
        return True
    # torch's constructor makes a BatchSampler over the loader's sampler; any other one was passed.
    return batches.sampler is not loader.sampler


def regular_batches(loader: DataLoader[Batch]) -> BatchSampler | None:
    """Return a batch sampler that the user gave and that makes batches as ``batch_size`` would."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches) is not BatchSampler:
        return None
    if not is_batched_by_user(loader):
        return None
    return batches


def undivided(sampler: DistributedSampler[Batch]) -> Sampler:
    """Return the sampler without its division and padding: evaluation reads each sample once."""
    count = sampler.total_size
    if not sampler.drop_last:
        # torch's Dataset declares no length.
        count = len(sampler.dataset)  # type: ignore[arg-type]
    copied = copy.copy(sampler)
    # The attributes that torch's constructor derives from the number of ranks.
    copied.__dict__.update(num_replicas=1, rank=0, num_samples=count, total_size=count)
    return copied


def reseeded(sampler: Sampler, loader: DataLoader[Batch]) -> Sampler:
    """Replace torchdata's RandomSampler without a generator: it draws its own seed, another one on every rank."""
    from_torchdata = type(sampler).__module__.startswith("torchdata.")
    if not from_torchdata or kind_of(sampler) != "RandomSampler":
        return sampler
    if loader.generator is not None:
        return sampler
    return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)
