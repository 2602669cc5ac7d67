"""Read several loaders together: `CombinedLoader`, its four modes, and its `Source`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, final

from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.core.errors import CheckpointError, DataError, did_you_mean
from trainer_kit.core.torch_private import tree_flatten, tree_unflatten
from trainer_kit.core.types import Batch, JsonObject, Loaders
from trainer_kit.data.order import MISSING, derive_seed, length_of
from trainer_kit.data.sizes import SizedBatch
from trainer_kit.data.source import (
    DividesItself,
    ReadOptions,
    Source,
    SourceState,
    generator_states,
    restore_generators,
)

__all__ = [
    "MODES",
    "CombinedLoader",
    "CombinedSource",
    "Joiner",
    "Leaf",
    "Mode",
    "Opener",
    "Spot",
    "combine",
    "combined_length",
    "is_tree",
    "read_together",
    "spots_at",
]

_T = TypeVar("_T")
Opener: TypeAlias = Callable[[int, int], Iterator[Batch]]
"""``open(turn, start)`` returns the batches of pass ``turn`` from batch ``start``."""
Joiner: TypeAlias = Callable[[Sequence[Batch]], Batch]
"""Returns one batch from each loader in the user's shape."""
Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES: Final[Mapping[str, str]] = {
    "min_size": "an epoch ends with the shortest",
    "max_size_cycle": "an epoch ends with the longest, the others restart",
    "max_size": "an epoch ends with the longest, None replaces the others",
    "sequential": "one after the other",
}
"""What each mode does, in a few words."""


class Leaf(NamedTuple):
    """One of the combined loaders."""

    length: int | None
    """Batches per pass, None if unknown."""
    open: Opener
    """``open(turn, start)`` returns the batches of pass ``turn`` from batch ``start``."""
    reread: Opener | None = None
    """Like ``open``, to read earlier batches again without recording the position."""


class Spot(NamedTuple):
    """The position in one of the combined loaders."""

    turn: int
    """Completed passes."""
    batch: int
    """Batches read in the current pass."""
    over: bool
    """Whether the loader has ended and does not restart."""


