"""Count what the ranks of a step send each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed._tools.fake_collectives import (
    CollectiveOp,
    collective_ops,
    sync_ops,
)

from trainer_kit.planning.records import Traffic

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

    def see(self, func: Any, args: Any, out: Any) -> None:
        """Count an operator, if it is a collective."""
        if func not in collective_ops or func in sync_ops:
            return
        ranks = tuple(
            dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        )
        if len(ranks) > 1:
            self.add(
                _kind(str(func)),
                ranks,
                CollectiveOp.get_comm_tensor_size(func, out, args, {}),
            )

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
        return tuple(sorted(calls, key=lambda one: (-one.bytes, one.kind, one.axis)))


def _kind(operator: str) -> str:
    for kind, names in _KINDS.items():
        if any(name in operator for name in names):
            return kind
    return operator.partition(".")[2].partition(".")[0].strip("_")
