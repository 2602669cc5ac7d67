"""Seed and synchronize the random generators of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer_kit.core.arguments import as_list, word_of
from trainer_kit.core.devices import deterministic_products
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state, seed_everything
from trainer_kit.core.types import Batch, Loaders

__all__ = ["draw_as_torch", "each_epoch", "generator_kinds", "set_seed", "synchronize"]

_KINDS: Final = ("torch", "cuda", "xla", "generator", "python", "numpy")


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False
) -> None:
    """Seed Python, NumPy and torch, and the data order of loaders that are prepared afterwards.

    Args:
        seed: 0 to 2**32 - 1.
        device_specific: seed each process differently; all processes keep one data order.
        deterministic: also make torch refuse operations with results that are not reproducible.

    Example:
        >>> set_seed(3)
        >>> first = torch.rand(1)
        >>> set_seed(3)
        >>> bool(first == torch.rand(1))
        True
    """
    if device_specific:
        seed += Environment.detect().rank
    seed_everything(seed % 2**32)
    if deterministic:
        deterministic_products()
        torch.use_deterministic_algorithms(True)


def draw_as_torch(loader: Loaders, processes: int, batches_read: int) -> None:
    """Advance torch's global generator as an iteration over the user's DataLoader would.

    The feed draws with generators of its own. A step that draws too (dropout, noise) gets the numbers of a plain loop.

    Args:
        loader: the user's; only a DataLoader draws.
        processes: the number of processes that share the data.
        batches_read: the batches that earlier iterations have read.
    """
    if not isinstance(loader, DataLoader):
        return
    keeps_workers = loader.num_workers > 0 and loader.persistent_workers
    # The iterator draws the seed of its workers; persistent workers have one iterator for all epochs.
    if loader.generator is None and not (keeps_workers and batches_read):
        _draw_seed()
    # On several processes Accelerate and Fabric have samplers with a generator of their own.
    if processes == 1:
        _draw_order(loader)


def _draw_order(loader: DataLoader[Batch]) -> None:
    """Draw what torch's samplers draw from the global generator: all of it before the first sample."""
    batches = loader.batch_sampler
    sampler: Iterable[object] = loader.sampler
    # The exact classes: a subclass may draw anything, at any time.
    if batches is not None:
        if type(batches) is not BatchSampler:
            return
        sampler = batches.sampler
    if getattr(sampler, "generator", None) is not None:
        return
    if type(sampler) is RandomSampler:
        _draw_seed()
    elif type(sampler) in (SubsetRandomSampler, WeightedRandomSampler):
        next(iter(sampler), None)


def _draw_seed() -> None:
    torch.empty((), dtype=torch.int64).random_()


def generator_kinds(kinds: Iterable[object] | None) -> list[str]:
    """Return ``rng_types`` as a list of names.

    Raises:
        ConfigurationError: a kind is unknown.
    """
    names = [word_of(kind) for kind in as_list(kinds)]
    for name in names:
        if name not in _KINDS:
            raise ConfigurationError(
                f"unknown kind of generator {name!r}", fix=did_you_mean(name, _KINDS)
            )
    return names


def each_epoch(
    world: Group, kinds: Iterable[object] | None, device: torch.device
) -> Callable[[], None] | None:
    """Return the function that synchronizes the generators at the start of an epoch; None if there is nothing to do.

    "generator" is the one of the data order, which is the same on all processes without an exchange.
    """
    names = [name for name in generator_kinds(kinds) if name != "generator"]
    if not names or world.size == 1:
        return None
    return partial(synchronize, world, names, None, device)


def synchronize(
    world: Group,
    kinds: Iterable[object] | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> None:
    """Copy the states of the main process's random generators to every process.

    Args:
        world: the processes; each of them makes this call.
        kinds: any of "torch", "cuda", "xla", "generator", "python", "numpy".
        generator: the generator for the kind "generator".
        device: the device for the kinds "cuda" and "xla".

    Raises:
        ConfigurationError: a kind is unknown.
    """
    names = generator_kinds(kinds)
    keys = {"device" if name in ("cuda", "xla") else name for name in names}
    states = rng_state(device)
    states = world.broadcast(
        {key: state for key, state in states.items() if key in keys}
    )
    restore_rng(states, device)
    if "generator" in names and generator is not None:
        generator.set_state(world.broadcast(generator.get_state()))
