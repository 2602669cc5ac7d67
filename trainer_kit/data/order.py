"""The samples of each micro-batch on each rank: a function of (seed, epoch) alone."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from trainer_kit.core.seed import preserved_rng, restore_rng, rng_state

__all__ = [
    "EMPTY",
    "MISSING",
    "BatchTurns",
    "SampleBlocks",
    "SampleIndex",
    "SeededIndices",
    "Split",
    "derive_seed",
    "drawn",
    "length_of",
    "seed_globals",
]

SampleIndex: TypeAlias = Any
"""What a sampler yields: the dataset's index of a sample, an int or any key; of a batch sampler, a list of them."""

_CHUNK = 65536
"""Indices drawn at a time; a sampler may be endless."""

_BATCH_CHUNK = 256
"""Batches drawn at a time from a batch sampler."""


@final
class _Empty:
    """The type of `EMPTY`."""

    def __repr__(self) -> str:
        return "EMPTY"

    def __reduce__(self) -> str:
        # By name: a copy from another process is the same object, which `is` finds.
        return "EMPTY"


EMPTY: Final = _Empty()
"""The batch of a rank whose share of the global micro-batch has no sample."""
MISSING: Final = (EMPTY, 0)
"""`EMPTY` in the form in which feeds pass batches on: with its number of samples. Compare this pair with ``is``."""


def derive_seed(*parts: int) -> int:
    """Return a seed of 63 bits from integers: equal on every machine, unrelated for different inputs.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    # Not ``hash``, which differs between Python versions, and not a sum, which is equal for (0, 1) and (1, 0).
    text = "/".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def length_of(sized: Any) -> int | None:
    """Return ``len(sized)``, or None if it has no length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def drawn(
    sampler: Iterable[SampleIndex], seed: int, chunk: int = _CHUNK
) -> Iterator[SampleIndex]:
    """Yield the items of ``sampler`` with Python's, NumPy's and torch's global generators seeded with ``seed``.

    The previous states of the generators are restored before an item is yielded.

    Args:
        sampler: any iterable; a sampler with its own generator is not affected.
        seed: 63 bits.
        chunk: items drawn at a time.
    """
    # User code between two items draws from its own states of the generators, and the sampler from the ones saved here.
    with preserved_rng():
        seed_globals(seed)
        iterator = iter(sampler)
        items = list(islice(iterator, chunk))
        state = rng_state()
    yield from items
    # A short chunk is the last one. The sampler is not asked again: it may be user code that fails after its end.
    while len(items) == chunk:
        with preserved_rng():
            restore_rng(state)
            items = list(islice(iterator, chunk))
            state = rng_state()
        yield from items


