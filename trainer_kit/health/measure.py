"""What one rank measures in a fraction of a second: products of matrices, memory, collectives, clock, disk.

Each speed is that of the fastest of many short repetitions: what else runs on the machine can only slow one down.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.protocols import Group
from trainer_kit.health.machine import driver_version

__all__ = ["clock_offsets", "disk_speed", "group_speeds", "local_speeds", "versions"]

_MIB: Final = 2**20
_REPEATS: Final = {"GEMM": 40, "memory": 32, "all-reduce": 6, "link": 5}
_CLOCK_ROUNDS: Final = 10
_DISK: Final = (64 * _MIB, 0.5)
"""The most bytes, and the most seconds before the flush."""
_Work = Callable[[], object]


def versions(device: torch.device) -> dict[str, str]:
    """What has to be equal on all ranks, by name.

    Args:
        device: of this rank; the driver and NCCL are asked for only on CUDA.

    Example:
        >>> versions(torch.device("cpu"))["torch"] == torch.__version__
        True
    """
    found = {
        "trainer_kit": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        found["driver"] = driver_version() or "unknown"
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def local_speeds(device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The speeds of a device, in FLOP/s (``GEMM``) and bytes a second (``memory``); and why one is missing, by name.

    Args:
        device: it is waited for (a sync point).
    """
    speeds, missing = dict[str, float](), dict[str, str]()
    if device.type == "xla":  # it compiles lazily, so the time of a call is not the time of its work
        return speeds, dict.fromkeys(("GEMM", "memory"), "not measured on xla")
    for name, prepare in (("GEMM", _gemm), ("memory", _copies)):
        try:
            with _aside():
                work, amount = prepare(device)
                speeds[name] = amount / _fastest(work, device, _REPEATS[name])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            missing[name] = "not enough free memory to measure it"
    return speeds, missing


def _gemm(device: torch.device) -> tuple[_Work, float]:
    """A product of matrices, and its floating-point operations."""
    on_cpu = device.type == "cpu"
    size = 4096 if not on_cpu else 256 if torch.get_num_threads() <= 4 else 1024
    # Random numbers switch as many bits as a model does; zeros would save the power that limits the clock.
    numbers = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if on_cpu else torch.float16
    left, right = (torch.rand(size, size, device=device, generator=numbers).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product), 2.0 * size**3


