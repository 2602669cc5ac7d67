"""The samplers that a prepared loader shows: they yield what the loader reads, in the order in which it reads it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol, final

from torch.utils.data import BatchSampler, RandomSampler

from trainer_kit.accelerator.samplers import BatchSamplerShard, SeedableRandomSampler
from trainer_kit.core.protocols import Group
from trainer_kit.data import Feed
from trainer_kit.data.order import BatchTurns, SampleBlocks, derive_seed, drawn

__all__ = ["LoaderBatches", "batches_in_order"]


class _OrderedLoader(Protocol):
    """What the samplers need of a prepared loader; the class itself is in a module that imports this one."""

    group: Group
    feed: Feed
    seed: int
    iteration: int
    even: bool

    def set_epoch(self, epoch: int) -> None: ...
    def set_even(self, even: bool) -> None: ...
    def __len__(self) -> int: ...


@final
class _LoaderOrder(SeedableRandomSampler):
    """The order of a prepared loader with ``shuffle=True``; its seed and its epoch are the loader's."""

    def __init__(self, loader: _OrderedLoader, sampler: RandomSampler) -> None:
        vars(self).update(vars(sampler))
        self._loader = loader
        self._sampler = sampler
        self.initial_seed = loader.seed

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the next iteration of the loader."""
        return self._loader.iteration

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return drawn(self._sampler, derive_seed(self._loader.seed, self.epoch, 0))


def batches_in_order(loader: _OrderedLoader, batches: Any) -> Any:
    """Return torch's batch sampler with the order that the loader draws from seed and epoch; others unchanged."""
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or type(sampler) is not RandomSampler:
        return batches
    # A generator of the user's decides the order.
    if sampler.generator is not None:
        return batches
    order = _LoaderOrder(loader, sampler)
    return BatchSampler(order, batches.batch_size, batches.drop_last)


@final
class LoaderBatches(BatchSamplerShard):
    """The batch sampler of a prepared loader; `even_batches` is the loader's."""

    def __init__(self, loader: _OrderedLoader, batch_sampler: BatchSampler) -> None:
        self._loader = loader
        size = getattr(batch_sampler, "batch_size", None)
        # None: batches are not divided.
        rank_size = loader.feed.per_rank_batch_size
        split = size is not None and rank_size is not None and size != rank_size
        super().__init__(
            batch_sampler, loader.group.size, loader.group.rank, split, loader.even
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        feed = self._loader.feed
        rank = self.process_index
        size = self.num_processes
        pads = self.even_batches
        # The same classes that the feed uses (`data.order`), so that this shows the batches that are trained on.
        if feed.per_rank_batch_size is None:
            if not feed.interleave:
                return super().__iter__()
            turns = BatchTurns(
                self.batch_sampler, rank=rank, size=size, sized=True, pad=pads
            )
            turns.begin(seed=0, start=0)
            return iter(turns)
        order: Any = list(chain.from_iterable(self.batch_sampler))
        if feed.interleave and type(self.batch_sampler) is BatchSampler:
            # Its last batch may be dropped on all processes, and complete on each with a repeated sample.
            order = self.batch_sampler.sampler
        blocks = SampleBlocks(
            order,
            feed.per_rank_batch_size,
            drop_last=self.drop_last,
            rank=rank,
            size=size,
            pad=pads,
            interleave=feed.interleave,
        )
        blocks.begin(seed=0, start=0)
        return iter(blocks)

    @property
    def even_batches(self) -> bool:
        """Whether the next epochs fill up the last batch."""
        return self._loader.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._loader.set_even(even)
