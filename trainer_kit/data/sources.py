"""The sources of one loader: a list of batches, a DataLoader over a map-style dataset, or a stream of batches."""

from __future__ import annotations

import copy
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from trainer_kit.core.display import bar_class
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data.division import (
    Division,
    check_division,
    divide_by_itself,
    fingerprint,
    loader_parts,
    worker_parts,
)
from trainer_kit.data.order import (
    EMPTY,
    MISSING,
    BatchTurns,
    SampleBlocks,
    Split,
    derive_seed,
    length_of,
    seed_globals,
)
from trainer_kit.data.place import (
    Place,
    Source,
    copied,
    end_workers,
    generator_states,
    kind_of,
    one_for_one,
    own_generators,
    refuse_batch_size,
    restore_generators,
    set_epoch,
    warn_of_early_end,
)
from trainer_kit.data.sizes import BatchSizes

__all__ = ["IndexedSource", "ListSource", "StreamSource", "has_state", "shuffle_buffer"]


@final
class ListSource(Source):
    """A sequence of batches: rank r takes those with index r, r + size, ..., and reads no other."""

    indexed = True
    exact = True

    def __init__(self, batches: Sequence[Any], place: Place) -> None:
        refuse_batch_size(batches, place)
        self.batches = batches
        self.rank, self.size = place.part
        self._place = place
        self._sizes = BatchSizes()
        self.counts = [self._sizes]

    @property
    def length(self) -> int:
        return -(-len(self.batches) // self.size)

    @property
    def even(self) -> bool:
        return self._place.size == self.size

    def samples(self, index: int) -> int | None:
        if type(self.batches) not in (
            list,
            tuple,
        ):  # a subclass may make each batch when it is read
            return None
        # A list holds its batches already: reading the sizes of other ranks' batches costs nothing.
        return self._sizes.total(
            self.batches[index * self.size : (index + 1) * self.size]
        )

    def describe(self) -> str:
        split = f", each {self.size}th by index" if self.size > 1 else ""
        return f"{kind_of(self.batches)} of {len(self.batches)} batches, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        return [("batches", self.size)]

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [
            {
                "size": len(self.batches),
                "unit": "batches",
                "order": kind_of(self.batches),
            }
        ]

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: Any = None
    ) -> Iterator[Any]:
        set_epoch(epoch, self.batches)
        if self.size == 1 and not start:
            return self._sizes.pairs(self.batches)
        count = len(self.batches)
        mine = map(
            self.batches.__getitem__,
            range(start * self.size + self.rank, count, self.size),
        )
        short = 0 < count % self.size <= self.rank and start < self.length
        return (
            chain(self._sizes.pairs(mine), (MISSING,))
            if short
            else self._sizes.pairs(mine)
        )


