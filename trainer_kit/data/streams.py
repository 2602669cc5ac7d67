"""`Stream`: data that are read in order, from a position that is saved as a few numbers, and the sources of a stream.

A stream yields *draws*: functions that return a sample. Streams of streams pass draws on, so that a sample of a
map-style dataset is loaded only where it is yielded: not in another worker, and not while a resume counts up to its
position.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Protocol, TypeAlias, TypeGuard, cast, final

from torch.utils.data import IterableDataset, get_worker_info

from trainer_kit.core.display import plural
from trainer_kit.core.errors import (
    CheckpointError,
    DataError,
)
from trainer_kit.core.types import (
    Batch,
    JsonObject,
    SavedState,
    StateDict,
)
from trainer_kit.data.order import length_of
from trainer_kit.data.source import (
    SourceState,
    kind_of,
    set_epoch,
)
from trainer_kit.data.sources import has_state
from trainer_kit.data.torch_private import replace_worker_info

__all__ = [
    "Cursor",
    "CursorState",
    "Draw",
    "Indexed",
    "IndexedStream",
    "ReplayedCursor",
    "Sample",
    "Stream",
    "as_stream",
    "integers_from_bytes",
    "integers_to_bytes",
    "passed_objects",
    "size_below",
]

Sample: TypeAlias = Batch
Draw: TypeAlias = Callable[[], Sample]
"""Returns a sample of a stream."""
CursorState: TypeAlias = SourceState
"""Numbers, texts, bytes and containers of them; each class of cursors has its own structure."""


def integers_to_bytes(values: Sequence[int]) -> bytes:
    """Return integers as 64 bits each: a state has many of them, and is copied after every batch.

    ``torch.load(weights_only=True)`` reads bytes, and a worker sends them faster than a list or a tensor.

    Example:
        >>> integers_from_bytes(integers_to_bytes([3, 1]))
        [3, 1]
    """
    # Their number comes first: ``weights_only=True`` refuses bytes of length 0.
    integers = array("q", [len(values)])
    integers.extend(values)
    return integers.tobytes()


def integers_from_bytes(content: bytes) -> list[int]:
    """Return the integers of `integers_to_bytes`.

    Raises:
        CheckpointError: something else, in a state of an older version.
    """
    if not isinstance(content, bytes):
        raise CheckpointError(
            "loaders",
            None,
            f"the positions in a stream are saved as bytes, and here they are {kind_of(content)}",
            fix="resume with the version that saved them, or from the end of an epoch",
        )
    return array("q", content).tolist()[1:]


class Indexed(Protocol):
    """A map-style dataset."""

    def __getitem__(self, index: int) -> Sample: ...

    def __len__(self) -> int: ...


class _Stateful(Protocol):
    """An iterable that saves its position."""

    def state_dict(self) -> SavedState: ...

    def load_state_dict(self, state: SavedState) -> None: ...


class Cursor(ABC):
    """One pass over a stream. It is its own iterator, over draws."""

    def __iter__(self) -> Iterator[Draw]:
        return self

    @abstractmethod
    def __next__(self) -> Draw: ...

    @abstractmethod
    def state(self) -> CursorState:
        """Return the position after the last draw, from which `Stream.open` continues."""

    def has_ended(self) -> bool:
        """Whether no draw is left, as far as that is known without reading. Default: not known."""
        return False


class Stream(IterableDataset[Sample], ABC):
    """A dataset that is read in order, and that can continue from a saved position.

    The order is a function of the stream's arguments and the epoch. In a ``DataLoader`` with n workers, each worker
    passes over all draws and yields every n-th sample; a source that would divide itself among workers is read as
    without workers. With ``batch_size=None`` the order is then that of one process; otherwise a worker fills a batch
    with its samples. Ranks are not divided here: each rank reads the same stream, and a Trainer or an Accelerator
    keeps each n-th batch.

    A state is valid for the same number of workers.

    Args:
        inputs: the streams that this one reads.

    Example:
        >>> from trainer_kit.data import shuffle
        >>> stream = shuffle([10, 11, 12, 13])
        >>> isinstance(stream, Stream)
        True
        >>> stream.set_epoch(1)
        >>> sorted(stream)
        [10, 11, 12, 13]
    """

    def __init__(self, *inputs: Stream) -> None:
        self.inputs = inputs
        self._epoch = 0
        self._saved: SavedState | None = None
        # The process in which it was loaded.
        self._loaded_by: int | None = None
        self._pass: _WorkerPass | None = None

    @abstractmethod
    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        """Begin a pass.

        Args:
            epoch: the number of the pass.
            state: the result of `Cursor.state`, to continue; None: from the start.
        """

    def leaves(self) -> Iterator[Stream]:
        """Yield the streams below this one that read no other stream; this one if it reads none."""
        if not self.inputs:
            yield self
        for stream in self.inputs:
            yield from stream.leaves()

    def describe_mixtures(self) -> list[JsonObject]:
        """Return the shares and the sizes of the sources of each mixture at and below this stream, the outer first."""
        below: list[JsonObject] = []
        for stream in self.inputs:
            below += stream.describe_mixtures()
        return below

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; a Trainer does so.

        Args:
            epoch: the number of the pass, from 0.
        """
        self._epoch = epoch

    def __getstate__(self) -> dict[str, object]:
        # A copy, as in a worker, begins its own pass: iterators of a pass cannot be pickled.
        return {**self.__dict__, "_pass": None}

    def __iter__(self) -> Iterator[Sample]:
        saved = self._saved
        self._saved = None
        # A process that was forked to train has a copy of the stream, and no workers.
        in_worker = get_worker_info() is not None
        if saved is not None and in_worker and self._loaded_by != os.getpid():
            raise DataError(
                "a position that is loaded in the main process would hold for every epoch of the workers",
                found=f"load_state_dict of a {kind_of(self)}, and a loader with workers",
                fix="load the state of torchdata's StatefulDataLoader, or use num_workers=0",
            )
        if saved is None:
            saved = _start_state(self._epoch)
        self._pass = _WorkerPass(self, saved)
        return self._pass

    def state_dict(self) -> StateDict:
        """Return the position after the last sample that this process has yielded."""
        # Loaded, but no pass has begun: the position is the loaded one.
        if self._saved is not None:
            return dict(self._saved)
        if self._pass is None:
            return _start_state(self._epoch)
        return self._pass.state_dict()

    def load_state_dict(self, state: SavedState) -> None:
        """Begin the next pass at a position of `state_dict`.

        Args:
            state: what `state_dict` returned, for the same number of workers.
        """
        self._saved = state
        self._loaded_by = os.getpid()