@final
class CombinedLoader:
    """Read several loaders as one loader.

    Args:
        iterables: a pytree (dict, list, tuple, nested) of loaders. A list or tuple inside it that contains no loaders
            is itself a loader: a list of batches.
        mode: when an epoch ends, and what it yields.

            - ``min_size``: ends with the shortest; yields a batch from each, in the shape of ``iterables``.
            - ``max_size``: ends with the longest; None replaces the batches of those that have ended.
            - ``max_size_cycle``: ends with the longest; those that have ended restart.
            - ``sequential``: all batches of the first, then all of the second, and so on.

    Iterating yields the batch that a step gets (Lightning's yields ``(batch, batch_idx, dataloader_idx)``).

    Raises:
        DataError: an unknown mode.

    Source: https://lightning.ai/docs/pytorch/stable/data/iterables.html

    Example:
        >>> both = CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, "max_size_cycle")
        >>> len(both), list(both)
        (3, [{'a': 1, 'b': 4}, {'a': 2, 'b': 5}, {'a': 3, 'b': 4}])
    """

    def __init__(self, iterables: Loaders, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            fix = did_you_mean(str(mode), MODES)
            raise DataError(
                "unknown mode of CombinedLoader", found=f"mode={mode!r}", fix=fix
            )
        self.iterables = iterables
        self.mode = mode
        self.flattened: list[Loaders]

        def is_leaf(node: object) -> bool:
            return not _is_node(node, iterables)

        self.flattened, self._spec = tree_flatten(iterables, is_leaf=is_leaf)

    def __len__(self) -> int:
        length = combined_length(
            self.mode, [length_of(loader) for loader in self.flattened]
        )
        if length is None:
            raise TypeError(
                "the length of a CombinedLoader is unknown if the loader that decides it has none"
            )
        return length

    def __iter__(self) -> Iterator[Batch]:
        leaves = [
            Leaf(length_of(loader), partial(_open_undivided, loader))
            for loader in self.flattened
        ]
        return combine(self.mode, leaves, self.join)

    def join(self, batches: Iterable[Batch]) -> Batch:
        """Return one batch from each loader in the shape of ``iterables``.

        Args:
            batches: one for each loader, in the order in which the loaders are in ``iterables``, depth first.
        """
        return tree_unflatten(batches, self._spec)


def _open_undivided(loader: Iterable[Batch], turn: int, start: int) -> Iterator[Batch]:
    """Open a loader that is not divided among ranks."""
    iterator = iter(loader)
    if start:
        return islice(iterator, start, None)
    return iterator


def is_tree(loader: object) -> bool:
    """Whether this is a container of loaders, rather than a loader or a list of batches.

    A mapping always is; a list or tuple is if it contains a loader.

    Example:
        >>> is_tree({"a": [1, 2]}), is_tree([range(3), range(4)]), is_tree([[1, 2], [3, 4]])
        (True, True, False)
    """
    if isinstance(loader, Mapping):
        return True
    if not isinstance(loader, (list, tuple)):
        return False
    # The first members suffice: do not search a list of a million batches.
    return _any_loader(islice(loader, 2))


def read_together(loader: Loaders) -> Loaders:
    """Return a loader unchanged, and a container of loaders as a `CombinedLoader` that cycles, as in Lightning."""
    if is_tree(loader):
        return CombinedLoader(loader, "max_size_cycle")
    return loader


def _any_loader(members: Iterable[object]) -> bool:
    return any(_is_loader(member) or _holds_loader(member) for member in members)


def _holds_loader(node: object) -> bool:
    if isinstance(node, Mapping):
        return _any_loader(node.values())
    if isinstance(node, (list, tuple)):
        return _any_loader(node)
    return False


def _is_loader(node: object) -> bool:
    kinds = (DataLoader, CombinedLoader, IterableDataset, Iterator, range)
    return isinstance(node, kinds)


def _is_node(node: object, root: object) -> bool:
    # What the user passes as a list is a list of loaders; a list inside it may be a list of batches.
    if node is root and isinstance(root, (list, tuple)):
        return not root or any(isinstance(member, Iterable) for member in root)
    return is_tree(node)


def combined_length(mode: Mode, lengths: list[int | None]) -> int | None:
    """Return the batches per pass; an unknown length counts as longer than any other.

    Example:
        >>> combined_length("min_size", [3, None]), combined_length("max_size", [3, None])
        (3, None)
    """
    if not lengths:
        return 0
    numbers = [length for length in lengths if length is not None]
    if mode == "min_size":
        return min(numbers, default=None)
    if len(numbers) < len(lengths):
        return None
    if mode == "sequential":
        return sum(numbers)
    return max(numbers)


def spots_at(
    mode: Mode, lengths: Sequence[int | None], start: int
) -> list[Spot] | None:
    """Return the position of each loader at batch ``start``; None if it is unknown before reading.

    Example:
        >>> spots_at("max_size_cycle", [5, 2], 3)
        [Spot(turn=0, batch=3, over=False), Spot(turn=1, batch=1, over=False)]
    """
    if not start or mode in ("min_size", "max_size"):
        return [Spot(0, start, False)] * len(lengths)
    spots = []
    for length in lengths:
        if mode == "max_size_cycle":
            if not length:
                return None
            spots.append(Spot(*divmod(start, length), False))
        elif start and length is None:
            return None
        else:
            read = start
            if length is not None:
                read = min(start, length)
            spots.append(Spot(0, read, over=read == length))
            start -= read
    return spots


def combine(
    mode: Mode,
    leaves: list[Leaf],
    join: Joiner,
    start: int = 0,
    spots: Sequence[Spot] | None = None,
) -> Iterator[Batch]:
    """Return the batches of several loaders from batch ``start``.

    If a rank has no share of a loader's last global batch (`MISSING`), ``max_size`` yields None for it,
    ``max_size_cycle`` this rank's previous batch, and ``min_size`` ends this rank's data with `MISSING`.

    Args:
        mode: see `CombinedLoader`.
        leaves: the loaders.
        join: returns one batch from each in the user's shape.
        start: the first batch.
        spots: the position of each loader at ``start``; None: computed from the lengths.
    """
    if spots is None:
        spots = spots_at(mode, [leaf.length for leaf in leaves], start)
    if mode == "sequential":
        if spots is None:
            return chain.from_iterable(_sequential(leaves, start))
        return chain.from_iterable(map(_open_leaf, leaves, spots))
    if spots is None:
        # The position in passes of unknown length is only found by reading them.
        return islice(combine(mode, leaves, join), start, None)
    if mode == "max_size_cycle":
        return _cycled(leaves, join, spots)
    iterators = list(map(_open_leaf, leaves, spots))
    if mode == "min_size":
        return _until_shortest(iterators, join)
    return (_join_ended(batches, join) for batches in zip_longest(*iterators))


def _open_leaf(leaf: Leaf, spot: Spot) -> Iterator[Batch]:
    if spot.over:
        return iter(())
    return leaf.open(spot.turn, spot.batch)


def _has_missing(batches: Iterable[Batch]) -> bool:
    # Not `MISSING in batches`: that would compare tensors.
    return any(batch is MISSING for batch in batches)


def _until_shortest(iterators: list[Iterator[Batch]], join: Joiner) -> Iterator[Batch]:
    for batches in zip(*iterators, strict=False):
        if _has_missing(batches):
            yield MISSING
        else:
            yield join(batches)


def _join_ended(batches: Sequence[Batch], join: Joiner) -> Batch:
    if not _has_missing(batches):
        return join(batches)
    present = []
    for batch in batches:
        if batch is MISSING:
            batch = None
        present.append(batch)
    if all(batch is None for batch in present):
        return MISSING
    return join(present)


def _sequential(leaves: list[Leaf], start: int) -> Iterator[Iterator[Batch]]:
    """Yield the opened loaders one after the other; a loader of unknown length is read to learn where it ends."""
    for leaf in leaves:
        if not start:
            yield leaf.open(0, 0)
        elif leaf.length is None:
            iterator = leaf.open(0, 0)
            while start and next(iterator, _END) is not _END:
                start -= 1
            yield iterator
        elif start >= leaf.length:
            start -= leaf.length
        else:
            yield leaf.open(0, start)
            start = 0


_END: Final = object()


def _cycled(leaves: list[Leaf], join: Joiner, spots: Sequence[Spot]) -> Iterator[Batch]:
    turns = [spot.turn for spot in spots]
    positions = [spot.batch for spot in spots]
    ended = [turn > 0 for turn in turns]
    if not leaves or all(ended):
        return
    iterators = [
        leaf.open(spot.turn, spot.batch)
        for leaf, spot in zip(leaves, spots, strict=True)
    ]
    batches: list[Batch] = [None] * len(leaves)
    while True:
        # 1. One batch of each. The epoch is over when each loader has ended at least once.
        previous = list(batches)
        for i, iterator in enumerate(iterators):
            batches[i] = next(iterator, _END)
            ended[i] = ended[i] or batches[i] is _END
        if all(ended):
            return
        # 2. Loaders that have ended restart; only now, since the last one may end in this turn.
        for i, leaf in enumerate(leaves):
            if batches[i] is _END:
                turns[i] += 1
                positions[i] = 0
                iterators[i] = leaf.open(turns[i], 0)
                batches[i] = next(iterators[i], _END)
                # An empty loader cannot restart.
                if batches[i] is _END:
                    return
            positions[i] += 1
        # 3. A loader in its first pass has a batch for this rank: the others repeat their previous one.
        fresh = any(
            batch is not MISSING and not over
            for batch, over in zip(batches, ended, strict=True)
        )
        for i, leaf in enumerate(leaves):
            if batches[i] is not MISSING or not fresh or positions[i] <= 1:
                continue
            batches[i] = previous[i]
            # The first batch after a resume has none before it: read it again.
            if previous[i] is None:
                reopen = leaf.reread or leaf.open
                batches[i] = next(reopen(turns[i], positions[i] - 2), MISSING)
        if _has_missing(batches):
            yield MISSING
        else:
            yield join(batches)


_START: Final = Spot(0, 0, False)
_PASSES = 2**20
"""More than the passes that a loader makes within one epoch."""


@final
class CombinedSource(Source):
    """The source of a `CombinedLoader`: each leaf is a source, with its own division and order.

    The position in each leaf follows from the lengths. With a source of uncertain length it is recorded.
    """

    def __init__(
        self,
        combined: CombinedLoader,
        options: ReadOptions,
        open_source: Callable[[Loaders, ReadOptions], Source],
    ) -> None:
        self.combined = combined
        self.sources: list[Source] = []
        for number, loader in enumerate(combined.flattened, 1):
            # One seed per loader: two loaders over one dataset must have different orders.
            seed = derive_seed(options.seed, number)
            # The position of a loader that has ended lies beyond its end.
            leaf_options = replace(options, seed=seed, turn=None)
            self.sources.append(open_source(loader, leaf_options))
        sizes = {source.per_rank_batch_size for source in self.sources}
        if len(sizes) == 1:
            self.per_rank_batch_size = sizes.pop()
        self.rolls = any(source.rolls for source in self.sources)
        self.generators = _concatenate(source.generators for source in self.sources)
        self.indexed = all(source.indexed for source in self.sources)
        self.exact = all(source.exact for source in self.sources)
        # Positions in exact loaders follow from the step; the states of generators do not.
        follows_from_step = self.exact and not self.generators
        self.stateful = not options.ordered and not follows_from_step
        # The positions of its loaders count their batches.
        self.shared = self.stateful
        self.counts = _concatenate(source.counts for source in self.sources)
        self.workers = _concatenate(source.workers for source in self.sources)
        self._spots: list[Spot] = []

    @property
    def divides_itself(self) -> list[DividesItself]:
        return [source.divides_itself for source in self.sources]

    def restore_division(self, divides_itself: DividesItself) -> None:
        # A checkpoint of an older version has False for all loaders.
        divisions: list[DividesItself] = [False] * len(self.sources)
        if isinstance(divides_itself, (list, tuple)) and divides_itself:
            divisions = divides_itself
        for source, division in zip(self.sources, divisions, strict=False):
            source.restore_division(division)

    def set_saved_ranks(self, ranks: int) -> None:
        for source in self.sources:
            source.set_saved_ranks(ranks)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    @property
    def length(self) -> int | None:
        return combined_length(
            self.combined.mode, [source.length for source in self.sources]
        )

    @property
    def even(self) -> bool:
        return all(source.even for source in self.sources)

    @property
    def stride(self) -> list[tuple[str, int]]:
        strides = _concatenate(source.stride for source in self.sources)
        mode = self.combined.mode
        if mode in ("min_size", "max_size"):
            return strides
        return [(f"{unit} of a {mode}", number) for unit, number in strides]

    @property
    def facts(self) -> list[JsonObject]:
        return _concatenate(source.facts for source in self.sources)

    def describe(self) -> str:
        mode = self.combined.mode
        descriptions = "; ".join(source.describe() for source in self.sources)
        return f"{mode} ({MODES[mode]}) of: {descriptions}"

    def state(self) -> SourceState:
        if not self.stateful:
            return None
        states = []
        for source, spot in zip(self.sources, self._spots, strict=True):
            if _within_pass(spot):
                state = source.state()
            else:
                state = generator_states(source.generators)
            states.append({"spot": list(spot), "state": state})
        return states

    @property
    def stateful_loaders(self) -> Sequence[object]:
        return _concatenate(source.stateful_loaders for source in self.sources)

    def resharded(self, state: SourceState, further: int) -> SourceState:
        raise CheckpointError(
            "loaders",
            None,
            f"the positions in the loaders of a {self.combined.mode} are known only for the number of ranks that saved,"
            " and for its batch sizes",
            fix="resume with the same number of ranks and batch sizes",
        )

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: SourceState = None
    ) -> Iterator[Batch]:
        # A length that is only a hint gives no position.
        lengths = []
        for source in self.sources:
            length = None
            if source.exact:
                length = source.length
            lengths.append(length)
        mode = self.combined.mode
        states: list[SourceState] = [None] * len(lengths)
        if state is None:
            spots = spots_at(mode, lengths, start)
        else:
            spots = [Spot(*leaf["spot"]) for leaf in state]
            states = [leaf["state"] for leaf in state]
        self._spots = list(spots or [_START] * len(lengths))
        # Each pass of a leaf within a pass of the whole has a different order.
        passes = _PASSES * turn
        leaves: list[Leaf] = []
        for i, source in enumerate(self.sources):
            spot = self._spots[i]
            if states[i] is not None and not _within_pass(spot):
                restore_generators(source.generators, states[i])
                states[i] = None
            opener = partial(_open_source, source, epoch, passes, spot, states[i])
            leaf = Leaf(lengths[i], opener, opener)
            if self.stateful:
                leaf = leaf._replace(open=partial(self._open_recorded, i, opener))
            # Ranks compare the first batches at one time, also of a loader that they reach at different times.
            compares = mode == "sequential" and source.divides_itself is None
            if compares and spot == _START:
                leaf = _open_early(leaf)
            leaves.append(leaf)
        return combine(mode, leaves, self._join, start, spots)

    def _join(self, pairs: Sequence[SizedBatch | None]) -> SizedBatch:
        """Return one batch in the user's shape, with the number of samples of the first loader that has not ended."""
        batches: list[Batch] = []
        size = None
        for pair in pairs:
            if pair is None:
                batches.append(None)
                continue
            batch, samples = pair
            batches.append(batch)
            if size is None:
                size = samples
        assert size is not None
        return self.combined.join(batches), size

    def _open_recorded(
        self,
        leaf: int,
        opener: Opener,
        turn: int,
        batch: int,
    ) -> Iterator[Batch]:
        # Opened now, not at the first batch: ranks may compare their first batches.
        batches = opener(turn, batch)
        return self._read(leaf, batches, turn, batch)

    def _read(
        self, leaf: int, batches: Iterator[Batch], turn: int, position: int
    ) -> Iterator[Batch]:
        for batch in batches:
            position += 1
            self._spots[leaf] = Spot(turn, position, False)
            yield batch
        self._spots[leaf] = Spot(turn, position, True)


def _concatenate(lists: Iterable[Iterable[_T]]) -> list[_T]:
    return list(chain.from_iterable(lists))


def _open_early(leaf: Leaf) -> Leaf:
    """Open the first pass of a loader now."""
    opened = [leaf.open(0, 0)]

    def open_next(turn: int, start: int) -> Iterator[Batch]:
        if opened:
            return opened.pop()
        return leaf.open(turn, start)

    return leaf._replace(open=open_next)


def _within_pass(spot: Spot) -> bool:
    """Whether a loader is in the middle of a pass; otherwise its state is only that of its generators."""
    return spot.batch > 0 and not spot.over


def _open_source(
    source: Source,
    epoch: int,
    passes: int,
    first: Spot,
    state: SourceState,
    turn: int,
    start: int,
) -> Iterator[Batch]:
    # The saved state is that of the first position only.
    if (turn, start) != (first.turn, first.batch):
        state = None
    return source.epoch(epoch, start, passes + turn, state)
