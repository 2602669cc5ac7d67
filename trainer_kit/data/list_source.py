"""The source of a loader that is a list of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import final

from trainer_kit.core.display import plural
from trainer_kit.core.types import Batch, JsonObject
from trainer_kit.data.order import MISSING
from trainer_kit.data.sizes import BatchSizes, SizedBatch
from trainer_kit.data.source import (
    ReadOptions,
    Source,
    SourceState,
    kind_of,
    refuse_batch_size,
    set_epoch,
)

__all__ = ["ListSource"]


@final
class ListSource(Source):
    """A sequence of batches: rank r takes those with index r, r + size, ..., and reads no other."""

    indexed = True
    exact = True

    def __init__(self, batches: Sequence[Batch], options: ReadOptions) -> None:
        refuse_batch_size(batches, options)
        self.batches = batches
        self.rank, self.size = options.rank_and_size
        self._options = options
        self._sizes = BatchSizes()
        self.counts = [self._sizes]

    @property
    def length(self) -> int:
        return -(-len(self.batches) // self.size)

    @property
    def even(self) -> bool:
        return self._options.size == self.size

    def samples(self, index: int) -> int | None:
        # A subclass may make each batch when it is read.
        if type(self.batches) not in (list, tuple):
            return None
        # A list holds its batches already: reading the sizes of other ranks' batches costs nothing.
        first = index * self.size
        return self._sizes.total(self.batches[first : first + self.size])

    def describe(self) -> str:
        split = ""
        if self.size > 1:
            split = f", one in {self.size} by index"
        return f"{kind_of(self.batches)} of {plural(len(self.batches), 'batch')}, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        return [("batches", self.size)]

    @property
    def facts(self) -> list[JsonObject]:
        return [
            {
                "size": len(self.batches),
                "unit": "batches",
                "order": kind_of(self.batches),
            }
        ]

    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: SourceState = None
    ) -> Iterator[SizedBatch]:
        set_epoch(epoch, self.batches)
        if self.size == 1 and not start:
            return self._sizes.pairs(self.batches)
        count = len(self.batches)
        indices = range(start * self.size + self.rank, count, self.size)
        batches = map(self.batches.__getitem__, indices)
        pairs = self._sizes.pairs(batches)
        # The last turn has no batch for the ranks behind the remainder.
        if 0 < count % self.size <= self.rank and start < self.length:
            return chain(pairs, (MISSING,))
        return pairs
