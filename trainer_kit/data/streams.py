"""What can only be read in order: an iterable, or a DataLoader over an IterableDataset."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, final

import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate

from trainer_kit.core.bars import bar_class
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.core.seed import preserved_rng
from trainer_kit.data.generators import generator_states, own_generators, restore_generators
from trainer_kit.data.order import MISSING, derive_seed, length_of, seed_globals
from trainer_kit.data.place import Place, copied, kind_of, one_for_one, refuse_batch_size, set_epoch
from trainer_kit.data.sizes import BatchSizes

__all__ = ["StreamSource"]


@final
class StreamSource:
    """Anything that can only be read in order: every rank reads all of it and keeps each size-th batch."""

    indexed = False

    def __init__(self, loader: Iterable[Any], place: Place) -> None:
        self.given, self.place, (self.rank, self.size) = loader, place, place.part
        self.loader: Any = loader
        self.generator: torch.Generator | None = None
        self.per_rank_batch_size: int | None = None
        self._sizes, self._counts = BatchSizes(), False
        if isinstance(loader, DataLoader):
            self.loader, self.generator = copied(loader)
            if place.batch_size is not None:
                if loader.batch_size is None:
                    refuse_batch_size(loader, place)
                batches = BatchSampler(loader.sampler, place.batch_size, loader.drop_last)
                self.loader.__dict__.update(batch_size=place.batch_size, batch_sampler=batches)
            self.per_rank_batch_size = self.loader.batch_size
            own = loader.batch_size is not None and loader.collate_fn is not default_collate
            if own and one_for_one(loader):  # what torch itself collates shows its size
                self._counts, self.loader.collate_fn = True, _Counting(loader.collate_fn)
            if not place.ordered and _has_state(loader.dataset):
                self.loader = _reading_states(self.loader)
        else:
            refuse_batch_size(loader, place)
        if place.reproducible and place.rank == 0:
            warnings.warn(
                f"reproducible_workers=True seeds samples that are asked for by index, and a {kind_of(loader)} is a"
                " stream: what it draws is up to it",
                stacklevel=2,
            )
        # An iterator can be read once; whatever makes a new one each time can be read again.
        self.once = isinstance(loader, Iterator)
        self.begun = False
        self.stateful = not place.ordered and _has_state(self.loader)
        number = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        self.workers = [number] if self.stateful else []
        # Worker processes that end with the epoch take all that they read with them.
        self.parts = number > 0 and not self.loader.persistent_workers
        self.rolls = self.stateful and not self.parts
        self.generators = own_generators(loader) if isinstance(loader, DataLoader) else []
        self._began: list[Any] = []

    @property
    def length(self) -> int | None:
        count = length_of(self.loader)
        if isinstance(self.loader, DataLoader):
            # torch would warn about each batch beyond the length that a dataset only claims to have.
            self.loader.__dict__["_IterableDataset_len_called"] = None
        return None if count is None else -(-count // self.size)

    @property
    def even(self) -> bool:
        # Whether all ranks read the same stream is up to the user's code.
        return self.place.size == 1

    def samples(self, index: int) -> None:
        return None

    @property
    def doubt(self) -> str | None:
        return self._sizes.doubt

    def describe(self) -> str:
        what = kind_of(self.given)
        if isinstance(self.given, DataLoader):
            what = f"{what} over {kind_of(self.given.dataset)}"
        split = f"; every rank reads all of it and keeps each {self.size}th batch" if self.size > 1 else ""
        return f"{what}, in its order{split}"

    @property
    def stride(self) -> list[tuple[str, int]]:
        each = self.per_rank_batch_size
        return [("batches", self.size)] if each is None else [("samples", self.size * each)]

    def state(self) -> Any:
        if not self.stateful:
            return {"generators": self._began} if self.generators else None
        own = self.loader.state_dict()
        return {
            # What lives in this process may go on changing.
            "loader": own if any(self.workers) else copy.deepcopy(own),
            "at": (self.rank + 1) % self.size,
            "generators": self._began,
        }

    def first_state(self) -> Any:
        if not self.stateful:
            return generator_states(self.generators)
        # Not the DataLoader's: that would start its workers.
        owner: Any = self.given.dataset if isinstance(self.given, DataLoader) else self.given
        with suppress(Exception):  # it arrives when the state is asked for in earnest
            return owner.state_dict()
        return None

    def divided_anew(self, state: Any, further: int) -> Any:
        if not self.place.shard or (state is not None and state["at"]):
            raise CheckpointError(
                "loaders",
                None,
                f"each rank read its own {kind_of(self.given)}: their states fit no other number of ranks",
                fix="resume with as many ranks as before",
            )
        return {"generators": self._began, **(state or {}), "further": further}

    def epoch(self, epoch: int, start: int = 0, turn: int = 0, state: Any = None) -> Iterator[Any]:
        parts = (getattr(self.given, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        set_epoch(epoch, self.given, *parts)
        if self.generators:
            if state is not None:
                restore_generators(self.generators, state["generators"])
            self._began = generator_states(self.generators)
        if self.generator is not None:
            # The same on all ranks: a dataset that shuffles in its workers must yield the same stream everywhere.
            self.generator.manual_seed(derive_seed(self.place.seed, epoch, turn))
        goes_on = self.stateful and state is not None and "loader" in state
        if goes_on:
            self.loader.load_state_dict(state["loader"])
        workers = self.loader.num_workers if isinstance(self.loader, DataLoader) else 0
        inside = goes_on and start > 0  # of an epoch, whose next batch is read under the generators of the run
        alike = self.size > 1 and not workers and not self.once and not inside
        iterator = self._alike(derive_seed(self.place.seed, epoch, turn)) if alike else iter(self.loader)
        if self.once and self.begun:
            iterator = chain(self._first(iterator), iterator)
        self.begun = True
        if start and not goes_on:
            self._drain(iterator, start)
        if state is not None:
            for _ in islice(iterator, state.get("further", 0)):
                pass
        if self.stateful and self.parts:
            iterator = self._letting_go(iterator)
        pairs = iterator if self._counts else self._sizes.pairs(iterator)
        return pairs if self.size == 1 else self._turns(pairs, state["at"] if goes_on else 0)

    def _alike(self, seed: int) -> Iterator[Any]:
        """Begin under generators that are the same on all ranks: a stream that shuffles has one order for all."""
        with preserved_rng():
            seed_globals(seed)
            iterator = iter(self.loader)
            first = list(islice(iterator, 1))  # a generator function has drawn nothing before
        yield from first
        yield from iterator

    def _letting_go(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """torchdata's loader holds on to the iterator, and so to its workers, where the reading ends early."""
        try:
            yield from iterator
        finally:
            if self.loader._iterator is iterator:
                self.loader.__dict__["_iterator"] = None

    def _drain(self, iterator: Iterator[Any], start: int) -> None:
        """Read up to batch ``start``; what that draws was drawn before."""
        count, tells = start * self.size, self.place.rank == 0
        began = time.monotonic()
        bar = bar_class()(
            islice(iterator, count), "reading up to where it was", count, leave=False, delay=2, disable=not tells
        )
        with preserved_rng():
            for _ in bar:
                pass
        if tells:
            warnings.warn(
                f"{kind_of(self.given)} cannot skip by index: to start at batch {start}, {count} batches were read and"
                f" thrown away in {time.monotonic() - began:.1f} s. With state_dict() and load_state_dict(state) on"
                f" {self._owner()} it goes on at once",
                stacklevel=2,
            )

    def _owner(self) -> str:
        return f"its dataset ({kind_of(self.given.dataset)})" if isinstance(self.given, DataLoader) else "it"

    def _first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            yield batch
            return
        raise DataError(
            f"this {kind_of(self.given)} has no batches left for another pass",
            found="an iterator, which can be read once, at its end",
            fix="pass something that can be iterated again: a DataLoader, a list, or an object whose __iter__"
            " makes a new iterator",
        )

    def _turns(self, pairs: Iterator[Any], at: int) -> Iterator[Any]:
        for pair in pairs:
            if at == self.rank:
                yield pair
            at = (at + 1) % self.size
        if 0 < at <= self.rank:
            yield MISSING


@final
class _Counting:
    """A user's ``collate_fn`` that also says how many samples it was given, wherever it runs."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        return self.collate(samples), len(samples)


def _has_state(owner: Any) -> bool:
    """torchdata's protocol."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _reading_states(loader: DataLoader[Any]) -> Any:
    """The same loader as torchdata's, which reads the state of its dataset in this process and in workers."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return loader  # one that makes its batches in its own way
    if loader.num_workers and not getattr(loader, "in_order", True):
        return loader  # batches come as workers finish them: no state says which did
    from torchdata.stateful_dataloader import StatefulDataLoader

    # Not its constructor, which knows neither all that torch has by now nor what a subclass added.
    made: Any = StatefulDataLoader.__new__(StatefulDataLoader)
    made.__dict__.update(
        loader.__dict__,
        snapshot_every_n_steps=1,
        next_iter_state=None,
        _initial_iter_for_state_dict=False,
    )
    return made
