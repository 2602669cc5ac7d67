"""The sources of one loader: a DataLoader over a map-style dataset, or a stream of batches."""

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

from trainer_kit.core.display import bar_class, plural
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.seed import preserved_rng
from trainer_kit.core.types import Batch, JsonObject
from trainer_kit.data.division import (
    check_division,
    divide_by_itself,
    divided_for_other_ranks,
    fingerprint,
    loader_parts,
    worker_parts,
)
from trainer_kit.data.order import (
    EMPTY,
    MISSING,
    BatchTurns,
    SampleBlocks,
    SampleIndex,
    Split,
    derive_seed,
    length_of,
    seed_globals,
)
from trainer_kit.data.samplers import (
    Sampler,
    counts_exactly,
    divided_by_one,
    is_batched_by_user,
    regular_batches,
    reseeded,
    undivided,
)
from trainer_kit.data.sizes import BatchSizes, SizedBatch
from trainer_kit.data.source import (
    DescribesMixtures,
    DividesItself,
    ReadOptions,
    Source,
    SourceState,
    copied,
    draws_each_batch,
    end_workers,
    find_generators,
    generator_states,
    kind_of,
    refuse_batch_size,
    restore_generators,
    set_epoch,
    warn_of_early_end,
)
from trainer_kit.data.torch_private import (
    batches_read,
    drop_iterator,
    forget_length_warning,
    iterator_method,
    kept_iterator,
)

__all__ = ["IndexedSource", "StreamSource", "has_state"]