def _start_state(epoch: int) -> StateDict:
    return {"epoch": epoch, "draws": 0, "cursor": None}


@final
class _WorkerPass:
    """The samples of one worker in one pass."""

    def __init__(
        self,
        stream: Stream,
        saved: SavedState,
    ) -> None:
        self._epoch: int = saved["epoch"]
        # Of all workers, so that every worker knows whose turn it is.
        self._draws: int = saved["draws"]
        self._cursor = stream.open(self._epoch, saved["cursor"])
        self._worker = 0
        self._workers = 1
        worker_info = get_worker_info()
        if worker_info is not None:
            self._worker = worker_info.id
            self._workers = worker_info.num_workers

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        # Every worker walks over all draws, and reads only its own: the order does not depend on the number of workers.
        for draw in self._cursor:
            worker = self._draws % self._workers
            self._draws += 1
            if worker == self._worker:
                return draw()
        raise StopIteration

    def state_dict(self) -> StateDict:
        return {
            "epoch": self._epoch,
            "draws": self._draws,
            "cursor": self._cursor.state(),
        }


def as_stream(source: object) -> Stream:
    """Return a stream over what a user passes.

    Args:
        source: a stream of this library; a map-style dataset or a list of samples; or an iterable, whose own position
            is saved if it has ``state_dict`` and ``load_state_dict``, and which is read again from its start otherwise.

    Raises:
        DataError: something that cannot be read more than once, or holds no samples.

    Example:
        >>> list(as_stream(["a", "b"]))
        ['a', 'b']
    """
    if isinstance(source, Stream):
        return source
    # A text is a sequence of characters, and a mapping iterates over its keys: neither is meant.
    holds_samples = not isinstance(source, (str, bytes, Mapping))
    if holds_samples and _is_indexed(source):
        return IndexedStream(source)
    if isinstance(source, Iterator):
        raise DataError(
            "a stream must be read again, by a resume and in the next epoch",
            found=f"an iterator ({kind_of(source)}), which can be read only once",
            fix="pass an object whose __iter__ starts a new pass, such as an IterableDataset",
        )
    if holds_samples and isinstance(source, Iterable):
        return _IterableStream(source)
    raise DataError(
        "a stream reads a dataset, a list of samples or an iterable",
        found=kind_of(source),
        fix="pass one of these; several of them go to trainer_kit.data.mix",
    )