def seed_globals(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would also seed the accelerators' generators, which are not restored here.
    torch.default_generator.manual_seed(seed)


@final
class SeededIndices(list[SampleIndex]):
    """A batch of indices; iteration, by a loader's worker, seeds the global generators before each index.

    So the random numbers of a sample depend on ``seed`` and the sample's position in the epoch, not on the worker.

    Args:
        indices: of the samples.
        seed: of the epoch.
        first: the position of the first sample in the epoch.
        step: the distance between the positions of two samples.
    """

    def __init__(
        self, indices: list[SampleIndex], seed: int, first: int, step: int = 1
    ) -> None:
        super().__init__(indices)
        self.seed = seed
        self.first = first
        self.step = step

    def __iter__(self) -> Iterator[SampleIndex]:
        # Over a copy, which is a plain list: this class iterates by this method.
        for number, index in enumerate(self[:]):
            position = self.first + number * self.step
            seed_globals(derive_seed(self.seed, position))
            yield index

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickling of a list iterates over it, which would seed this process.
        return SeededIndices, (self[:], self.seed, self.first, self.step)


class Split(ABC):
    """Replaces the ``batch_sampler`` (or ``sampler``) of a DataLoader, and yields this rank's part.

    Args:
        order: what the user's sampler or batch sampler yields.
        rank: this rank, from 0.
        size: the number of ranks that share the data.
        pad: a short last global micro-batch is filled from the start of the order.
        chunk: items of ``order`` drawn at a time.

    Attributes:
        handed: micro-batches given to the loader in this epoch.
        empty: whether this rank has no share of the last global micro-batch.
        sizes: samples of the micro-batches that the loader got in this epoch and `Feed` has not read yet.
        shares: None, or the indices of those micro-batches, as far as `Feed` has not named them yet.
    """

    def __init__(
        self, order: Iterable[SampleIndex], rank: int, size: int, pad: bool, chunk: int
    ) -> None:
        self.order = order
        self.rank = rank
        self.size = size
        self.pad = pad
        self._chunk = chunk
        self.shares: deque[list[SampleIndex]] | None = None
        self.begin(0, 0)

    def begin(self, seed: int, start: int, sample_seed: int | None = None) -> None:
        """Prepare the iteration with ``seed`` from micro-batch ``start``; see `SeededIndices` for ``sample_seed``."""
        self._start = start
        self._sample_seed = sample_seed
        self.handed = 0
        self.empty = False
        self.sizes: deque[int] = deque()
        if self.shares is not None:
            self.shares = deque()
        # Samples of the global micro-batches whose size only reading has shown.
        self._sizes_read: dict[int, int] = {}
        self._drawn = drawn(self.order, seed, self._chunk)

    def draw(self) -> None:
        """Begin to draw the order now, not at the loader's first request."""
        first = list(islice(self._drawn, 1))
        self._drawn = chain(first, self._drawn)

    @abstractmethod
    def __iter__(self) -> Iterator[SampleIndex]: ...
    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def samples(self, index: int) -> int | None:
        """Return the number of samples of global micro-batch ``index``; None if it is not known yet."""


@final
class SampleBlocks(Split):
    """Global micro-batches of ``batch_size * size`` consecutive samples; rank r takes the r-th contiguous block.

    A short last one is divided as evenly as possible, with one sample more on the first ranks; with ``pad`` it is
    filled from the start of the order.

    Args:
        order: what the user's sampler yields.
        batch_size: samples of a micro-batch on each rank.
        drop_last: leave out an incomplete last micro-batch.
        rank: this rank, from 0.
        size: the number of ranks that share the data.
        pad: a short last global micro-batch is filled from the start of the order.
        interleave: divide as torch's ``DistributedSampler``: rank r takes the samples r, r + size, ..., and ``pad``
            fills only up to a multiple of ``size``.

    Example:
        >>> for rank in range(2):
        ...     blocks = SampleBlocks(range(7), 2, drop_last=False, rank=rank, size=2)
        ...     blocks.begin(seed=0, start=0)
        ...     print(list(blocks))
        [[0, 1], [4, 5]]
        [[2, 3], [6]]
    """

    def __init__(
        self,
        order: Iterable[SampleIndex],
        batch_size: int,
        *,
        drop_last: bool,
        rank: int,
        size: int,
        pad: bool = False,
        interleave: bool = False,
    ) -> None:
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.interleave = interleave
        super().__init__(order, rank, size, pad, _CHUNK)

    def __len__(self) -> int:
        # A sampler without a length raises TypeError, as ``len`` does.
        count = len(self.order)  # type: ignore[arg-type]
        block_size = self.batch_size * self.size
        if not self.drop_last:
            return -(-count // block_size)
        padding = self._count_padding(count % block_size)
        return (count + padding) // block_size

    def _count_padding(self, count: int) -> int:
        """Return the number of repeated samples in a last global micro-batch of ``count`` samples."""
        if not self.pad or not count:
            return 0
        if self.interleave:
            return -count % self.size
        # A batch that is to be dropped is not filled up.
        if self.drop_last:
            return 0
        return self.batch_size * self.size - count

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        block_size = self.batch_size * self.size
        first = self._start * block_size
        low = self.rank * self.batch_size
        high = low + self.batch_size
        head: list[SampleIndex] = []
        order = self._order_from(first, head)
        sizes = self.sizes
        # The usual case, without a call for each batch.
        takes_block = self.size == 1 and self._sample_seed is None
        shares = self.shares
        block = list(islice(order, block_size))
        while len(block) == block_size:
            self.handed += 1
            sizes.append(self.batch_size)
            if takes_block:
                if shares is not None:
                    shares.append(list(block))
                yield block
            elif self.interleave:
                share = block[self.rank :: self.size]
                yield self._record_share(share, first + self.rank)
            elif self.size == 1:
                yield self._record_share(block, first)
            else:
                yield self._record_share(block[low:high], first + low)
            first += block_size
            block = list(islice(order, block_size))
        padding = self._count_padding(len(block))
        if not block or (self.drop_last and len(block) + padding < block_size):
            return
        # Before the padding: repeated samples count in no sum over the data.
        self._sizes_read[first // block_size] = len(block)
        block += islice(cycle(head or block), padding)
        yield from self._last_share(block, first)

    def _last_share(
        self, block: list[SampleIndex], first: int
    ) -> Iterator[list[SampleIndex]]:
        """Yield this rank's samples of an incomplete global micro-batch, unless it has none."""
        share_size, remainder = divmod(len(block), self.size)
        low = self.rank * share_size + min(self.rank, remainder)
        if self.rank < remainder:
            share_size += 1
        share = block[low : low + share_size]
        if self.interleave:
            low = self.rank
            share = block[self.rank :: self.size]
        if share:
            self.handed += 1
            self.sizes.append(len(share))
            yield self._record_share(share, first + low)
        else:
            self.empty = True

    def _record_share(self, share: list[SampleIndex], first: int) -> list[SampleIndex]:
        """Record this rank's indices if asked to, and return them, seeded if the samples are."""
        if self.shares is not None:
            self.shares.append(list(share))
        if self._sample_seed is None:
            return share
        # Positions in the order of the whole epoch, so that the seeds do not depend on the number of ranks.
        step = 1
        if self.interleave:
            step = self.size
        return SeededIndices(share, self._sample_seed, first, step)

    def _order_from(self, first: int, head: list[SampleIndex]) -> Iterator[SampleIndex]:
        """Return the order from sample ``first``; with ``pad`` fill ``head`` with the start of the order."""
        head_size = 0
        if self.pad:
            head_size = self.batch_size * self.size
        # The exact class: a subclass may yield another order.
        if type(self.order) is SequentialSampler:
            # A range is sliced without counting up to ``first``.
            indices = range(len(self.order.data_source))
            head += indices[:head_size]
            return iter(indices[first:])
        # One iterator for both: what the head has taken is no longer ahead of ``first``.
        head += islice(self._drawn, head_size)
        skipped = max(0, first - head_size)
        remaining = islice(self._drawn, skipped, None)
        return chain(head[first:], remaining)

    def samples(self, index: int) -> int | None:
        block_size = self.batch_size * self.size
        # For yielded micro-batches the number is known; for later ones only the sampler's length can tell.
        if self._sizes_read and index >= min(self._sizes_read):
            return self._sizes_read.get(index)
        if index < self._start + self.handed:
            return block_size
        count = length_of(self.order)
        if count is None:
            return None
        remaining = count - index * block_size
        if remaining >= block_size:
            return block_size
        if remaining <= 0:
            return None
        complete = remaining + self._count_padding(remaining) >= block_size
        if self.drop_last and not complete:
            return None
        return remaining


@final
class BatchTurns(Split):
    """``size`` consecutive items of a user's batch sampler form one global micro-batch; rank r takes the r-th.

    Args:
        order: yields lists of indices, or single items if the loader does not collate.
        rank: this rank, from 0.
        size: the number of ranks that share the data.
        sized: whether an item's length is its number of samples.
        pad: a rank without a share of the last global micro-batch gets a batch from the start of the order.
        whole: with ``pad``: fill the last batches from the start of the order up to this size; None: do not.
    """

    def __init__(
        self,
        order: Iterable[SampleIndex],
        *,
        rank: int,
        size: int,
        sized: bool,
        pad: bool = False,
        whole: int | None = None,
    ) -> None:
        self.sized = sized
        self.whole = None
        if pad and sized:
            self.whole = whole
        chunk = _CHUNK
        if sized:
            chunk = _BATCH_CHUNK
        super().__init__(order, rank, size, pad, chunk)

    def __len__(self) -> int:
        # A sampler without a length raises TypeError, as ``len`` does.
        count = len(self.order)  # type: ignore[arg-type]
        return -(-count // self.size)

    def __iter__(self) -> Iterator[SampleIndex]:
        head: list[SampleIndex] = []
        if self.pad:
            head += islice(self._drawn, self.size)
        first = self._start * self.size
        skipped = max(0, first - len(head))
        order = chain(head[first:], islice(self._drawn, skipped, None))
        position = first + self.rank
        sizes = self.sizes
        # Only the last turn is padded, so each turn is drawn before the previous one is yielded.
        next_turn = list(islice(order, self.size))
        while next_turn:
            turn = next_turn
            next_turn = list(islice(order, self.size))
            if self.sized:
                self._sizes_read[position // self.size] = sum(map(len, turn))
            if self.rank < len(turn):
                share = turn[self.rank]
            elif head:
                share = head[(self.rank - len(turn)) % len(head)]
            else:
                self.empty = True
                return
            if self.whole is not None and not next_turn and len(share) < self.whole:
                filling = islice(cycle(chain(*head)), self.whole - len(share))
                share = [*share, *filling]
            yield self._record_batch(share, position, sizes)
            position += self.size

    def _record_batch(
        self, batch: SampleIndex, position: int, sizes: deque[int]
    ) -> SampleIndex:
        """Count and record a batch of the user's batch sampler, and return it, seeded if its samples are."""
        self.handed += 1
        if self.sized:
            sizes.append(len(batch))
        if self.shares is not None:
            indices = [batch]
            if self.sized:
                indices = list(batch)
            self.shares.append(indices)
        if not self.sized or self._sample_seed is None:
            return batch
        return SeededIndices(list(batch), derive_seed(self._sample_seed, position), 0)

    def samples(self, index: int) -> int | None:
        return self._sizes_read.get(index)
