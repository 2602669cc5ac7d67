"""A process group of torch's fake backend: this process is one rank of many, and nothing is sent.

This is the only file that uses it; it is private.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, _redistribute

from trainer_kit.core.display import plural
from trainer_kit.core.errors import StrategyError

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
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise StrategyError(
            "planning needs a process that is not a rank of a run",
            found=f"a process group of {plural(dist.get_world_size(), 'rank')}",
            fix="plan in a separate process, before the first fit: trainer-kit plan train.py",
        )
    excepthook = sys.excepthook  # torch replaces it
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
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
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # torch 2.9 has no cache in C++.
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
