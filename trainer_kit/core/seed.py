"""Random state: seed, save and restore every global generator."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import StateDict

__all__ = [
    "order_seed",
    "preserved_rng",
    "reset_seed",
    "restore_rng",
    "rng_state",
    "seed_everything",
    "swap_last_seed",
]

_GeneratorModule: TypeAlias = Any
"""A module with ``get_rng_state(device)`` and ``set_rng_state(state, device)``."""
_MERSENNE_WORDS: Final = 624
"""The words of the state of NumPy's generator."""
_last_seed: int | None = None


def seed_everything(
    seed: int | None = None, workers: bool = False, verbose: bool = True
) -> int:
    """Seed Python, NumPy and torch (all devices), and the data order of later fits.

    A later ``torch.manual_seed`` does not change the data order; another call of this function does.

    Args:
        seed: 0 to 2**32 - 1; None draws one from the system.
        workers: accepted for compatibility with Lightning; loader workers are always seeded from (seed, epoch).
        verbose: accepted for compatibility with Lightning; nothing is printed.

    Returns:
        The seed.

    Example:
        >>> seed_everything(7)
        7
    """
    global _last_seed
    # From the system, not from a generator that may have been seeded before.
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    seed = int(seed)
    if not 0 <= seed < 2**32:
        raise ConfigurationError(
            "a seed must be an integer from 0 to 2**32 - 1", found=str(seed)
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        # torch does not seed XLA; a runtime that starts later takes torch's seed.
        xla.manual_seed(seed)
    _last_seed = seed
    return seed


def reset_seed() -> None:
    """Seed every generator again as the last `seed_everything` did; without such a call this does nothing.

    Example:
        >>> _ = seed_everything(7)
        >>> first = torch.rand(1)
        >>> reset_seed()
        >>> bool(torch.rand(1) == first)
        True
    """
    if _last_seed is not None:
        seed_everything(_last_seed)


def order_seed() -> int:
    """The seed of the data order if no argument sets one.

    It is that of the last `seed_everything`; without such a call torch's initial seed: of the last
    ``torch.manual_seed``, or drawn from the system. Ranks may differ; the caller uses that of rank 0.
    """
    # torch draws 64 bits if nothing was seeded; the value is written to JSON, where 63 bits are portable.
    if _last_seed is None:
        return torch.initial_seed() % 2**63
    return _last_seed


def swap_last_seed(seed: int | None) -> int | None:
    """Replace the seed of the last `seed_everything`; returns what it was. For ranks that take turns in a process."""
    global _last_seed
    previous = _last_seed
    _last_seed = seed
    return previous


def rng_state(device: torch.device | None = None) -> StateDict:
    """The state of every global generator: Python, NumPy, torch on the CPU and on ``device``."""
    # The legacy form has no nested dictionaries: it is what `restore_rng` checks.
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: StateDict = {
        "python": random.getstate(),
        "numpy": (name, keys, position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state["device"] = _generators(device).get_rng_state(device)
    return state


def _generators(device: torch.device) -> _GeneratorModule:
    """The module with an accelerator's generator; for XLA a module of torch_xla, whose state is a number."""
    if device.type != "xla":
        return torch.get_device_module(device)
    from torch_xla.core import xla_model

    return xla_model


def restore_rng(state: StateDict, device: torch.device | None = None) -> None:
    """Restore the result of `rng_state`; generators missing from it are not changed."""
    if "python" in state:
        version, internal, gauss = state["python"]
        # ``setstate`` takes the words only as a tuple, and a checkpoint may hold a list.
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        position = state["numpy"][2]
        # NumPy does not check it, and would read beyond the end of its words.
        if not 0 <= position <= _MERSENNE_WORDS:
            raise ValueError(f"a Mersenne Twister has no position {position}")
        np.random.set_state(tuple(state["numpy"]))
    # torch takes the states of all its generators as tensors on the CPU, and a load may have moved them.
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "device" in state and device is not None and device.type != "cpu":
        device_state = state["device"]
        # XLA's is a number.
        if isinstance(device_state, torch.Tensor):
            device_state = device_state.cpu()
        _generators(device).set_rng_state(device_state, device)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """A context that restores the random state at its end."""
    state = rng_state(device)
    try:
        yield
    finally:
        restore_rng(state, device)
