"""Ranks that compute one batch together draw the same: whole activations must be the same on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_kit.core.protocols import Group
from trainer_kit.core.seed import restore_rng, rng_state

__all__ = ["agree_on_noise", "digest", "drawing_alike"]


def agree_on_noise(groups: Iterable[Group], device: torch.device) -> None:
    """Every rank of a group goes on with the generators of its first one; one number is exchanged where they agree."""
    for group in groups:
        state = rng_state(device)
        if len({row[0] for row in group.agree([digest(state)])}) > 1:
            restore_rng(group.broadcast(state), device)


def drawing_alike(call: Callable[..., Any], groups: Sequence[Group], device: torch.device) -> Callable[..., Any]:
    """A step ahead of which ranks agree, for hooks and loaders may have drawn on one of them alone."""

    def step(*arguments: Any) -> Any:
        agree_on_noise(groups, device)
        return call(*arguments)

    return step


def digest(state: dict[str, Any]) -> int:
    """A number for `rng_state`, the same in every process, that a float64 can hold.

    Example:
        >>> digest(rng_state()) == digest(rng_state())
        True
    """
    _, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    # Of numbers alone: before Python 3.12 the hash of None is its place in memory.
    numbers = (version, words, -1 if gauss is None else gauss, *rest)
    found = zlib.crc32(keys.tobytes(), hash(numbers) & 0xFFFFFFFF)
    for name in ("torch", "device"):
        one = state.get(name)
        if isinstance(one, Tensor):
            found = zlib.crc32(one.numpy().tobytes(), found)  # no sync point: generators' states are on the host
        elif one is not None:
            found = zlib.crc32(repr(one).encode(), found)
    return found
