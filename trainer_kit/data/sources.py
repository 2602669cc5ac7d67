"""What can be asked for by index: a list of batches, or a DataLoader over a map-style dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainer_kit.core.errors import DataError
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data.generators import generator_states, own_generators, restore_generators
from trainer_kit.data.order import EMPTY, MISSING, BatchTurns, SampleBlocks, Split, derive_seed, length_of
from trainer_kit.data.place import Place, copied, kind_of, one_for_one, refuse_batch_size, set_epoch
from trainer_kit.data.sizes import BatchSizes

__all__ = ["IndexedSource", "ListSource"]


@final
class ListSource:
    """A sequence of batches: rank r takes those with index r, r + size, ..., and reads no other."""

    per_rank_batch_size = None
    stateful = rolls = once = False
    indexed = True

    def __init__(self, batches: Sequence[Any], place: Place) -> None:
        refuse_batch_size(batches, place)
        self.batches, (self.rank, self.size) = batches, place.part
        self.even = place.size == self.size
        self.generators: list[Any] = []
        self.workers: list[int] = []
        self._sizes = BatchSizes()

    @property
    def length(self) -> int:
        return -(-len(self.batches) // self.size)

    def samples(self, index: int) -> int | None:
        if type(self.batches) not in (list, tuple):  # a subclass may make its batches as they are asked for
            return None
        # A list holds its batches already: looking at the other ranks' costs no read, and no exchange.
        return self._sizes.total(self.batches[index * self.size : (index + 1) * self.size])

    @property
    def doubt(self) -> str | None:
        return self._sizes.doubt

    def describe(self) -> str:
        split = f", each {self.size}th by index" if self.size > 1 else ""
        return f"{kind_of(self.batches)} of {len(self.batches)} batches, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        return [("batches", self.size)]

    def state(self) -> None:
        return None

    def first_state(self) -> None:
        return None

    def divided_anew(self, state: Any, further: int) -> None:
        return None

    def epoch(self, epoch: int, start: int = 0, turn: int = 0, state: Any = None) -> Iterator[Any]:
        set_epoch(epoch, self.batches)
        if self.size == 1 and not start:
            return self._sizes.pairs(self.batches)
        count = len(self.batches)
        mine = map(self.batches.__getitem__, range(start * self.size + self.rank, count, self.size))
        short = 0 < count % self.size <= self.rank and start < self.length
        return chain(self._sizes.pairs(mine), (MISSING,)) if short else self._sizes.pairs(mine)


@final
class IndexedSource:
    """A DataLoader over a map-style dataset, rebuilt once around this rank's part of its sampler's order."""

    stateful = rolls = once = False
    indexed = True

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        self.given, self.place = loader, place
        self.loader, self.generator = copied(loader)
        self.own_batches = _own_batches(loader)
        self.order, self.split_by_user = self._find_order()
        self.generators = own_generators(loader, self.order, getattr(self.order, "sampler", None))
        self.workers: list[int] = []
        self._began: list[Any] = []
        rank, size = (0, 1) if self.split_by_user else place.part
        self.split: Split
        self.per_rank_batch_size: int | None
        if self.own_batches:
            refuse_batch_size(loader, place)
            # Neither batch size nor batch sampler: each item of the sampler is a batch.
            sized = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
            given = getattr(loader.batch_sampler, "batch_size", None)
            whole = self.per_rank_batch_size = given if isinstance(given, int) else None
            self.split = BatchTurns(self.order, rank=rank, size=size, sized=sized, pad=place.pad, whole=whole)
            self.loader.__dict__["sampler" if loader.batch_sampler is None else "batch_sampler"] = self.split
        else:
            per_rank = place.batch_size or loader.batch_size or 1
            self.split = SampleBlocks(
                self.order, per_rank, drop_last=loader.drop_last, rank=rank, size=size, pad=place.pad
            )
            self.loader.__dict__.update(batch_size=per_rank, batch_sampler=self.split)
            self.per_rank_batch_size = per_rank
        self._drawn = one_for_one(loader) and (not isinstance(self.split, BatchTurns) or self.split.sized)
        self._sizes = BatchSizes()  # for a loader that makes its batches in its own way

    @property
    def doubt(self) -> str | None:
        return self._sizes.doubt

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
                        f"this {kind_of(sampler)} divides the data otherwise than the strategy does",
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
        if self.place.size > 1 and not (self.place.shard and self._drawn):
            return None
        count = self.split.samples(index)
        return count * self.place.size if count is not None and self.split_by_user else count

    def describe(self) -> str:
        name, size = kind_of(self.order), self.place.part[1]
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
        return f"{kind_of(self.given)} over {kind_of(self.given.dataset)}, {how}{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        size = self.place.part[1]
        return [("batches", size)] if self.own_batches else [("samples", size * (self.per_rank_batch_size or 1))]

    def state(self) -> Any:
        return {"generators": self._began} if self.generators else None

    def first_state(self) -> Any:
        return generator_states(self.generators)

    def divided_anew(self, state: Any, further: int) -> Any:
        return state

    def epoch(self, epoch: int, start: int = 0, turn: int = 0, state: Any = None) -> Iterator[Any]:
        given = self.given
        inner = getattr(given.batch_sampler, "sampler", None)
        set_epoch(epoch, given, given.dataset, given.sampler, given.batch_sampler, inner, self.order)
        seed = derive_seed(self.place.seed, epoch, turn)
        ours = self.place.shard and not self.split_by_user
        sample_seed = derive_seed(seed) if ours else derive_seed(seed, self.place.rank)
        seeds = self.loader.num_workers > 0 or self.place.reproducible
        self.split.begin(seed, start, sample_seed if seeds and given.batch_sampler is not None else None)
        if self.generators:
            # The whole order of an epoch is drawn from where they stand at its start.
            if state is not None:
                restore_generators(self.generators, state["generators"])
            self._began = generator_states(self.generators)
        if self.generator is not None:
            # By rank, or the workers of all ranks would draw the same augmentations.
            self.generator.manual_seed(derive_seed(seed, self.place.rank))
        iterator = iter(self.loader)
        if self.generators and not self.loader.num_workers:
            self.split.draw()  # with workers it has been, for the batches that they read ahead
        batches = _untouched(iterator) if seeds and not self.loader.num_workers else iterator
        # None of these costs a Python frame per batch. A loader draws ahead of its batches, never behind them.
        sizes = iter(self.split.sizes.popleft, None)
        pairs = zip(batches, sizes, strict=False) if self._drawn else self._sizes.pairs(batches)
        return chain(pairs, self._end(iterator, start))

    def _end(self, iterator: Iterator[Any], start: int) -> Iterator[Any]:
        """What comes after the last batch: two checks, and `MISSING` where this rank has no share of it."""
        split, kind = self.split, kind_of(self.given)
        # Only torch's own iterators count; what a subclass makes of their batches is its own business.
        read = getattr(iterator, "_num_yielded", None)
        if read is not None and read < split.handed:
            raise DataError(
                f"StopIteration from user code ended the data after {start + read} batches of {self.length}",
                found=f"raised in {kind_of(self.given.dataset)} or the collate_fn of this {kind}",
                fix="raise another error there, or let the sampler end where the data do",
            )
        if not split.handed and not split.empty and (start or self.place.part[1] > 1) and (self.length or 0) > start:
            raise DataError(
                f"this {kind} does not read its batch sampler, so its data can be neither divided nor skipped",
                found=f"{kind}.__iter__ ended without taking one batch of indices",
                fix="divide the data in the loader itself and pass use_distributed_sampler=False",
            )
        if split.empty:
            yield MISSING


def _untouched(batches: Iterator[Any]) -> Iterator[Any]:
    """The samples are seeded in this process: its own generators are put back behind each batch."""
    while True:
        with preserved_rng():
            batch = next(batches, EMPTY)
        if batch is EMPTY:
            return
        yield batch


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
    ours = type(sampler).__module__.startswith("torchdata.") and kind_of(sampler) == "RandomSampler"
    if ours and loader.generator is None:
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)
    return sampler
