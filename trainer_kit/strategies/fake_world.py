"""A process group of torch's fake backend: this process is one rank of many, and nothing is sent.

This is the only file that uses it; it is private.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies.torch_private import clear_sharding_caches, make_fake_store

__all__ = ["fake_world", "forget_layouts"]


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Inside, torch's default process group has ``size`` ranks; this process is one of them, and nothing is sent.

    Args:
        size: the number of ranks.
        rank: of this process.

    Raises:
        StrategyError: this process has a process group already.
    """
    if dist.is_initialized():
        raise StrategyError(
            "planning needs a process that is not a rank of a run",
            found=f"a process group of {plural(dist.get_world_size(), 'rank')}",
            fix="plan in a separate process, before the first fit: trainer-kit plan train.py",
        )
    excepthook = sys.excepthook  # torch replaces it
    dist.init_process_group("fake", rank=rank, world_size=size, store=make_fake_store())
    forget_layouts()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()
        sys.excepthook = excepthook


def forget_layouts() -> None:
    """Empty the caches of DTensor, which hold results of operations with the mesh that this process was in.

    Meshes of the same ranks are equal there, although each says which part is its own: the next rank of this process,
    or one forked from it, would take the part of the rank that filled the cache.
    """
    clear_sharding_caches()
