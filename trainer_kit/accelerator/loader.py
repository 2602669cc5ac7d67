"""A loader for raw loops: sharded over processes, with batches on the device and a position that can be saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
)

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.split_batches import split_loader
from trainer_kit.accelerator.uneven_batches import Turn, evened, filled
from trainer_kit.compat.options import DataLoaderConfiguration
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.core.tensors import move_to_device
from trainer_kit.data import EMPTY, MISSING, Feed
from trainer_kit.data.combined import CombinedLoader, read_together
from trainer_kit.data.division import check_division, divide_by_itself, fingerprint
from trainer_kit.data.order import BatchTurns, SampleBlocks, derive_seed, drawn
from trainer_kit.state.data_changes import describe_changes

__all__ = [
    "BatchSamplerShard",
    "IterableDatasetShard",
    "LaterLoader",
    "PreparedLoader",
    "SeedableRandomSampler",
    "prepare_loader",
    "skip_first_batches",
]


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of a seed and the epoch.

    Args:
        args: of torch's ``RandomSampler``.
        data_seed: the seed; by default torch's initial seed.
        kwargs: of torch's ``RandomSampler``.

    Example:
        >>> sampler = SeedableRandomSampler(range(8), data_seed=3)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first != second
        True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration."""
        self.epoch = epoch


def _shares(
    turns: Iterator[list[Any]],
    whole: int,
    rank: int,
    each: int,
    drop_last: bool,
    even: bool,
) -> Iterator[Any]:
    """Yield a process's share of each turn; a short turn is filled up from the start of the data."""
    first: list[Any] = []
    for turn in turns:
        first = first or turn
        if len(turn) < whole:
            if drop_last:
                return
            turn = (
                turn + list(islice(cycle(first), whole - len(turn))) if even else turn
            )
        if mine := turn[rank * each : (rank + 1) * each]:
            yield mine


class BatchSamplerShard(BatchSampler):
    """The batches of one process, from a batch sampler for all processes.

    Args:
        batch_sampler: the batch sampler for all processes.
        num_processes: the number of processes.
        process_index: the rank of this process.
        split_batches: each process gets a part of every batch; otherwise every ``num_processes``-th batch.
        even_batches: every process gets equally many samples: the last batches are filled up from the start.

    Raises:
        ConfigurationError: ``split_batches`` with a batch size that is not divisible by the number of processes.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> [list(BatchSamplerShard(BatchSampler(range(7), 2, False), 2, rank)) for rank in (0, 1)]
        [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (
            self.batch_size is None or self.batch_size % num_processes
        ):
            raise ConfigurationError(
                "split_batches needs a batch size that can be divided by the number of processes",
                found=f"batch_size={self.batch_size} over {num_processes} processes",
            )

    @property
    def total_length(self) -> int:
        """The number of batches over all processes."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the batch sampler for all processes."""
        return self.batch_sampler.sampler

    def __len__(self) -> int:
        whole, rest = divmod(
            self.total_length, 1 if self.split_batches else self.num_processes
        )
        return whole + (
            rest > 0
            and not self.drop_last
            and (self.even_batches or self.process_index < rest)
        )

    def __iter__(self) -> Iterator[Any]:
        source, each, turn = (
            iter(self.batch_sampler),
            self.batch_size or 1,
            self.num_processes,
        )
        if self.split_batches:
            each, turn = each // self.num_processes, 1
        turns = iter(lambda: list(islice(source, turn)), [])
        rows = (
            turns
            if self.batch_size is None
            else ([index for batch in turn for index in batch] for turn in turns)
        )
        shares = _shares(
            rows,
            each * self.num_processes,
            self.process_index,
            each,
            self.drop_last,
            self.even_batches,
        )
        return (share[0] for share in shares) if self.batch_size is None else shares


