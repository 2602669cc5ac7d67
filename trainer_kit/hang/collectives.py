"""Read the collectives that this process has issued from torch's flight recorder."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import distributed as dist

__all__ = ["issued_collectives"]

_MAX_CALLS: Final = 64
"""The number of last collectives that are returned for each group."""
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Private functions of torch (2.13) for gloo and NCCL; without them a rank is named by its stack alone."""
_BYTES: Final = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


def issued_collectives() -> tuple[dict[str, Any], list[Any] | None]:
    """Return the last collectives of the training threads, by process group.

    Formatting the recorder's stacks takes seconds, so they are omitted: the main thread's stack shows its call.

    Returns:
        For each group name ``"ranks"`` (a list) and ``"calls"``, a list of ``[number, name with size, amount]``; and
        the group and number of the last collective, or None. Without a recorder an empty dict and None.
    """
    ranks_of_group = dist.distributed_c10d._world.pg_group_ranks
    ranks = {
        group.group_name: sorted(members) for group, members in ranks_of_group.items()
    }
    groups: dict[str, Any] = {}
    last: list[Any] | None = None
    for entry in _training_entries():
        group = entry["process_group"][0]
        if group not in ranks:
            continue
        number = int(entry["collective_seq_id"])
        calls = groups.setdefault(group, {"ranks": ranks[group], "calls": []})["calls"]
        if not calls or calls[-1][0] != number:
            calls.append([number, _name(entry), _amount(entry)])
            del calls[:-_MAX_CALLS]
        last = [group, number]
    return groups, last


def _training_entries() -> Iterator[dict[str, Any]]:
    """Yield the recorder's collectives of the main thread and of torch's own threads, in the order of their calls."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump() or "{}").get("entries", [])
    # Threads of this library use separate groups, for checkpoints.
    side_threads = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    }
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        if not entry.get("is_p2p") and entry.get("thread_id") not in side_threads:
            yield entry


def _name(entry: Mapping[str, Any]) -> str:
    """Return a collective's name with the sizes of its inputs."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    if not sizes:
        return name
    text = ", ".join("x".join(map(str, size)) or "1" for size in sizes[:4])
    if len(sizes) > 4:
        text += ", …"
    return f"{name}[{text}]"


def _amount(entry: Mapping[str, Any]) -> str:
    """Return the amount of data of a collective."""
    sizes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    amount = 0
    for size, dtype in zip(sizes, dtypes, strict=False):
        amount += math.prod(size) * _BYTES.get(dtype, 4)
    return f"{amount / 1e6:.1f} MB" if amount >= 1e5 else f"{amount} bytes"
