"""Which part of the data is read where, and what `Feed` asks of every kind of loader."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer_kit.core.errors import DataError
from trainer_kit.data.workers import EndsWithParent, heard_context

__all__ = [
    "Place",
    "Source",
    "copied",
    "generator_states",
    "kind_of",
    "one_for_one",
    "own_generators",
    "refuse_batch_size",
    "restore_generators",
    "set_epoch",
]

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def own_generators(*owners: Any) -> list[Any]:
    """Every generator among the attributes of these objects, once each.

    Example:
        >>> shared = torch.Generator()
        >>> sampler = torch.utils.data.RandomSampler(range(3), generator=shared)
        >>> own_generators(sampler, torch.utils.data.BatchSampler(sampler, 2, False), None) == [shared]
        True
    """
    found = {}
    for owner in owners:
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, _KINDS):
                found[id(value)] = value
    return list(found.values())


def generator_states(generators: Iterable[Any]) -> list[Any]:
    """Where they stand, as plain data and tensors."""
    return [_state(generator) for generator in generators]


def restore_generators(generators: Iterable[Any], states: Sequence[Any]) -> None:
    """Put `generator_states` back; one that is of another kind today stays where it is."""
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
            generator.setstate((state[0], tuple(state[1]), state[2]))


def _state(generator: Any) -> list[Any]:
    state: Any
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.getstate()
    return [type(generator).__name__, state]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which part of the data is read here, and how."""

    rank: int = 0
    size: int = 1
    seed: int = 0
    shard: bool = True
    batch_size: int | None = None
    ordered: bool = False
    reproducible: bool = False
    pad: bool = False

    @property
    def part(self) -> tuple[int, int]:
        """(rank, size) of the division that is ours to make."""
        return (self.rank, self.size) if self.shard else (0, 1)


class Source(Protocol):
    """What `Feed` asks of a loader; the meaning of each is documented there."""

    @property
    def length(self) -> int | None: ...
    @property
    def even(self) -> bool: ...
    @property
    def per_rank_batch_size(self) -> int | None: ...
    @property
    def indexed(self) -> bool:
        """Whether a batch is found without reading those before it."""

    @property
    def once(self) -> bool:
        """Whether it can be read only once, over all epochs."""

    @property
    def stateful(self) -> bool:
        """Whether `state` tells more with each batch, and `epoch` can begin with it."""

    @property
    def workers(self) -> list[int]:
        """How many processes read, one for each loader with a state: it is known for as many only."""

    @property
    def rolls(self) -> bool:
        """Whether an epoch may depend on how far the ones before it were read."""

    @property
    def generators(self) -> list[Any]:
        """The user's own, that the order is drawn from."""

    @property
    def stride(self) -> list[tuple[str, int]]:
        """How much of a loader's order one global micro-batch covers: (unit, number), one for each loader."""

    @property
    def doubt(self) -> str | None:
        """Why the number of samples of its batches may be wrong; None where it is certain, or nothing was read yet."""

    def samples(self, index: int) -> int | None: ...
    def describe(self) -> str: ...
    def epoch(self, epoch: int, start: int = 0, turn: int = 0, state: Any = None) -> Iterator[tuple[Any, int]]:
        """Batches, each with its number of samples; `MISSING` where this rank has no share of a global micro-batch.

        ``turn`` counts the passes within one epoch; ``state`` is that of batch ``start``, where there is one.
        """

    def state(self) -> Any:
        """What `epoch` needs besides the position to begin behind the last batch; None where that is nothing."""

    def first_state(self) -> Any:
        """The state before anything is read: whether it can be saved is asked before the first step."""

    def divided_anew(self, state: Any, further: int) -> Any:
        """The state of the last of several ranks, for any rank of another number of them; raises where it is none.

        ``further`` batches, over all ranks, are to be read and thrown away behind it.
        """


def kind_of(thing: Any) -> str:
    return type(thing).__name__


def set_epoch(epoch: int, *parts: Any) -> None:
    seen: set[int] = set()
    for part in parts:
        if id(part) not in seen and callable(found := getattr(part, "set_epoch", None)):
            found(epoch)
        seen.add(id(part))


def refuse_batch_size(loader: Any, place: Place) -> None:
    if place.batch_size is not None:
        raise DataError(
            f"the batch size of this {kind_of(loader)} cannot be set from outside",
            found=f"global_batch_size={place.batch_size * place.size} for batches that it makes by itself",
            fix="leave global_batch_size out, or pass a DataLoader(dataset, batch_size=...)",
        )


def one_for_one(loader: DataLoader[Any]) -> bool:
    """Whether a loader yields one batch for each list of indices that it draws, in the same order."""
    kind: Any = type(loader)
    made_by = {kind.__iter__.__module__.partition(".")[0], kind._get_iterator.__module__.partition(".")[0]}
    return made_by <= {"torch", "torchdata"} and (loader.num_workers == 0 or getattr(loader, "in_order", True))


def copied(loader: DataLoader[Any]) -> tuple[DataLoader[Any], torch.Generator | None]:
    """A loader of the user's class with all its attributes, and the generator its workers are seeded from.

    No generator where the user gave one: that one is obeyed, and drawing from it disturbs nobody.
    """
    mine = copy.copy(loader)
    generator = torch.Generator() if loader.generator is None else None
    # DataLoader.__setattr__ refuses to set these.
    mine.__dict__.update(_iterator=None, generator=generator or loader.generator)
    if loader.num_workers:
        mine.__dict__["worker_init_fn"] = EndsWithParent(loader.worker_init_fn)
        mine.multiprocessing_context = heard_context(loader.multiprocessing_context)
    if "_initial_iter_for_state_dict" in mine.__dict__:
        mine.__dict__["_initial_iter_for_state_dict"] = False  # that was the other's iterator
    return mine, generator