@final
class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, from a stream for all processes.

    Args:
        dataset: the stream.
        batch_size: the batch size of the loader that reads this data set.
        drop_last: drop the samples of an incomplete last batch.
        num_processes: the number of processes.
        process_index: the rank of this process.
        split_batches: ``batch_size`` is the total over all processes.

    Example:
        >>> [list(IterableDatasetShard(range(5), 2, num_processes=2, process_index=rank)) for rank in (0, 1)]
        [[0, 1, 4, 0], [2, 3, 1, 2]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ConfigurationError(
                "split_batches needs a batch size that can be divided by the number of processes",
                found=f"batch_size={batch_size} over {num_processes} processes",
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the stream, if it has this method."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole = (
            self.batch_size
            if self.split_batches
            else self.batch_size * self.num_processes
        )
        turns = (
            len(self.dataset) // whole
            if self.drop_last
            else -(-len(self.dataset) // whole)
        )
        return turns * whole // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        whole = (
            self.batch_size
            if self.split_batches
            else self.batch_size * self.num_processes
        )
        source = iter(self.dataset)
        turns = iter(lambda: list(islice(source, whole)), [])
        each = whole // self.num_processes
        for share in _shares(
            turns, whole, self.process_index, each, self.drop_last, True
        ):
            yield from share


_END: Any = object()
_NOT_READ: Any = object()


@final
class PreparedLoader:
    """Iterating it yields this process's batches of one epoch; each epoch has its own order.

    Attributes of the user's loader (``dataset``, ``batch_size``, …) are available here too.

    Args:
        loader: the user's loader; it does not change.
        make_feed: makes the feed of this process for a seed; its first argument is ``even``.
        group: the processes over which data are sharded.
        device: the device of batches; None: batches are not moved.
        window: the Accelerator's; records which loader is read.
        seed: of the data order, the same on every process.
        even: fill up the last batch from the start of the data, so that every process gets equally many samples.
        dispatch: a group whose first process reads all data and sends the others theirs; None: each process reads.
        non_blocking: copies to an accelerator are asynchronous.
        shard: selects the part of a batch that this process computes; None: all of it.
        end: called when the loop has finished a batch outside a window.
        before_epoch: called before the first batch of an epoch.

    Attributes:
        iteration: the number of epochs begun so far, from which the order of the next one follows.
        size: the number of samples in the current batch on this process.
        weight: the weight of the current batch on this process.
        total: its weight over all processes; None: unknown without an exchange.
        nominal: the weight of a full batch, the same on every process.
        asked: whether `ask_for_sizes` was called.
        counts: for each process, the samples of the current batch that are not repeated; None: all of them.
        end_of_dataloader: whether the current batch is the last one.
        batches_read: the number of batches yielded in all epochs.
    """

    def __init__(
        self,
        loader: Any,
        make_feed: Callable[[bool, int], Feed],
        group: Group,
        device: torch.device | None,
        window: Accumulation,
        *,
        seed: int,
        even: bool,
        dispatch: Group | None = None,
        non_blocking: bool = False,
        shard: Callable[[Any], Any] | None = None,
        end: Callable[[], None] | None = None,
        before_epoch: Callable[[], None] | None = None,
    ) -> None:
        self.dataloader = loader
        self.group = group
        self.device = device
        self.window = window
        self.seed = seed
        self.even = even
        self.dispatch = dispatch
        self.non_blocking = non_blocking
        self.feed = make_feed(even, seed)
        self._shard = shard
        self._end = end
        self._before_epoch = before_epoch
        self._make_feed = make_feed
        self.iteration = 0
        self.size = 1
        self.weight = self.nominal = 1.0
        self.total: float | None = None
        self.counts: list[int] | None = None
        self.asked = False
        self.end_of_dataloader = False
        self._position: tuple[int, int] | None = (
            None  # (epoch, batches yielded) of the current iteration
        )
        self._resume: tuple[int, int] | None = None
        self.batches_read = 0  # batches yielded in all epochs
        # Whether the feed divides several loaders, each by itself, so that each process reads all batches of its feed.
        self._several = self.feed.size > 1 and not self.feed.indexed
        # Whether the loader divides the data by itself, so that each process reads all of its own batches.
        self._alone = self._several or (
            group.size > 1
            and not self.feed.indexed
            and divide_by_itself(loader) is not None
        )
        # Whether each process knows all batches: the main process reads for all, or each reads the whole stream.
        self._shared = not self._alone and (
            dispatch is not None or (group.size > 1 and not self.feed.indexed)
        )
        self._compares = False
        self._turn: tuple[int, list[int] | None, bool] = (
            0,
            None,
            False,
        )  # samples, `counts`, whether it is the last
        self._drop_last = bool(getattr(loader, "drop_last", False))

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of the current iteration; a copy continues at the same position."""
        fresh: dict[str, Any] = {
            "feed": None,
            "_position": None,
            "_resume": self._resume or self._position,
        }
        return {**vars(self), **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.feed = self._make_feed(self.even, self.seed)

    def __len__(self) -> int:
        length = self.feed.length
        if length is None:
            raise TypeError(
                f"object of type {type(self.dataloader).__name__!r} has no len()"
            )
        if not self._shared:
            return length
        return (
            length // self.group.size
            if self._drop_last
            else -(-length // self.group.size)
        )

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a batch over all processes."""
        return (self.feed.per_rank_batch_size or 1) * self.group.size

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the data set."""
        return len(self.dataloader.dataset)

    @property
    def remainder(self) -> int:
        """The last batch's samples over all processes, without repeated ones; 0 for a full batch.

        -1 for a stream before its last batch, for batches of unknown size, and with ``drop_last``.
        """
        if self._drop_last:
            return -1
        dataset = getattr(self.dataloader, "dataset", None)
        if isinstance(dataset, Sized) and self.feed.per_rank_batch_size is not None:
            return len(dataset) % self.total_batch_size
        return (
            sum(self.counts)
            if self.end_of_dataloader and self.counts is not None
            else -1
        )

    @property
    def batch_sampler(self) -> Any:
        """The batches of this process as indices, or the user's batch sampler where processes do not divide it."""
        given = _in_order(self, self.dataloader.batch_sampler)
        divided = (
            isinstance(given, BatchSampler) and self.group.size > 1 and not self._shared
        )
        return _OwnBatches(self, given) if divided else given

    def set_even(self, even: bool) -> None:
        """Set whether the next epochs fill up the last batch."""
        if even != self.even:
            begun, state = self._position is not None, self.state_dict()
            self.even = even
            self.feed = self._make_feed(even, self.seed)
            if (
                not begun
            ):  # keeps the generators' states, and the position of a loaded state
                self._load_tracks([state["track"]] * self.group.size)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch``; by default it is the one after the last."""
        self.iteration = epoch
        if self._resume is not None and self._resume[0] != epoch:
            self._resume = None

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(None)

    def begin(self, batches: int) -> Iterator[Any]:
        """Iterate over the next epoch from batch ``batches`` on; after `load_states` this is the interrupted epoch."""
        return self._iterate(batches)

    def _iterate(self, begin: int | None) -> Iterator[Any]:
        """Iterate over one epoch; leaving the loop early ends the epoch.

        A loader whose length is unknown, or only a hint, is read one batch ahead, to detect its last batch.
        """
        epoch, start = (self.iteration, 0) if self._resume is None else self._resume
        start, self._resume = start if begin is None else begin, None
        if (
            self._before_epoch is not None and not start
        ):  # a resumed epoch continues with each process's own states
            self._before_epoch()
        window = self.window
        if self._position is not None:
            # A feed reads one epoch at a time: make another while one is being read, or was abandoned.
            self.feed = self._make_feed(self.even, self.seed)
        feed = self.feed
        source = self._open(feed, epoch, start)
        together = self._shared or (self._alone and self.even)
        self.iteration, self.end_of_dataloader = epoch + 1, False
        self._position = (epoch, start)
        window.reading.append(self)
        window.batches = self
        known = len(self) if feed.exact and feed.length is not None else None
        ahead = known is None and not together
        at, after = start, _NOT_READ
        device = self.device
        if (
            device is not None
            and device.type == "cpu"
            and not torch.accelerator.is_available()
        ):
            device = None  # batches on the CPU need no move
        self.nominal = float(self.feed.per_rank_batch_size or 1)
        try:
            while (
                pair := next(source, _END) if after is _NOT_READ else after
            ) is not _END:
                if ahead:
                    after = next(source, _END)
                if missing := pair is MISSING and self.even:
                    pair = self._first(epoch)
                batch, size = pair
                if batch is EMPTY:
                    break  # this process has no samples of the last batch
                self._note(
                    feed, at, size, missing, after is _END if ahead else at + 1 == known
                )
                at += 1
                self.batches_read += 1
                self._position = (epoch, at)
                if feed.stateful:
                    feed.loader_state.forget(
                        at * self.group.size if self._shared else at
                    )
                window.batches = self
                if device is not None:
                    batch = move_to_device(batch, device, self.non_blocking)
                yield batch if self._shard is None else self._shard(batch)
                if self._end is not None and window.sync:
                    self._end()
        finally:
            self._position = None
            window.end_reading(self)

    def _first(self, epoch: int) -> Any:
        return next(iter(self.feed.sized_epoch(epoch, 0)), MISSING)

    def _note(self, feed: Feed, at: int, mine: int, missing: bool, last: bool) -> None:
        """Record a batch's size and weight before it is yielded; ``missing``: this is a padding batch."""
        size = self.group.size
        self.size, self.end_of_dataloader, self.counts = mine, last, None
        self.weight = self.total = mine
        if size == 1 and not self._shared:
            return
        if self._shared or (self._alone and self.even):
            self.total, self.counts, self.end_of_dataloader = self._turn
            return
        total, each = feed.samples(at), feed.per_rank_batch_size
        self.total = total
        if total is None or each is None:
            self._ask(missing, last, total)
        elif total < each * size:
            self._count_last(total, each)

    def _count_last(self, total: int, each: int) -> None:
        """Record which of the ``total`` samples of an incomplete last batch each process has."""
        size = self.group.size
        if self.even and not self.feed.interleave:
            # Samples that are not repeated come first, in rank order.
            self.counts = [
                min(each, max(0, total - rank * each)) for rank in range(size)
            ]
            self.total = each * size
            return
        share, more = divmod(total, size)
        self.counts = [share + (rank < more) for rank in range(size)]
        if self.even:
            self.total = max(self.counts) * size

    def ask_for_sizes(self) -> None:
        """Warn if the sample counts that determine batch weights are uncertain."""
        self.asked = True
        self.feed.ask_for_sizes(
            "call accelerator.backward(loss, weight=...) with the sum over what weight counts"
        )

    def _ask(self, missing: bool, last: bool, samples: int | None) -> None:
        if (
            not self.even
        ):  # a process may have no batches left: no exchange, equal weights
            self.weight, self.total = 1.0, float(self.group.size)
            self.nominal = 1.0
        elif last:
            rows = self.group.agree([self.size, 0 if missing else self.size])
            self.total = sum(row[0] for row in rows)
            rest = sum(row[1] for row in rows) if samples is None else samples
            self.counts = []
            for row in rows:  # the last processes have the repeated batches
                count = int(min(row[1], rest))
                rest -= count
                self.counts.append(count)

    def compare_first(self) -> None:
        """In the next iteration, compare the first batches of the processes: see `Feed`, ``agree``."""
        self._compares = self._shared

    def _open(self, feed: Feed, epoch: int, start: int) -> Iterator[Any]:
        reads = self.dispatch is None or self.dispatch.rank == 0 or self._compares
        source = (
            feed.sized_epoch(epoch, start * (self.group.size if self._shared else 1))
            if reads
            else iter(())
        )
        if self._compares:
            source = self._compared(source)
        if self._shared:
            return self._in_turns(feed, source)
        return self._in_step(source) if self._alone and self.even else source

    def _compared(self, source: Iterator[Any]) -> Iterator[Any]:
        """Find out whether the loader divides the data by itself, and return all of its batches.

        The other processes read their first batch with the generators of the first one. An error there says that only
        the first one can read.
        """
        self._compares = False
        everyone = self.dispatch or self.group
        state = everyone.broadcast(rng_state())
        first: list[Any] = []
        readable = True
        problem: Exception | None = None
        try:
            if everyone.rank == 0:
                first = list(islice(source, 1))
            else:
                with preserved_rng():
                    restore_rng(state)
                    first = list(islice(source, 1))
        except Exception as error:  # of any class: user code reads the data
            problem, readable = error, False
        rows = everyone.agree([fingerprint(first), readable])
        readers = [row[0] for row in rows if row[1]]
        if len(readers) == len(rows) and len(set(readers)) > 1:
            self._alone, self._shared, self.dispatch = True, False, None
            if everyone.rank == 0:
                warnings.warn(
                    f"the first batch of this {type(self.dataloader).__name__} differs from process to process: it is"
                    " taken to divide the data by itself, and every process reads all of its batches."
                    " DataLoaderConfiguration(dispatch_batches=True) reads it on the main process only",
                    stacklevel=2,
                )
        if problem is not None and everyone.rank == 0:
            return _raising(problem)
        return chain(first, source)

    def _in_step(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of data that divide themselves, equally many on every process.

        A process that has no more batches repeats its last one, of which no sample counts.
        """
        group = self.group
        source = (read for read in source if read is not MISSING)
        pair, after = MISSING, next(source, _END)
        rows = group.agree([after is not _END])
        if not any(row[0] for row in rows):
            return
        if not all(
            row[0] for row in rows
        ):  # a process without any batch gets another one's
            reader = [bool(row[0]) for row in rows].index(True)
            lent = group.broadcast(after if group.rank == reader else None, reader)
            pair = lent if after is _END else pair
        more = True
        while more:
            count = 0
            if after is not _END:
                pair, count = after, after[1]
                after = next(source, _END)
            rows = group.agree([count, after is not _END, pair[1]])
            counts = [int(row[0]) for row in rows]
            longest = int(max(row[2] for row in rows))
            more = any(row[1] for row in rows)
            self._turn = (
                longest * group.size,
                None if min(counts) == longest else counts,
                not more,
            )
            yield filled(pair, longest)

    def _in_turns(self, feed: Feed, source: Iterator[Any]) -> Iterator[Any]:
        """Yield this process's batches of a stream, which is read in turns of one batch per process.

        If the main process reads for all, an error of its reader is raised on every process.
        """
        rank, processes = self.group.rank, self.group.size

        def read() -> Turn:
            turn = list(islice(source, processes))
            return [] if self._drop_last and len(turn) < processes else turn

        after = self._turn_of(read)
        while turn := after:
            after = self._turn_of(read)
            counts: list[int] | None = [size for _, size in turn] + [0] * (
                processes - len(turn)
            )
            if len(set(counts or ())) == 1:
                counts = None
            elif self.even and (
                not after or feed.per_rank_batch_size is not None
            ):  # each worker has a last batch
                turn, counts = evened(
                    turn,
                    processes,
                    getattr(self.dataloader, "collate_fn", None) is default_collate,
                )
            self._turn = sum(size for _, size in turn), counts, not after
            yield turn[rank] if rank < len(turn) else MISSING

    def _turn_of(self, read: Callable[[], Turn]) -> Turn:
        return read() if self.dispatch is None else on_rank_zero(self.dispatch, read)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, batches yielded, the seed, and the state of the user's loader."""
        epoch, batch = self._resume or self._position or (self.iteration, 0)
        inside = self._position is not None or self._resume is not None
        each = self.group.size if self._shared else 1
        feed = self.feed
        begun = epoch if inside or feed.once else None
        state = feed.loader_state.state_dict(
            begun, batch * each, self.batches_read * each
        )
        place = {
            "epoch": epoch,
            "batch": batch,
            "samples": batch * self.total_batch_size,
            "read": self.batches_read,
        }
        return {
            **place,
            "seed": self.seed,
            "track": state,
            "alone": None if self._compares else self._alone,
            "data": feed.facts,
        }

    def describe_changes(self, state: Mapping[str, Any]) -> list[str]:
        """Return a line for each change of the data since a state, if that lies inside an epoch."""
        epoch, batch = self._resume or (int(state["epoch"]), 0)
        if not batch:
            return []
        if self.feed.exact and self.feed.length is not None and batch > len(self):
            return [
                f"the state is at batch {batch} of epoch {epoch}, which has {len(self)} now: the loader yields no"
                " batches in that epoch"
            ]
        return describe_changes(state.get("data"), self.feed.facts, epoch)

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue the next iteration at the position of the states, in the same order.

        Args:
            states: of every process of the saved run; the number of processes and the batch size may differ now.

        Raises:
            CheckpointError: with the current batch size no batch ends at the saved position.
        """
        alone = states[0].get(
            "alone", False
        )  # older checkpoints: every stream was divided here
        if self._compares and alone is not None:
            self._compares = False
            if alone:
                self._alone, self._shared, self.dispatch = True, False, None
        if self._alone and len(states) != self.group.size and int(states[0]["batch"]):
            raise CheckpointError(
                "loaders",
                None,
                "the loader divides the data itself, and its position is known only for the processes that saved",
                fix="resume with the same number of processes, or from the end of an epoch",
            )
        epoch, batch, samples = (
            int(states[0][key]) for key in ("epoch", "batch", "samples")
        )
        if samples != batch * self.total_batch_size:
            batch = self._batches_of(samples)
        self.iteration, self._position = epoch, None
        self._resume = (epoch, batch) if batch else None
        self.seed, self.batches_read = int(states[0]["seed"]), int(states[0]["read"])
        self.feed = self._make_feed(self.even, self.seed)
        self._load_tracks([state["track"] for state in states])

    def _load_tracks(self, tracks: Sequence[Any]) -> None:
        """Restore the readers; the main process has read the whole stream, with and without dispatch."""
        rank, size = self.group.rank, self.group.size
        if self._several or (not self._shared and self.feed.indexed):
            self.feed.loader_state.load_state_dict(tracks, rank)
            return
        own = tracks[rank] if len(tracks) == size and self.dispatch is None else None
        self.feed.loader_state.load_state_dict([tracks[0] if own is None else own], 0)

    def describe(self) -> str:
        """Describe the data, their order and their sharding in one line."""
        text = self.feed.describe()
        if self.dispatch is not None:
            return f"{text}; the main process reads, and hands every {self.group.size} batches round"
        each = (
            f"; every process reads all of it and keeps each {self.group.size}th batch"
        )
        return f"{text}{each}" if self._shared else text

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the next iteration at a saved position; each process passes its own state.

        Raises:
            CheckpointError: the number of processes or the batch size differs, and the position in a stream cannot be
                converted.
        """
        own = dict(state_dict)
        if (
            self.feed.stateful
            and own["samples"] != own["batch"] * self.total_batch_size
        ):
            raise CheckpointError(
                "the state of a loader",
                "samples",
                f"{own['batch']} batches had {own['samples']} samples, and would have other ones now",
                fix="resume with as many processes and the same batch size, or by accelerator.load_state",
            )
        self.load_states([own] * self.group.size)
        if self.group.rank == 0:
            for line in self.describe_changes(own):
                warnings.warn(line, stacklevel=2)

    def _batches_of(self, samples: int) -> int:
        """Return the number of batches in an epoch that hold this many samples."""
        size, feed = self.total_batch_size, self.feed
        if feed.exact and feed.length is not None:
            last = None if self._shared else feed.samples(len(self) - 1)
            if samples >= (len(self) - 1) * size + (last or size):
                return len(self)
        batches, rest = divmod(samples, size)
        if rest:
            raise CheckpointError(
                "loaders",
                "samples",
                f"{samples} samples are not a whole number of batches of {size}",
                fix="resume with as many processes and batches of the same size, or with a size that divides them",
            )
        return batches


def _raising(error: Exception) -> Iterator[Any]:
    """An iterator that raises an error, where the processes expect one of the reader."""
    raise error
    yield


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader whose iterations begin with batch ``num_batches``; a prepared loader reads no earlier data.

    Args:
        dataloader: a loader, prepared or not, or any iterable; it does not change.
        num_batches: the number of batches that are skipped, in each iteration.

    Example:
        >>> list(skip_first_batches([1, 2, 3], 2))
        [3]
    """
    return LaterLoader(dataloader, num_batches)


@final
class _OwnOrder(SeedableRandomSampler):
    """The order of a prepared loader with ``shuffle=True``; its seed and its epoch are the loader's."""

    def __init__(self, loader: PreparedLoader, given: RandomSampler) -> None:
        vars(self).update(vars(given))
        self._loader, self._given = loader, given
        self.initial_seed = loader.seed

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the next iteration of the loader."""
        return self._loader.iteration

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return drawn(self._given, derive_seed(self._loader.seed, self.epoch, 0))


def _in_order(loader: PreparedLoader, batches: Any) -> Any:
    """Return torch's batch sampler with the order that the loader draws from seed and epoch; others unchanged."""
    given = getattr(batches, "sampler", None)
    if (
        type(batches) is BatchSampler
        and type(given) is RandomSampler
        and given.generator is None
    ):
        return BatchSampler(
            _OwnOrder(loader, given), batches.batch_size, batches.drop_last
        )
    return batches


@final
class _OwnBatches(BatchSamplerShard):
    """The batch sampler of a prepared loader; `even_batches` is the loader's."""

    def __init__(self, loader: PreparedLoader, given: BatchSampler) -> None:
        self._loader = loader
        size, each = (
            getattr(given, "batch_size", None),
            loader.feed.per_rank_batch_size,
        )  # None: not divided
        split = None not in (size, each) and size != each
        super().__init__(
            given, loader.group.size, loader.group.rank, split, loader.even
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        each = loader.feed.per_rank_batch_size
        drops, rank, size = self.drop_last, self.process_index, self.num_processes
        pads = self.even_batches
        if each is None and loader.feed.interleave:
            turns = BatchTurns(
                self.batch_sampler, rank=rank, size=size, sized=True, pad=pads
            )
            turns.begin(seed=0, start=0)
            return iter(turns)
        if each is None:
            return super().__iter__()
        order: Any = [index for batch in self.batch_sampler for index in batch]
        if loader.feed.interleave and type(self.batch_sampler) is BatchSampler:
            # Its last batch may be dropped on all processes, and complete on each with a repeated sample.
            order = self.batch_sampler.sampler
        blocks = SampleBlocks(
            order,
            each,
            drop_last=drops,
            rank=rank,
            size=size,
            pad=pads,
            interleave=loader.feed.interleave,
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


@final
class LaterLoader:
    """A view of a loader that begins at a later batch."""

    def __init__(self, loader: Any, batches: int) -> None:
        self.loader = loader
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.begin(self.batches)
        return islice(iter(self.loader), self.batches, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "batches"):
            raise AttributeError(name)
        return getattr(self.loader, name)


def prepare_loader(
    loader: Any,
    group: Group,
    world: Group,
    device: torch.device | None,
    window: Accumulation,
    config: DataLoaderConfiguration,
    seed: int,
    shard: Callable[[Any], Any] | None = None,
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
    batch_size, source = None, loader
    if config.split_batches:
        batch_size, source = split_loader(loader, group.size)
    stream = not Feed(source, seed=seed).indexed
    asked = config.dispatch_batches
    division = divide_by_itself(loader) if stream and group.size > 1 else None
    if division is not None:
        check_division(division, group.rank, group.size)
        if asked:
            raise ConfigurationError(
                "dispatch_batches=True reads on the main process only, and this loader gives it only its own part",
                found=f"a {type(division.part).__name__} that divides the data for {division.ranks} processes",
                fix="leave dispatch_batches out, or do not let the loader divide the data",
            )
    # A stream shuffled during reading has a different order on each process, unless one process reads for all.
    several = stream and not asked and isinstance(read_together(source), CombinedLoader)
    alone = several or division is not None
    dispatch = world.size > 1 and not alone and (stream if asked is None else asked)
    reads_all = dispatch or (stream and not several)
    rank, size = (0, 1) if reads_all else (group.rank, group.size)

    turn = group.size if reads_all else 1
    agree = group.agree if several and group.size > 1 else None
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
        dispatch=world if dispatch else None,
        non_blocking=config.non_blocking,
        shard=shard,
        end=end,
        before_epoch=before_epoch,
    )
    if stream and not asked:
        prepared.compare_first()
    return prepared


def _make_feed(
    loader: Any,
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
