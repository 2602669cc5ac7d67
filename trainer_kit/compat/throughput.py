"""Throughput of a custom training loop, under the names of Lightning's Fabric."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainer_kit.core.device_table import device_peak
from trainer_kit.core.errors import ConfigurationError

__all__ = ["Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]

_PRECISION_OF: Final = {
    torch.float32: "32-true",
    torch.float16: "16-true",
    torch.bfloat16: "bf16-true",
}


class Throughput:
    """Rates over a rolling window of updates.

    `compute` returns ``time``, ``batches``, ``samples`` and ``lengths`` of the last update. Once the window is full it
    adds ``device/batches_per_sec``, ``device/samples_per_sec``, ``device/items_per_sec``, ``device/flops_per_sec`` and
    ``device/mfu``; with several devices the same without ``device/``, over all of them.

    Args:
        available_flops: peak FLOP/s of one device, for ``mfu``.
        world_size: the number of devices.
        window_size: updates in the window, at least 2.
        separator: stands between ``device`` and the name of a rate.

    Raises:
        ConfigurationError: a size is too small.

    Example:
        >>> throughput = Throughput(window_size=2)
        >>> for i in range(1, 4):
        ...     throughput.update(time=i / 2, batches=i, samples=8 * i)
        >>> throughput.compute()["device/samples_per_sec"]
        16.0
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if world_size < 1 or window_size < 2:
            raise ConfigurationError(
                "a rate needs at least one device and a window of two updates",
                found=f"world_size={world_size}, window_size={window_size}",
            )
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self.window_size = window_size
        self._updates: deque[tuple[float, int, int, int | None]] = deque(
            maxlen=window_size
        )
        # A queue of its own: not every update has FLOPs.
        self._flops: deque[int] = deque(maxlen=window_size)

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Record the totals of this device so far.

        Args:
            time: seconds since the loop began.
            batches: all batches.
            samples: all samples.
            lengths: all items, such as tokens; in every update or in none.
            flops: FLOPs since the last update.

        Raises:
            ConfigurationError: a total is smaller than before, or there are fewer samples than batches or fewer items
                than samples.
        """
        totals = (time, batches, samples, lengths)
        description = (
            f"time={time}, batches={batches}, samples={samples}, lengths={lengths}"
        )
        if samples < batches or (lengths is not None and lengths < samples):
            raise ConfigurationError(
                "a batch has at least one sample, and a sample one item",
                found=description,
            )
        if self._updates:
            previous = self._updates[-1]
            if (previous[3] is None) != (lengths is None):
                raise ConfigurationError(
                    "lengths= must be in every update or in none", found=description
                )
            # Equal times would be a division by zero once the window is full.
            if time <= previous[0] or _decrease(previous[1:], totals[1:]):
                raise ConfigurationError(
                    "update takes totals since the loop began, which grow",
                    found=f"{description}, after {previous}",
                )
        self._updates.append(totals)
        if flops is not None:
            # As in Lightning: the caller counts one device, and all devices do the same work.
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, float]:
        """The totals, and the rates if the window is full.

        Raises:
            ConfigurationError: there was no update.
        """
        if not self._updates:
            raise ConfigurationError(
                "there is nothing to compute", fix="call update first"
            )
        first = self._updates[0]
        last = self._updates[-1]
        values: dict[str, float] = {
            "time": last[0],
            "batches": last[1],
            "samples": last[2],
        }
        if last[3] is not None:
            values["lengths"] = last[3]
        # As in Lightning, a rate is always over a whole window.
        if len(self._updates) < self.window_size:
            return values
        seconds = last[0] - first[0]
        rates = {
            "batches": (last[1] - first[1]) / seconds,
            "samples": (last[2] - first[2]) / seconds,
        }
        # A checker cannot know that the items are in all updates or in none.
        if first[3] is not None and last[3] is not None:
            rates["items"] = (last[3] - first[3]) / seconds
        # The FLOPs of the first update lie before the window's first time.
        if len(self._flops) == self.window_size:
            flops = sum(self._flops) - self._flops[0]
            rates["flops"] = flops / seconds / self.world_size
        for name, rate in rates.items():
            values[f"device{self.separator}{name}_per_sec"] = rate
            if self.world_size > 1:
                values[f"{name}_per_sec"] = rate * self.world_size
        if self.available_flops and "flops" in rates:
            values[f"device{self.separator}mfu"] = rates["flops"] / self.available_flops
        return values

    def reset(self) -> None:
        """Empty the window."""
        self._updates.clear()
        self._flops.clear()


class ThroughputMonitor(Throughput):
    """`Throughput` of a Fabric, which logs the values; on ranks other than 0 every call does nothing.

    Args:
        fabric: the Fabric, whose loggers get the values.
        options: ``window_size`` and ``separator`` of `Throughput`.

    Example:
        >>> from trainer_kit import Fabric
        >>> monitor = ThroughputMonitor(Fabric(accelerator="cpu", devices=1), window_size=2)
        >>> monitor.update(time=0.5, batches=1, samples=8)
        >>> monitor.compute_and_log(step=1)["samples"]
        8
    """

    def __init__(self, fabric: Any, **options: Any) -> None:
        # The table of data sheets has CUDA devices only; without a peak there is no MFU.
        peak = None
        if fabric.device.type == "cuda":
            peak = device_peak(
                torch.cuda.get_device_name(fabric.device),
                fabric.strategy.precision.name,
            )
        super().__init__(available_flops=peak, world_size=fabric.world_size, **options)
        self._fabric = fabric
        self.step = -1

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """See `Throughput.update`."""
        # Rates of rank 0 stand for all ranks, which take the same steps: no rank waits for another here.
        if self._fabric.is_global_zero:
            super().update(
                time=time,
                batches=batches,
                samples=samples,
                lengths=lengths,
                flops=flops,
            )

    def compute(self) -> dict[str, float]:
        """See `Throughput.compute`; empty on ranks other than 0."""
        if not self._fabric.is_global_zero:
            return {}
        return super().compute()

    def compute_and_log(self, step: int | None = None) -> dict[str, float]:
        """Log and return the values.

        Args:
            step: of the values; by default the number of earlier calls.
        """
        # The first step is 0, as in Lightning.
        if step is None:
            step = self.step + 1
        self.step = step
        values = self.compute()
        self._fabric.log_dict(values, step=self.step)
        return values


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], Tensor],
    loss_fn: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Count the FLOPs of a forward, and of its backward if there is a loss.

    Args:
        model: not used; the functions run it. On the meta device nothing is computed.
        forward_fn: runs the model and returns its output.
        loss_fn: the loss of an output; None counts the forward alone.

    Example:
        >>> with torch.device("meta"):
        ...     layer, x = nn.Linear(4, 2, bias=False), torch.ones(8, 4)
        >>> measure_flops(layer, lambda: layer(x)), measure_flops(layer, lambda: layer(x), torch.sum)
        (128, 256)
    """
    from torch.utils.flop_counter import FlopCounterMode

    # It counts operators at dispatch, so that tensors on the meta device count like others.
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Peak FLOP/s of a device by its data sheet, dense; None if it is unknown.

    Args:
        device: a device of this machine.
        dtype: the dtype of the matmuls, or a precision such as ``"bf16-mixed"``.

    Example:
        >>> get_available_flops(torch.device("cpu"), torch.float32) is None
        True
    """
    # The table has CUDA devices only.
    if device.type != "cuda":
        return None
    precision = dtype
    if isinstance(precision, torch.dtype):
        precision = _PRECISION_OF.get(precision, "64-true")
    return device_peak(torch.cuda.get_device_name(device), precision)


def _decrease(before: Sequence[int | None], after: Sequence[int | None]) -> bool:
    return any(
        a is not None and b is not None and b < a
        for a, b in zip(before, after, strict=True)
    )
