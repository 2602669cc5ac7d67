"""Count what the ranks of a step send each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, final

import torch.distributed as dist

from trainer_kit.planning.operators import Arguments, Operator, Result
from trainer_kit.planning.records import Traffic
from trainer_kit.planning.torch_private import CollectiveOp, collective_ops, sync_ops

__all__ = ["TrafficCounter"]

_KINDS: Final = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "receive": ("recv",),
}
"""For each kind, what the names of torch's operators contain."""
_UNCOUNTED: Final = "receive"
"""Its bytes are those that another rank sends."""


@final
class TrafficCounter:
    """Counts the collectives of a step, by kind and mesh axis, with torch's list of collectives, which is private.

    The bytes of a collective are those of the whole tensor: what an all-gather returns, a reduce-scatter or an
    all-reduce takes, a send sends (the convention of nccl-tests).

    Args:
        axes: the name of the axis by the ranks of its group; other groups are named ``"world"``.
    """

    def __init__(self, axes: Mapping[tuple[int, ...], str]) -> None:
        self.axes = axes
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def see(self, func: Operator, args: Arguments, out: Result) -> None:
        """Count an operator, if it is a collective."""
        # Operators that only wait for a collective send nothing themselves.
        if func not in collective_ops or func in sync_ops:
            return
        # Private classes of torch (`torch.distributed._tools`), which know where each collective has its group and
        # size.
        group = CollectiveOp.get_process_group(func, args)
        ranks = tuple(dist.get_process_group_ranks(group))
        # A group of one rank sends nothing.
        if len(ranks) > 1:
            size = CollectiveOp.get_comm_tensor_size(func, out, args, {})
            self.add(_kind(str(func)), ranks, size)

    def add(self, kind: str, ranks: tuple[int, ...], size: int, count: int = 1) -> None:
        """Count collectives over these ranks."""
        if kind != _UNCOUNTED:
            key = kind, self.axes.get(ranks, "world")
            self._counts[key] += count
            self._bytes[key] += size

    def restart(self) -> None:
        """Forget what was counted."""
        self._counts.clear()
        self._bytes.clear()

    def traffic(self) -> tuple[Traffic, ...]:
        """What was counted, the most bytes first."""
        calls = [
            Traffic(kind=kind, axis=axis, count=count, bytes=self._bytes[kind, axis])
            for (kind, axis), count in self._counts.items()
        ]
        # By name too: the order must not depend on which collective ran first.
        calls.sort(key=lambda traffic: (-traffic.bytes, traffic.kind, traffic.axis))
        return tuple(calls)


def _kind(operator: str) -> str:
    for kind, names in _KINDS.items():
        if any(name in operator for name in names):
            return kind
    # A collective that a later torch adds is shown by its own name.
    return operator.partition(".")[2].partition(".")[0].strip("_")
