"""What an `Accelerator` exchanges between processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch import Tensor

from trainer_kit.accelerator import collectives
from trainer_kit.accelerator.accumulation_window import Window
from trainer_kit.accelerator.collective_debug import meet
from trainer_kit.accelerator.hang_watchdog import Waiting
from trainer_kit.accelerator.process import Processes
from trainer_kit.core.collective_errors import compare
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.strategies.strategy import Strategy

__all__ = ["Gathering"]

_ALONE: Final = nullcontext()


class Gathering(Processes):
    """Collectives over all processes; every process calls them."""

    strategy: Strategy
    window: Window
    debug: bool
    waiting: Waiting | None
    _triggered: bool

    def gather(self, tensor: Any) -> Any:
        """Nested tensors of all processes one after the other, along the first dimension."""
        with self._together(tensor, "gather"):
            return collectives.gather(self.world, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Nested tensors reduced over the processes: "sum", "mean", "max", "min" or "none"."""
        with self._together(tensor, "reduce"):
            return collectives.reduce(self.world, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Nested tensors made as long along ``dim`` as the longest of all processes."""
        with self._together(None, "pad_across_processes"):
            return collectives.pad_across_processes(self.world, tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Results of the current batch of all processes, without those of samples that are there twice.

        Of processes that get the same batches one counts.

        Args:
            input_data: nested tensors of one entry a sample along the first dimension, or other objects. A scalar is
                gathered from each process.
            use_gather_object: also for tensors: they may then differ in shape.
        """
        with self._together(None, "gather_for_metrics"):
            return self._gather_for_metrics(input_data, use_gather_object)

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool) -> Any:
        batches: Any = self.window.batches
        data = self.strategy.data
        counts: list[int] | None = None if batches is None else batches.counts
        if use_gather_object or not _all_tensors(input_data):
            mine = input_data
            if data.size > 1:
                compare(data, "gather_for_metrics(objects)")
            if counts is not None and isinstance(mine, (list, tuple)) and len(mine) == batches.size:
                mine = mine[: counts[data.rank]]
            return collectives.gather_object(data, mine)
        if counts is None:
            return collectives.gather(data, input_data, "gather_for_metrics")
        return collectives.gather_rows(data, input_data, batches.size, counts)

    def _together(self, data: Any, call: str) -> AbstractContextManager[None]:
        if self.waiting is None:
            return _ALONE
        if self.debug:
            meet(self.world, data, call)
        return self.waiting(call)

    def set_trigger(self) -> None:
        """Tell every process that asks `check_trigger` next."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since; every process asks at the same place."""
        with self._together(None, "check_trigger"):
            found = any(row[0] for row in self.world.agree([float(self._triggered)]))
        if found:
            self._triggered = False
        return found


def _all_tensors(data: Any) -> bool:
    try:
        collectives.each_tensor(data, _nothing, strict=True)
    except ConfigurationError:
        return False
    return True


def _nothing(tensor: Tensor) -> Tensor:
    return tensor
