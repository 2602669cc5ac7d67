"""Read several loaders together: `CombinedLoader`, its four modes, and its `Source`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice, zip_longest
from typing import Any, Final, Literal, NamedTuple, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.core.errors import CheckpointError, DataError, did_you_mean
from trainer_kit.data.order import MISSING, derive_seed, length_of
from trainer_kit.data.place import Place, Source, generator_states, restore_generators

__all__ = [
    "MODES",
    "CombinedLoader",
    "CombinedSource",
    "Leaf",
    "Mode",
    "Spot",
    "combine",
    "combined_length",
    "is_tree",
    "read_together",
    "spots_at",
]

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES: Final[Mapping[str, str]] = {
    "min_size": "an epoch ends with the shortest",
    "max_size_cycle": "an epoch ends with the longest, the others start again",
    "max_size": "an epoch ends with the longest, None takes the place of the others",
    "sequential": "one after the other",
}
"""What each mode does, in a few words."""


class Leaf(NamedTuple):
    """One of the combined loaders."""

    length: int | None
    """Batches per pass, None if unknown."""
    open: Callable[[int, int], Iterator[Any]]
    """``open(turn, start)`` returns the batches of pass ``turn`` from batch ``start``."""
    again: Callable[[int, int], Iterator[Any]] | None = None
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

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            fix = did_you_mean(str(mode), MODES)
            raise DataError(
                "unknown mode of CombinedLoader", found=f"mode={mode!r}", fix=fix
            )
        self.iterables = iterables
        self.mode = mode
        self.flattened: list[Any]
        self.flattened, self._spec = tree_flatten(
            iterables, is_leaf=lambda node: not _is_node(node, iterables)
        )

    def __len__(self) -> int:
        length = combined_length(
            self.mode, [length_of(loader) for loader in self.flattened]
        )
        if length is None:
            raise TypeError(
                "the length of a CombinedLoader is unknown if the loader that decides it has none"
            )
        return length

    def __iter__(self) -> Iterator[Any]:
        leaves = [
            Leaf(length_of(loader), partial(_reopened, loader))
            for loader in self.flattened
        ]
        return combine(self.mode, leaves, self.join)

    def join(self, parts: Iterable[Any]) -> Any:
        """Return one batch from each loader in the shape of ``iterables``."""
        return tree_unflatten(parts, self._spec)


def _reopened(loader: Iterable[Any], turn: int, start: int) -> Iterator[Any]:
    """Open a loader that is not divided among ranks."""
    iterator = iter(loader)
    return islice(iterator, start, None) if start else iterator


def is_tree(loader: Any) -> bool:
    """Whether this is a container of loaders, rather than a loader or a list of batches.

    A mapping always is; a list or tuple is if it contains a loader.

    Example:
        >>> is_tree({"a": [1, 2]}), is_tree([range(3), range(4)]), is_tree([[1, 2], [3, 4]])
        (True, True, False)
    """
    if isinstance(loader, Mapping):
        return True
    # The first members suffice: do not search a list of a million batches.
    members = islice(loader, 2) if isinstance(loader, (list, tuple)) else ()
    return any(_is_loader(member) or _holds_loader(member) for member in members)


def read_together(loader: Any) -> Any:
    """Return a loader unchanged, and a container of loaders as a `CombinedLoader` that cycles, as in Lightning."""
    return CombinedLoader(loader, "max_size_cycle") if is_tree(loader) else loader


def _holds_loader(node: Any) -> bool:
    members = (
        node.values()
        if isinstance(node, Mapping)
        else node
        if isinstance(node, (list, tuple))
        else ()
    )
    return any(_is_loader(member) or _holds_loader(member) for member in members)


def _is_loader(node: Any) -> bool:
    return isinstance(
        node, (DataLoader, CombinedLoader, IterableDataset, Iterator, range)
    )


def _is_node(node: Any, root: Any) -> bool:
    if node is root and isinstance(root, (list, tuple)):
        return any(isinstance(member, Iterable) for member in root) or not root
    return is_tree(node)


def combined_length(mode: Mode, lengths: list[int | None]) -> int | None:
    """Return the batches per pass; an unknown length counts as longer than any other.

    Example:
        >>> combined_length("min_size", [3, None]), combined_length("max_size", [3, None])
        (3, None)
    """
    known = [length for length in lengths if length is not None]
    if mode == "min_size":
        return min(known, default=0 if not lengths else None)
    if len(known) < len(lengths):
        return None
    return sum(known) if mode == "sequential" else max(known, default=0)


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
            read = start if length is None else min(start, length)
            spots.append(Spot(0, read, over=read == length))
            start -= read
    return spots


def combine(
    mode: Mode,
    leaves: list[Leaf],
    join: Callable[[Any], Any],
    start: int = 0,
    spots: Sequence[Spot] | None = None,
) -> Iterator[Any]:
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
        parts = (
            _sequential(leaves, start) if spots is None else map(_opened, leaves, spots)
        )
        return chain.from_iterable(parts)
    if spots is None:
        # The position in passes of unknown length is only found by reading them.
        return islice(combine(mode, leaves, join), start, None)
    if mode == "max_size_cycle":
        return _cycled(leaves, join, spots)
    iterators = [_opened(leaf, spot) for leaf, spot in zip(leaves, spots, strict=True)]
    if mode == "min_size":
        return (
            MISSING if _has_empty(parts) else join(parts)
            for parts in zip(*iterators, strict=False)
        )
    return (_join_ended(parts, join) for parts in zip_longest(*iterators))


def _opened(leaf: Leaf, spot: Spot) -> Iterator[Any]:
    return iter(()) if spot.over else leaf.open(spot.turn, spot.batch)


def _has_empty(parts: Iterable[Any]) -> bool:
    # Not `MISSING in parts`: that would compare tensors.
    return any(part is MISSING for part in parts)


def _join_ended(parts: tuple[Any, ...], join: Callable[[Any], Any]) -> Any:
    if not _has_empty(parts):
        return join(parts)
    kept = [None if part is MISSING else part for part in parts]
    return MISSING if all(part is None for part in kept) else join(kept)


def _sequential(leaves: list[Leaf], start: int) -> Iterator[Iterator[Any]]:
    for leaf in leaves:
        if start and leaf.length is not None and start >= leaf.length:
            start -= leaf.length
        elif start and leaf.length is None:
            iterator = leaf.open(0, 0)
            while start and next(iterator, _END) is not _END:
                start -= 1
            yield iterator
        else:
            yield leaf.open(0, start)
            start = 0


_END = object()


def _cycled(
    leaves: list[Leaf], join: Callable[[Any], Any], places: Sequence[Spot]
) -> Iterator[Any]:
    turns, positions = (
        [place.turn for place in places],
        [place.batch for place in places],
    )
    ended = [turn > 0 for turn in turns]
    if not leaves or all(ended):
        return
    iterators = [
        leaf.open(place.turn, place.batch)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    parts: list[Any] = [None] * len(leaves)
    while True:
        before = list(parts)
        for i, iterator in enumerate(iterators):
            parts[i] = next(iterator, _END)
            ended[i] = ended[i] or parts[i] is _END
        if all(ended):
            return
        for i, leaf in enumerate(leaves):
            if parts[i] is _END:
                turns[i], positions[i] = turns[i] + 1, 0
                iterators[i] = leaf.open(turns[i], 0)
                parts[i] = next(iterators[i], _END)
                if parts[i] is _END:
                    return
            positions[i] += 1
        fresh = any(
            part is not MISSING and not over
            for part, over in zip(parts, ended, strict=True)
        )
        for i, leaf in enumerate(leaves):
            if parts[i] is MISSING and fresh and positions[i] > 1:
                known = before[i] is not None
                parts[i] = (
                    before[i]
                    if known
                    else next(
                        (leaf.again or leaf.open)(turns[i], positions[i] - 2), MISSING
                    )
                )
        yield MISSING if _has_empty(parts) else join(parts)


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
        place: Place,
        opened: Callable[[Any, Place], Source],
    ) -> None:
        self.combined = combined
        # One seed per loader: two loaders over one dataset must have different orders.
        # The position of a loader that has ended lies beyond its end.
        places = (
            replace(place, seed=derive_seed(place.seed, 1 + i), turn=None)
            for i in count()
        )
        self.sources = [
            opened(loader, own)
            for loader, own in zip(combined.flattened, places, strict=False)
        ]
        sizes = {source.per_rank_batch_size for source in self.sources}
        self.per_rank_batch_size = sizes.pop() if len(sizes) == 1 else None
        self.rolls = any(source.rolls for source in self.sources)
        self.generators = [
            generator for source in self.sources for generator in source.generators
        ]
        self.indexed = all(source.indexed for source in self.sources)
        self.exact = all(source.exact for source in self.sources)
        self.stateful = not place.ordered and (bool(self.generators) or not self.exact)
        self.counts = [one for source in self.sources for one in source.counts]
        self.workers = [number for source in self.sources for number in source.workers]
        self._spots: list[Spot] = []
        self._states: list[Any] = []

    @property
    def alone(self) -> list[Any]:
        return [source.alone for source in self.sources]

    def leave_alone(self, alone: Any) -> None:
        for source, value in zip(
            self.sources, alone or [False] * len(self.sources), strict=False
        ):
            source.leave_alone(value)

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
        parts = [part for source in self.sources for part in source.stride]
        if self.combined.mode in ("min_size", "max_size"):
            return parts
        return [(f"{unit} of a {self.combined.mode}", number) for unit, number in parts]

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [fact for source in self.sources for fact in source.facts]

    def describe(self) -> str:
        mode = self.combined.mode
        return f"{mode} ({MODES[mode]}) of: " + "; ".join(
            source.describe() for source in self.sources
        )

    def state(self) -> Any:
        if not self.stateful:
            return None
        return [
            {
                "spot": list(spot),
                "state": source.state()
                if _reads(spot)
                else generator_states(source.generators),
            }
            for source, spot in zip(self.sources, self._spots, strict=True)
        ]

    def resharded(self, state: Any, further: int) -> Any:
        raise CheckpointError(
            "loaders",
            None,
            f"the positions in the loaders of a {self.combined.mode} are known only for the number of ranks that saved",
            fix="resume with the same number of ranks",
        )

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: Any = None
    ) -> Iterator[Any]:
        # A length that is only a hint gives no position.
        lengths = [source.length if source.exact else None for source in self.sources]
        spots = (
            spots_at(self.combined.mode, lengths, start)
            if state is None
            else [Spot(*leaf["spot"]) for leaf in state]
        )
        none = [Spot(0, 0, False)] * len(lengths)
        self._spots = list(spots or none)
        states = (
            [None] * len(lengths)
            if state is None
            else [leaf["state"] for leaf in state]
        )
        leaves = []
        for i, (spot, leaf_state) in enumerate(zip(self._spots, states, strict=True)):
            if not _reads(spot) and leaf_state is not None:
                restore_generators(self.sources[i].generators, leaf_state)
                leaf_state = None
            # Each pass of a leaf within a pass of the whole has a different order.
            opened = partial(
                _open, self.sources[i], epoch, _PASSES * turn, spot, leaf_state
            )
            noted = partial(self._noted, i, opened) if self.stateful else opened
            leaf = Leaf(lengths[i], noted, opened)
            # Ranks compare the first batches at one time, also of a loader that they reach at different times.
            early = (
                self.combined.mode == "sequential"
                and self.sources[i].alone is None
                and not start
            )
            leaves.append(_opened_early(leaf) if early else leaf)
        return combine(self.combined.mode, leaves, self._join, start, spots)

    def _join(self, parts: Sequence[tuple[Any, int] | None]) -> tuple[Any, int]:
        """Return one batch in the user's shape, with the number of samples of the first loader that has not ended."""
        batches = [None if part is None else part[0] for part in parts]
        first = parts[0]
        if first is None:
            first = next(part for part in parts if part is not None)
        return self.combined.join(batches), first[1]

    def _noted(
        self,
        leaf: int,
        opened: Callable[[int, int], Iterator[Any]],
        turn: int,
        batch: int,
    ) -> Iterator[Any]:
        return self._read(
            leaf, opened(turn, batch), turn, batch
        )  # opened now: ranks may compare its first batch

    def _read(
        self, leaf: int, parts: Iterator[Any], turn: int, batch: int
    ) -> Iterator[Any]:
        for part in parts:
            batch += 1
            self._spots[leaf] = Spot(turn, batch, False)
            yield part
        self._spots[leaf] = Spot(turn, batch, True)


def _opened_early(leaf: Leaf) -> Leaf:
    """Open the first pass of a loader now."""
    first = [leaf.open(0, 0)]
    return leaf._replace(
        open=lambda turn, start: first.pop() if first else leaf.open(turn, start)
    )


def _reads(spot: Spot) -> bool:
    """Whether a loader is in the middle of a pass; otherwise its state is only that of its generators."""
    return spot.batch > 0 and not spot.over


def _open(
    source: Source,
    epoch: int,
    passes: int,
    first: Spot,
    state: Any,
    turn: int,
    start: int,
) -> Iterator[Any]:
    known = (turn, start) == (first.turn, first.batch)
    return source.epoch(epoch, start, passes + turn, state if known else None)