def _is_indexed(source: object) -> TypeGuard[Indexed]:
    if isinstance(source, IterableDataset):
        return False
    methods = ("__getitem__", "__len__")
    return all(callable(getattr(source, name, None)) for name in methods)


@final
class IndexedStream(Stream):
    """The samples of a map-style dataset or a list, in their order."""

    def __init__(self, source: Indexed) -> None:
        super().__init__()
        self.source = source

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        self.set_source_epoch(epoch)
        return _IndexedCursor(self, state or 0)

    def set_source_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the dataset, if it has it."""
        set_epoch(epoch, self.source)

    def draw(self, index: int) -> Draw:
        """Return the draw of one sample."""
        return partial(self.source.__getitem__, index)


@final
class _IndexedCursor(Cursor):
    def __init__(
        self,
        stream: IndexedStream,
        index: int,
    ) -> None:
        self._stream = stream
        self._index = index
        # At the start of the pass, as a DataLoader's sampler does.
        self._count = len(stream.source)

    def has_ended(self) -> bool:
        return self._index >= self._count

    def __next__(self) -> Draw:
        if self.has_ended():
            raise StopIteration
        draw = self._stream.draw(self._index)
        self._index += 1
        return draw

    def state(self) -> CursorState:
        return self._index


@final
class _IterableStream(Stream):
    """The samples of an iterable of a user."""

    def __init__(self, source: Iterable[Sample]) -> None:
        super().__init__()
        self.source = source

    def open(
        self,
        epoch: int,
        state: CursorState = None,
    ) -> Cursor:
        set_epoch(epoch, self.source)
        return _IterableCursor(self.source, state)


def passed_objects(stream: Stream) -> Iterator[object]:
    """Yield the objects of a user below a stream that have a position or an epoch of their own."""
    for leaf in stream.leaves():
        if not isinstance(leaf, (_IterableStream, IndexedStream)):
            continue
        # A map-style dataset has no position.
        if isinstance(leaf, _IterableStream) or hasattr(leaf.source, "set_epoch"):
            yield leaf.source


def size_below(stream: Stream) -> int | None:
    """Return the length of what a user passed below a stream; None if it is unknown, or if there are several."""
    leaves = list(stream.leaves())
    if len(leaves) > 1 or not isinstance(leaves[0], (_IterableStream, IndexedStream)):
        return None
    return length_of(leaves[0].source)


@final
class _IterableCursor(Cursor):
    def __init__(
        self,
        source: Iterable[Sample],
        state: CursorState,
    ) -> None:
        self._stateful: _Stateful | None = None
        if has_state(source):
            self._stateful = cast("_Stateful", source)
        self._read = 0
        self._opened_with = None
        if state is not None:
            self._read = state["read"]
            self._opened_with = state["source"]
        self._has_read = False
        # Many sources read the worker once, in __iter__.
        with _without_workers():
            if self._opened_with is not None and self._stateful is not None:
                self._stateful.load_state_dict(self._opened_with)
            self._iterator = iter(source)
            if self._stateful is None:
                _read_up_to(
                    self._iterator,
                    self._read,
                    source,
                )

    def __next__(self) -> Draw:
        with _without_workers():
            sample = next(self._iterator)
        self._has_read = True
        self._read += 1
        # Read already: an iterable has no way to skip a sample for another worker.
        return lambda: sample

    def state(self) -> CursorState:
        # Before its first sample a source may still return the position of its previous pass: the body of a generator
        # has not begun.
        source_state = self._opened_with
        if self._stateful is not None and self._has_read:
            # The source goes on to change its own.
            source_state = copy.deepcopy(self._stateful.state_dict())
        return {"read": self._read, "source": source_state}


def _read_up_to(
    iterator: Iterator[Sample],
    count: int,
    source: object,
) -> None:
    read = sum(1 for _ in islice(iterator, count))
    if read < count:
        raise _shorter(
            source,
            read,
            count,
        )


def _shorter(
    source: object,
    read: int,
    count: int,
) -> CheckpointError:
    return CheckpointError(
        "loaders",
        None,
        f"a {kind_of(source)} ended after {plural(read, 'sample')}; the checkpoint has read {count} of them",
        fix="resume with the data of the checkpoint",
    )


@contextmanager
def _without_workers() -> Iterator[None]:
    """Inside, ``get_worker_info()`` is None: a source that divides itself among workers yields all of its samples.

    The outermost stream divides them. Sources that know of workers and those that do not are read alike, and neither
    loses nor repeats a sample.
    """
    worker_info = get_worker_info()
    if worker_info is None:
        yield
        return
    # torch has no function that sets it.
    replace_worker_info(None)
    try:
        yield
    finally:
        replace_worker_info(worker_info)


@final
class ReplayedCursor:
    """Reads a stream whose draws are used in another order, and knows from where they can be read again.

    A state holds the *positions* (numbers of draws) that are still needed, and a state of the stream at or before the
    first of them: an anchor. A resume opens the stream there and reads the needed draws again.

    Args:
        stream: what is read.
        epoch: of the pass.
        interval: draws between two anchors.
        state: the result of `state`, to continue.

    Attributes:
        read: number of draws that were read.
        draws: after a resume, the needed draws by position.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        interval: int,
        state: CursorState = None,
    ) -> None:
        self.read = 0
        self.draws: dict[int, Draw] = {}
        self._interval = interval
        self._anchors: deque[tuple[int, CursorState]] = deque()
        if state is None:
            self._cursor = stream.open(epoch)
            return
        # Back to the anchor, and forward over everything that was read since.
        self.read = state["anchor"]
        self._cursor = stream.open(epoch, state["stream"])
        needed = set(integers_from_bytes(state["needed"]))
        earliest = min(
            needed,
            default=state["read"],
        )
        while self.read < state["read"]:
            position = self.read
            draw = self.take(earliest)
            if draw is None:
                raise _shorter(
                    stream,
                    position,
                    state["read"],
                )
            if position in needed:
                self.draws[position] = draw

    def take(self, earliest: int) -> Draw | None:
        """Return the next draw; None at the end of the stream.

        Args:
            earliest: a position at or before all draws that are still needed.
        """
        self._drop_anchors(earliest)
        # A state of the stream costs memory, so one is kept for each interval and not for each draw.
        if self.read % self._interval == 0 or not self._anchors:
            self._anchors.append((self.read, self._cursor.state()))
        draw = next(self._cursor, None)
        if draw is not None:
            self.read += 1
        return draw

    def state(
        self,
        positions: Sequence[int],
        earliest: int,
    ) -> StateDict:
        """Return the state from which the draws at these positions, and all later ones, can be read again.

        Args:
            positions: of draws that were read.
            earliest: the first of them; without one, the next position.
        """
        anchor = self.read
        stream_state = None
        # An anchor behind the next draw is not there before the first one is taken.
        if earliest == self.read:
            stream_state = self._cursor.state()
        else:
            self._drop_anchors(earliest)
            anchor, stream_state = self._anchors[0]
        return {
            "read": self.read,
            "needed": integers_to_bytes(positions),
            "anchor": anchor,
            "stream": stream_state,
        }

    def _drop_anchors(self, earliest: int) -> None:
        # Anchors before the earliest needed draw are never used again, except for the last one before it.
        while len(self._anchors) > 1 and self._anchors[1][0] <= earliest:
            self._anchors.popleft()
