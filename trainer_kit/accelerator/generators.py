"""Seed and synchronise the random generators of several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch

from trainer_kit.core.arguments import as_list, word_of
from trainer_kit.core.devices import deterministic_products
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state, seed_everything

__all__ = ["each_epoch", "generator_kinds", "set_seed", "synchronize"]

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
    seed_everything(
        (seed + (Environment.detect().rank if device_specific else 0)) % 2**32
    )
    if deterministic:
        deterministic_products()
        torch.use_deterministic_algorithms(True)


def generator_kinds(kinds: Iterable[Any] | None) -> list[str]:
    """Return ``rng_types`` as a list of words.

    Raises:
        ConfigurationError: a kind is unknown.
    """
    words = [word_of(kind) for kind in as_list(kinds)]
    for word in words:
        if word not in _KINDS:
            raise ConfigurationError(
                f"unknown kind of generator {word!r}", fix=did_you_mean(word, _KINDS)
            )
    return words


def each_epoch(
    world: Group, kinds: Iterable[Any] | None, device: torch.device
) -> Callable[[], None] | None:
    """Return what synchronises the generators at the begin of an epoch, see `synchronize`; None if nothing is to do.

    "generator" is the one of the data order, which is the same on all processes without an exchange.
    """
    words = [word for word in generator_kinds(kinds) if word != "generator"]
    return (
        partial(synchronize, world, words, None, device)
        if words and world.size > 1
        else None
    )


def synchronize(
    world: Group,
    kinds: Iterable[Any] | None,
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
    words = generator_kinds(kinds)
    mine = rng_state(device)
    wanted = {"device" if word in ("cuda", "xla") else word for word in words}
    theirs = world.broadcast(
        {key: value for key, value in mine.items() if key in wanted}
    )
    restore_rng(theirs, device)
    if "generator" in words and generator is not None:
        generator.set_state(world.broadcast(generator.get_state()))
