"""The generators that a user gave a loader or its samplers: found, and kept for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["generator_states", "own_generators", "restore_generators"]

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
