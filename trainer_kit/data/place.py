"""The base class of the sources that `Feed` reads, the part of the data that a rank reads, and shared helpers."""

from __future__ import annotations

import copy
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer_kit.core.errors import DataError
from trainer_kit.data.division import worker_parts
from trainer_kit.data.sizes import BatchSizes
from trainer_kit.data.workers import EndsWithParent, checked_context

__all__ = [
    "Place",
    "Source",
    "copied",
    "draws_each_batch",
    "end_workers",
    "find_generators",
    "generator_states",
    "kind_of",
    "refuse_batch_size",
    "restore_generators",
    "set_epoch",
    "warn_of_early_end",
]

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def find_generators(*owners: Any) -> list[Any]:
    """Return every generator among the attributes of these objects, once each.

    Example:
        >>> shared = torch.Generator()
        >>> sampler = torch.utils.data.RandomSampler(range(3), generator=shared)
        >>> find_generators(sampler, torch.utils.data.BatchSampler(sampler, 2, False), None) == [shared]
        True
    """
    generators = {}  # by identity: a generator may be shared, and equal ones are not the same
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, _KINDS):
                generators[id(value)] = value
    return list(generators.values())


def generator_states(generators: Iterable[Any]) -> list[Any]:
    """Return the type names and states of generators, as plain data and tensors."""
    return [[type(generator).__name__, _state(generator)] for generator in generators]


def restore_generators(generators: Iterable[Any], states: Sequence[Any]) -> None:
    """Restore `generator_states`; a generator of another type stays unchanged."""
    for generator, (kind, state) in zip(generators, states, strict=False):
        if kind != type(generator).__name__:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            # A checkpoint may hold the inner tuple as a list.
            version, internal, gauss_next = state
            generator.setstate((version, tuple(internal), gauss_next))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


@dataclass(frozen=True, kw_only=True)
class Place:
    """The part of the data that this rank reads, and the options of reading; see `Feed`."""

    rank: int = 0
    size: int = 1
    seed: int = 0
    shard: bool = True
    batch_size: int | None = None
    ordered: bool = False
    reproducible: bool = False
    pad: bool = False
    interleave: bool = False
    agree: Callable[[list[float]], list[list[float]]] | None = None
    turn: int | None = 1
    """Batches that the caller reads at once; None: a position may lie beyond the end of this loader."""

    @property
    def part(self) -> tuple[int, int]:
        """(rank, size) of the division by this library."""
        if not self.shard:
            return (0, 1)
        return (self.rank, self.size)


class Source(ABC):
    """A loader as one rank reads it. `Feed` documents the members without a comment.

    The names of the subclasses are part of checkpoints.
    """

    per_rank_batch_size: int | None = None
    indexed = False
    exact = False
    once = False
    stateful = False
    """Whether `state` changes with each batch, and `epoch` can start from it."""
    rolls = False
    """Whether an epoch may depend on the number of batches read in earlier epochs."""
    workers: Sequence[int] = ()
    """The number of worker processes of each loader with a state, which is valid only for this number."""
    generators: Sequence[Any] = ()
    """The user's generators that the order is drawn from."""
    counts: Sequence[BatchSizes] = ()
    """What counts the samples of batches whose loader does not."""
    alone: Any = False
    """Whether the loader divides the data by itself; None: not known yet. For several loaders, a list."""
    _began: Sequence[Any] = ()

    @property
    @abstractmethod
    def length(self) -> int | None: ...
    @property
    @abstractmethod
    def even(self) -> bool: ...
    @property
    @abstractmethod
    def stride(self) -> list[tuple[str, int]]: ...
    @property
    def doubt(self) -> str | None:
        """The reason why the numbers of samples may be wrong; None if they are certain, or nothing was read yet."""
        doubts = (sizes.doubt for sizes in self.counts if sizes.doubt is not None)
        return next(doubts, None)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What decides the order of the data, as plain data: one for each loader. Default: nothing is known."""
        return [{}]

    @abstractmethod
    def describe(self) -> str: ...
    @abstractmethod
    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: Any = None
    ) -> Iterator[tuple[Any, int]]:
        """Return batches with their number of samples; `MISSING` if this rank has no share of a global micro-batch.

        ``turn`` counts the passes within one epoch; ``state`` is the state at batch ``start``, if there is one.
        """

    def close(self) -> None:
        """End the workers that live until the end of the run. Default: there are none."""

    def samples(self, index: int) -> int | None:
        """Return the number of samples of a global micro-batch over all ranks. Default: unknown."""
        return None

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        """Return the dataset's indices in this rank's micro-batch of the epoch that is being read. Default: unknown.

        The order is drawn again, in the time that this takes; what is being read goes on unchanged.
        """
        return None

    def record_indices(self) -> None:
        """From the next epoch on, keep the dataset's indices of each batch for `next_indices`. Default: unknown."""

    def next_indices(self) -> list[Any] | None:
        """Return the indices of the earliest batch of this epoch that was read and not named yet; None if unknown."""
        return None

    def leave_alone(self, alone: Any) -> None:
        """Set `alone` to what a checkpoint holds, if it is not known yet. Default: it is known."""

    def state(self) -> Any:
        """Return what `epoch` needs besides the position to continue after the last batch. Default: nothing."""
        return None

    def draw_from(self, state: Any) -> None:
        """Restore the user's generators, if there is a state, and record from where the order is drawn."""
        if self.generators:
            if state is not None:
                restore_generators(self.generators, state["generators"])
            self._began = generator_states(self.generators)

    def resharded(self, state: Any, further: int) -> Any:
        """Return the state for another number of ranks, from that of the last rank. Default: the same.

        After it, ``further`` batches over all ranks are to be read and discarded. CheckpointError if there is no such
        state.
        """
        return state


