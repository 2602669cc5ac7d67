"""`shuffle`: a stream in a random order that a resume continues exactly."""

from __future__ import annotations

from array import array
from typing import Final, final

from trainer_kit.core.arguments import typed_function
from trainer_kit.core.errors import DataError
from trainer_kit.data.order import derive_seed
from trainer_kit.data.source import kind_of
from trainer_kit.data.streams import (
    Cursor,
    CursorState,
    Draw,
    IndexedStream,
    ReplayedCursor,
    Stream,
    as_stream,
    integers_from_bytes,
)

__all__ = ["Permutation", "shuffle"]

_OLDEST: Final = 4
"""A sample leaves the buffer after at most this many times its size, so that a resume reads no more than that again."""


@typed_function
def shuffle(
    stream: object,
    buffer: int | None = None,
    seed: int = 0,
) -> Stream:
    """Return a stream in a random order, a function of the seed and the epoch.

    With a buffer, as many samples are held, and each one that is yielded is replaced by the next one of the stream. The
    state holds their *positions* in the stream, ``buffer`` integers, and no sample: a resume reads the last samples
    again, at most 6 times the buffer, and continues with the same samples in the same order. For that a sample leaves
    the buffer at the latest when 4 times as many others were read after it. A checkpoint can hold about 25 million of
    these integers over all ranks and workers.

    Without a buffer the order is a permutation of the whole dataset, which must be map-style. It is computed index by
    index: neither the order nor the state takes memory.

    Args:
        stream: a stream, a map-style dataset or an iterable; see `trainer_kit.data.mix` about its position.
        buffer: number of samples to hold (``buffer_size`` elsewhere); None: permute a map-style dataset.
        seed: of the order.

    Returns:
        A stream for a ``DataLoader``, or for another function of `trainer_kit.data`.

    Raises:
        DataError: a buffer below 1, or none for a stream without indices.

    Example:
        >>> list(shuffle(range(8), seed=1))
        [1, 7, 2, 0, 5, 3, 4, 6]
        >>> stream = shuffle(range(8), buffer=4)
        >>> samples = iter(stream)
        >>> read = [next(samples) for _ in range(3)]
        >>> resumed = shuffle(range(8), buffer=4)
        >>> resumed.load_state_dict(stream.state_dict())
        >>> list(resumed) == list(samples)
        True
    """
    source = as_stream(stream)
    if buffer is None:
        if not isinstance(source, IndexedStream):
            raise DataError(
                "only a map-style dataset can be permuted as a whole",
                found=f"{kind_of(stream)}, which is read in order",
                fix="pass buffer=10_000, the number of samples to shuffle among",
            )
        return _PermutedStream(source, seed)
    if buffer < 1:
        raise DataError(
            "a buffer holds at least one sample",
            found=f"buffer={buffer}",
        )
    return _ShuffledStream(
        source,
        buffer,
        seed,
    )


@final
class _ShuffledStream(Stream):
    """A stream in the order of a shuffle buffer."""

    def __init__(
        self,
        source: Stream,
        buffer: int,
        seed: int,
    ) -> None:
        super().__init__(source)
        self.source = source
        self.buffer = buffer
        self.seed = seed

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        return _BufferCursor(
            self,
            epoch,
            state,
        )


