"""Read the collectives that this process has issued from torch's flight recorder."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any, Final, TypeAlias, TypedDict

from trainer_kit.hang.torch_private import ranks_of_groups, recorded_collectives

__all__ = ["GroupCalls", "LastCall", "issued_collectives"]

_MAX_CALLS: Final = 64
"""The number of last collectives that are returned for each group."""
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


_RecorderEntry: TypeAlias = dict[str, Any]
"""One call in torch's flight recorder, as its JSON has it."""


class GroupCalls(TypedDict):
    """The last collectives of one process group; plain data, because ranks exchange it as JSON."""

    ranks: list[int]
    calls: list[tuple[int, str, str]]
    """Of each its number in the group, its name with sizes, and its amount of data."""


LastCall: TypeAlias = tuple[str, int]
"""A collective by the name of its group and its number there."""


def issued_collectives() -> tuple[dict[str, GroupCalls], LastCall | None]:
    """Return the last collectives of the training threads, by process group.

    Formatting the recorder's stacks takes seconds, so they are omitted: the main thread's stack shows its call.

    Returns:
        The calls of each group by its name, and the last collective. Without a recorder an empty dict and None.
    """
    ranks = ranks_of_groups()
    groups: dict[str, GroupCalls] = {}
    last: LastCall | None = None
    for entry in _training_entries():
        group = str(entry["process_group"][0])
        # The recorder also has groups that were destroyed since.
        if group not in ranks:
            continue
        number = int(entry["collective_seq_id"])
        calls = groups.setdefault(group, {"ranks": ranks[group], "calls": []})["calls"]
        # Entries with one number are one collective of the group.
        if not calls or calls[-1][0] != number:
            calls.append((number, _name(entry), _amount(entry)))
            del calls[:-_MAX_CALLS]
        last = (group, number)
    return groups, last


def _training_entries() -> Iterator[_RecorderEntry]:
    """Yield the recorder's collectives of the main thread and of torch's own threads, in the order of their calls."""
    entries = recorded_collectives()
    # Threads of this library use separate groups, for checkpoints. A rank may wait there while it trains, so their
    # calls would name the wrong rank. A backward's collectives come from a thread of autograd, which Python does not
    # list: they stay.
    side_threads = {
        str(thread.ident)
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    }
    # gloo and NCCL have recorders of their own; the time tells which call was the last.
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        # Pipelines send from rank to rank: such a call has no counterpart with its number on the others.
        if not entry.get("is_p2p") and entry.get("thread_id") not in side_threads:
            yield entry


def _name(entry: _RecorderEntry) -> str:
    """Return a collective's name with the sizes of its inputs."""
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    if not sizes:
        return name
    text = ", ".join("x".join(map(str, size)) or "1" for size in sizes[:4])
    if len(sizes) > 4:
        text += ", …"
    return f"{name}[{text}]"


def _amount(entry: _RecorderEntry) -> str:
    """Return the amount of data of a collective."""
    sizes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    amount = 0
    for size, dtype in zip(sizes, dtypes, strict=False):
        amount += math.prod(size) * _BYTES.get(dtype, 4)
    if amount < 1e5:
        return f"{amount} bytes"
    return f"{amount / 1e6:.1f} MB"
