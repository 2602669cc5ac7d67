"""Several loaders as one rank reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, final

from trainer_kit.core.errors import CheckpointError
from trainer_kit.data.combined import MODES, CombinedLoader, Leaf, Spot, combine, combined_length, spots_at
from trainer_kit.data.generators import generator_states, restore_generators
from trainer_kit.data.order import derive_seed
from trainer_kit.data.place import Place, Source

__all__ = ["CombinedSource"]

_PASSES = 2**20
"""More than the passes that a loader makes within one epoch."""


@final
class CombinedSource:
    """Every leaf is a source of its own, so division and order are those of each loader.

    Where each leaf is follows from the lengths; only where one is no more than a claim is it noted.
    """

    def __init__(self, combined: CombinedLoader, place: Place, opened: Callable[[Any, Place], Source]) -> None:
        self.combined = combined
        # A seed each: two loaders over one dataset must not come in the same order.
        places = (replace(place, seed=derive_seed(place.seed, 1 + i)) for i in count())
        self.sources = [opened(loader, own) for loader, own in zip(combined.flattened, places, strict=False)]
        sizes = {source.per_rank_batch_size for source in self.sources}
        self.per_rank_batch_size = sizes.pop() if len(sizes) == 1 else None
        self.once = False  # as a whole: a leaf may be
        self.rolls = any(source.rolls for source in self.sources)
        self.generators = [generator for source in self.sources for generator in source.generators]
        self.indexed = all(source.indexed for source in self.sources)
        self.stateful = not place.ordered and (bool(self.generators) or not self.indexed)
        self.workers = [number for source in self.sources for number in source.workers]
        self._spots: list[Spot] = []
        self._states: list[Any] = []

    @property
    def length(self) -> int | None:
        return combined_length(self.combined.mode, [source.length for source in self.sources])

    @property
    def even(self) -> bool:
        return all(source.even for source in self.sources)

    @property
    def stride(self) -> list[tuple[str, int]]:
        parts = [part for source in self.sources for part in source.stride]
        if self.combined.mode in ("min_size", "max_size"):
            return parts
        return [(f"{unit} of a {self.combined.mode}", number) for unit, number in parts]

    def samples(self, index: int) -> None:
        return None

    @property
    def doubt(self) -> str | None:
        return next((source.doubt for source in self.sources if source.doubt is not None), None)

    def describe(self) -> str:
        mode = self.combined.mode
        return f"{mode} ({MODES[mode]}) of: " + "; ".join(source.describe() for source in self.sources)

    def state(self) -> Any:
        if not self.stateful:
            return None
        return [
            {"spot": list(spot), "state": source.state() if _reads(spot) else generator_states(source.generators)}
            for source, spot in zip(self.sources, self._spots, strict=True)
        ]

    def first_state(self) -> Any:
        return [source.first_state() for source in self.sources]

    def divided_anew(self, state: Any, further: int) -> Any:
        raise CheckpointError(
            "loaders",
            None,
            f"where the loaders of a {self.combined.mode} are is known for as many ranks as wrote it only",
            fix="resume with as many ranks as before",
        )

    def epoch(self, epoch: int, start: int = 0, turn: int = 0, state: Any = None) -> Iterator[Any]:
        lengths = [source.length for source in self.sources]
        spots = (
            spots_at(self.combined.mode, lengths, start) if state is None else [Spot(*leaf["spot"]) for leaf in state]
        )
        none = [Spot(0, 0, False)] * len(lengths)
        self._spots = list(spots or none)
        states = [None] * len(lengths) if state is None else [leaf["state"] for leaf in state]
        leaves = []
        for i, (spot, leaf_state) in enumerate(zip(self._spots, states, strict=True)):
            if not _reads(spot) and leaf_state is not None:
                restore_generators(self.sources[i].generators, leaf_state)
                leaf_state = None
            # Passes within passes: each comes in an order of its own.
            opened = partial(_open, self.sources[i], epoch, _PASSES * turn, spot, leaf_state)
            noted = partial(self._noted, i, opened) if self.stateful else opened
            leaves.append(Leaf(lengths[i], noted, opened))
        return combine(self.combined.mode, leaves, self._join, start, spots)

    def _join(self, parts: Sequence[tuple[Any, int] | None]) -> tuple[Any, int]:
        """One batch in the user's shape; it has as many samples as that of the first loader that is not at its end."""
        batches = [None if part is None else part[0] for part in parts]
        first = parts[0]
        if first is None:
            first = next(part for part in parts if part is not None)
        return self.combined.join(batches), first[1]

    def _noted(self, leaf: int, opened: Callable[[int, int], Iterator[Any]], turn: int, batch: int) -> Iterator[Any]:
        for part in opened(turn, batch):
            batch += 1
            self._spots[leaf] = Spot(turn, batch, False)
            yield part
        self._spots[leaf] = Spot(turn, batch, True)


def _reads(spot: Spot) -> bool:
    """Whether a loader is in the middle of a pass; else there is nothing to know of it but its generators."""
    return spot.batch > 0 and not spot.over


def _open(source: Source, epoch: int, passes: int, first: Spot, state: Any, turn: int, start: int) -> Iterator[Any]:
    known = (turn, start) == (first.turn, first.batch)
    return source.epoch(epoch, start, passes + turn, state if known else None)
