"""One loader as one rank reads it: a list, a stream, or a DataLoader over a map-style dataset.

Each kind answers the same questions (`Source`); `Feed` picks the kind.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, final

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainer_kit.core.errors import DataError
from trainer_kit.data.order import EMPTY, BatchTurns, SampleBlocks, Split, derive_seed, length_of
from trainer_kit.data.sizes import batch_size_of, size_reader

__all__ = ["IndexedSource", "ListSource", "Place", "Source", "StreamSource"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which part of the data is read here, and how."""

    rank: int = 0
    size: int = 1
    seed: int = 0
    shard: bool = True
    batch_size: int | None = None
    ordered: bool = False

    @property
    def part(self) -> tuple[int, int]:
        """(rank, size) of the division that is ours to make."""
        return (self.rank, self.size) if self.shard else (0, 1)


class Source(Protocol):
    """What `Feed` asks of a loader; the meaning of each is documented there."""

    @property
    def length(self) -> int | None: ...
    @property
    def even(self) -> bool: ...
    @property
    def per_rank_batch_size(self) -> int | None: ...
    def samples(self, index: int) -> int | None: ...
    def describe(self) -> str: ...
    def epoch(self, epoch: int, start: int = 0, turn: int = 0) -> Iterator[Any]:
        """``turn`` counts the passes within one epoch."""


def _kind(thing: Any) -> str:
    return type(thing).__name__


def _set_epoch(epoch: int, *parts: Any) -> None:
    seen: set[int] = set()
    for part in parts:
        if id(part) not in seen and callable(found := getattr(part, "set_epoch", None)):
            found(epoch)
        seen.add(id(part))


def _refuse_batch_size(loader: Any, place: Place) -> None:
    if place.batch_size is not None:
        raise DataError(
            f"the batch size of this {_kind(loader)} cannot be set from outside",
            found=f"global_batch_size={place.batch_size * place.size} for batches that it makes by itself",
            fix="leave global_batch_size out, or pass a DataLoader(dataset, batch_size=...)",
        )