def _copies(device: torch.device) -> tuple[_Work, float]:
    """A copy from one part of memory to another, the next one at each call, and the bytes that it reads and writes."""
    size, parts = (32 * _MIB, 8) if device.type == "cpu" else (256 * _MIB, 1)
    source, target = (torch.ones(parts, size // parts, dtype=torch.uint8, device=device) for _ in range(2))
    turns = cycle(range(parts))  # a part is not in the caches any more when its turn comes again

    def work() -> None:
        at = next(turns)
        target[at].copy_(source[at])

    return work, 2.0 * size / parts


def group_speeds(group: Group, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The speeds of the network as this rank sees them, in bytes a second; and why one is missing, by name.

    ``all-reduce`` is the bus bandwidth, as nccl-tests defines it; it is as slow as the slowest link, on all ranks.
    ``link`` is this rank's part of exchanges in which all ranks send and receive at once, with the better of two pairs
    of partners: a rank is slow with both only if its own link is. It takes four ranks to tell that.

    Every rank must call it.

    Args:
        group: of all ranks.
        device: of this rank.
    """
    if group.size < 2 or device.type == "xla":
        return {}, {}
    sent, received = _buffers(device)
    alone_fails = float(sent is None)
    if any(row[0] for row in group.agree([alone_fails])) or sent is None or received is None:
        return {}, {"all-reduce": "not enough free memory on a rank to measure it"}
    amount, size = float(sent.numel() * sent.element_size()), group.size

    def speed(name: str, work: _Work) -> float:
        return amount / _fastest(work, device, _REPEATS[name], group.barrier)

    with _aside():
        speeds = {"all-reduce": 2 * (size - 1) / size * speed("all-reduce", lambda: group.all_reduce(sent, "max"))}
        if size > 3:
            shifts = [_shift(group, sent, received, distance) for distance in (1, 2)]
            speeds["link"] = max(speed("link", shift) for shift in shifts)
    return speeds, {}


def _buffers(device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    numbers = (4 if device.type == "cpu" else 64) * _MIB // 4
    try:
        return torch.ones(numbers, device=device), torch.empty(numbers, device=device)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    return None, None


def _shift(group: Group, sent: torch.Tensor, received: torch.Tensor, distance: int) -> _Work:
    """Send to the rank ``distance`` places on, and receive from the one as far back."""
    to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size

    def work() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, group=group.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=group.group, group_peer=source),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return work


@contextmanager
def _aside() -> Iterator[None]:
    """Compute without gradients and autocast, whatever surrounds the measurement."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _fastest(work: _Work, device: torch.device, repeats: int, before: Callable[[], None] | None = None) -> float:
    """Seconds of the fastest of ``repeats`` calls; one more warms up.

    On CUDA events take the time on the device; elsewhere the host takes it, and waits for the device.

    Args:
        work: what to measure.
        device: on which it computes.
        repeats: calls that are measured.
        before: called before each one.
    """
    if device.type == "cuda":
        return _fastest_on_cuda(work, device, repeats, before)
    wait = torch.get_device_module(device).synchronize
    seconds = []
    for _ in range(1 + repeats):
        if before is not None:
            before()
        began = time.perf_counter()
        work()
        wait()  # sync point: the measurement
        seconds.append(time.perf_counter() - began)
    return max(min(seconds[1:]), 1e-9)


def _fastest_on_cuda(
    work: _Work, device: torch.device, repeats: int, before: Callable[[], None] | None = None
) -> float:
    pairs = []
    for _ in range(1 + repeats):
        if before is not None:
            before()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        work()
        ended.record()
        pairs.append((began, ended))
    torch.cuda.synchronize(device)  # sync point: the measurement
    milliseconds: float = min(began.elapsed_time(ended) for began, ended in pairs[1:])
    return max(milliseconds / 1000, 1e-9)


def clock_offsets(group: Group) -> list[tuple[float, float]]:
    """For each rank the bounds, in seconds, of how far its clock is ahead of rank 0's.

    No rank leaves an exchange before all have entered it. So the time at which one rank enters is before the time at
    which another one leaves, whatever the load, and each exchange narrows the bounds. Every rank must call it.

    Example:
        >>> from trainer_kit.strategies.single import Alone
        >>> clock_offsets(Alone())
        [(0.0, 0.0)]
    """
    entered, left = list[list[float]](), list[float]()
    for _ in range(_CLOCK_ROUNDS):
        rows = group.agree([time.time()])
        left.append(time.time())
        entered.append([row[0] for row in rows])
    exits = group.agree(left)
    return [(0.0, 0.0), *(_bounds(entered, exits, rank) for rank in range(1, group.size))]


def _bounds(entered: Sequence[Sequence[float]], exits: Sequence[Sequence[float]], rank: int) -> tuple[float, float]:
    low = max(at[rank] - out for at, out in zip(entered, exits[0], strict=True))
    high = min(out - at[0] for at, out in zip(entered, exits[rank], strict=True))
    return low, max(low, high)


def disk_speed(directory: Path) -> float:
    """Bytes a second of a file that is written to the directory and flushed to the disk; at most 64 MiB.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> disk_speed(Path(tempfile.gettempdir())) > 0
        True
    """
    block, (most, seconds), written = os.urandom(4 * _MIB), _DISK, 0  # random: some file systems compress
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file:
        began = time.perf_counter()
        while written < most and time.perf_counter() - began < seconds:
            written += file.write(block)
        os.fsync(file.fileno())
        return written / max(time.perf_counter() - began, 1e-9)
