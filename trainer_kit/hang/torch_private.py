"""The private names of torch that the watchdog reads, checked with torch 2.13 and 2.14; no other module here names one.

The watchdog must never end a run that would go on, so most of them have a fallback: without them the report of a hang
says less.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import distributed as dist

from trainer_kit.core.torch_private import default_store
from trainer_kit.data.torch_private import WORKER_ITERATOR

__all__ = [
    "BACKWARD_FUNCTION",
    "COMPILERS",
    "TORCH",
    "WORLD",
    "Store",
    "connect_to_store",
    "find_awaited_worker",
    "ranks_of_groups",
    "recorded_collectives",
]

# Frames hold the path that was imported: links, such as that of an environment, stay as they are.
TORCH: Final = str(Path(torch.__file__).absolute().parent)
COMPILERS: Final = (
    os.path.join(TORCH, "_dynamo", ""),
    os.path.join(TORCH, "_inductor", ""),
)
"""Directories of compiler code. Without them compilation counts as a forward, whose time is limited."""
BACKWARD_FUNCTION: Final = "_engine_run_backward"
"""The Python function that waits for autograd's engine. Without it a backward counts as the code that called it."""
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions that write the flight recorder of gloo and of NCCL. Without them a rank is named by its stack alone."""
_LOADER_FUNCTION: Final = "_try_get_data"
"""What waits for a worker of a data loader. Without it the report does not say which worker is awaited."""
WORLD: Final = "_world"
"""The name of the record of all process groups. Without it the report names no group."""


class Store(Protocol):
    """The methods of torch's stores that the watchdog calls; torch exports none of the classes."""

    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(
        self, key: str, expected_value: str, desired_value: str
    ) -> bytes: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> object: ...


def connect_to_store(prefix: str, timeout: timedelta) -> Store:
    """A second connection to the store of the world.

    Args:
        prefix: of its keys, which keeps them apart from torch's.
        timeout: for each request.
    """
    store = default_store()
    connection = store.clone()
    connection.set_timeout(timeout)
    return dist.distributed_c10d.PrefixStore(prefix, connection)


def ranks_of_groups() -> dict[str, list[int]]:
    """The ranks of each process group by its name, which the flight recorder uses; torch lists no groups in public."""
    members_of_group = getattr(dist.distributed_c10d, WORLD).pg_group_ranks
    ranks: dict[str, list[int]] = {}
    for group, members in members_of_group.items():
        # Torch keeps the number of a group without this rank in place of it; the pipeline's groups are such ones.
        if isinstance(group, int):
            continue
        ranks[group.group_name] = sorted(members)
    return ranks


def recorded_collectives() -> list[dict[str, Any]]:
    """The entries of torch's flight recorders; none without a recorder."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump() or "{}").get("entries", [])
    return entries


def find_awaited_worker(frames: Sequence[FrameType]) -> tuple[int, int, Any] | None:
    """Find the worker for which a thread waits in a data loader: its number, process id and init function."""
    for caller in frames:
        loader: Any = caller.f_locals.get("self")
        if type(loader).__name__ != WORKER_ITERATOR:
            continue
        if caller.f_code.co_name != _LOADER_FUNCTION:
            continue
        # The task that the loader returns next, with the worker that computes it.
        worker = loader._task_info.get(loader._rcvd_idx, (None,))[0]
        if worker is None:
            return None
        return worker, loader._workers[worker].pid, loader._worker_init_fn
    return None