def kind_of(instance: object) -> str:
    return type(instance).__name__


def set_epoch(epoch: int, *parts: Any) -> None:
    called: set[int] = set()
    for owner in parts:
        if id(owner) in called:
            continue
        called.add(id(owner))
        setter = getattr(owner, "set_epoch", None)
        if callable(setter):
            setter(epoch)


def warn_of_early_end(loader: Any, start: int) -> None:
    """Warn that a loader has ended before the position of a resume, batch ``start``."""
    warnings.warn(
        f"this {kind_of(loader)} has ended before batch {start}, at which this resume continues: it has fewer data than"
        " in the checkpoint, and the epoch counts as complete",
        stacklevel=2,
    )


def refuse_batch_size(loader: Any, place: Place) -> None:
    if place.batch_size is not None:
        raise DataError(
            f"the Trainer cannot set the batch size of this {kind_of(loader)}",
            found=f"global_batch_size={place.batch_size * place.size} for batches that the loader makes itself",
            fix="leave global_batch_size out, or pass a DataLoader(dataset, batch_size=...)",
        )


def draws_each_batch(loader: DataLoader[Any]) -> bool:
    """Whether a loader yields one batch for each list of indices that it draws, in the order of the lists."""
    kind: Any = type(loader)
    # A subclass that overrides either method may drop, repeat or merge batches.
    for method in (kind.__iter__, kind._get_iterator):
        if method.__module__.partition(".")[0] not in ("torch", "torchdata"):
            return False
    return loader.num_workers == 0 or getattr(loader, "in_order", True)


def end_workers(loader: DataLoader[Any]) -> None:
    """End the persistent workers of a loader that this library has copied.

    Garbage collection of a cycle closes the pipes to the workers before the loader can ask them to end, and then waits
    five seconds for each.
    """
    iterator = loader._iterator
    # torchdata's iterator keeps a state, and is another class.
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        loader.__dict__["_iterator"] = None
        iterator._shutdown_workers()


_SHARED_EPOCH = ("datasets", "streaming")
"""Libraries whose data sets share their epoch with the copies in workers."""


def _hidden_from_workers(loader: DataLoader[Any]) -> Any:
    """Return a part whose ``set_epoch`` does not reach its copies in workers that live on; None without one.

    Such workers would read every epoch in the order of the first one. They are started again for each epoch.
    """
    for member in worker_parts(loader):
        if not callable(getattr(member, "set_epoch", None)):
            continue
        package = type(member).__module__.partition(".")[0]
        if package not in _SHARED_EPOCH:
            return member
    return None


def _end_workers_each_epoch(loader: DataLoader[Any], part: Any, warns: bool) -> None:
    """Give up the persistent workers of a copied loader."""
    loader.__dict__["persistent_workers"] = False
    if warns:
        warnings.warn(
            f"the persistent workers of this {kind_of(loader)} start again for each epoch: set_epoch of"
            f" {kind_of(part)} does not reach the copies in workers that live on. persistent_workers=False omits this"
            " line",
            stacklevel=3,
        )


def copied(
    loader: DataLoader[Any], warns: bool
) -> tuple[DataLoader[Any], torch.Generator | None]:
    """Return a copy of a loader, and the generator for the seeds of its workers; None if the user gave one.

    Args:
        loader: the user's.
        warns: warn where the copy behaves differently.
    """
    duplicate = copy.copy(loader)
    # Written into ``__dict__``: DataLoader.__setattr__ refuses to set these after the constructor.
    attributes = duplicate.__dict__
    attributes["_iterator"] = None
    generator = None
    if loader.generator is None:
        generator = torch.Generator()
        attributes["generator"] = generator
    if loader.persistent_workers:
        hidden = _hidden_from_workers(loader)
        if hidden is not None:
            _end_workers_each_epoch(duplicate, hidden, warns)
    if loader.num_workers:
        ends_with_parent = EndsWithParent(loader.worker_init_fn, loader.num_workers)
        attributes["worker_init_fn"] = ends_with_parent
        context = checked_context(loader.multiprocessing_context)
        # Through the property, which validates it.
        duplicate.multiprocessing_context = context
    if "_initial_iter_for_state_dict" in attributes:
        # torchdata's: the iterator belongs to the user's loader.
        attributes["_initial_iter_for_state_dict"] = False
    return duplicate, generator