@final
class IndexedSource(Source):
    """A DataLoader over a map-style dataset, copied once with this rank's part of its sampler's order."""

    indexed = True

    def __init__(self, loader: DataLoader[Batch], options: ReadOptions) -> None:
        self.user_loader = loader
        self.options = options
        self.loader, self.generator = copied(loader, options.rank == 0)
        # Interleaved samples are divided before they are batched: a regular batch sampler of the user is replaced by
        # one over this rank's samples.
        self._regular = None
        if options.interleave:
            self._regular = regular_batches(loader)
        self.batched_by_user = self._regular is None and is_batched_by_user(loader)
        self.order, self.split_by_user = self._find_order()
        self.generators = find_generators(
            loader, self.order, getattr(self.order, "sampler", None)
        )
        rank, size = options.rank_and_size
        # Its sampler yields this rank's part already.
        if self.split_by_user:
            rank, size = 0, 1
        self.split: Split
        if self.batched_by_user:
            refuse_batch_size(loader, options)
            self.split = self._split_batches(rank, size)
        else:
            self.split = self._split_samples(rank, size)
        one_to_one = draws_each_batch(loader)
        # Whether the split counts the samples of each batch before the loader makes it.
        self._drawn = one_to_one
        if isinstance(self.split, BatchTurns):
            self._drawn = one_to_one and self.split.sized
        self.exact = one_to_one and counts_exactly(self.order)
        # For a loader that makes its own batches.
        self._sizes = BatchSizes()
        self.counts = [self._sizes]

    def _split_batches(self, rank: int, size: int) -> BatchTurns:
        """Divide the batches of the user's batch sampler, and put the division into the copied loader."""
        loader = self.user_loader
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(batch_size, int) and not self.options.interleave:
            self.per_rank_batch_size = batch_size
        # Without a batch size and a batch sampler each item of the sampler is a batch.
        sized = loader.batch_sampler is not None
        sized = sized or isinstance(loader.sampler, BatchSampler)
        split = BatchTurns(
            self.order,
            rank=rank,
            size=size,
            sized=sized,
            pad=self.options.pad,
            whole=self.per_rank_batch_size,
        )
        name = "batch_sampler"
        if loader.batch_sampler is None:
            name = "sampler"
        # Into ``__dict__``, here and below: DataLoader refuses to set these after the constructor.
        self.loader.__dict__[name] = split
        return split

    def _split_samples(self, rank: int, size: int) -> SampleBlocks:
        """Divide the sampler's order into batches, and put the division into the copied loader."""
        loader = self.user_loader
        batch_size = self.options.batch_size or loader.batch_size or 1
        drop_last = loader.drop_last
        if self._regular is not None:
            batch_size = self._regular.batch_size
            drop_last = self._regular.drop_last
        split = SampleBlocks(
            self.order,
            batch_size,
            drop_last=drop_last,
            rank=rank,
            size=size,
            pad=self.options.pad,
            interleave=self.options.interleave,
        )
        self.loader.__dict__.update(batch_size=batch_size, batch_sampler=split)
        self.per_rank_batch_size = batch_size
        return split

    def _find_order(self) -> tuple[Sampler, bool]:
        """Return what yields the indices (or batches of indices), and whether these are already one rank's part."""
        loader = self.user_loader
        options = self.options
        order: Sampler = loader.sampler
        if self.batched_by_user and loader.batch_sampler is not None:
            order = loader.batch_sampler
        if self._regular is not None:
            order = self._regular.sampler
        if not options.shard:
            return reseeded(order, loader), False
        division = divide_by_itself(order, _SAMPLERS) or divided_by_one(order)
        if division is None:
            return reseeded(order, loader), False
        # Evaluation counts each sample once, and torch's DistributedSampler repeats samples to fill its last batch.
        matches = (division.ranks, division.rank) == (options.size, options.rank)
        if options.ordered and matches and type(order) is DistributedSampler:
            return undivided(order), False
        if options.size > 1 and not matches:
            data_rank = f"data rank {options.rank} of {options.size}"
            raise DataError(
                f"this {kind_of(division.part)} shards the data differently from the strategy",
                found=f"num_replicas={division.ranks}, rank={division.rank} on {data_rank}",
                fix="leave the sampler out: the Trainer shards the data",
            )
        return order, True

    @property
    def length(self) -> int | None:
        return length_of(self.split)

    @property
    def even(self) -> bool:
        return self.options.size == 1 or (
            self.options.shard and self.length is not None
        )

    def samples(self, index: int) -> int | None:
        if self.options.size > 1 and not (self.options.shard and self._drawn):
            return None
        count = self.split.samples(index)
        if count is not None and self.split_by_user:
            return count * self.options.size
        return count

    def describe(self) -> str:
        loader = f"{kind_of(self.user_loader)} over {kind_of(self.user_loader.dataset)}"
        return f"{loader}, {self._describe_order()}{self._describe_split()}"

    def _describe_order(self) -> str:
        name = kind_of(self.order)
        if type(self.order) is SequentialSampler:
            return f"in order ({name})"
        if getattr(self.order, "generator", None) is not None:
            return f"in the order of {name}, which has its own generator"
        if type(self.order) is RandomSampler:
            return f"shuffled by (seed, epoch) ({name})"
        return f"in the order of {name}, drawn under (seed, epoch)"

    def _describe_split(self) -> str:
        size = self.options.rank_and_size[1]
        if self.split_by_user and self.options.ordered:
            return ", sharded by the user's sampler (it may repeat samples)"
        if self.split_by_user:
            return ", sharded by the user's sampler"
        if size == 1:
            return ""
        if self.batched_by_user:
            return f", {plural(size, 'consecutive batch')} to {plural(size, 'rank')}"
        if self.options.interleave:
            return f", one sample in {size} to each of {plural(size, 'rank')}, in batches of {self.per_rank_batch_size}"
        samples = plural(self.per_rank_batch_size or 1, "sample")
        return f", {size} consecutive blocks of {samples} to {plural(size, 'rank')}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        size = self.options.rank_and_size[1]
        if self.batched_by_user:
            return [("batches", size)]
        return [("samples", size * (self.per_rank_batch_size or 1))]

    @property
    def facts(self) -> list[JsonObject]:
        return [
            {
                "size": length_of(self.user_loader.dataset),
                "unit": "samples",
                "order": kind_of(self.order),
            }
        ]

    def state(self) -> SourceState:
        if not self.generators:
            return None
        return {"generators": self._began}

    def close(self) -> None:
        end_workers(self.loader)

    def indices(self, epoch: int, batch: int) -> list[SampleIndex] | None:
        if not self._drawn:
            return None
        # A copy, and generators that are put back: what is being read goes on unchanged.
        split = copy.copy(self.split)
        states = generator_states(self.generators)
        split.begin(derive_seed(self.options.seed, epoch, 0), batch)
        try:
            restore_generators(self.generators, self._began)
            indices = next(iter(split), ())
            return list(indices)
        finally:
            restore_generators(self.generators, states)

    def record_indices(self) -> None:
        if draws_each_batch(self.user_loader):
            self.split.shares = deque()

    def next_indices(self) -> list[SampleIndex] | None:
        shares = self.split.shares
        if not shares:
            return None
        return shares.popleft()

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: SourceState = None
    ) -> Iterator[SizedBatch]:
        loader = self.user_loader
        samplers = list(loader_parts(loader.batch_sampler, _SAMPLERS))
        # The inner ones first: one that passes another epoch on to its parts has the last word.
        set_epoch(
            epoch,
            *reversed(worker_parts(loader)),
            *reversed(samplers),
            loader.sampler,
            self.order,
            loader,
        )
        seed = derive_seed(self.options.seed, epoch, turn)
        in_workers = self.loader.num_workers > 0
        seeds_samples = in_workers or self.options.reproducible
        sample_seed = None
        if seeds_samples and loader.batch_sampler is not None:
            sample_seed = self._sample_seed(seed)
        self.split.begin(seed, start, sample_seed)
        # The whole order of an epoch is drawn from the states at its start.
        self.draw_from(state)
        if self.generator is not None:
            # A different seed per rank, or the workers of all ranks would draw the same augmentations.
            self.generator.manual_seed(derive_seed(seed, self.options.rank))
        iterator = iter(self.loader)
        # With workers the loader has drawn already, for the batches that they prefetch.
        if self.generators and not in_workers:
            self.split.draw()
        batches: Iterator[Batch] = iterator
        if seeds_samples and not in_workers:
            batches = _restoring(iterator)
        # None of these adds a Python frame per batch. A loader draws the indices before the batch.
        pairs: Iterator[SizedBatch]
        if self._drawn:
            sizes = iter(self.split.sizes.popleft, None)
            pairs = zip(batches, sizes, strict=False)
        else:
            pairs = self._sizes.pairs(batches)
        return chain(pairs, self._end(iterator, start))

    def _sample_seed(self, seed: int) -> int:
        """Return the seed of the samples: the same on all ranks if their positions in the order differ."""
        if self.options.shard and not self.split_by_user:
            return derive_seed(seed)
        return derive_seed(seed, self.options.rank)

    def _end(self, iterator: Iterator[Batch], start: int) -> Iterator[SizedBatch]:
        """Check the end of the data, and yield `MISSING` if this rank has no share of the last global micro-batch."""
        split = self.split
        kind = kind_of(self.user_loader)
        # A subclass may do anything with the batches of the iterator.
        read = batches_read(iterator)
        if read is not None and read < split.handed:
            raise DataError(
                f"StopIteration from user code ended the data after {plural(start + read, 'batch')} of {self.length}",
                found=f"raised in {kind_of(self.user_loader.dataset)} or the collate_fn of this {kind}",
                fix="raise another error there, or let the sampler end where the data ends",
            )
        ignores_split = not split.handed and not split.empty
        needs_split = start > 0 or self.options.rank_and_size[1] > 1
        if ignores_split and needs_split and (self.length or 0) > start:
            raise DataError(
                f"this {kind} does not read its batch sampler, so its data cannot be sharded or skipped",
                found=f"{kind}.__iter__ ended without taking one batch of indices",
                fix="shard the data in the loader itself and pass use_distributed_sampler=False",
            )
        if split.empty:
            yield MISSING


