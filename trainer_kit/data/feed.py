"""`Feed`: read the user's loader on one rank, epoch after epoch, and save and restore the position in it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from typing import Final, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.core.tensors import BLOCKING, map_leaves
from trainer_kit.core.types import (
    Batch,
    JsonObject,
    Loaders,
    Nested,
    SavedState,
    StateDict,
)
from trainer_kit.data.combined import CombinedLoader, CombinedSource, read_together
from trainer_kit.data.division import divided_for_other_ranks
from trainer_kit.data.list_source import ListSource
from trainer_kit.data.order import EMPTY, MISSING
from trainer_kit.data.sizes import SizedBatch
from trainer_kit.data.source import (
    ReadOptions,
    Source,
    SourceState,
    generator_states,
    kind_of,
    restore_generators,
    warn_of_early_end,
)
from trainer_kit.data.sources import IndexedSource, StreamSource

__all__ = ["Ahead", "Feed", "LoaderState"]

_SHOWN: Final = 8
"""Samples that a description of a batch names."""


@final
class LoaderState:
    """Read a source, and keep its state after each of the last batches.

    The loop reads batches early, so the state that a checkpoint needs is not the current one. A source without state
    (`Source.stateful`) is only read.

    A checkpoint holds the state before the last batch; a resume reads this batch again and discards it. Only so is the
    loader in the same condition as before: also at the end of its data, and whether it restarts in each epoch or not.
    Reading for a resume draws nothing from the global generators.

    Args:
        source: the source.
        size: the number of data ranks.
        warn_of_end: called with the position of a resume that lies beyond the end of the data; None: not reported here.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        warn_of_end: Callable[[int], None] | None = None,
    ) -> None:
        self._source = source
        self._size = size
        self._warn_of_end = warn_of_end
        # By number of batches read: the state of the source after them.
        self._states: dict[int, SourceState] = {}
        # The epoch that is being read, and its batches so far.
        self._epoch = -1
        self._batches_read = 0
        self._ended = False
        # Epoch and start of the latest pass, and the state from which it began: before its first batch is completed,
        # a checkpoint holds that state.
        self._opened: tuple[int, int] | None = None
        self._before: StateDict | None = None
        # The generators from which a stream without a state drew its order: a resume reads it again.
        self._rng: StateDict | None = None
        self._check: Callable[[SourceState], object] | None = None
        # A state is restored only into a source of the same kind.
        units = [unit for unit, _ in source.stride]
        self._kind = [kind_of(source), len(source.workers), *units]
        self._strides = [number for _, number in source.stride]

    def check_first(self, check: Callable[[SourceState], object]) -> None:
        """Call ``check`` with the first state, once the first batch was read.

        A state is never asked for before: a loader may not accept one after it was asked.
        """
        self._check = check

    def reopen(self) -> None:
        """Read from the position that `load_state_dict` is given next, as in a new process."""
        self._states = {}
        self._before = None
        self._opened = None
        self._epoch = -1
        self._batches_read = 0
        self._ended = False

    def epoch(self, epoch: int, start: int) -> Iterator[SizedBatch]:
        """Return the batches of an epoch from ``start``; see `Feed.epoch`."""
        source = self._source
        drains = not source.indexed and not source.stateful
        if drains and not start and not (source.once and self._rng):
            # A stream must draw the same order when it is read again.
            self._rng = rng_state()
        # Only the first pass after a load continues from its state.
        unread = self._opened is None
        before = self.state_dict(epoch, start)
        if unread and before is not None:
            with preserved_rng():
                iterator = self._resume(before, epoch, start)
        else:
            iterator = source.epoch(epoch, start)
        self._before = before
        self._opened = (epoch, start)
        self._epoch = epoch
        self._batches_read = start
        self._ended = False
        if not source.stateful:
            return iterator
        self._states = {}
        if unread:
            self._record_start(before, epoch, start)
        return self._recorded(iterator, start)

    def _record_start(self, before: StateDict | None, epoch: int, start: int) -> None:
        """Record the states that are known before the first batch is read."""
        if before is None:
            # A new loader needs no state.
            if not start:
                self._states[0] = None
            return
        if before["epoch"] != epoch or before["divided"]:
            return
        self._states[before["batch"]] = before["state"]
        if before["skip"]:
            self._states[start] = self._source.state()

    def _recorded(
        self, batches: Iterator[SizedBatch], position: int
    ) -> Iterator[SizedBatch]:
        read_state = self._source.state
        states = self._states
        for batch in batches:
            position += 1
            # At `MISSING` the loader may have ended: the state before its end is the one to save.
            if batch is not MISSING:
                states[position] = read_state()
                if self._check is not None:
                    check = self._check
                    self._check = None
                    check(states[position])
            self._batches_read = position
            yield batch
        self._ended = True

    def forget(self, first: int) -> None:
        """Drop old states: the loop has loaded a window that begins with batch ``first``."""
        states = self._states
        # A checkpoint holds the state before its last batch.
        earliest = min(first, max(states, default=0)) - 1
        outdated = [position for position in states if position < earliest]
        for position in outdated:
            del states[position]

    def state_dict(
        self, epoch: int | None = None, batch: int = 0, read: int = 0
    ) -> StateDict | None:
        """Return the state for a checkpoint, in addition to these numbers; None if there is none.

        Args:
            epoch: completed epochs; None between two epochs.
            batch: completed micro-batches of the current epoch.
            read: completed micro-batches of the whole run.
        """
        source = self._source
        if self._opened is None or self._opened == (epoch, batch):
            return self._before
        inside = epoch == self._epoch
        if not source.stateful and not source.indexed and (inside or source.once):
            record = self._record(batch, source.state())
            record["epoch"] = epoch
            record["rng"] = self._rng
            if source.once:
                record["passed"] = read - batch
            return record
        if not source.stateful and not source.generators:
            return None
        if not source.stateful and inside:
            return self._record(batch, source.state())
        record = self._record(0, None)
        if inside or source.rolls:
            last = self._batches_read
            if inside:
                last = min(batch, last)
            # An epoch of one batch has no state before that batch.
            earlier = (position for position in self._states if position < last)
            previous = max(earlier, default=last)
            record = self._record(previous, self._states.get(previous))
            record["skip"] = last - previous
            # If this rank's data ended before the other ranks', a resume starts at the end.
            record["ended"] = self._ended and (not inside or batch > last)
        if not inside:
            record["generators"] = generator_states(source.generators)
        return record

    def _record(self, batch: int, state: SourceState) -> StateDict:
        return {
            "epoch": self._epoch,
            "batch": batch,
            "state": state,
            "skip": 0,
            "ended": False,
            "passed": 0,
            "generators": None,
            "rng": None,
            "divided": False,
            "kind": self._kind,
            "strides": self._strides,
            "workers": list(self._source.workers),
            "alone": self._source.divides_itself,
        }

    def load_state_dict(self, ranks: Sequence[SavedState | None], rank: int) -> None:
        """Continue at the position of a checkpoint.

        Args:
            ranks: the result of `state_dict` on each rank.
            rank: this rank.

        Raises:
            CheckpointError: the loader cannot continue from that state.
        """
        last = ranks[-1]
        self._source.set_saved_ranks(len(ranks))
        if last is not None and list(last["kind"]) == self._kind:
            # One rank reads everything, so that it does not know whether the loader would divide the data.
            if len(ranks) > 1:
                # Older checkpoints have no such entry: every stream was divided by this library.
                self._source.restore_division(last.get("alone", False))
        same_ranks = len(ranks) == self._size
        if same_ranks and not (self._source.shared and self._is_resized(last)):
            saved = ranks[rank]
        else:
            saved = self._resharded(last, len(ranks))
        if saved is None or list(saved["kind"]) != self._kind:
            # The state of another kind of loader: only the position is used.
            return
        # The state for another number of ranks has been converted.
        if not saved["divided"]:
            saved = self._resized(saved)
        saved_workers = list(saved["workers"])
        workers = list(self._source.workers)
        needs_state = saved["state"] is not None or saved["skip"]
        if saved_workers != workers and needs_state:
            saved_numbers = ", ".join(map(str, saved_workers))
            numbers = ", ".join(map(str, workers))
            raise CheckpointError(
                "loaders",
                "workers",
                f"the position in the data is valid for num_workers={saved_numbers}, "
                f"and it is {numbers}",
                fix=f"resume with num_workers={saved_numbers}",
            )
        self._before = dict(saved)

    def _resharded(self, last: SavedState | None, ranks: int) -> StateDict | None:
        """Return the state for another number of ranks: that of the last rank, which has read the furthest."""
        if last is None:
            return None
        divides_itself = last.get("alone") is True or self._source.divides_itself
        if divides_itself is True and last["batch"]:
            raise divided_for_other_ranks()
        saved = dict(last)
        if not self._source.stateful:
            return saved
        if saved["generators"] is not None and saved["ended"]:
            # The next pass starts from the beginning.
            return {**saved, "state": None, "skip": 0, "ended": False}
        if saved["state"] is not None or saved["skip"]:
            further = saved["skip"] * ranks
            # Of the batches of this run, which may have another size.
            if list(saved["kind"]) == self._kind:
                further = self._batches_to_discard(saved, further, self._size)
            saved["state"] = self._source.resharded(saved["state"], further)
        return {**saved, "skip": 0, "divided": True}

    def _is_resized(self, saved: SavedState | None) -> bool:
        """Whether the batches of a saved state had another size. Older checkpoints hold no sizes."""
        if saved is None or list(saved["kind"]) != self._kind:
            return False
        return saved.get("strides") not in (None, self._strides)

    def _resized(self, saved: SavedState) -> SavedState:
        """Return a rank's own state for batches of another size."""
        if not self._is_resized(saved):
            return saved
        skip = saved["skip"]
        # A previous epoch that has ended is read to its end, whatever the size of its batches.
        if not saved["ended"]:
            skip = self._batches_to_discard(saved, skip, 1)
        # Positions of the saved run are not those of this one.
        return {**saved, "skip": skip, "divided": True}

    def _batches_to_discard(self, saved: SavedState, skip: int, ranks: int) -> int:
        """Return how many batches of this run have as many samples as those between a saved state and its position.

        Args:
            saved: the state; its batches may have had another size.
            skip: the result for batches of the same size; older checkpoints hold no sizes.
            ranks: number of ranks that share these batches.

        Raises:
            CheckpointError: no whole number of them.
        """
        saved_strides = saved.get("strides")
        if saved_strides is None:
            return skip
        counts = set()
        for saved_stride, stride in zip(saved_strides, self._strides, strict=True):
            counts.add(divmod(saved["skip"] * saved_stride * ranks, stride))
        count, remainder = min(counts)
        if remainder or len(counts) > 1:
            before = " and ".join(map(str, saved_strides))
            now = " and ".join(map(str, self._strides))
            raise CheckpointError(
                "loaders",
                None,
                f"the position in the stream is known for steps of {before} over all ranks, not for steps of {now}",
                fix="resume with the batch size of the checkpoint, or with one that divides it",
            )
        workers = max(saved["workers"], default=0)
        # One batch of before would be several now, and they come from several workers, each of which has its own part.
        if count != skip and workers > 1:
            raise CheckpointError(
                "loaders",
                None,
                f"the position in a stream that {plural(workers, 'worker')} read is known for batches of one size",
                fix="resume with the batch size of the checkpoint on each rank, or from the end of an epoch;"
                " with num_workers=1 the size may change",
            )
        batches: int = count
        return batches

    def _resume(
        self, saved: SavedState, epoch: int, start: int
    ) -> Iterator[SizedBatch]:
        source = self._source
        if saved["rng"] is not None:
            self._rng = saved["rng"]
            restore_rng(self._rng)
        if saved["epoch"] == epoch and saved["passed"]:
            return source.epoch(epoch, start + saved["passed"])
        if saved["epoch"] == epoch:
            # A source without a state skips to the position itself.
            first = start
            if source.stateful:
                first = saved["batch"]
            iterator = source.epoch(epoch, first, 0, saved["state"])
            read = _skip(iterator, saved)
            ends_early = read < saved["skip"] and not saved["ended"]
            if ends_early and self._warn_of_end is not None:
                self._warn_of_end(start)
            return iterator
        # Saved between two epochs: the previous one is read to its end, so that a loader that does not restart in each
        # epoch goes on as it would have.
        if saved["state"] is not None or saved["skip"]:
            previous_epoch = source.epoch(
                saved["epoch"], saved["batch"], 0, saved["state"]
            )
            _skip(previous_epoch, saved)
        restore_generators(source.generators, saved["generators"] or ())
        return source.epoch(epoch, start)


