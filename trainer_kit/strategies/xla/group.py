"""A `Group` of processes over torch_xla's own collectives."""

from __future__ import annotations

import pickle
import struct
from typing import Any, final

import torch
from torch import Tensor

from trainer_kit.core.errors import ConfigurationError

__all__ = ["XLAGroup"]


@final
class XLAGroup:
    """The processes that ``torch_xla.launch`` started, one for each device.

    Values on the host are exchanged through the device: torch_xla has no channel between hosts. Each such exchange ends
    the graph that is being traced.
    """

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._xm = xm
        self.device = torch_xla.device()
        self.rank = xr.global_ordinal()
        self.size = xr.world_size()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce over the ranks, in place; ``op`` is sum, mean, min or max."""
        kinds = {"sum": "sum", "mean": "sum", "avg": "sum", "min": "min", "max": "max"}
        if op not in kinds:
            raise ConfigurationError(f"unknown reduction {op!r}", fix="use one of: sum, mean, min, max")
        there = tensor.to(self.device)
        (reduced,) = self._xm.all_reduce(kinds[op], [there])
        if op in ("mean", "avg"):
            reduced = reduced / self.size
        return tensor.copy_(reduced) if reduced.dtype == tensor.dtype else reduced

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack over the ranks: shape (size, *tensor.shape)."""
        gathered: Tensor = self._xm.all_gather(tensor.detach().to(self.device).unsqueeze(0))
        return gathered.to(tensor.device)

    def all_gather_object(self, value: Any) -> list[Any]:
        """One small picklable value from every rank, in rank order."""
        return [pickle.loads(payload) for payload in self._xm.rendezvous("gather", pickle.dumps(value))]

    def gather_object(self, value: Any) -> list[Any] | None:
        """As `all_gather_object`, but None on all ranks except the first."""
        values = self.all_gather_object(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """A tensor (in place), or one small picklable value, from rank ``source``."""
        if isinstance(value, Tensor):
            return value.copy_(self.all_gather(value)[source])
        mine = pickle.dumps(value if self.rank == source else None)
        return pickle.loads(self._xm.rendezvous("broadcast", mine)[source])

    def barrier(self) -> None:
        """Wait for every rank."""
        self._xm.rendezvous("barrier")

    def agree(self, values: list[float]) -> list[list[float]]:
        """A few numbers of every rank, one row for each rank."""
        layout = f"{len(values)}d"
        return [list(struct.unpack(layout, row)) for row in self._xm.rendezvous("agree", struct.pack(layout, *values))]

    def side_group(self, recreate: bool = False) -> None:
        """Not needed: every rank holds the whole state, so ranks never write a checkpoint together."""

    def average(self, gradients: list[Tensor]) -> None:
        """Average over the ranks, in place, as part of the step's own graph."""
        with torch.no_grad():
            self._xm.all_reduce("sum", gradients, scale=1.0 / self.size)
