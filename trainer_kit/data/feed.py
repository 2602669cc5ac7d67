"""`Feed`: the user's loader as one rank reads it, epoch after epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state
from trainer_kit.data.combined import CombinedLoader, CombinedSource, read_together
from trainer_kit.data.order import MISSING
from trainer_kit.data.place import Place, Source, generator_states, kind_of, restore_generators
from trainer_kit.data.sources import IndexedSource, ListSource, StreamSource

__all__ = ["Feed", "Track"]


@final
class Track:
    """Reads a source, and keeps its state after each of the last batches.

    Reading may be ahead of training, so the state that a checkpoint needs is not that of the moment. A source that
    has none (`Source.stateful`) is read as it is.

    A checkpoint has the state ahead of the last batch, which is read once more and thrown away: only so is a loader in
    the condition in which it was, at the end of its data too, and whether it starts again with each epoch or goes on.
    Nothing that this reads draws from the global generators.

    Args:
        source: is read.
        size: data ranks.
    """

    def __init__(self, source: Source, size: int) -> None:
        self._source, self._size = source, size
        self._states: dict[int, Any] = {}
        self._epoch, self._at, self._ended = -1, 0, False
        self._opened: tuple[int, int] | None = None
        self._before: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._kind = [kind_of(source), len(source.workers), *(unit for unit, _ in source.stride)]

    def epoch(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on; see `Feed.epoch`."""
        source = self._source
        drains = not source.indexed and not source.stateful
        if drains and not start and not (source.once and self._rng):
            self._rng = rng_state()  # a stream that is read again draws its order as it did
        unread, before = self._opened is None, self.state_dict(epoch, start)
        if unread and before is not None:
            with preserved_rng():
                iterator = self._go_on(before, epoch, start)
        else:
            iterator = source.epoch(epoch, start)
        self._before, self._opened = before, (epoch, start)
        self._epoch, self._at, self._ended = epoch, start, False
        if not source.stateful:
            return iterator
        self._states = {}
        if unread and before is None and not start:
            self._states[0] = None  # a new loader is the same
        elif unread and before is not None and before["epoch"] == epoch and not before["divided"]:
            self._states[before["batch"]] = before["state"]
            if before["skip"]:
                self._states[start] = source.state()
        return self._noted(iterator, start)

    def _noted(self, batches: Iterator[Any], at: int) -> Iterator[Any]:
        state, states = self._source.state, self._states
        for batch in batches:
            at += 1
            if batch is not MISSING:  # its loader may have ended, so the state before it is kept
                states[at] = state()
            self._at = at
            yield batch
        self._ended = True

    def forget(self, first: int) -> None:
        """A window that begins with batch ``first`` was loaded: what is older is not asked for any more."""
        states = self._states
        keep = min(first, max(states, default=0)) - 1
        for at in [at for at in states if at < keep]:
            del states[at]

    def state_dict(self, epoch: int | None = None, batch: int = 0, read: int = 0) -> dict[str, Any] | None:
        """What a checkpoint keeps besides these numbers; None for nothing.

        Args:
            epoch: completed epochs; None between two of them.
            batch: completed micro-batches of the running epoch.
            read: completed micro-batches of the whole run.
        """
        source = self._source
        if self._opened is None or self._opened == (epoch, batch):
            return self._before
        inside = epoch == self._epoch
        if not source.stateful and not source.indexed and (inside or source.once):
            passed = read - batch if source.once else 0
            return {**self._record(batch, source.state()), "epoch": epoch, "passed": passed, "rng": self._rng}
        if not source.stateful and not source.generators:
            return None
        if not source.stateful and inside:
            return self._record(batch, source.state())
        record = self._record(0, None)
        if inside or source.rolls:
            last = min(batch, self._at) if inside else self._at
            # Of an epoch of one batch there is no state ahead of it.
            ahead = max((at for at in self._states if at < last), default=last)
            record = self._record(ahead, self._states.get(ahead))
            # Where this rank's data ended before the others' it is the end that is gone on from.
            record.update(skip=last - ahead, ended=self._ended and (not inside or batch > last))
        if not inside:
            record["generators"] = generator_states(source.generators)
        return record

    def _record(self, batch: int, state: Any) -> dict[str, Any]:
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
            "workers": self._source.workers,
        }

    def load_state_dict(self, ranks: Sequence[Mapping[str, Any] | None], rank: int) -> None:
        """Begin where a checkpoint says.

        Args:
            ranks: what `state_dict` gave on each rank.
            rank: this one.

        Raises:
            CheckpointError: the loader cannot begin with that.
        """
        saved = ranks[rank] if len(ranks) == self._size else self._divided_anew(ranks[-1], len(ranks))
        if saved is None or list(saved["kind"]) != self._kind:
            return  # of another loader, so that only the position holds
        then, now = list(saved["workers"]), self._source.workers
        if then != now and (saved["state"] is not None or saved["skip"]):
            raise CheckpointError(
                "loaders",
                "workers",
                f"where the data are is known for {_named(then)} worker processes, and there are {_named(now)}",
                fix=f"resume with num_workers={_named(then)}",
            )
        self._before = dict(saved)

    def _divided_anew(self, last: Mapping[str, Any] | None, ranks: int) -> dict[str, Any] | None:
        """The last rank has read all that the others have: for any number of ranks it is there that they go on."""
        if last is None or not self._source.stateful:
            return None if last is None else dict(last)
        saved = dict(last)
        if saved["generators"] is not None and saved["ended"]:  # the next pass begins at the beginning
            return {**saved, "state": None, "skip": 0, "ended": False}
        if saved["state"] is not None or saved["skip"]:
            saved["state"] = self._source.divided_anew(saved["state"], saved["skip"] * ranks)
        return {**saved, "skip": 0, "divided": True}

    def _go_on(self, saved: Mapping[str, Any], epoch: int, start: int) -> Iterator[Any]:
        source = self._source
        if saved["rng"] is not None:
            self._rng = saved["rng"]
            restore_rng(self._rng)
        if saved["epoch"] == epoch and saved["passed"]:
            return source.epoch(epoch, start + saved["passed"])
        if saved["epoch"] == epoch:
            iterator = source.epoch(epoch, saved["batch"] if source.stateful else start, 0, saved["state"])
            _pass(iterator, saved)
            return iterator
        if saved["state"] is not None or saved["skip"]:
            _pass(source.epoch(saved["epoch"], saved["batch"], 0, saved["state"]), saved)
        restore_generators(source.generators, saved["generators"] or ())
        return source.epoch(epoch, start)