def _skip(batches: Iterator[SizedBatch], saved: SavedState) -> int:
    """Read and discard the batches between a saved state and the position; return their number."""
    skipped = batches
    if not saved["ended"]:
        skipped = islice(batches, saved["skip"])
    return sum(1 for _ in skipped)


@final
class Feed:
    """One rank's view of the user's loader: its part of every global micro-batch, in a reproducible order.

    A global micro-batch has ``batch_size * size`` consecutive samples of the sampler's order; rank r takes the r-th
    contiguous block, and the samples of a short last one are divided as evenly as possible. With a user's
    ``batch_sampler``, ``size`` consecutive batches form one global micro-batch. Data that cannot be indexed are read by
    every rank, which keeps each ``size``-th batch.

    The order depends on (seed, epoch) alone and changes no global generator. A sampler with its own generator, and a
    sampler that divides the data (``DistributedSampler``), are used unchanged. In worker processes the random numbers
    of a sample (augmentation) depend on (seed, epoch, position in the order) and not on the worker, except for streams
    and loaders with ``batch_size=None``. The user's loader is never changed; ``set_epoch`` of its sampler or dataset is
    called.

    Args:
        loader: a DataLoader, any iterable of batches, a `CombinedLoader`, or a pytree of loaders, the shorter of which
            restart until the longest ends.
        rank: the part that this rank reads, from 0.
        size: the number of parts.
        seed: any integer; with the epoch it decides the order.
        shard: False: every rank reads the whole loader.
        batch_size: samples per micro-batch on each rank, instead of the loader's.
        reproducible: without workers, seed each sample in this process, and restore the generators after it.
        ordered: for evaluation: replace a torch ``DistributedSampler``, which repeats samples; all ranks together read
            every sample exactly once.
        pad: fill the last global micro-batch from the start of the epoch's order, so that all ranks have the same
            number of samples; only for samples that are found by index.
        interleave: divide samples that are found by index as torch's ``DistributedSampler``: rank r takes the samples
            r, r + size, ..., and ``pad`` fills the last micro-batch only up to a multiple of ``size``. The batches of
            a custom batch sampler are not filled; a rank without one gets a batch from the start of the order.
        agree: ``agree(numbers)`` gathers a few numbers of every rank. With it, the first batches of a stream whose
            attributes do not tell are compared: if they differ, it divides the data by itself, and is left alone.
        turn: batches that the caller reads at once, as one batch of each rank; the last turn may be incomplete.

    Attributes:
        loader_state: the position in the loader, for a checkpoint.
        per_rank_batch_size: samples per micro-batch on this rank, except in the last one; None if unknown.
        indexed: whether a batch is found without reading the batches before it.
        exact: whether an epoch has exactly `length` batches; else `length` is a hint, as the user's code computes it.
        stateful: whether the loader's own state is read after each batch (torchdata's ``state_dict`` protocol).
        stateful_loaders: the loaders whose own state is read; any other stream is read again up to its position.
        once: whether the loader can be read only once, over all epochs.
        stride: the part of a loader's order that a global micro-batch covers: (unit, number), one for each loader.
        samples: ``samples(index)`` returns the number of samples of a global micro-batch over all ranks; None if it is
            unknown before reading. With a user's batch sampler it is known after the batch was read.
        describe: returns one line about the data, their order and their division.
        record_indices: from the next epoch on, keeps the dataset's indices of each batch for ``next_indices``.
        next_indices: returns the dataset's indices of this rank's next batch, once that was read, in the order of
            reading; None where the loader does not draw them: for a stream, a list of batches, or several loaders read
            together.

    Raises:
        DataError: a loader that cannot be iterated, a batch size that cannot be set, a sampler that divides for
            another number of ranks; while reading: a one-shot iterator that has ended, a dataset that raises
            StopIteration.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> for rank in range(2):
        ...     feed = Feed(DataLoader(range(7), batch_size=2), rank=rank, size=2)
        ...     print(feed.length, [batch.tolist() for batch in feed.epoch(0)])
        2 [[0, 1], [4, 5]]
        2 [[2, 3], [6]]
    """

    def __init__(
        self,
        loader: Loaders,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shard: bool = True,
        batch_size: int | None = None,
        reproducible: bool = False,
        ordered: bool = False,
        pad: bool = False,
        interleave: bool = False,
        agree: Callable[[list[float]], list[list[float]]] | None = None,
        turn: int = 1,
    ) -> None:
        if not 0 <= rank < size:
            raise DataError(
                "a feed's rank is one of 0 to size - 1",
                found=f"rank={rank}, size={size}",
            )
        options = ReadOptions(
            rank=rank,
            size=size,
            seed=seed,
            shard=shard,
            batch_size=batch_size,
            reproducible=reproducible,
            ordered=ordered,
            pad=pad,
            interleave=interleave,
            agree=agree,
            turn=turn,
        )
        self.loader = loader
        self.size = size
        self.reproducible = reproducible
        self.interleave = interleave
        self._asks = rank == 0
        self._source = _open(loader, options)
        warn_of_end = None
        if rank == 0:
            warn_of_end = partial(warn_of_early_end, loader)
        self.loader_state = LoaderState(self._source, size, warn_of_end)
        # The source's own methods: no frame of this class between the loop and them.
        self.per_rank_batch_size = self._source.per_rank_batch_size
        self.indexed = self._source.indexed
        self.exact = self._source.exact
        self.stateful = self._source.stateful
        self.stateful_loaders = self._source.stateful_loaders
        self.once = self._source.once
        self.stride = self._source.stride
        self.samples = self._source.samples
        self.describe = self._source.describe
        self.record_indices = self._source.record_indices
        self.next_indices = self._source.next_indices
        self.close = self._source.close

    @property
    def length(self) -> int | None:
        """Micro-batches per epoch, equal on all ranks; None if unknown. For a stream, the result of its ``len``."""
        return self._source.length

    @property
    def facts(self) -> list[JsonObject]:
        """What decides the order of the data, as plain data for a checkpoint: one for each loader."""
        return self._source.facts

    @property
    def even(self) -> bool:
        """Whether it is known in advance that all ranks get the same number of batches (`EMPTY` counts)."""
        return self._source.even

    @property
    def draws(self) -> bool:
        """Whether reading may draw from this process's global generators: then batches must not be read early.

        A checkpoint holds the generators as they are after a step; a batch that was read early is read again.
        """
        return not self.reproducible and _draws(self.loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return this rank's batches of an epoch.

        Args:
            epoch: from 0; the order depends on it.
            start: the first micro-batch. Map-style data are skipped by index, and a loader with a state continues from
                it; any other stream is read up to this batch, with a warning.

        Yields:
            batches, or `EMPTY` if this rank has no share of a global micro-batch.
        """
        return map(itemgetter(0), self.sized_epoch(epoch, start))

    def sized_epoch(self, epoch: int, start: int = 0) -> Iterator[SizedBatch]:
        """Like `epoch`, each batch with its number of samples; `MISSING` instead of `EMPTY`.

        The number counts the indices (for a stream, the samples) that the DataLoader drew, independent of its
        ``collate_fn``. Without a DataLoader it is read from the batch; see `ask_for_sizes`.
        """
        return self.loader_state.epoch(epoch, start)

    def name_batch(self, epoch: int, batch: int) -> str:
        """Describe this rank's micro-batch ``batch`` of the epoch that is being read, with its samples if known."""
        name = f"batch {batch} of epoch {epoch}"
        indices = self._source.indices(epoch, batch)
        if indices is None:
            return name
        shown = ", ".join(map(str, indices[:_SHOWN]))
        if len(indices) > _SHOWN:
            shown += f" and {len(indices) - _SHOWN} more"
        return f"{name} (samples {shown} of the dataset)"

    def ask_for_sizes(self, how: str) -> None:
        """Warn, once and on rank 0, if the numbers of samples were read from batches and may be wrong.

        Args:
            how: how the user can pass the numbers.
        """
        doubt = self._source.doubt
        if doubt is not None and self._asks:
            self._asks = False
            warnings.warn(
                f"the number of samples in a batch of this {kind_of(self.loader)} is ambiguous: {doubt}. If batches"
                f" differ in size, {how}. A DataLoader with a batch_size or a batch_sampler tells it by itself",
                stacklevel=2,
            )


def _draws(loader: Loaders) -> bool:
    loader = read_together(loader)
    if isinstance(loader, CombinedLoader):
        return any(map(_draws, loader.flattened))
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0
    return type(loader) not in (list, tuple)


def _open(loader: Loaders, options: ReadOptions) -> Source:
    loader = read_together(loader)
    if isinstance(loader, CombinedLoader):
        return CombinedSource(loader, options, _open)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            return StreamSource(loader, options)
        return IndexedSource(loader, options)
    if isinstance(loader, Sequence) and not isinstance(loader, (str, bytes)):
        return ListSource(loader, options)
    if _holds_samples(loader) or not isinstance(loader, Iterable):
        fix = _fix_for(loader)
        raise DataError("this is not a loader", found=type(loader).__name__, fix=fix)
    return StreamSource(loader, options)


def _holds_samples(value: object) -> bool:
    """Whether this can be iterated, but yields samples (or characters) instead of batches."""
    if isinstance(value, (str, bytes, Tensor)):
        return True
    return isinstance(value, Dataset) and not isinstance(value, IterableDataset)


def _fix_for(value: object) -> str:
    data = None
    if isinstance(value, Tensor):
        data = "TensorDataset(inputs, targets)"
    elif isinstance(value, Dataset):
        data = "dataset"
    if data is not None:
        return f"pass a DataLoader: DataLoader({data}, batch_size=32), with shuffle=True for training"
    if callable(value):
        return "call it and pass what it returns"
    return "pass a DataLoader or a list of batches"


def _pinned(batch: Batch) -> Batch:
    """Return the batch in pinned memory, from which a copy is asynchronous; pinned tensors are returned unchanged."""

    def pin(leaf: Nested) -> Nested:
        if isinstance(leaf, Tensor):
            # Only dense tensors in host memory can be pinned.
            if leaf.device.type == "cpu" and leaf.layout == torch.strided:
                return leaf.pin_memory()
            return leaf
        if callable(getattr(leaf, "pin_memory", None)):
            return leaf.pin_memory()
        return leaf

    return map_leaves(batch, pin)


@cache
def _side_stream(device: torch.device) -> torch.Stream | None:
    """Return the copy stream of a device. There is only one: torch does not reuse memory across streams."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.Stream(device)


@final
class Ahead:
    """Yield moved batches; the next batch is copied while the current one is computed.

    Each batch is pinned and copied on a separate stream; the current stream waits for the copy, the host does not. An
    error while the next batch is read or moved is raised when that batch is requested.

    Args:
        iterator: batches on the host. It is read one batch early, so it must end where reading must stop. `EMPTY` is
            yielded unchanged.
        move: ``move(batch)`` returns the batch on the device.
        device: the accelerator; None, or a device that ``torch.accelerator`` does not drive: no stream, no pinning.

    Example:
        >>> moved = []
        >>> ahead = Ahead(iter([1, 2, 3]), lambda batch: moved.append(batch) or batch * 10)
        >>> next(ahead), moved
        (10, [1, 2])
    """

    def __init__(
        self,
        iterator: Iterable[Batch],
        move: Callable[[Batch], Batch],
        device: torch.device | None = None,
    ) -> None:
        self._iterator = iter(iterator)
        self._move = move
        self._device = device
        self._stream: torch.Stream | None = None
        if device is not None and device.type not in BLOCKING:
            self._stream = _side_stream(device)
        self._waiting: _Ready | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        ready = self._waiting or self._read()
        if ready.error is not None:
            # An iterator that has ended stays ended; after another error reading continues.
            self._waiting = None
            if isinstance(ready.error, StopIteration):
                self._waiting = ready
            raise ready.error
        if ready.event is not None:
            torch.accelerator.current_stream(self._device).wait_event(ready.event)
        self._waiting = self._read()
        return ready.batch

    def _read(self) -> _Ready:
        try:
            batch = next(self._iterator)
            if batch is EMPTY:
                return _Ready(batch)
            if self._stream is None:
                return _Ready(self._move(batch))
            batch = _pinned(batch)
            # The copy may reuse the memory of an earlier batch, so it waits for all queued steps. The next step is
            # queued afterwards, and runs in parallel with the copy.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                return _Ready(self._move(batch), event=self._stream.record_event())
        except Exception as error:
            # Raised by the next request: the current batch is still to be trained on.
            return _Ready(error=error)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A moved batch, or the error of reading or moving it."""

    batch: Batch = None
    event: torch.Event | None = None
    error: Exception | None = None