@final
class IndexedSource(Source):
    """A DataLoader over a map-style dataset, copied once with this rank's part of its sampler's order."""

    indexed = True

    def __init__(self, loader: DataLoader[Any], place: Place) -> None:
        self.given = loader
        self.place = place
        self.loader, self.generator = copied(loader, place.rank == 0)
        regular = _regular_batches(loader) if place.interleave else None
        self._regular = regular
        self.own_batches = _own_batches(loader) and regular is None
        self.order, self.split_by_user = self._find_order()
        self.generators = own_generators(
            loader, self.order, getattr(self.order, "sampler", None)
        )
        rank, size = (0, 1) if self.split_by_user else place.part
        self.split: Split
        if self.own_batches:
            refuse_batch_size(loader, place)
            # Without a batch size and a batch sampler each item of the sampler is a batch.
            sized = loader.batch_sampler is not None or isinstance(
                loader.sampler, BatchSampler
            )
            given = getattr(loader.batch_sampler, "batch_size", None)
            fills = isinstance(given, int) and not place.interleave
            whole = self.per_rank_batch_size = given if fills else None
            self.split = BatchTurns(
                self.order,
                rank=rank,
                size=size,
                sized=sized,
                pad=place.pad,
                whole=whole,
            )
            self.loader.__dict__[
                "sampler" if loader.batch_sampler is None else "batch_sampler"
            ] = self.split
        else:
            per_rank = place.batch_size or loader.batch_size or 1
            drop_last = loader.drop_last
            if regular is not None:
                per_rank, drop_last = regular.batch_size, regular.drop_last
            self.split = SampleBlocks(
                self.order,
                per_rank,
                drop_last=drop_last,
                rank=rank,
                size=size,
                pad=place.pad,
                interleave=place.interleave,
            )
            self.loader.__dict__.update(batch_size=per_rank, batch_sampler=self.split)
            self.per_rank_batch_size = per_rank
        self._drawn = one_for_one(loader) and (
            not isinstance(self.split, BatchTurns) or self.split.sized
        )
        self.exact = one_for_one(loader) and _counts_exactly(self.order)
        self._sizes = BatchSizes()  # for a loader that makes its own batches
        self.counts = [self._sizes]

    def _find_order(self) -> tuple[Any, bool]:
        """Return what yields the indices (or batches of indices), and whether these are already one rank's part."""
        loader, place = self.given, self.place
        order = (
            loader.sampler
            if not self.own_batches or loader.batch_sampler is None
            else loader.batch_sampler
        )
        if self._regular is not None:
            order = self._regular.sampler
        if not place.shard:
            return _reseeded(order, loader), False
        division = divide_by_itself(order, _SAMPLERS) or _divided_by_one(order)
        if division is None:
            return _reseeded(order, loader), False
        here = (place.size, place.rank)
        if (
            place.ordered
            and type(order) is DistributedSampler
            and (division.ranks, division.rank) == here
        ):
            return _undivided(order), False
        if place.size > 1 and (division.ranks, division.rank) != here:
            raise DataError(
                f"this {kind_of(division.part)} divides the data differently from the strategy",
                found=f"num_replicas={division.ranks}, rank={division.rank} on data rank {place.rank} of {place.size}",
                fix="leave the sampler out: the Trainer divides the data",
            )
        return order, True

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
        return (
            count * self.place.size
            if count is not None and self.split_by_user
            else count
        )

    def describe(self) -> str:
        name, size = kind_of(self.order), self.place.part[1]
        if type(self.order) is SequentialSampler:
            how = f"in order ({name})"
        elif getattr(self.order, "generator", None) is not None:
            how = f"in the order of {name}, which has its own generator"
        elif type(self.order) is RandomSampler:
            how = f"shuffled by (seed, epoch) ({name})"
        else:
            how = f"in the order of {name}, drawn under (seed, epoch)"
        if self.split_by_user:
            split = ", divided by the user's sampler" + (
                " (it may repeat samples)" if self.place.ordered else ""
            )
        elif size == 1:
            split = ""
        elif self.own_batches:
            split = f", {size} consecutive batches to {size} ranks"
        elif self.place.interleave:
            split = f", each {size}th sample to one of {size} ranks, in batches of {self.per_rank_batch_size}"
        else:
            split = f", {size} consecutive blocks of {self.per_rank_batch_size} samples to {size} ranks"
        return f"{kind_of(self.given)} over {kind_of(self.given.dataset)}, {how}{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        size = self.place.part[1]
        return (
            [("batches", size)]
            if self.own_batches
            else [("samples", size * (self.per_rank_batch_size or 1))]
        )

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [
            {
                "size": length_of(self.given.dataset),
                "unit": "samples",
                "order": kind_of(self.order),
            }
        ]

    def state(self) -> Any:
        return {"generators": self._began} if self.generators else None

    def close(self) -> None:
        end_workers(self.loader)

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        if not self._drawn:
            return None
        split, states = copy.copy(self.split), generator_states(self.generators)
        split.begin(derive_seed(self.place.seed, epoch, 0), batch)
        try:
            restore_generators(self.generators, self._began)
            return list(next(iter(split), ()))
        finally:
            restore_generators(self.generators, states)

    def record_indices(self) -> None:
        if one_for_one(self.given):
            self.split.shares = deque()

    def next_indices(self) -> list[Any] | None:
        return self.split.shares.popleft() if self.split.shares else None

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: Any = None
    ) -> Iterator[Any]:
        given = self.given
        samplers = list(loader_parts(given.batch_sampler, _SAMPLERS))
        set_epoch(
            epoch,
            *reversed(worker_parts(given)),
            *reversed(samplers),
            given.sampler,
            self.order,
            given,
        )
        seed = derive_seed(self.place.seed, epoch, turn)
        ours = self.place.shard and not self.split_by_user
        sample_seed = derive_seed(seed) if ours else derive_seed(seed, self.place.rank)
        seeds = self.loader.num_workers > 0 or self.place.reproducible
        self.split.begin(
            seed,
            start,
            sample_seed if seeds and given.batch_sampler is not None else None,
        )
        self.draw_from(
            state
        )  # the whole order of an epoch is drawn from the states at its start
        if self.generator is not None:
            # A different seed per rank, or the workers of all ranks would draw the same augmentations.
            self.generator.manual_seed(derive_seed(seed, self.place.rank))
        iterator = iter(self.loader)
        if self.generators and not self.loader.num_workers:
            self.split.draw()  # with workers the loader has drawn already, for the batches that they prefetch
        batches = (
            _restoring(iterator) if seeds and not self.loader.num_workers else iterator
        )
        # None of these adds a Python frame per batch. A loader draws the indices before the batch.
        sizes = iter(self.split.sizes.popleft, None)
        pairs = (
            zip(batches, sizes, strict=False)
            if self._drawn
            else self._sizes.pairs(batches)
        )
        return chain(pairs, self._end(iterator, start))

    def _end(self, iterator: Iterator[Any], start: int) -> Iterator[Any]:
        """Check the end of the data, and yield `MISSING` if this rank has no share of the last global micro-batch."""
        split, kind = self.split, kind_of(self.given)
        # Only torch's iterators count their batches; a subclass may do anything with them.
        read = getattr(iterator, "_num_yielded", None)
        if read is not None and read < split.handed:
            raise DataError(
                f"StopIteration from user code ended the data after {start + read} batches of {self.length}",
                found=f"raised in {kind_of(self.given.dataset)} or the collate_fn of this {kind}",
                fix="raise another error there, or let the sampler end where the data ends",
            )
        if (
            not split.handed
            and not split.empty
            and (start or self.place.part[1] > 1)
            and (self.length or 0) > start
        ):
            raise DataError(
                f"this {kind} does not read its batch sampler, so its data cannot be divided or skipped",
                found=f"{kind}.__iter__ ended without taking one batch of indices",
                fix="divide the data in the loader itself and pass use_distributed_sampler=False",
            )
        if split.empty:
            yield MISSING