@final
class _BufferCursor(Cursor):
    """Yields a random draw of the buffer, and adds the next one of the stream.

    The random numbers are a function of (seed, epoch, number of draws), so they have no state.
    """

    def __init__(
        self,
        stream: _ShuffledStream,
        epoch: int,
        state: CursorState,
    ) -> None:
        self._size = stream.buffer
        self._seed = derive_seed(stream.seed, epoch)
        self._yielded = 0
        self._ended = False
        # An array of 64-bit integers: a state copies it after every batch.
        self._positions = array("q")
        source_state = None
        if state is not None:
            self._yielded = state["yielded"]
            source_state = state["source"]
            # A mixture asks whether its source has ended. Older states do not tell, until the next draw.
            self._ended = state.get("ended", False)
            self._positions.extend(integers_from_bytes(source_state["needed"]))
        # The samples of the buffer are not saved, only their positions: a resume reads them again.
        self._source = ReplayedCursor(
            stream.source,
            epoch,
            stream.buffer,
            source_state,
        )
        self._draws = [self._source.draws[position] for position in self._positions]
        slots = range(len(self._positions))
        # The slot of each position, to find the oldest draw without a search.
        self._slots = dict(
            zip(
                self._positions,
                slots,
                strict=True,
            )
        )
        self._oldest = min(
            self._positions,
            default=self._source.read,
        )

    def has_ended(self) -> bool:
        return self._ended and not self._draws

    def __next__(self) -> Draw:
        # Filled before the first draw, and again after each one.
        while not self._ended and len(self._draws) < self._size:
            self._add()
        if not self._draws:
            raise StopIteration
        slot = self._choose_slot()
        self._yielded += 1
        return self._remove(slot)

    def _add(self) -> None:
        position = self._source.read
        draw = self._source.take(self._oldest)
        if draw is None:
            self._ended = True
            return
        self._slots[position] = len(self._draws)
        self._positions.append(position)
        self._draws.append(draw)

    def _choose_slot(self) -> int:
        while self._oldest not in self._slots:
            self._oldest += 1
        # Bounds how far back a resume must read: by chance one draw could stay in the buffer for very long.
        if self._source.read - self._oldest > _OLDEST * self._size:
            return self._slots[self._oldest]
        number = derive_seed(self._seed, self._yielded)
        return number % len(self._draws)

    def _remove(self, slot: int) -> Draw:
        """Return the draw of a slot, and move the last one into it."""
        # The order inside the buffer does not matter, so nothing is shifted.
        draw = self._draws[slot]
        del self._slots[self._positions[slot]]
        last_draw = self._draws.pop()
        last_position = self._positions.pop()
        if slot < len(self._draws):
            self._draws[slot] = last_draw
            self._positions[slot] = last_position
            self._slots[last_position] = slot
        return draw

    def state(self) -> CursorState:
        earliest = min(
            self._positions,
            default=self._source.read,
        )
        source_state = self._source.state(
            self._positions,
            earliest,
        )
        return {
            "yielded": self._yielded,
            "source": source_state,
            "ended": self._ended,
        }


@final
class _PermutedStream(Stream):
    """A map-style dataset in the order of a permutation."""

    def __init__(
        self,
        source: IndexedStream,
        seed: int,
    ) -> None:
        super().__init__(source)
        self.source = source
        self.seed = seed

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        # The dataset may draw by epoch too, for example augmentations.
        self.source.set_source_epoch(epoch)
        count = len(self.source.source)
        permutation = Permutation(count, derive_seed(self.seed, epoch))
        return _PermutedCursor(
            self.source,
            permutation,
            state or 0,
        )


@final
class _PermutedCursor(Cursor):
    def __init__(
        self,
        source: IndexedStream,
        permutation: Permutation,
        position: int,
    ) -> None:
        self._source = source
        self._permutation = permutation
        self._position = position

    def has_ended(self) -> bool:
        return self._position >= self._permutation.count

    def __next__(self) -> Draw:
        if self.has_ended():
            raise StopIteration
        index = self._permutation(self._position)
        self._position += 1
        return self._source.draw(index)

    def state(self) -> CursorState:
        return self._position


@final
class Permutation:
    """A random order of ``range(count)`` that is computed index by index, in constant memory.

    A Feistel network permutes the numbers below a power of four; a result that is too large is permuted again, until it
    is below ``count``: less than four times on average.

    Args:
        count: number of indices.
        seed: of the order.

    Example:
        >>> permutation = Permutation(6, seed=3)
        >>> sorted(permutation(position) for position in range(6))
        [0, 1, 2, 3, 4, 5]
        >>> Permutation(10**12, seed=3)(0) < 10**12
        True
    """

    _ROUNDS: Final = 8

    def __init__(
        self,
        count: int,
        seed: int,
    ) -> None:
        self.count = count
        # An even number of bits, since both halves of a Feistel network have the same size.
        bits = max(count - 1, 1).bit_length()
        self._half_bits = (bits + 1) // 2
        self._half_mask = (1 << self._half_bits) - 1
        self._keys = [derive_seed(seed, number) for number in range(self._ROUNDS)]

    def __call__(self, position: int) -> int:
        """Return the index at a position of the order."""
        index = self._encipher(position)
        # Cycle walking: it keeps the order a permutation, because enciphering is one on the larger range.
        while index >= self.count:
            index = self._encipher(index)
        return index

    def _encipher(self, number: int) -> int:
        left_half = number >> self._half_bits
        right_half = number & self._half_mask
        for key in self._keys:
            mixed = _mix(right_half ^ key) & self._half_mask
            left_half, right_half = right_half, left_half ^ mixed
        return left_half << self._half_bits | right_half


_64_BITS: Final = 2**64 - 1


def _mix(number: int) -> int:
    """Return a number of 64 bits whose every bit depends on all bits of ``number`` (the finalizer of SplitMix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _64_BITS
    return number ^ number >> 31