@final
class ListSource:
    """A sequence of batches: rank r takes those with index r, r + size, ..., and reads no other."""

    per_rank_batch_size = None

    def __init__(self, batches: Sequence[Any], place: Place) -> None:
        _refuse_batch_size(batches, place)
        self.batches, (self.rank, self.size) = batches, place.part
        self.even = place.size == self.size
        self._size: Callable[[Any], int] | None = None

    @property
    def length(self) -> int:
        return -(-len(self.batches) // self.size)

    def samples(self, index: int) -> int | None:
        if type(self.batches) not in (list, tuple):  # a subclass may make its batches as they are asked for
            return None
        # A list holds its batches already: looking at the other ranks' costs no read, and no exchange.
        if self._size is None:
            self._size = size_reader(self.batches[0]) if self.batches else batch_size_of
        return sum(map(self._size, self.batches[index * self.size : (index + 1) * self.size]))

    def describe(self) -> str:
        split = f", each {self.size}th by index" if self.size > 1 else ""
        return f"{_kind(self.batches)} of {len(self.batches)} batches, in its order{split}"

    def epoch(self, epoch: int, start: int = 0, turn: int = 0) -> Iterator[Any]:
        _set_epoch(epoch, self.batches)
        if self.size == 1 and not start:
            return iter(self.batches)
        count = len(self.batches)
        mine = map(self.batches.__getitem__, range(start * self.size + self.rank, count, self.size))
        short = 0 < count % self.size <= self.rank and start < self.length
        return chain(mine, (EMPTY,)) if short else mine


@final
class StreamSource:
    """Anything that can only be read in order: every rank reads all of it and keeps each size-th batch."""

    def __init__(self, loader: Iterable[Any], place: Place) -> None:
        self.given, self.place, (self.rank, self.size) = loader, place, place.part
        self.loader, self.generator = loader, None
        self.per_rank_batch_size: int | None = None
        if isinstance(loader, DataLoader):
            self.loader, self.generator = _copied(loader)
            if place.batch_size is not None:
                if loader.batch_size is None:
                    _refuse_batch_size(loader, place)
                batches = BatchSampler(loader.sampler, place.batch_size, loader.drop_last)
                self.loader.__dict__.update(batch_size=place.batch_size, batch_sampler=batches)
            self.per_rank_batch_size = self.loader.batch_size
        else:
            _refuse_batch_size(loader, place)
        # An iterator can be read once; whatever makes a new one each time can be read again.
        self.once = isinstance(loader, Iterator)
        self.begun = False

    @property
    def length(self) -> int | None:
        count = length_of(self.loader)
        if isinstance(self.loader, DataLoader):
            # torch would warn about each batch beyond the length that a dataset only claims to have.
            self.loader.__dict__["_IterableDataset_len_called"] = None
        return None if count is None else -(-count // self.size)

    @property
    def even(self) -> bool:
        # Whether all ranks read the same stream is up to the user's code.
        return self.place.size == 1

    def samples(self, index: int) -> None:
        return None

    def describe(self) -> str:
        what = _kind(self.given)
        if isinstance(self.given, DataLoader):
            what = f"{what} over {_kind(self.given.dataset)}"
        split = f"; every rank reads all of it and keeps each {self.size}th batch" if self.size > 1 else ""
        return f"{what}, in its order{split}"

    def epoch(self, epoch: int, start: int = 0, turn: int = 0) -> Iterator[Any]:
        parts = (getattr(self.given, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        _set_epoch(epoch, self.given, *parts)
        if self.generator is not None:
            # The same on all ranks: a dataset that shuffles in its workers must yield the same stream everywhere.
            self.generator.manual_seed(derive_seed(self.place.seed, epoch, turn))
        iterator = iter(self.loader)
        if self.once and self.begun:
            iterator = chain(self._first(iterator), iterator)
        self.begun = True
        if start:
            dropped = start * self.size
            if self.place.rank == 0:
                warnings.warn(
                    f"{_kind(self.given)} cannot skip by index: to start at batch {start}, {dropped} batches"
                    " are read and thrown away",
                    stacklevel=3,
                )
            iterator = islice(iterator, dropped, None)
        return iterator if self.size == 1 else self._turns(iterator)

    def _first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch
            return
        raise DataError(
            f"this {_kind(self.given)} has no batches left for another pass",
            found="an iterator, which can be read once, at its end",
            fix="pass something that can be iterated again: a DataLoader, a list, or an object whose __iter__"
            " makes a new iterator",
        )

    def _turns(self, iterator: Iterator[Any]) -> Iterator[Any]:
        at = 0
        for batch in iterator:
            if at == self.rank:
                yield batch
            at = (at + 1) % self.size
        if 0 < at <= self.rank:
            yield EMPTY


def _copied(loader: DataLoader[Any]) -> tuple[DataLoader[Any], torch.Generator | None]:
    """A loader of the user's class with all its attributes, and the generator its workers are seeded from.

    No generator where the user gave one: that one is obeyed, and drawing from it disturbs nobody.
    """
    mine = copy.copy(loader)
    generator = torch.Generator() if loader.generator is None else None
    # DataLoader.__setattr__ refuses to set these.
    mine.__dict__.update(_iterator=None, generator=generator or loader.generator)
    return mine, generator


@final
class IndexedSource:
    """A DataLoader over a map-style dataset, rebuilt once around this rank's part of its sampler's order."""

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        self.given, self.place = loader, place
        self.loader, self.generator = _copied(loader)
        self.own_batches = _own_batches(loader)
        self.order, self.split_by_user = self._find_order()
        rank, size = (0, 1) if self.split_by_user else place.part
        self.split: Split
        if self.own_batches:
            _refuse_batch_size(loader, place)
            # Neither batch size nor batch sampler: each item of the sampler is a batch.
            sized = loader.batch_sampler is not None
            self.split = BatchTurns(self.order, rank=rank, size=size, sized=sized)
            self.loader.__dict__["batch_sampler" if sized else "sampler"] = self.split
            given = getattr(loader.batch_sampler, "batch_size", None)
            self.per_rank_batch_size: int | None = given if isinstance(given, int) else None
        else:
            per_rank = place.batch_size or loader.batch_size or 1
            self.split = SampleBlocks(self.order, per_rank, drop_last=loader.drop_last, rank=rank, size=size)
            self.loader.__dict__.update(batch_size=per_rank, batch_sampler=self.split)
            self.per_rank_batch_size = per_rank

    def _find_order(self) -> tuple[Any, bool]:
        """What yields the indices (or batches of them), and whether that is one rank's part already."""
        loader, place = self.given, self.place
        order = loader.sampler if not self.own_batches or loader.batch_sampler is None else loader.batch_sampler
        if not place.shard:
            return _reseeded(order, loader), False
        samplers: tuple[Any, ...] = (order, getattr(order, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                found = sampler.num_replicas, sampler.rank
                if place.ordered and type(order) is DistributedSampler and found == (place.size, place.rank):
                    return _undivided(order), False
                if place.size > 1 and found != (place.size, place.rank):
                    raise DataError(
                        f"this {_kind(sampler)} divides the data otherwise than the strategy does",
                        found=f"num_replicas={found[0]}, rank={found[1]} on data rank {place.rank} of {place.size}",
                        fix="leave the sampler out: the data are divided without one",
                    )
                return order, True
        return _reseeded(order, loader), False

    @property
    def length(self) -> int | None:
        return length_of(self.split)

    @property
    def even(self) -> bool:
        return self.place.size == 1 or (self.place.shard and self.length is not None)

    def samples(self, index: int) -> int | None:
        if self.place.size > 1 and not self.place.shard:
            return None
        count = self.split.samples(index)
        return count * self.place.size if count is not None and self.split_by_user else count

    def describe(self) -> str:
        name, size = _kind(self.order), self.place.part[1]
        if type(self.order) is SequentialSampler:
            how = f"in order ({name})"
        elif getattr(self.order, "generator", None) is not None:
            how = f"in the order of {name}, which has a generator of its own"
        elif type(self.order) is RandomSampler:
            how = f"shuffled by (seed, epoch) ({name})"
        else:
            how = f"in the order of {name}, drawn under (seed, epoch)"
        if self.split_by_user:
            split = ", divided by the user's sampler" + (" (it may repeat samples)" if self.place.ordered else "")
        elif size == 1:
            split = ""
        elif self.own_batches:
            split = f", {size} consecutive batches to {size} ranks"
        else:
            split = f", {size} consecutive blocks of {self.per_rank_batch_size} samples to {size} ranks"
        return f"{_kind(self.given)} over {_kind(self.given.dataset)}, {how}{split}"

    def epoch(self, epoch: int, start: int = 0, turn: int = 0) -> Iterator[Any]:
        given = self.given
        inner = getattr(given.batch_sampler, "sampler", None)
        _set_epoch(epoch, given, given.dataset, given.sampler, given.batch_sampler, inner, self.order)
        seed = derive_seed(self.place.seed, epoch, turn)
        ours = self.place.shard and not self.split_by_user
        sample_seed = derive_seed(seed) if ours else derive_seed(seed, self.place.rank)
        self.split.begin(seed, start, sample_seed if self.loader.num_workers else None)
        if self.generator is not None:
            # By rank, or the workers of all ranks would draw the same augmentations.
            self.generator.manual_seed(derive_seed(seed, self.place.rank))
        iterator = iter(self.loader)
        # A chain costs no Python frame per batch.
        return chain(iterator, self._end(iterator, start))

    def _end(self, iterator: Iterator[Any], start: int) -> Iterator[Any]:
        """What comes after the last batch: two checks, and `EMPTY` where this rank has no share of it."""
        split, kind = self.split, _kind(self.given)
        # Only torch's own iterators count; what a subclass makes of their batches is its own business.
        read = getattr(iterator, "_num_yielded", None)
        if read is not None and read < split.handed:
            raise DataError(
                f"StopIteration from user code ended the data after {start + read} batches of {self.length}",
                found=f"raised in {_kind(self.given.dataset)} or the collate_fn of this {kind}",
                fix="raise another error there, or let the sampler end where the data do",
            )
        if not split.handed and not split.empty and (start or self.place.part[1] > 1) and (self.length or 0) > start:
            raise DataError(
                f"this {kind} does not read its batch sampler, so its data can be neither divided nor skipped",
                found=f"{kind}.__iter__ ended without taking one batch of indices",
                fix="divide the data in the loader itself and pass use_distributed_sampler=False",
            )
        if split.empty:
            yield EMPTY


def _own_batches(loader: DataLoader[Any]) -> bool:
    """Whether batches are made otherwise than by ``batch_size`` and the sampler."""
    made = loader.batch_sampler
    return loader.batch_size is None or not (isinstance(made, BatchSampler) and made.sampler is loader.sampler)


def _undivided(sampler: DistributedSampler[Any]) -> Any:
    """Its order before it is divided and padded: evaluation reads each sample once."""
    whole = copy.copy(sampler)
    count = sampler.total_size if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
    whole.num_replicas, whole.rank, whole.num_samples, whole.total_size = 1, 0, count, count
    return whole


def _reseeded(sampler: Any, loader: DataLoader[Any]) -> Any:
    """torchdata's RandomSampler draws its generator's seed where nobody gave one: another order on every rank."""
    ours = type(sampler).__module__.startswith("torchdata.") and _kind(sampler) == "RandomSampler"
    if ours and loader.generator is None:
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)
    return sampler
