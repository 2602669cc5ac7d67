"""`Feed`: the user's loader as one rank reads it, epoch after epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_kit.core.errors import DataError
from trainer_kit.data.combined import CombinedLoader, read_together
from trainer_kit.data.loader_state import Track
from trainer_kit.data.place import Place, Source, kind_of
from trainer_kit.data.several import CombinedSource
from trainer_kit.data.sources import IndexedSource, ListSource
from trainer_kit.data.streams import StreamSource

__all__ = ["Feed"]


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
