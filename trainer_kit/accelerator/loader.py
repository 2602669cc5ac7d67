"""A loader for custom training loops: sharded over ranks, with batches on the device and a saved position."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from typing import Any, Final, final

import torch
from torch.utils.data import BatchSampler, default_collate

from trainer_kit.accelerator.accumulation import Accumulation
from trainer_kit.accelerator.generators import draw_as_torch
from trainer_kit.accelerator.loader_samplers import LoaderBatches, batches_in_order
from trainer_kit.accelerator.uneven_batches import SizedBatch, Turn, evened, filled
from trainer_kit.core.collective_errors import on_rank_zero
from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.types import Batch, Loaders, SavedState, StateDict
from trainer_kit.data import EMPTY, MISSING, Feed
from trainer_kit.data.division import divide_by_itself, fingerprint
from trainer_kit.state.data_changes import describe_changes

__all__ = [
    "LaterLoader",
    "PreparedLoader",
    "skip_first_batches",
]


_END: Final[Any] = object()
"""Marks the end of a source; None could be a batch."""
_NOT_READ: Final[Any] = object()
"""The next batch while none was read ahead."""


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
        asked_for_sizes: whether `ask_for_sizes` was called.
        counts: for each process, the samples of the current batch that are not repeated; None: all of them.
        end_of_dataloader: whether the current batch is the last one.
        batches_read: the number of batches yielded in all epochs.
    """

    def __init__(
        self,
        loader: Loaders,
        make_feed: Callable[[bool, int], Feed],
        group: Group,
        device: torch.device | None,
        window: Accumulation,
        *,
        seed: int,
        even: bool,
        dispatch: Group | None = None,
        non_blocking: bool = False,
        shard: Callable[[Batch], Batch] | None = None,
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
        self.weight = 1.0
        self.nominal = 1.0
        self.total: float | None = None
        self.counts: list[int] | None = None
        self.asked_for_sizes = False
        self.end_of_dataloader = False
        # The epoch and the batches yielded of the current iteration.
        self._position: tuple[int, int] | None = None
        # The same, where the next iteration begins.
        self._resume: tuple[int, int] | None = None
        self.batches_read = 0
        # Whether the feed divides several loaders, each by itself, so that each process reads all batches of its feed.
        self._has_several_loaders = self.feed.size > 1 and not self.feed.indexed
        is_distributed_stream = group.size > 1 and not self.feed.indexed
        # Whether the loader divides the data by itself, so that each process reads all of its own batches.
        self._divides_itself = self._has_several_loaders or (
            is_distributed_stream and divide_by_itself(loader) is not None
        )
        # Whether each process knows all batches: the main process reads for all, or each reads the whole stream.
        # Positions of the reader then count all batches, those of this loader its own.
        self._reads_all = not self._divides_itself and (
            dispatch is not None or is_distributed_stream
        )
        # Whether the next iteration finds out whether the loader divides the data by itself.
        self._compares = False
        # The samples of a turn, their `counts`, and whether it is the last turn.
        self._turn: tuple[int, list[int] | None, bool] = (0, None, False)
        self._drop_last = bool(getattr(loader, "drop_last", False))

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __getstate__(self) -> StateDict:
        """Leave out the state of the current iteration; a copy continues at the same position."""
        # The feed holds iterators and worker processes, which cannot be copied.
        return {
            **vars(self),
            "feed": None,
            "_position": None,
            "_resume": self._resume or self._position,
        }

    def __setstate__(self, state: SavedState) -> None:
        vars(self).update(state)
        self.feed = self._make_feed(self.even, self.seed)

    def __len__(self) -> int:
        length = self.feed.length
        if length is None:
            raise TypeError(
                f"object of type {type(self.dataloader).__name__!r} has no len()"
            )
        # The length of the feed is that of this process, except where one reader reads for all of them.
        if not self._reads_all:
            return length
        turns, remaining = divmod(length, self.group.size)
        if remaining and not self._drop_last:
            turns += 1
        return turns

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
        if not self.end_of_dataloader or self.counts is None:
            return -1
        return sum(self.counts)

    @property
    def batch_sampler(self) -> Any:
        """The batches of this process as indices, or the user's batch sampler where processes do not divide it."""
        batch_sampler = batches_in_order(self, self.dataloader.batch_sampler)
        divides = self.group.size > 1 and not self._reads_all
        if divides and isinstance(batch_sampler, BatchSampler):
            return LoaderBatches(self, batch_sampler)
        return batch_sampler

    def set_even(self, even: bool) -> None:
        """Set whether the next epochs fill up the last batch."""
        if even == self.even:
            return
        state = self.state_dict()
        self.even = even
        self.feed = self._make_feed(even, self.seed)
        # Between epochs the new feed continues with the generators' states, and the position of a loaded state.
        if self._position is None:
            self._load_tracks([state["track"]] * self.group.size)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch ``epoch``; by default it is the one after the last."""
        self.iteration = epoch
        if self._resume is not None and self._resume[0] != epoch:
            self._resume = None

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(None)

    def begin(self, batches: int) -> Iterator[Batch]:
        """Iterate over the next epoch from batch ``batches`` on; after `load_states` this is the interrupted epoch."""
        return self._iterate(batches)

    def _iterate(self, begin: int | None) -> Iterator[Batch]:
        """Iterate over one epoch; leaving the loop early ends the epoch.

        A loader whose length is unknown, or only a hint, is read one batch ahead, to detect its last batch.
        """
        epoch, start = self._next_position(begin)
        window = self.window
        if self._position is not None:
            # A feed reads one epoch at a time: make another while one is being read, or was abandoned.
            self.feed = self._make_feed(self.even, self.seed)
        feed = self.feed
        source = self._open(feed, epoch, start)
        self._enter(epoch, start)
        length = self._exact_length
        reads_ahead = length is None and not self._agrees_on_batches
        index = start
        next_pair = _NOT_READ
        device = self._target_device()
        batches_per_turn = self._batches_per_turn
        try:
            while True:
                pair = next_pair
                if pair is _NOT_READ:
                    pair = next(source, _END)
                if pair is _END:
                    break
                is_last = index + 1 == length
                if reads_ahead:
                    next_pair = next(source, _END)
                    is_last = next_pair is _END
                # This process has no batch in the last turn: it repeats its first one, because an exchange of gradients
                # needs all processes. None of its samples counts.
                missing = pair is MISSING and self.even
                if missing:
                    pair = self._first_pair(epoch)
                batch, size = pair
                # This process has no samples of the last batch.
                if batch is EMPTY:
                    break
                # Everything below is true while the loop's body runs, so it is set before the batch is yielded.
                self._note(feed, index, size, missing, is_last)
                index += 1
                self.batches_read += 1
                self._position = (epoch, index)
                # The reader records its state at each batch; those before the current one are not needed any more.
                if feed.stateful:
                    feed.loader_state.forget(index * batches_per_turn)
                # Again, because another loader may have been read since: an evaluation inside the epoch, for example.
                window.batches = self
                if device is not None:
                    batch = move_to_device(batch, device, self.non_blocking)
                # After the move: a part of a sequence is cut on the device, without another copy on the host.
                if self._shard is not None:
                    batch = self._shard(batch)
                yield batch
                # On XLA this cuts the graph: an evaluation loop would otherwise trace all of its batches into one.
                if self._end is not None and window.sync:
                    self._end()
        finally:
            self._position = None
            window.end_reading(self)

    @property
    def _exact_length(self) -> int | None:
        """The number of batches in an epoch; None if it is unknown."""
        # The length of a stream, or of a batch sampler of the user, is only a hint: reading ends with the data.
        if not self.feed.exact or self.feed.length is None:
            return None
        return len(self)

    def _enter(self, epoch: int, start: int) -> None:
        """Record that an epoch is read from a batch on."""
        # Before the first batch: the epoch counts as begun, also where the loop leaves it early.
        self.iteration = epoch + 1
        self.end_of_dataloader = False
        self.nominal = float(self.feed.per_rank_batch_size or 1)
        self._position = (epoch, start)
        self.window.reading.append(self)
        self.window.batches = self

    def _next_position(self, begin: int | None) -> tuple[int, int]:
        """Return the epoch of the next iteration and its first batch, and synchronize generators before a new epoch."""
        epoch = self.iteration
        start = 0
        resumed = self._resume
        if resumed is not None:
            epoch, start = resumed
            self._resume = None
        if begin is not None:
            start = begin
        # A resumed epoch continues with each process's own states: copying those of the main process would change it.
        if self._before_epoch is not None and not start:
            self._before_epoch()
        # The states of a resumed epoch are those after this draw.
        if resumed is None:
            draw_as_torch(self.dataloader, self.group.size, self.batches_read)
        return epoch, start

    @property
    def _agrees_on_batches(self) -> bool:
        """Whether the processes know about each batch how many samples all of them have."""
        return self._reads_all or (self._divides_itself and self.even)

    def _target_device(self) -> torch.device | None:
        """Return the device to which batches are moved; None where they are there already."""
        device = self.device
        if device is None or device.type != "cpu":
            return device
        # On a machine without an accelerator all batches are on the CPU: walking them would be for nothing.
        if not torch.accelerator.is_available():
            return None
        return device

    def _first_pair(self, epoch: int) -> SizedBatch:
        return next(iter(self.feed.sized_epoch(epoch, 0)), MISSING)

    def _note(
        self, feed: Feed, index: int, samples: int, missing: bool, last: bool
    ) -> None:
        """Record a batch's size and weight before it is yielded; ``missing``: this is a padding batch."""
        # Values of a single process first; what follows corrects them where several processes share a batch.
        size = self.group.size
        self.size = samples
        self.end_of_dataloader = last
        self.counts = None
        self.weight = samples
        self.total = samples
        if size == 1 and not self._reads_all:
            return
        # The generator that yielded the batch has counted the samples of all processes. (The condition is that of
        # `_agrees_on_batches`, without a call in every batch.)
        if self._reads_all or (self._divides_itself and self.even):
            self.total, self.counts, self.end_of_dataloader = self._turn
            return
        # Batches divided by index: their sizes follow from the index, without an exchange.
        total = feed.samples(index)
        rank_size = feed.per_rank_batch_size
        self.total = total
        if total is None or rank_size is None:
            self._weigh_unknown(missing, last, total)
        elif total < rank_size * size:
            self._count_last(total, rank_size)

    def _count_last(self, total: int, rank_size: int) -> None:
        """Record which of the ``total`` samples of an incomplete last batch each process has."""
        size = self.group.size
        if self.even and not self.feed.interleave:
            # Samples that are not repeated come first, in rank order.
            self.counts = []
            for rank in range(size):
                remaining = max(0, total - rank * rank_size)
                self.counts.append(min(rank_size, remaining))
            self.total = rank_size * size
            return
        share, longer_shares = divmod(total, size)
        self.counts = [share + (rank < longer_shares) for rank in range(size)]
        if self.even:
            self.total = max(self.counts) * size

    def ask_for_sizes(self) -> None:
        """Warn if the sample counts that determine batch weights are uncertain."""
        self.asked_for_sizes = True
        self.feed.ask_for_sizes(
            "call accelerator.backward(loss, weight=...) with the loss summed over the items that weight counts"
        )

    def _weigh_unknown(self, missing: bool, last: bool, samples: int | None) -> None:
        """Record the weight of a batch whose size on the other processes is unknown.

        Args:
            missing: this is a padding batch.
            last: this is the last batch of the epoch.
            samples: the samples of the batch over all processes; None: unknown.
        """
        if not self.even:
            # A process may have no batches left: no exchange, equal weights.
            self.weight = 1.0
            self.total = float(self.group.size)
            self.nominal = 1.0
            return
        if not last:
            return
        # One exchange in an epoch, for its last batch: `gather_for_metrics` must know which samples are repeats. The
        # weights of earlier batches are corrected at the end of their windows.
        rank_samples = self.size
        if missing:
            rank_samples = 0
        rows = self.group.agree([self.size, rank_samples])
        self.total = sum(row[0] for row in rows)
        remaining: float = sum(row[1] for row in rows)
        if samples is not None:
            remaining = samples
        self.counts = []
        # The last processes have the repeated batches.
        for row in rows:
            count = int(min(row[1], remaining))
            remaining -= count
            self.counts.append(count)

    def compare_first(self) -> None:
        """In the next iteration, compare the first batches of the processes: see `Feed`, ``agree``."""
        self._compares = self._reads_all

    def _open(self, feed: Feed, epoch: int, start: int) -> Iterator[SizedBatch]:
        # Where the main process reads for all, the data of the others are never opened, except once for a comparison.
        source: Iterator[SizedBatch] = iter(())
        if self.dispatch is None or self.dispatch.rank == 0 or self._compares:
            source = feed.sized_epoch(epoch, start * self._batches_per_turn)
        if self._compares:
            source = self._compare_readers(source)
        if self._reads_all:
            return self._read_in_turns(feed, source)
        if self._agrees_on_batches:
            return self._read_in_step(source)
        return source

    @property
    def _batches_per_turn(self) -> int:
        """The batches that the feed reads for each batch of this process."""
        if self._reads_all:
            return self.group.size
        return 1

    def _compare_readers(self, source: Iterator[SizedBatch]) -> Iterator[SizedBatch]:
        """Find out whether the loader divides the data by itself, and return all of its batches.

        The other processes read their first batch with the generators of the first one. An error there says that only
        the first one can read.
        """
        self._compares = False
        world = self.dispatch or self.group
        # A stream that shuffles draws from the process's generators, which scripts may seed differently: without one
        # state for all, equal streams would look divided.
        generators = world.broadcast(rng_state())
        first_batch: list[SizedBatch] = []
        problem: Exception | None = None
        # The data are read by user code, which may raise any exception.
        try:
            if world.rank == 0:
                first_batch = list(islice(source, 1))
            else:
                # This process draws what it would have drawn without the comparison.
                with preserved_rng():
                    restore_rng(generators)
                    first_batch = list(islice(source, 1))
        except Exception as error:
            problem = error
        # Every process reaches this exchange, also one that failed to read: raising before it would hang the others.
        rows = world.agree([fingerprint(first_batch), problem is None])
        fingerprints = [row[0] for row in rows if row[1]]
        all_can_read = len(fingerprints) == len(rows)
        if all_can_read and len(set(fingerprints)) > 1:
            self._set_divides_itself()
            if world.rank == 0:
                warnings.warn(
                    f"the first batch of this {type(self.dataloader).__name__} differs from process to process: it is"
                    " assumed to shard the data itself, and every process reads all of its batches."
                    " DataLoaderConfiguration(dispatch_batches=True) reads it on the main process only",
                    stacklevel=2,
                )
        # An error of the reader is raised where the others expect a batch of it (`_read_turn`), and so on all of them.
        if problem is not None and world.rank == 0:
            return _raise_at_next(problem)
        # The compared batch is the first one of the epoch, so that none is read twice or lost.
        return chain(first_batch, source)

    def _set_divides_itself(self) -> None:
        self._divides_itself = True
        self._reads_all = False
        self.dispatch = None

    def _read_in_step(self, source: Iterator[SizedBatch]) -> Iterator[SizedBatch]:
        """Yield the batches of data that divide themselves, equally many on every process.

        A process that has no more batches repeats its last one, of which no sample counts.
        """
        group = self.group
        source = (pair for pair in source if pair is not MISSING)
        pair = MISSING
        next_pair = next(source, _END)
        has_batch = [bool(row[0]) for row in group.agree([next_pair is not _END])]
        if not any(has_batch):
            return
        if not all(has_batch):
            # A process without any batch gets another one's: it needs one to take part in the exchange of gradients.
            reader = has_batch.index(True)
            sent = None
            if group.rank == reader:
                sent = next_pair
            sent = group.broadcast(sent, reader)
            if next_pair is _END:
                pair = sent
        continues = True
        while continues:
            count = 0
            if next_pair is not _END:
                pair = next_pair
                count = pair[1]
                next_pair = next(source, _END)
            rows = group.agree([count, next_pair is not _END, pair[1]])
            counts = [int(row[0]) for row in rows]
            longest = int(max(row[2] for row in rows))
            continues = any(row[1] for row in rows)
            total = longest * group.size
            if min(counts) == longest:
                self._turn = (total, None, not continues)
            else:
                self._turn = (total, counts, not continues)
            yield filled(pair, longest)

    def _read_in_turns(
        self, feed: Feed, source: Iterator[SizedBatch]
    ) -> Iterator[SizedBatch]:
        """Yield this process's batches of a stream, which is read in turns of one batch per process.

        If the main process reads for all, an error of its reader is raised on every process.
        """
        rank = self.group.rank
        processes = self.group.size

        def read() -> Turn:
            turn = list(islice(source, processes))
            if self._drop_last and len(turn) < processes:
                return []
            return turn

        # One turn ahead, because the length of a stream is unknown: only so the last turn is known to be the last.
        next_turn = self._read_turn(read)
        while next_turn:
            turn = next_turn
            next_turn = self._read_turn(read)
            sizes = [size for _, size in turn]
            counts: list[int] | None = sizes + [0] * (processes - len(turn))
            is_full = len(turn) == processes and len(set(sizes)) == 1
            # Batches of unknown size may differ all the time, and are only filled up at the end. Batches of a known
            # size are short at the end of each worker's share, so a short turn is not always the last.
            fills = not next_turn or feed.per_rank_batch_size is not None
            if is_full:
                counts = None
            elif self.even and fills:
                collate = getattr(self.dataloader, "collate_fn", None)
                turn, counts = evened(turn, processes, collate is default_collate)
            self._turn = (sum(size for _, size in turn), counts, not next_turn)
            pair = MISSING
            if rank < len(turn):
                pair = turn[rank]
            yield pair

    def _read_turn(self, read: Callable[[], Turn]) -> Turn:
        """Read a turn, or get it from the main process."""
        if self.dispatch is None:
            return read()
        return on_rank_zero(self.dispatch, read)

    def state_dict(self) -> StateDict:
        """Return the position: epoch, batches yielded, the seed, and the state of the user's loader."""
        epoch, batch = self._resume or self._position or (self.iteration, 0)
        inside = self._position is not None or self._resume is not None
        feed = self.feed
        # Between epochs a reader has no position, except one whose data can be read once only: it goes on.
        reader_epoch = None
        if inside or feed.once:
            reader_epoch = epoch
        loader_state = feed.loader_state.state_dict(
            reader_epoch,
            batch * self._batches_per_turn,
            self.batches_read * self._batches_per_turn,
        )
        # None: not compared yet, so that a resumed run compares in its first epoch.
        divides_itself: bool | None = self._divides_itself
        if self._compares:
            divides_itself = None
        return {
            "epoch": epoch,
            "batch": batch,
            "samples": batch * self.total_batch_size,
            "read": self.batches_read,
            "seed": self.seed,
            "track": loader_state,
            "alone": divides_itself,
            "data": feed.facts,
        }

    def describe_changes(self, state: SavedState) -> list[str]:
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

    def load_states(self, states: Sequence[SavedState]) -> None:
        """Continue the next iteration at the position of the states, in the same order.

        Args:
            states: of every process of the saved run; the number of processes and the batch size may differ now.

        Raises:
            CheckpointError: with the current batch size no batch ends at the saved position.
        """
        state = states[0]
        # Under older versions, which do not say it, no stream divided itself.
        divided_itself = state.get("alone", False)
        if self._compares and divided_itself is not None:
            self._compares = False
            if divided_itself:
                self._set_divides_itself()
        # Samples, not batches, are the position: the number of processes and the batch size may be others now.
        epoch = int(state["epoch"])
        batch = int(state["batch"])
        samples = int(state["samples"])
        if self._divides_itself and batch and len(states) != self.group.size:
            raise CheckpointError(
                "loaders",
                None,
                "the loader shards the data itself, and its position is valid only for the processes that saved it",
                fix="resume with the same number of processes, or from the end of an epoch",
            )
        if samples != batch * self.total_batch_size:
            batch = self._count_batches(samples)
        self.iteration = epoch
        self._position = None
        self._resume = None
        if batch:
            self._resume = (epoch, batch)
        # The order follows from the seed of the saved run, also where this run has another one.
        self.seed = int(state["seed"])
        self.batches_read = int(state["read"])
        self.feed = self._make_feed(self.even, self.seed)
        self._load_tracks([each["track"] for each in states])

    def _load_tracks(self, tracks: Sequence[SavedState]) -> None:
        """Restore the readers; the main process has read the whole stream, with and without dispatch."""
        rank = self.group.rank
        loader_state = self.feed.loader_state
        if self._has_several_loaders or (not self._reads_all and self.feed.indexed):
            loader_state.load_state_dict(tracks, rank)
            return
        track = None
        if self.dispatch is None and len(tracks) == self.group.size:
            track = tracks[rank]
        if track is None:
            track = tracks[0]
        loader_state.load_state_dict([track], 0)

    def describe(self) -> str:
        """Describe the data, their order and their sharding in one line."""
        text = self.feed.describe()
        if self.dispatch is not None:
            return f"{text}; the main process reads, and hands every {plural(self.group.size, 'batch')} round"
        if not self._reads_all:
            return text
        return f"{text}; every process reads all of it and keeps one batch in {self.group.size}"

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue the next iteration at a saved position; each process passes its own state.

        Raises:
            CheckpointError: the number of processes or the batch size differs, and the position in a stream cannot be
                converted.
        """
        state = dict(state_dict)
        batch = state["batch"]
        samples = state["samples"]
        if self.feed.stateful and samples != batch * self.total_batch_size:
            raise CheckpointError(
                "the state of a loader",
                "samples",
                f"{plural(batch, 'batch')} had {plural(samples, 'sample')}, and would have different ones now",
                fix="resume with as many processes and the same batch size, or by accelerator.load_state",
            )
        self.load_states([state] * self.group.size)
        if self.group.rank == 0:
            for line in self.describe_changes(state):
                warnings.warn(line, stacklevel=2)

    def _count_batches(self, samples: int) -> int:
        """Return the number of batches in an epoch that hold this many samples."""
        size = self.total_batch_size
        feed = self.feed
        if feed.exact and feed.length is not None:
            # The end of an epoch is a position too, although its last batch may be short.
            last_index = len(self) - 1
            last_size = None
            if not self._reads_all:
                last_size = feed.samples(last_index)
            if samples >= last_index * size + (last_size or size):
                return len(self)
        batches, remaining = divmod(samples, size)
        if remaining:
            raise CheckpointError(
                "loaders",
                "samples",
                f"{plural(samples, 'sample')} do not fill whole batches of {size}",
                fix="resume with as many processes and batches of the same size, or with a size that divides them",
            )
        return batches


def _raise_at_next(error: Exception) -> Iterator[SizedBatch]:
    """Return an iterator that raises an error, where the processes expect one of the reader."""
    raise error
    yield


def skip_first_batches(
    dataloader: Iterable[Batch], num_batches: int = 0
) -> LaterLoader:
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
class LaterLoader:
    """A view of a loader that begins at a later batch."""

    def __init__(self, loader: Loaders, batches: int) -> None:
        self.loader = loader
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.loader, PreparedLoader):
            return self.loader.begin(self.batches)
        return islice(iter(self.loader), self.batches, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "batches"):
            raise AttributeError(name)
        return getattr(self.loader, name)
