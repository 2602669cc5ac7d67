"""The base class of the sources that `Feed` reads, the options of reading, and shared helpers."""

from __future__ import annotations

import copy
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer_kit.core.errors import DataError
from trainer_kit.core.types import Batch, JsonObject
from trainer_kit.data.division import worker_parts
from trainer_kit.data.order import SampleIndex
from trainer_kit.data.sizes import BatchSizes, SizedBatch
from trainer_kit.data.torch_private import (
    ITERATOR,
    drop_iterator,
    has_workers,
    iterator_method,
    kept_iterator,
    shut_down_workers,
)
from trainer_kit.data.workers import EndsWithParent, checked_context

__all__ = [
    "DescribesMixtures",
    "DividesItself",
    "RandomGenerator",
    "ReadOptions",
    "Source",
    "SourceState",
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

RandomGenerator: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
SourceState: TypeAlias = Any
"""What `Source.state` returns, as plain data and tensors: each class has its own structure. None: nothing is needed."""
DividesItself: TypeAlias = "bool | list[DividesItself] | None"
"""Whether a loader divides the data among the ranks by itself; None: not known yet. For several loaders, a list."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def find_generators(*owners: object) -> list[RandomGenerator]:
    """Return every generator among the attributes of these objects, once each.

    Example:
        >>> shared = torch.Generator()
        >>> sampler = torch.utils.data.RandomSampler(range(3), generator=shared)
        >>> find_generators(sampler, torch.utils.data.BatchSampler(sampler, 2, False), None) == [shared]
        True
    """
    # By identity: a generator may be shared, and equal ones are not the same.
    generators = {}
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, _KINDS):
                generators[id(value)] = value
    return list(generators.values())


def generator_states(generators: Iterable[RandomGenerator]) -> list[SourceState]:
    """Return the type names and states of generators, as plain data and tensors."""
    return [[type(generator).__name__, _state(generator)] for generator in generators]


def restore_generators(
    generators: Iterable[RandomGenerator], states: Sequence[SourceState]
) -> None:
    """Restore `generator_states`; a generator of another type stays unchanged."""
    # Not strict: a checkpoint of an older program may have more or fewer of them.
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


def _state(generator: RandomGenerator) -> SourceState:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a rank reads its part of the data; `Feed` documents the arguments of the same names."""

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
    def rank_and_size(self) -> tuple[int, int]:
        """The rank and the number of ranks among which this library divides the data; (0, 1) without a division."""
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
    shared = False
    """Whether all ranks read one stream, so that a state is valid for this number of ranks and samples of a batch."""
    rolls = False
    """Whether an epoch may depend on the number of batches read in earlier epochs."""
    workers: Sequence[int] = ()
    """The number of worker processes of each loader with a state, which is valid only for this number."""
    generators: Sequence[RandomGenerator] = ()
    """The user's generators that the order is drawn from."""
    counts: Sequence[BatchSizes] = ()
    """What counts the samples of batches whose loader does not."""
    _divides_itself: bool | None = False
    _began: Sequence[SourceState] = ()
    """The states of `generators` from which the order of the current epoch is drawn."""

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
    def divides_itself(self) -> DividesItself:
        """Whether the loader divides the data among the ranks. Default: it does not."""
        return self._divides_itself

    @property
    def facts(self) -> list[JsonObject]:
        """What decides the order of the data, as plain data: one for each loader. Default: nothing is known."""
        return [{}]

    @abstractmethod
    def describe(self) -> str: ...
    @abstractmethod
    def epoch(
        self, epoch: int, start: int = 0, turn: int = 0, state: SourceState = None
    ) -> Iterator[SizedBatch]:
        """Return batches with their number of samples; `MISSING` if this rank has no share of a global micro-batch.

        ``turn`` counts the passes within one epoch; ``state`` is the state at batch ``start``, if there is one.
        """

    def close(self) -> None:
        """End the workers that live until the end of the run. Default: there are none."""

    def samples(self, index: int) -> int | None:
        """Return the number of samples of a global micro-batch over all ranks. Default: unknown."""
        return None

    def indices(self, epoch: int, batch: int) -> list[SampleIndex] | None:
        """Return the dataset's indices in this rank's micro-batch of the epoch that is being read. Default: unknown.

        The order is drawn again, in the time that this takes; what is being read continues unchanged.
        """
        return None

    def record_indices(self) -> None:
        """From the next epoch on, keep the dataset's indices of each batch for `next_indices`. Default: unknown."""

    def next_indices(self) -> list[SampleIndex] | None:
        """Return the indices of the earliest batch of this epoch that was read and not named yet; None if unknown."""
        return None

    def restore_division(self, divides_itself: DividesItself) -> None:
        """Set `divides_itself` to what a checkpoint holds, if it is not known yet. Default: it is known."""

    def set_saved_ranks(self, ranks: int) -> None:
        """Set the number of ranks that saved the position of the next epoch. Default: it does not matter."""

    def state(self) -> SourceState:
        """Return what `epoch` needs besides the position to continue after the last batch. Default: nothing."""
        return None

    @property
    def stateful_loaders(self) -> Sequence[object]:
        return ()

    def draw_from(self, state: SourceState) -> None:
        """Restore the user's generators, if there is a state, and record from where the order is drawn."""
        if self.generators:
            if state is not None:
                restore_generators(self.generators, state["generators"])
            self._began = generator_states(self.generators)

    def resharded(self, state: SourceState, further: int) -> SourceState:
        """Return the state for another number of ranks, from that of the last rank. Default: the same.

        After it, ``further`` batches over all ranks are to be read and discarded. CheckpointError if there is no such
        state.
        """
        return state


@runtime_checkable
class DescribesMixtures(Protocol):
    """A dataset that may read several sources in given shares."""

    def describe_mixtures(self) -> list[JsonObject]:
        """Return the shares and the sizes of the sources of each mixture, as plain data for a checkpoint."""


def kind_of(instance: object) -> str:
    return type(instance).__name__


def set_epoch(epoch: int, *parts: object) -> None:
    """Call ``set_epoch`` of those objects that have it, in this order, once each."""
    called: set[int] = set()
    for owner in parts:
        if id(owner) in called:
            continue
        called.add(id(owner))
        setter = getattr(owner, "set_epoch", None)
        if callable(setter):
            setter(epoch)


def warn_of_early_end(loader: object, start: int) -> None:
    """Warn that a loader has ended before the position of a resume, batch ``start``."""
    warnings.warn(
        f"this {kind_of(loader)} has ended before batch {start}, at which this resume continues: it has fewer data than"
        " in the checkpoint, and the epoch counts as complete",
        stacklevel=2,
    )


def refuse_batch_size(loader: object, options: ReadOptions) -> None:
    """Raise `DataError` if the user asks for a batch size of a loader that creates batches itself."""
    if options.batch_size is not None:
        raise DataError(
            f"the Trainer cannot set the batch size of this {kind_of(loader)}",
            found=f"global_batch_size={options.batch_size * options.size} for batches that the loader makes itself",
            fix="leave global_batch_size out, or pass a DataLoader(dataset, batch_size=...)",
        )


def draws_each_batch(loader: DataLoader[Batch]) -> bool:
    """Whether a loader yields one batch for each list of indices that it draws, in the order of the lists."""
    kind = type(loader)
    # A subclass that overrides either method may drop, repeat or merge batches.
    for method in (kind.__iter__, iterator_method(kind)):
        if method.__module__.partition(".")[0] not in ("torch", "torchdata"):
            return False
    return loader.num_workers == 0 or getattr(loader, "in_order", True)


def end_workers(loader: DataLoader[Batch]) -> None:
    """End the persistent workers of a loader that this library has copied.

    Garbage collection of a cycle closes the pipes to the workers before the loader can ask them to end, and then waits
    five seconds for each.
    """
    iterator = kept_iterator(loader)
    # torchdata's iterator keeps a state, and is another class.
    if has_workers(iterator):
        drop_iterator(loader)
        shut_down_workers(iterator)


_SHARED_EPOCH = ("datasets", "streaming")
"""Libraries whose data sets share their epoch with the copies in workers."""


def _hidden_from_workers(loader: DataLoader[Batch]) -> object | None:
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


def _end_workers_each_epoch(
    loader: DataLoader[Batch], owner: object, warns: bool
) -> None:
    """Give up the persistent workers of a copied loader."""
    loader.__dict__["persistent_workers"] = False
    if warns:
        warnings.warn(
            f"the persistent workers of this {kind_of(loader)} start again for each epoch: set_epoch of"
            f" {kind_of(owner)} does not reach the copies in workers that live on. persistent_workers=False omits this"
            " line",
            stacklevel=3,
        )


def copied(
    loader: DataLoader[Batch], warns: bool
) -> tuple[DataLoader[Batch], torch.Generator | None]:
    """Return a copy of a loader, and the generator for the seeds of its workers; None if the user gave one.

    Args:
        loader: the user's.
        warns: warn where the copy behaves differently.
    """
    duplicate = copy.copy(loader)
    # Written into ``__dict__``: DataLoader.__setattr__ refuses to set these after the constructor.
    attributes = duplicate.__dict__
    # The iterator of the user's own pass, and its workers, stay with the user's loader.
    attributes[ITERATOR] = None
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