def _restoring(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches whose samples seed the generators of this process, and restore the generators after each batch."""
    while True:
        with preserved_rng():
            batch = next(batches, EMPTY)
        if batch is EMPTY:
            return
        yield batch


_SAMPLERS = ("sampler", "batch_sampler", "base_sampler")


@final
class StreamSource(Source):
    """Data that can only be read in order: every rank reads all batches and keeps each size-th batch."""

    def __init__(self, loader: Iterable[Batch], options: ReadOptions) -> None:
        self.user_loader = loader
        self.options = options
        self.rank, self.size = options.rank_and_size
        self._saved_ranks = 0
        self._divides_itself = self._find_division()
        if self._divides_itself:
            self.rank, self.size = 0, 1
        self.loader: Any = loader
        self.generator: torch.Generator | None = None
        self._sizes = BatchSizes()
        self.counts = [self._sizes]
        self._counts = False
        if isinstance(loader, DataLoader):
            self.loader, self.generator = copied(loader, options.rank == 0)
            batch_size = options.batch_size
            if batch_size is not None:
                if loader.batch_size is None:
                    refuse_batch_size(loader, options)
                batches = BatchSampler(loader.sampler, batch_size, loader.drop_last)
                self.loader.__dict__.update(
                    batch_size=batch_size, batch_sampler=batches
                )
            self.per_rank_batch_size = self.loader.batch_size
            # Batches of torch's default collate_fn show their size.
            collates = loader.collate_fn is not default_collate
            collates = collates and loader.batch_size is not None
            if collates and draws_each_batch(loader):
                self._counts = True
                self.loader.collate_fn = _Counting(loader.collate_fn)
            # An evaluation has no position to save.
            if not options.ordered and has_state(loader.dataset):
                self.loader = _reading_states(self.loader)
        else:
            refuse_batch_size(loader, options)
        if options.reproducible and options.rank == 0:
            warnings.warn(
                f"reproducible_workers=True seeds samples that are read by index, but a {kind_of(loader)} is a"
                " stream, which must seed its own random numbers",
                stacklevel=2,
            )
        # An iterator can be read once; any other iterable makes a new iterator for each pass.
        self.once = isinstance(loader, Iterator)
        self.begun = False
        self._loaded = False
        self.stateful = not options.ordered and has_state(self.loader)
        number = 0
        if isinstance(self.loader, DataLoader):
            number = self.loader.num_workers
        self.workers = []
        if self.stateful:
            self.workers = [number]
        # Workers that end with the epoch lose the batches that they have prefetched.
        self.workers_end = number > 0 and not self.loader.persistent_workers
        self.rolls = self.stateful and not self.workers_end
        self.generators = []
        if isinstance(loader, DataLoader):
            self.generators = find_generators(loader)
        # In checkpoints a list, also without generators.
        self._began = []

    def _find_division(self) -> bool | None:
        options = self.options
        if options.rank_and_size[1] == 1:
            return False
        division = divide_by_itself(self.user_loader)
        if division is None:
            if options.agree is None:
                return False
            # Unknown until `_compare` has seen the first batch of each rank.
            return None
        check_division(division, options.rank, options.size)
        return True

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether this library divides the stream among ranks."""
        return self.size > 1

    def restore_division(self, divides_itself: DividesItself) -> None:
        if self._divides_itself is not None or divides_itself is None:
            return
        self._divides_itself = bool(divides_itself)
        self.rank, self.size = self.options.rank_and_size
        if self._divides_itself:
            self.rank, self.size = 0, 1

    def set_saved_ranks(self, ranks: int) -> None:
        self._saved_ranks = ranks

    def _compare(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Compare the first batch with that of the other ranks, and return an iterator that still yields it.

        Equal batches are one stream, which is divided here; if they differ, the loader divides the data. Every rank
        calls it, and an error is raised after the exchange, so that no rank waits for another one.
        """
        first: list[Batch] = []
        problem: Exception | None = None
        try:
            first = list(islice(iterator, 1))
        except Exception as error:
            # Of any class: user code reads the data.
            problem = error
        assert self.options.agree is not None
        rows = self.options.agree([fingerprint(first)])
        self.restore_division(any(row != rows[0] for row in rows))
        if problem is not None:
            raise problem
        if self._divides_itself and self.options.rank == 0:
            warnings.warn(
                f"the first batch of this {kind_of(self.user_loader)} differs from rank to rank: it is assumed to"
                " shard the data itself, and every rank reads all of its batches. If it does not, seed it equally on"
                " all ranks; use_distributed_sampler=False omits this comparison",
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
            forget_length_warning(self.loader)
        if count is None:
            return None
        return -(-count // self.size)

    @property
    def even(self) -> bool:
        # The user's code decides whether all ranks read the same stream.
        return self.options.size == 1

    def describe(self) -> str:
        data = kind_of(self.user_loader)
        if isinstance(self.user_loader, DataLoader):
            data = f"{data} over {kind_of(self.user_loader.dataset)}"
        split = ""
        if self._divides_itself:
            split = "; it shards the data across ranks itself"
        elif self.size > 1:
            split = f"; every rank reads all of it and keeps one batch in {self.size}"
        return f"{data}, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        size = self.options.rank_and_size[1]
        if self.per_rank_batch_size is None:
            return [("batches", size)]
        return [("samples", size * self.per_rank_batch_size)]

    @property
    def facts(self) -> list[JsonObject]:
        data: object = self.user_loader
        facts: JsonObject = {"unit": "batches"}
        if isinstance(self.user_loader, DataLoader):
            data = self.user_loader.dataset
            facts = {"unit": "samples", "workers": self.user_loader.num_workers}
        facts["size"] = length_of(data)
        facts["order"] = kind_of(data)
        if isinstance(data, DescribesMixtures):
            facts["mixtures"] = data.describe_mixtures()
            facts["continues"] = self.stateful
        return [facts]

    def state(self) -> SourceState:
        if not self.stateful and not self.generators:
            return None
        if not self.stateful:
            return {"generators": self._began}
        loader_state = self.loader.state_dict()
        if not any(self.workers):
            # The state of objects in this process may still change.
            loader_state = copy.deepcopy(loader_state)
        return {
            "loader": loader_state,
            "at": (self.rank + 1) % self.size,
            "generators": self._began,
        }

    @property
    def stateful_loaders(self) -> Sequence[object]:
        if not self.stateful:
            return ()
        return (self.user_loader,)

    def resharded(self, state: SourceState, further: int) -> SourceState:
        within_turn = state is not None and state["at"]
        if not self.options.shard or self._divides_itself or within_turn:
            raise CheckpointError(
                "loaders",
                None,
                f"each rank read its own {kind_of(self.user_loader)}: the states need the same number of ranks",
                fix="resume with the same number of ranks",
            )
        return {"generators": self._began, **(state or {}), "further": further}

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: SourceState = None
    ) -> Iterator[SizedBatch]:
        # The inner ones first: a data set that passes another epoch on to its parts has the last word.
        set_epoch(
            epoch,
            *reversed(worker_parts(self.user_loader)),
            getattr(self.user_loader, "sampler", None),
            getattr(self.user_loader, "batch_sampler", None),
            self.user_loader,
        )
        self.draw_from(state)
        if self.generator is not None:
            # The same seed on all ranks: a dataset that shuffles in its workers must yield the same stream everywhere.
            self.generator.manual_seed(derive_seed(self.options.seed, epoch, turn))
        resumes = self.stateful and state is not None and "loader" in state
        if resumes:
            self._load(state["loader"])
        elif self._loaded:
            self._forget()
        # The next batch of a started epoch is read under the generators of the run; one that ranks compare is not.
        continues = resumes and start > 0 and self._divides_itself is not None
        if self._draws_here() and not continues:
            seed = derive_seed(self.options.seed, epoch, turn)
            iterator = self._seeded(seed)
        else:
            iterator = iter(self.loader)
        # Also in the middle of an epoch, if the checkpoint of one rank does not tell how it is divided.
        if self._divides_itself is None:
            iterator = self._compare(iterator)
            # One rank did not know; as many ranks as now had another kind of loader, each with its own position.
            other_ranks = self._saved_ranks != self.options.rank_and_size[1]
            if self._divides_itself and start and other_ranks:
                raise divided_for_other_ranks()
        # An iterator that has ended yields nothing more: an error instead of an empty epoch.
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
        pairs = iterator
        if not self._counts:
            pairs = self._sizes.pairs(iterator)
        if self.size == 1:
            return pairs
        first_rank = 0
        if resumes:
            first_rank = state["at"]
        return self._turns(pairs, first_rank)

    def _draws_here(self) -> bool:
        """Whether this process makes a new stream that the ranks divide, so its order must be the same on all."""
        if self.size == 1 or self.once:
            return False
        return not isinstance(self.loader, DataLoader) or not self.loader.num_workers

    def _load(self, state: SourceState) -> None:
        self._loaded = True
        self.loader.load_state_dict(state)

    def _forget(self) -> None:
        """Begin the next epoch at its start: litdata's loader continues from a loaded state until it has ended once."""
        self._loaded = False
        from_litdata = type(self.loader).__module__.startswith("litdata.")
        if from_litdata and getattr(self.loader, "restore", None) is True:
            self.loader.restore = False

    def _seeded(self, seed: int) -> Iterator[Batch]:
        """Start with equal generators on all ranks, so that a stream that shuffles has the same order everywhere."""
        with preserved_rng():
            seed_globals(seed)
            iterator = iter(self.loader)
            # A generator function draws nothing before its first item.
            first = list(islice(iterator, 1))
        yield from first
        yield from iterator

    def _released(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Release the iterator, and so its workers, when reading ends early: torchdata's loader keeps it."""
        try:
            yield from iterator
        finally:
            if kept_iterator(self.loader) is iterator:
                drop_iterator(self.loader)

    def _drain(self, iterator: Iterator[Batch], start: int) -> None:
        """Read and discard the batches before ``start``, and restore the global generators."""
        count = start * self.size
        first_rank = self.options.rank == 0
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
            turn = self.options.turn
            if turn is not None and read <= count - self.size * turn:
                warn_of_early_end(self.user_loader, start)
            warnings.warn(
                f"{kind_of(self.user_loader)} cannot skip by index: to start at batch {start}, "
                f"{plural(read, 'batch was', 'batches were')} read and"
                f" discarded in {time.monotonic() - began:.1f} s. With state_dict() and load_state_dict(state) on"
                f" {self._owner()} a resume does not read them",
                stacklevel=2,
            )

    def _owner(self) -> str:
        if isinstance(self.user_loader, DataLoader):
            return f"its dataset ({kind_of(self.user_loader.dataset)})"
        return "it"

    def _first(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            yield batch
            return
        raise DataError(
            f"this {kind_of(self.user_loader)} has no batches left for another pass",
            found="an exhausted iterator, which can be read only once",
            fix="pass something that can be iterated again: a DataLoader, a list, or an object whose __iter__"
            " makes a new iterator",
        )

    def _turns(
        self, pairs: Iterator[SizedBatch], turn_rank: int
    ) -> Iterator[SizedBatch]:
        """Yield this rank's batches of the stream; ``turn_rank`` is the rank that the first one belongs to."""
        for pair in pairs:
            if turn_rank == self.rank:
                yield pair
            turn_rank = (turn_rank + 1) % self.size
        if 0 < turn_rank <= self.rank:
            yield MISSING


@final
class _Counting:
    """A user's ``collate_fn`` that also returns the number of its samples, in this process or a worker."""

    def __init__(self, collate: Callable[[list[Any]], Batch]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> SizedBatch:
        return self.collate(samples), len(samples)


def has_state(owner: object) -> bool:
    """Whether an object has torchdata's state protocol."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(owner, name, None)) for name in methods)


def _reading_states(loader: DataLoader[Batch]) -> Any:
    """Return a loader as torchdata's, which reads the state of its dataset in this process and in workers."""
    kind = type(loader)
    # A subclass that overrides either method makes its own batches.
    if kind.__iter__ is not DataLoader.__iter__:
        return loader
    if iterator_method(kind) is not iterator_method(DataLoader):
        return loader
    # Batches that arrive in any order: no state describes that.
    if loader.num_workers and not getattr(loader, "in_order", True):
        return loader
    from torchdata.stateful_dataloader import StatefulDataLoader

    # Not its constructor, which lacks newer arguments of torch and attributes of a subclass.
    stateful: Any = StatefulDataLoader.__new__(StatefulDataLoader)
    stateful.__dict__.update(
        loader.__dict__,
        snapshot_every_n_steps=1,
        next_iter_state=None,
        _initial_iter_for_state_dict=False,
    )
    return stateful
