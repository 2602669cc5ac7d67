"""Read the collectives that this process has issued from torch's flight recorder, without stacks."""

from __future__ import annotations

import json
import math
import threading
from typing import Any, Final

import torch
from torch import distributed as dist

__all__ = ["issued_calls"]

_KEPT: Final = 64  # collectives kept per group
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


def issued_calls() -> tuple[dict[str, Any], list[Any] | None]:
    """Return the last collectives of the training threads, by process group.

    Formatting the recorder's stacks takes seconds, so they are omitted: the main thread's stack shows its call.

    Returns:
        For each group name ``"ranks"`` (a list) and ``"calls"``, a list of ``[number, name with size, amount]``; and
        the group and number of the last collective, or None. Without a recorder an empty dict and None.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo, NCCL; some torch versions lack one
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump() or "{}").get("entries", [])
    others = {str(thread.ident) for thread in threading.enumerate() if thread is not threading.main_thread()}
    ranks = {group.group_name: sorted(found) for group, found in dist.distributed_c10d._world.pg_group_ranks.items()}
    groups: dict[str, Any] = {}
    last: list[Any] | None = None
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        group = entry["process_group"][0]
        # Our own threads use separate groups, for checkpoints.
        if entry.get("is_p2p") or entry.get("thread_id") in others or group not in ranks:
            continue
        calls = groups.setdefault(group, {"ranks": ranks[group], "calls": []})["calls"]
        number = int(entry["collective_seq_id"])
        if not calls or calls[-1][0] != number:
            calls.append([number, *_named(entry)])
            del calls[:-_KEPT]
        last = [group, number]
    return groups, last


def _named(entry: dict[str, Any]) -> tuple[str, str]:
    """Return a collective's name with its input sizes, and the amount of data."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    text = ", ".join("x".join(map(str, size)) or "1" for size in sizes[:4]) + (", …" if len(sizes) > 4 else "")
    kinds = entry.get("input_dtypes") or []
    amount = sum(math.prod(size) * _BYTES.get(kind, 4) for size, kind in zip(sizes, kinds, strict=False))
    return f"{name}[{text}]" if text else name, f"{amount / 1e6:.1f} MB" if amount >= 1e5 else f"{amount} bytes"