def _named(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))


def _pass(batches: Iterator[Any], saved: Mapping[str, Any]) -> None:
    for _ in islice(batches, saved["skip"]):
        pass
    if saved["ended"]:
        for _ in batches:
            pass


@final
class Feed:
    """One user's loader as one rank sees it: this rank's part of every global micro-batch, in a reproducible order.

    A global micro-batch is ``batch_size * size`` consecutive samples of the sampler's order; rank r takes the r-th
    contiguous block, and the samples of a last, short one are divided as evenly as possible. From a user's own
    ``batch_sampler``, ``size`` consecutive batches make one global micro-batch. Data that cannot be indexed are read
    by every rank, which keeps each ``size``-th batch.

    The order is drawn from (seed, epoch) alone and touches no global generator; a sampler with its own generator, and
    one that divides by itself (``DistributedSampler``), are obeyed. In worker processes, what a dataset draws for a
    sample (augmentation) depends on (seed, epoch, the sample's place in the order) and not on the worker; streams and
    loaders with ``batch_size=None`` are exempt. The user's loader is never changed; ``set_epoch`` of its sampler or
    dataset is called.

    Args:
        loader: a DataLoader, any iterable of batches, a `CombinedLoader`, or a pytree of loaders, the shorter of which
            start again until the longest ends.
        rank: which part is read here, from 0.
        size: in how many parts the data are divided.
        seed: any whole number; with the epoch it decides the order.
        shard: False: every rank reads the loader as it is.
        batch_size: samples a micro-batch on each rank, in place of the loader's own.
        reproducible: seed each sample in this process too, where there are no workers; what it draws is put back.
        ordered: for evaluation: a torch ``DistributedSampler`` is undone, for it repeats samples; every sample is read
            exactly once over all ranks.
        pad: fill the last global micro-batch up from the start of the epoch's order, so that all ranks have equally
            many samples; only where samples are found by index.

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
        loader: Any,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shard: bool = True,
        batch_size: int | None = None,
        reproducible: bool = False,
        ordered: bool = False,
        pad: bool = False,
    ) -> None:
        if not 0 <= rank < size:
            raise DataError("a feed's rank is one of 0 to size - 1", found=f"rank={rank}, size={size}")
        place = Place(
            rank=rank,
            size=size,
            seed=seed,
            shard=shard,
            batch_size=batch_size,
            reproducible=reproducible,
            ordered=ordered,
            pad=pad,
        )
        self.loader, self.reproducible, self._asks = loader, reproducible, rank == 0
        self._source = _open(loader, place)
        self.track = Track(self._source, size)
        """Where it is, for a checkpoint."""
        self.per_rank_batch_size: int | None = self._source.per_rank_batch_size
        """Samples a micro-batch on this rank, but for the last; None when unknown."""

    @property
    def length(self) -> int | None:
        """Micro-batches an epoch, the same on every rank; None when unknown. For a stream, what its ``len`` claims."""
        return self._source.length

    @property
    def even(self) -> bool:
        """Whether it is certain beforehand that every rank gets the same number of batches (`EMPTY` counts)."""
        return self._source.even

    def samples(self, index: int) -> int | None:
        """Samples of global micro-batch ``index`` over all ranks.

        None when only reading would tell. With a user's batch sampler it is known once the batch has been read.
        """
        return self._source.samples(index)

    @property
    def indexed(self) -> bool:
        """Whether a batch is found without reading those before it; then `length` is certain, where there is one."""
        return self._source.indexed

    @property
    def stateful(self) -> bool:
        """Whether the loader's own state is read after each batch (torchdata's ``state_dict`` protocol)."""
        return self._source.stateful

    @property
    def once(self) -> bool:
        """Whether it can be read only once, over all epochs."""
        return self._source.once

    @property
    def stride(self) -> list[tuple[str, int]]:
        """How much of a loader's order a global micro-batch covers: (unit, number), one for each loader."""
        return self._source.stride

    @property
    def draws(self) -> bool:
        """Whether reading may draw from this process's global generators: then nothing may be read ahead of its turn.

        A checkpoint has the generators as they are after a step, and a batch that was read by then is read again.
        """
        return not self.reproducible and _draws(self.loader)

    def first_state(self) -> Any:
        """The loader's state before anything is read: whether it can be saved is asked before the first step."""
        return self._source.first_state()

    def describe(self) -> str:
        """One line: what is read, in which order, and how it is divided."""
        return self._source.describe()

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """This rank's batches of an epoch.

        Args:
            epoch: from 0; the order depends on it.
            start: the micro-batch to begin with. Map-style data are skipped by index, a loader with a state goes on
                from it; any other stream is read up to there, with a warning.

        Yields:
            batches, or `EMPTY` where this rank has no share of a global micro-batch.
        """
        return map(itemgetter(0), self.sized_epoch(epoch, start))

    def sized_epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        """As `epoch`, each batch with its number of samples; `MISSING` in place of `EMPTY`.

        The number is that of the indices (of a stream: of the samples) that the DataLoader drew for it, whatever its
        ``collate_fn`` made of them. Where no DataLoader draws them it is read from the batch; see `ask_for_sizes`.
        """
        return self.track.epoch(epoch, start)

    def ask_for_sizes(self, how: str) -> None:
        """Warn where the numbers of samples were read from batches that leave them in doubt: once, on rank 0.

        Args:
            how: in which way the user can give them.
        """
        doubt = self._source.doubt
        if doubt is not None and self._asks:
            self._asks = False
            warnings.warn(
                f"the number of samples in a batch of this {kind_of(self.loader)} is not certain: {doubt}. If batches"
                f" differ in size, {how}. A DataLoader with a batch_size or a batch_sampler tells it by itself",
                stacklevel=2,
            )


def _draws(loader: Any) -> bool:
    loader = read_together(loader)
    if isinstance(loader, CombinedLoader):
        return any(map(_draws, loader.flattened))
    if isinstance(loader, DataLoader):
        return loader.num_workers == 0
    return type(loader) not in (list, tuple)


def _open(loader: Any, place: Place) -> Source:
    loader = read_together(loader)
    if isinstance(loader, CombinedLoader):
        return CombinedSource(loader, place, _open)
    if isinstance(loader, DataLoader):
        kind = StreamSource if isinstance(loader.dataset, IterableDataset) else IndexedSource
        return kind(loader, place)
    if isinstance(loader, Sequence) and not isinstance(loader, (str, bytes)):
        return ListSource(loader, place)
    one = isinstance(loader, (str, bytes, Tensor)) or (
        isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    )
    if one or not isinstance(loader, Iterable):
        raise DataError(
            "this is not a loader",
            found=f"a {type(loader).__name__}",
            fix="call it and pass what it returns" if callable(loader) else "pass a DataLoader or a list of batches",
        )
    return StreamSource(loader, place)
