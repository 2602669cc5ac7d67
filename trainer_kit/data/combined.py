"""Several loaders read together: `CombinedLoader` and the four ways to combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, Final, Literal, NamedTuple, final

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.core.errors import DataError, did_you_mean
from trainer_kit.data.order import MISSING, length_of

__all__ = [
    "MODES",
    "CombinedLoader",
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
    """One of the loaders that are combined."""

    length: int | None
    """Batches of a pass, None when unknown."""
    open: Callable[[int, int], Iterator[Any]]
    """``open(turn, start)``: the batches of pass ``turn`` from batch ``start`` on."""
    again: Callable[[int, int], Iterator[Any]] | None = None
    """The same for a second look at what was read before."""


class Spot(NamedTuple):
    """Where one of them is."""

    turn: int
    """Its passes before this one."""
    batch: int
    """Batches read of this one."""
    over: bool
    """Whether it has ended, and is not started again."""


@final
class CombinedLoader:
    """Read several loaders as one.

    Args:
        iterables: a pytree (dict, list, tuple, nested) of loaders. A list or tuple inside it whose members are no
            loaders is itself one: a list of batches.
        mode: when it ends, and what it yields.

            - ``min_size``: with the shortest; a batch from each, in the shape of ``iterables``.
            - ``max_size``: with the longest; None in place of those that have ended.
            - ``max_size_cycle``: with the longest; those that have ended start again.
            - ``sequential``: all of the first, then all of the second; each loader's own batches.

    Iterating yields what a step gets, the batch (Lightning's yields ``(batch, batch_idx, dataloader_idx)``).

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
            raise DataError("CombinedLoader has no such mode", found=f"mode={mode!r}", fix=fix)
        self.iterables, self.mode = iterables, mode
        self.flattened: list[Any]
        self.flattened, self._spec = tree_flatten(iterables, is_leaf=lambda node: not _is_node(node, iterables))

    def __len__(self) -> int:
        length = combined_length(self.mode, [length_of(loader) for loader in self.flattened])
        if length is None:
            raise TypeError("the length of a CombinedLoader is unknown where that of a loader is that decides it")
        return length

    def __iter__(self) -> Iterator[Any]:
        leaves = [Leaf(length_of(loader), _Reopen(loader)) for loader in self.flattened]
        return combine(self.mode, leaves, self.join)

    def join(self, parts: Iterable[Any]) -> Any:
        """One batch from each loader, in the shape of ``iterables``."""
        return tree_unflatten(parts, self._spec)


class _Reopen:
    """Opens a loader that is not divided among ranks."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __call__(self, turn: int, start: int) -> Iterator[Any]:
        iterator = iter(self.loader)
        return islice(iterator, start, None) if start else iterator


def is_tree(loader: Any) -> bool:
    """Whether this is a container of loaders, rather than a loader or a list of batches.

    A mapping always is; a list or tuple is when a loader is found in it.

    Example:
        >>> is_tree({"a": [1, 2]}), is_tree([range(3), range(4)]), is_tree([[1, 2], [3, 4]])
        (True, True, False)
    """
    if isinstance(loader, Mapping):
        return True
    # The first members tell: a list of a million batches is not searched.
    members = islice(loader, 2) if isinstance(loader, (list, tuple)) else ()
    return any(_is_loader(member) or _holds_loader(member) for member in members)


def read_together(loader: Any) -> Any:
    """The loader as it is; a container of loaders becomes a `CombinedLoader` that cycles, as Lightning trains on it."""
    return CombinedLoader(loader, "max_size_cycle") if is_tree(loader) else loader


def _holds_loader(node: Any) -> bool:
    members = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
    return any(_is_loader(member) or _holds_loader(member) for member in members)


def _is_loader(node: Any) -> bool:
    return isinstance(node, (DataLoader, CombinedLoader, IterableDataset, Iterator, range))


def _is_node(node: Any, root: Any) -> bool:
    if node is root and isinstance(root, (list, tuple)):
        return any(isinstance(member, Iterable) for member in root) or not root
    return is_tree(node)


def combined_length(mode: Mode, lengths: list[int | None]) -> int | None:
    """Batches of a pass; an unknown length counts as longer than any other.

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


def spots_at(mode: Mode, lengths: Sequence[int | None], start: int) -> list[Spot] | None:
    """Where each loader is at batch ``start``; None where only reading would tell.

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
    """The batches of several loaders from batch ``start`` on.

    Where a rank has no share of one loader's last global batch (`MISSING`): ``max_size`` gives None in its place,
    ``max_size_cycle`` this rank's batch before it, ``min_size`` ends this rank's data with `MISSING`.

    Args:
        mode: see `CombinedLoader`.
        leaves: the loaders.
        join: puts one batch from each into the user's shape.
        start: the batch to begin with.
        spots: where each loader is at ``start``; None: that is worked out from the lengths.
    """
    if spots is None:
        spots = spots_at(mode, [leaf.length for leaf in leaves], start)
    if mode == "sequential":
        parts = _sequential(leaves, start) if spots is None else map(_opened, leaves, spots)
        return chain.from_iterable(parts)
    if spots is None:
        # Where a pass of unknown length stands after `start` batches is only found by reading them.
        return islice(combine(mode, leaves, join), start, None)
    if mode == "max_size_cycle":
        return _cycled(leaves, join, spots)
    iterators = [_opened(leaf, spot) for leaf, spot in zip(leaves, spots, strict=True)]
    if mode == "min_size":
        return (MISSING if _has_empty(parts) else join(parts) for parts in zip(*iterators, strict=False))
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


def _cycled(leaves: list[Leaf], join: Callable[[Any], Any], places: Sequence[Spot]) -> Iterator[Any]:
    turns, positions = [place.turn for place in places], [place.batch for place in places]
    ended = [turn > 0 for turn in turns]
    if not leaves or all(ended):
        return
    iterators = [leaf.open(place.turn, place.batch) for leaf, place in zip(leaves, places, strict=True)]
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
        fresh = any(part is not MISSING and not over for part, over in zip(parts, ended, strict=True))
        for i, leaf in enumerate(leaves):
            if parts[i] is MISSING and fresh and positions[i] > 1:
                known = before[i] is not None
                parts[i] = before[i] if known else next((leaf.again or leaf.open)(turns[i], positions[i] - 2), MISSING)
        yield MISSING if _has_empty(parts) else join(parts)
