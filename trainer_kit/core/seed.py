"""Random state: seeding all of it, and putting it aside."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer_kit.core.errors import ConfigurationError

__all__ = ["order_seed", "preserved_rng", "restore_rng", "rng_state", "seed_everything"]

_last_seed: int | None = None


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch (all devices), and the order of the data of fits that begin afterwards.

    A later ``torch.manual_seed`` does not change the order of the data; another call of this function does.

    Args:
        seed: 0 to 2**32 - 1; drawn from the system when None.
        workers: accepted for Lightning's sake; loader workers are always seeded from (seed, epoch).
        verbose: accepted for Lightning's sake; nothing is printed.

    Returns:
        The seed.

    Example:
        >>> seed_everything(7)
        7
    """
    global _last_seed
    chosen = int.from_bytes(os.urandom(4), "little") if seed is None else int(seed)
    if not 0 <= chosen < 2**32:
        raise ConfigurationError("a seed is a whole number from 0 to 2**32 - 1", found=str(chosen))
    random.seed(chosen)
    np.random.seed(chosen)
    torch.manual_seed(chosen)
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        xla.manual_seed(chosen)  # torch seeds every accelerator but this; one that is not up yet takes torch's seed
    _last_seed = chosen
    return chosen


def order_seed() -> int:
    """The seed of the order of the data where no argument gives one.

    That of the last `seed_everything`; without such a call torch's own: the last ``torch.manual_seed``, or what torch
    drew from the system when this process began. Ranks may differ; the caller takes that of rank 0.
    """
    # torch draws 64 bits where nothing was seeded; records are JSON, whose readers agree on 63.
    return torch.initial_seed() % 2**63 if _last_seed is None else _last_seed


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Every global generator's state: Python, NumPy, torch on the CPU and on ``device``."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys, position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state["device"] = _generators(device).get_rng_state(device)
    return state


def _generators(device: torch.device) -> Any:
    """Who keeps the generator of an accelerator; torch_xla is no module of torch, and its state is a number."""
    if device.type != "xla":
        return torch.get_device_module(device)
    from torch_xla.core import xla_model

    return xla_model


def restore_rng(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put `rng_state` back; a part that is missing is left alone."""
    if "python" in state:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        if not 0 <= state["numpy"][2] <= 624:  # NumPy would read beyond its 624 words
            raise ValueError(f"a Mersenne Twister has no position {state['numpy'][2]}")
        np.random.set_state(tuple(state["numpy"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "device" in state and device is not None and device.type != "cpu":
        kept = state["device"]
        _generators(device).set_rng_state(kept.cpu() if isinstance(kept, torch.Tensor) else kept, device)


@contextmanager
def preserved_rng(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn inside is not drawn outside."""
    state = rng_state(device)
    try:
        yield
    finally:
        restore_rng(state, device)