def _restoring(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches whose samples seed the generators of this process, and restore the generators after each batch."""
    while True:
        with preserved_rng():
            batch = next(batches, EMPTY)
        if batch is EMPTY:
            return
        yield batch


_SAMPLERS = ("sampler", "batch_sampler", "base_sampler")


def _divided_by_one(order: Any) -> Division | None:
    """Return the division of a sampler that was made for one rank, by the attributes of torch's."""
    samplers: tuple[Any, ...] = (order, getattr(order, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
            return Division(sampler, sampler.num_replicas, sampler.rank)
    return None


def _counts_exactly(order: Any) -> bool:
    """Whether the length of a sampler or batch sampler is the number of its items: torch's own are known to be so."""
    if type(order) is BatchSampler:
        return _counts_exactly(order.sampler)
    return isinstance(order, Sequence) or type(order).__module__.startswith(
        ("torch.utils.data.", "trainer_kit.")
    )


def _own_batches(loader: DataLoader[Any]) -> bool:
    """Whether batches are not made from ``batch_size`` and the sampler."""
    made = loader.batch_sampler
    return loader.batch_size is None or not (
        isinstance(made, BatchSampler) and made.sampler is loader.sampler
    )


def _regular_batches(loader: DataLoader[Any]) -> BatchSampler | None:
    """Return a batch sampler that the user gave and that makes batches as ``batch_size`` would."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or type(batches) is not BatchSampler:
        return None
    return batches if _own_batches(loader) else None


def _undivided(sampler: DistributedSampler[Any]) -> Any:
    """Return the sampler without its division and padding: evaluation reads each sample once."""
    whole = copy.copy(sampler)
    count = sampler.total_size if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
    whole.num_replicas = 1
    whole.rank = 0
    whole.num_samples = count
    whole.total_size = count
    return whole


def _reseeded(sampler: Any, loader: DataLoader[Any]) -> Any:
    """Replace torchdata's RandomSampler without a generator: it draws its own seed, another one on every rank."""
    ours = (
        type(sampler).__module__.startswith("torchdata.")
        and kind_of(sampler) == "RandomSampler"
    )
    if ours and loader.generator is None:
        return RandomSampler(
            sampler.data_source, sampler.replacement, sampler.num_samples
        )
    return sampler


@final
class StreamSource(Source):
    """Data that can only be read in order: every rank reads all batches and keeps each size-th batch."""

    def __init__(self, loader: Iterable[Any], place: Place) -> None:
        self.given = loader
        self.place = place
        self.rank, self.size = place.part
        self.alone = self._find_division()
        if self.alone:
            self.rank, self.size = 0, 1
        self.loader: Any = loader
        self.generator: torch.Generator | None = None
        self._sizes = BatchSizes()
        self.counts = [self._sizes]
        self._counts = False
        if isinstance(loader, DataLoader):
            self.loader, self.generator = copied(loader, place.rank == 0)
            if place.batch_size is not None:
                if loader.batch_size is None:
                    refuse_batch_size(loader, place)
                batches = BatchSampler(
                    loader.sampler, place.batch_size, loader.drop_last
                )
                self.loader.__dict__.update(
                    batch_size=place.batch_size, batch_sampler=batches
                )
            self.per_rank_batch_size = self.loader.batch_size
            own = (
                loader.batch_size is not None
                and loader.collate_fn is not default_collate
            )
            if own and one_for_one(
                loader
            ):  # batches of torch's own collate_fn show their size
                self._counts = True
                self.loader.collate_fn = _Counting(loader.collate_fn)
            if not place.ordered and has_state(loader.dataset):
                self.loader = _reading_states(self.loader)
        else:
            refuse_batch_size(loader, place)
        if place.reproducible and place.rank == 0:
            warnings.warn(
                f"reproducible_workers=True seeds samples that are asked for by index, and a {kind_of(loader)} is a"
                " stream: what it draws is up to it",
                stacklevel=2,
            )
        # An iterator can be read once; any other iterable makes a new iterator for each pass.
        self.once = isinstance(loader, Iterator)
        self.begun = False
        self._loaded = False
        self.stateful = not place.ordered and has_state(self.loader)
        number = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        self.workers = [number] if self.stateful else []
        # Workers that end with the epoch lose the batches that they have prefetched.
        self.workers_end = number > 0 and not self.loader.persistent_workers
        self.rolls = self.stateful and not self.workers_end
        self.generators = (
            own_generators(loader) if isinstance(loader, DataLoader) else []
        )
        self._began = []  # in checkpoints a list, also without generators

    def _find_division(self) -> bool | None:
        place = self.place
        if place.part[1] == 1:
            return False
        division = divide_by_itself(self.given)
        if division is None:
            return False if place.agree is None else None
        check_division(division, place.rank, place.size)
        return True

    def leave_alone(self, alone: Any) -> None:
        if self.alone is None and alone is not None:
            self.alone = bool(alone)
            self.rank, self.size = (0, 1) if alone else self.place.part

    def _compare(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Compare the first batch with that of the other ranks, and return an iterator that still yields it.

        Equal batches are one stream, which is divided here; if they differ, the loader divides the data. Every rank
        calls it, and an error is raised after the exchange, so that no rank waits for another one.
        """
        first: list[Any] = []
        problem: Exception | None = None
        try:
            first = list(islice(iterator, 1))
        except Exception as error:  # of any class: user code reads the data
            problem = error
        assert self.place.agree is not None
        rows = self.place.agree([fingerprint(first)])
        self.leave_alone(any(row != rows[0] for row in rows))
        if problem is not None:
            raise problem
        if self.alone and self.place.rank == 0:
            warnings.warn(
                f"the first batch of this {kind_of(self.given)} differs from rank to rank: it is taken to divide the"
                " data by itself, and every rank reads all of its batches. If it does not, seed it equally on all"
                " ranks; use_distributed_sampler=False omits this comparison",
                stacklevel=2,
            )
        return chain(first, iterator)

    def close(self) -> None:
        if isinstance(self.loader, DataLoader):
            end_workers(self.loader)

    @property
    def length(self) -> int | None:
        count = length_of(self.loader)
        if isinstance(self.loader, DataLoader):
            # Otherwise torch would warn about each batch beyond the length that the dataset claims to have.
            self.loader.__dict__["_IterableDataset_len_called"] = None
        return None if count is None else -(-count // self.size)

    @property
    def even(self) -> bool:
        # The user's code decides whether all ranks read the same stream.
        return self.place.size == 1

    def describe(self) -> str:
        what = kind_of(self.given)
        if isinstance(self.given, DataLoader):
            what = f"{what} over {kind_of(self.given.dataset)}"
        split = ""
        if self.alone:
            split = "; it divides the data among the ranks itself"
        elif self.size > 1:
            split = f"; every rank reads all of it and keeps each {self.size}th batch"
        return f"{what}, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        each = self.per_rank_batch_size
        size = self.place.part[1]  # of all ranks together
        return [("batches", size)] if each is None else [("samples", size * each)]

    @property
    def facts(self) -> list[dict[str, Any]]:
        if not isinstance(self.given, DataLoader):
            return [
                {
                    "size": length_of(self.given),
                    "unit": "batches",
                    "order": kind_of(self.given),
                }
            ]
        data = self.given.dataset
        workers = self.given.num_workers
        return [
            {
                "size": length_of(data),
                "unit": "samples",
                "order": kind_of(data),
                "workers": workers,
            }
        ]

    def state(self) -> Any:
        if not self.stateful:
            return {"generators": self._began} if self.generators else None
        own = self.loader.state_dict()
        return {
            # The state of objects in this process may still change.
            "loader": own if any(self.workers) else copy.deepcopy(own),
            "at": (self.rank + 1) % self.size,
            "generators": self._began,
        }

    def resharded(self, state: Any, further: int) -> Any:
        if not self.place.shard or self.alone or (state is not None and state["at"]):
            raise CheckpointError(
                "loaders",
                None,
                f"each rank read its own {kind_of(self.given)}: the states need the same number of ranks",
                fix="resume with the same number of ranks",
            )
        return {"generators": self._began, **(state or {}), "further": further}

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: Any = None
    ) -> Iterator[Any]:
        parts = (
            getattr(self.given, name, None) for name in ("sampler", "batch_sampler")
        )
        # The inner ones first: a data set that passes another epoch on to its parts has the last word.
        set_epoch(epoch, *reversed(worker_parts(self.given)), *parts, self.given)
        self.draw_from(state)
        if self.generator is not None:
            # The same seed on all ranks: a dataset that shuffles in its workers must yield the same stream everywhere.
            self.generator.manual_seed(derive_seed(self.place.seed, epoch, turn))
        resumes = self.stateful and state is not None and "loader" in state
        if resumes:
            self._load(state["loader"])
        elif self._loaded:
            self._forget()
        workers = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        inside = (
            resumes and start > 0
        )  # the next batch of a started epoch is read under the generators of the run
        alike = self.size > 1 and not workers and not self.once and not inside
        iterator = (
            self._seeded(derive_seed(self.place.seed, epoch, turn))
            if alike
            else iter(self.loader)
        )
        if self.alone is None and not resumes:
            iterator = self._compare(iterator)
        if self.once and self.begun:
            iterator = chain(self._first(iterator), iterator)
        self.begun = True
        if start and not resumes:
            self._drain(iterator, start)
        if state is not None:
            for _ in islice(iterator, state.get("further", 0)):
                pass
        if self.stateful and self.workers_end:
            iterator = self._released(iterator)
        pairs = iterator if self._counts else self._sizes.pairs(iterator)
        return (
            pairs
            if self.size == 1
            else self._turns(pairs, state["at"] if resumes else 0)
        )

    def _load(self, state: Any) -> None:
        self._loaded = True
        self.loader.load_state_dict(state)
        buffer = shuffle_buffer(self.given)
        if buffer and self.place.rank == 0:
            warnings.warn(
                f"this resume is not exact: the data set shuffles in a buffer of {buffer} examples, whose content its"
                " state does not hold, so the next examples come in another order and some of the buffer are not read."
                " For an exact resume shuffle before the stream (Dataset.shuffle, then to_iterable_dataset), or"
                " save between epochs",
                stacklevel=2,
            )

    def _forget(self) -> None:
        """Begin the next epoch at its start: litdata's loader goes on from a loaded state until it has ended once."""
        self._loaded = False
        if getattr(self.loader, "restore", None) is True and type(
            self.loader
        ).__module__.startswith("litdata."):
            self.loader.restore = False

    def _seeded(self, seed: int) -> Iterator[Any]:
        """Start with equal generators on all ranks, so that a stream that shuffles has the same order everywhere."""
        with preserved_rng():
            seed_globals(seed)
            iterator = iter(self.loader)
            first = list(
                islice(iterator, 1)
            )  # a generator function draws nothing before its first item
        yield from first
        yield from iterator

    def _released(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Release the iterator, and so its workers, when reading ends early: torchdata's loader keeps it."""
        try:
            yield from iterator
        finally:
            if self.loader._iterator is iterator:
                self.loader.__dict__["_iterator"] = None

    def _drain(self, iterator: Iterator[Any], start: int) -> None:
        """Read and discard the batches before ``start``, and restore the global generators."""
        count = start * self.size
        first_rank = self.place.rank == 0
        began = time.monotonic()
        bar = bar_class()(
            islice(iterator, count),
            "reading up to where it was",
            count,
            leave=False,
            delay=2,
            disable=not first_rank,
        )
        with preserved_rng():
            read = sum(1 for _ in bar)
        if first_rank:
            # The last turn may be incomplete: its position lies beyond the end of the same data.
            turn = self.place.turn
            if turn is not None and read <= count - self.size * turn:
                warn_of_early_end(self.given, start)
            warnings.warn(
                f"{kind_of(self.given)} cannot skip by index: to start at batch {start}, {read} batches were read and"
                f" discarded in {time.monotonic() - began:.1f} s. With state_dict() and load_state_dict(state) on"
                f" {self._owner()} a resume does not read them",
                stacklevel=2,
            )

    def _owner(self) -> str:
        return (
            f"its dataset ({kind_of(self.given.dataset)})"
            if isinstance(self.given, DataLoader)
            else "it"
        )

    def _first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch
            return
        raise DataError(
            f"this {kind_of(self.given)} has no batches left for another pass",
            found="an exhausted iterator, which can be read only once",
            fix="pass something that can be iterated again: a DataLoader, a list, or an object whose __iter__"
            " makes a new iterator",
        )

    def _turns(self, pairs: Iterator[Any], at: int) -> Iterator[Any]:
        for pair in pairs:
            if at == self.rank:
                yield pair
            at = (at + 1) % self.size
        if 0 < at <= self.rank:
            yield MISSING


@final
class _Counting:
    """A user's ``collate_fn`` that also returns the number of its samples, in this process or a worker."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        return self.collate(samples), len(samples)


def has_state(owner: Any) -> bool:
    """Whether an object has torchdata's state protocol."""
    return callable(getattr(owner, "state_dict", None)) and callable(
        getattr(owner, "load_state_dict", None)
    )


def _reading_states(loader: DataLoader[Any]) -> Any:
    """Return a loader as torchdata's, which reads the state of its dataset in this process and in workers."""
    kind = type(loader)
    if (
        kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    ):
        return loader  # it makes its own batches
    if loader.num_workers and not getattr(loader, "in_order", True):
        return loader  # batches arrive in any order: no state describes that
    from torchdata.stateful_dataloader import StatefulDataLoader

    # Not its constructor, which lacks newer arguments of torch and attributes of a subclass.
    made: Any = StatefulDataLoader.__new__(StatefulDataLoader)
    made.__dict__.update(
        loader.__dict__,
        snapshot_every_n_steps=1,
        next_iter_state=None,
        _initial_iter_for_state_dict=False,
    )
    return made


def shuffle_buffer(loader: Any) -> int:
    """Return the size of the shuffle buffer of a Hugging Face stream inside a loader; 0 without one."""
    sources = [getattr(part, "_ex_iterable", None) for part in loader_parts(loader)]
    for _ in range(_DEEPEST_SOURCE):
        for source in sources:
            size = getattr(source, "buffer_size", 0)
            if type(source).__name__ == "BufferShuffledExamplesIterable" and size > 1:
                return int(size)
        sources = [
            getattr(source, "ex_iterable", None)
            for source in sources
            if source is not None
        ]
    return 0


_DEEPEST_SOURCE = 16
"""Operations on a Hugging Face stream that are searched."""
