"""A survey of all ranks: each measures itself, and the result names those that differ from the others.

Each speed is that of the fastest of many short repetitions: what else runs on the machine can only slow one down.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median_high, median_low
from time import monotonic
from typing import Final, final

import torch
import torch.distributed as dist

from trainer_kit.core.devices import ran_out_of_memory
from trainer_kit.core.display import in_units, plural
from trainer_kit.core.protocols import Group
from trainer_kit.health.machine import Finding, driver_version

__all__ = [
    "RankHealth",
    "Survey",
    "clock_offsets",
    "group_speeds",
    "slow_ranks",
    "survey",
    "versions",
]

_ROUNDS: Final = 3
"""The most measurements of each rank: a rank is named only if it is slow in all of them."""
_SLOW: Final = {"GEMM": 0.7, "memory": 0.7, "link": 0.5, "disk": 0.25}
"""By measurement, the part of the median below which a rank is slow; see docs/decisions/launch.md#0150."""
_SLOW_ON_CPU: Final = 0.5
_SLOW_DISK: Final = 20e6
_CLOCK_TOLERANCE: Final = 1.0
"""Seconds by which the clocks of ranks may differ."""
_MUST_BE_EQUAL: Final = ("trainer_kit", "torch", "NCCL")
_UNITS: Final = {"GEMM": "FLOP/s"}
_FIXES: Final = {
    "cuda": "look at its clock, temperature and other processes (nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE); if it"
    " stays slow, train without it",
    "cpu": "look for other processes on its cores (top), and at the CPU limit of its container",
    "link": "look at its network card and cable (ethtool, ibstat), and at NCCL_SOCKET_IFNAME; if it stays slow, train"
    " without that machine",
    "disk": "use a faster directory: a checkpoint of 10 GB takes minutes here",
    "clocks": "synchronize the clocks of all machines with NTP (chronyc tracking)",
    "versions": "install the same versions on all machines",
}


@final
@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """One rank, and what it has measured.

    Attributes:
        rank: in the group that was surveyed.
        host: its name.
        device: such as ``cuda:3``.
        versions: by name.
        speeds: by measurement: ``GEMM`` in FLOP/s; ``memory``, ``all-reduce``, ``link`` and ``disk`` in bytes a second.
        missing: by measurement, why there is no speed.
    """

    rank: int
    host: str
    device: str
    versions: Mapping[str, str]
    speeds: Mapping[str, float]
    missing: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.device})"


@final
@dataclass(frozen=True, kw_only=True)
class Survey:
    """What all ranks have measured, and what follows from it; equal on all ranks.

    Attributes:
        ranks: in order.
        findings: those that are not OK name ranks.
        seconds: that it took.
    """

    ranks: tuple[RankHealth, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def unusual(self) -> list[Finding]:
        """The findings that are not OK."""
        return [finding for finding in self.findings if finding.level != "OK"]

    def describe(self) -> str:
        """One line: the speeds, from the slowest to the fastest rank."""
        ranges = []
        for name, values in _columns(self.ranks).items():
            if name != "link":
                ranges.append(f"{name} {_range(values, name)}")
        count = len(self.ranks)
        ranks = f"{count} rank{'s' * (count > 1)}"
        return f"{ranks}, {', '.join(ranges)} ({self.seconds:.1f} s)"


def survey(
    group: Group,
    device: torch.device,
    directory: Path | None,
    beside: Sequence[Finding] = (),
) -> Survey:
    """Measure every rank, and compare them. Every rank must call it; a sync point of some tenths of a second.

    A rank that looks slow is measured again, together with all others, and is named if it is slow each time. Random
    state, gradients and settings of torch stay as they are.

    Args:
        group: of all ranks.
        device: of this rank.
        directory: whose disk the first rank of each machine measures; None: no disk.
        beside: further findings of this rank.
    """
    start = monotonic()
    host = socket.gethostname()
    first_of_host = group.all_gather_object(host).index(host) == group.rank
    offsets = clock_offsets(group)
    speeds: dict[str, float] = {}
    missing: dict[str, str] = {}
    notes = [replace(finding, host=host) for finding in beside]
    if first_of_host and directory is not None:
        # Once on each machine: its ranks would share the speed of the disk.
        try:
            speeds["disk"] = _disk_speed(directory)
        except OSError as error:
            text = f"{directory} cannot be written to: {error.strerror}"
            fix = "make room, or use another directory"
            notes.append(Finding("disk", text, "fix", fix, host))
    health = RankHealth(
        rank=group.rank,
        host=host,
        device=str(device),
        versions=versions(device),
        speeds=speeds,
        missing=missing,
    )
    ranks: list[RankHealth] = []
    # All ranks measure again, not only the slow one: collectives need every rank, and load on a shared machine passes.
    for _ in range(_ROUNDS):
        for measured, reasons in (_local_speeds(device), group_speeds(group, device)):
            for name, speed in measured.items():
                speeds[name] = max(speed, speeds.get(name, 0.0))
            missing.update(reasons)
        # Equal on all ranks after the exchange, so all of them leave the loop together.
        ranks = group.all_gather_object(health)
        if not slow_ranks(ranks):
            break
    findings: list[Finding] = []
    for notes_of_rank in group.all_gather_object(notes):
        findings += notes_of_rank
    findings += _compare(ranks, offsets)
    seconds = monotonic() - start
    return Survey(ranks=tuple(ranks), findings=tuple(findings), seconds=seconds)


def slow_ranks(ranks: Sequence[RankHealth]) -> list[tuple[str, RankHealth, float]]:
    """Measurement, rank and part of the median of all ranks, for each rank that is slow.

    The median of an even number is the higher of the two: of two ranks the slower one is named.

    Example:
        >>> fast, slow = [
        ...     RankHealth(rank=rank, host="a", device="cuda:0", versions={}, speeds={"GEMM": speed}, missing={})
        ...     for rank, speed in enumerate((100.0, 60.0))
        ... ]
        >>> [(name, str(rank), share) for name, rank, share in slow_ranks([fast, slow])]
        [('GEMM', 'rank 1 (a, cuda:0)', 0.6)]
    """
    slow = []
    for name, values in _columns(ranks).items():
        median = median_high(values)
        for rank in ranks:
            limit = _limit(name, rank.device)
            if name in rank.speeds and rank.speeds[name] < limit * median:
                slow.append((name, rank, rank.speeds[name] / median))
    return slow


def _limit(name: str, device: str) -> float:
    limit = _SLOW.get(name, 0.0)
    # Ranks on CPUs share cores and caches, so their speeds differ more.
    if device == "cpu":
        return min(limit, _SLOW_ON_CPU)
    return limit


def _columns(ranks: Sequence[RankHealth]) -> dict[str, list[float]]:
    """By measurement, the speeds of the ranks that have it."""
    columns: dict[str, list[float]] = {}
    for name in ("GEMM", "memory", "all-reduce", "link", "disk"):
        values = [rank.speeds[name] for rank in ranks if name in rank.speeds]
        if values:
            columns[name] = values
    return columns


def _compare(
    ranks: Sequence[RankHealth], offsets: Sequence[tuple[float, float]]
) -> Iterator[Finding]:
    yield from _speeds(ranks)
    if len(ranks) > 1:
        yield from _clocks(ranks, offsets)
        yield from _versions(ranks)


def _speeds(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    slow = slow_ranks(ranks)
    for name, values in _columns(ranks).items():
        text = _range(values, name)
        if len(values) > 1:
            text += f" on {plural(len(values), 'rank')}"
        yield Finding(name, text)
        for slow_name, rank, share in slow:
            if slow_name == name:
                yield _slow_finding(name, rank, share)
    # One machine, or equally slow ones, have no slower rank: the disk has a limit of its own, and is named once.
    slow_disks = {rank.rank for name, rank, _ in slow if name == "disk"}
    for rank in ranks:
        speed = rank.speeds.get("disk", _SLOW_DISK)
        if speed < _SLOW_DISK and rank.rank not in slow_disks:
            text = f"{rank}: {_rate(speed, 'disk')}"
            yield Finding("disk", text, "warning", _FIXES["disk"], rank.host)
        for name, reason in rank.missing.items():
            text = f"{rank}: {reason}"
            yield Finding(name, text, "warning", "measure before training", rank.host)


def _slow_finding(name: str, rank: RankHealth, share: float) -> Finding:
    speed = _rate(rank.speeds[name], name)
    text = f"{rank}: {speed}, {share:.2g} times the median of the ranks"
    kind = "cuda"
    if rank.device == "cpu":
        kind = "cpu"
    fix = _FIXES.get(name, _FIXES[kind])
    return Finding(name, text, "warning", fix, rank.host)


def _range(values: Sequence[float], name: str) -> str:
    low = _rate(min(values), name)
    high = _rate(max(values), name)
    # Compared as text: a difference that is not shown is none.
    if low == high:
        return low
    number, unit = low.split()
    if unit == high.split()[1]:
        return f"{number} to {high}"
    return f"{low} to {high}"


def _rate(value: float, name: str) -> str:
    """A speed as text."""
    return f"{in_units(value)[:-1]}{_UNITS.get(name, 'B/s')}"


def _clocks(
    ranks: Sequence[RankHealth], offsets: Sequence[tuple[float, float]]
) -> Iterator[Finding]:
    # From the median, not from rank 0, whose clock may be the wrong one.
    median = median_low([(low + high) / 2 for low, high in offsets])
    equal = True
    for rank, (low, high) in zip(ranks, offsets, strict=True):
        # An offset is known within bounds; only one that is too large in the best case is reported.
        smallest_error = max(low - median, median - high)
        if smallest_error <= _CLOCK_TOLERANCE:
            continue
        equal = False
        ahead = (low + high) / 2 - median
        text = f"{rank}: {ahead:+.1f} s from the median of the ranks"
        yield Finding("clocks", text, "warning", _FIXES["clocks"], rank.host)
    if equal:
        spread = max(high for _, high in offsets) - min(low for low, _ in offsets)
        milliseconds = max(spread, 0.001) * 1000
        text = f"of {plural(len(ranks), 'rank')} are equal within {milliseconds:.0f} ms"
        yield Finding("clocks", text)


def _versions(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    # The keys of a dict keep the order in which ranks name them.
    names: dict[str, None] = {}
    for rank in ranks:
        names.update(dict.fromkeys(rank.versions))
    equal = []
    for name in names:
        counts = Counter(rank.versions.get(name, "none") for rank in ranks)
        # What most ranks have is taken for right.
        (usual, count), *differing = counts.most_common()
        if not differing:
            equal.append(f"{name} {usual}")
        for version, _ in differing:
            ranks_with_it = [
                str(rank)
                for rank in ranks
                if rank.versions.get(name, "none") == version
            ]
            text = (
                f"{name} {version} on {', '.join(ranks_with_it)}, "
                f"and {usual} on {count} rank{'s' * (count > 1)}"
            )
            # Other versions may differ and train, but are the first suspect of a difference in results.
            level = "fix" if name in _MUST_BE_EQUAL else "warning"
            yield Finding("versions", text, level, _FIXES["versions"])
    if equal:
        yield Finding(
            "versions", f"equal on {plural(len(ranks), 'rank')}: {', '.join(equal)}"
        )


_MIB: Final = 2**20
_REPEATS: Final = {"GEMM": 40, "memory": 32, "all-reduce": 6, "link": 5}
_CLOCK_ROUNDS: Final = 10
_DISK_BYTES: Final = 64 * _MIB
_DISK_SECONDS: Final = 0.5
"""The most seconds of writing before the flush."""
_Work = Callable[[], object]


def versions(device: torch.device) -> dict[str, str]:
    """What has to be equal on all ranks, by name.

    Args:
        device: of this rank; the driver and NCCL are asked for only on CUDA.

    Example:
        >>> versions(torch.device("cpu"))["torch"] == torch.__version__
        True
    """
    facts = {
        "trainer_kit": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    if device.type == "cuda":
        facts["driver"] = driver_version() or "unknown"
        if dist.is_nccl_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call] # torch's
            facts["NCCL"] = ".".join(map(str, version))
    return facts


def _local_speeds(device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The speeds of a device, in FLOP/s (``GEMM``) and bytes a second (``memory``); and why one is missing, by name.

    Args:
        device: it is waited for (a sync point).
    """
    if device.type == "xla":
        # It compiles lazily, so the time of a call is not the time of its work.
        return {}, dict.fromkeys(("GEMM", "memory"), "not measured on xla")
    speeds: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, prepare in (("GEMM", _gemm), ("memory", _copies)):
        # A model may already fill the device: the check then says so, and training begins.
        try:
            with _without_gradients():
                work, amount = prepare(device)
                speeds[name] = amount / _fastest(work, device, _REPEATS[name])
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            missing[name] = "not enough free memory to measure it"
    return speeds, missing


def _gemm(device: torch.device) -> tuple[_Work, float]:
    """A matmul, and its floating-point operations."""
    if device.type != "cpu":
        size = 4096
        dtype = torch.float16
    else:
        size = 256
        if torch.get_num_threads() > 4:
            size = 1024
        dtype = torch.float32
    # Random numbers switch as many bits as a model does; zeros would save the power that limits the clock.
    generator = torch.Generator(device).manual_seed(0)
    first = torch.rand(size, size, device=device, generator=generator).to(dtype)
    second = torch.rand(size, size, device=device, generator=generator).to(dtype)
    result = torch.empty_like(first)
    return lambda: torch.mm(first, second, out=result), 2.0 * size**3


def _copies(device: torch.device) -> tuple[_Work, float]:
    """A copy from one part of memory to another, the next one at each call, and the bytes that it reads and writes."""
    size = 256 * _MIB
    blocks = 1
    if device.type == "cpu":
        size = 32 * _MIB
        # A block is not in the caches of a CPU any more when its turn comes again.
        blocks = 8
    shape = (blocks, size // blocks)
    source = torch.ones(shape, dtype=torch.uint8, device=device)
    target = torch.ones(shape, dtype=torch.uint8, device=device)
    turns = cycle(range(blocks))

    def work() -> None:
        block = next(turns)
        target[block].copy_(source[block])

    return work, 2.0 * size / blocks


def group_speeds(
    group: Group, device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
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
    # All ranks skip the measurement if one has no memory for it: a collective with a rank missing would hang.
    failed_somewhere = any(row[0] for row in group.agree([float(sent is None)]))
    if failed_somewhere or sent is None or received is None:
        return {}, {"all-reduce": "not enough free memory on a rank to measure it"}
    amount = float(sent.numel() * sent.element_size())
    size = group.size

    def speed(name: str, work: _Work) -> float:
        return amount / _fastest(work, device, _REPEATS[name], group.barrier)

    with _without_gradients():
        # "max": a sum in place would grow with each repetition, until it is infinite.
        all_reduce = speed("all-reduce", lambda: group.all_reduce(sent, "max"))
        bus_factor = 2 * (size - 1) / size
        speeds = {"all-reduce": bus_factor * all_reduce}
        # With three ranks, both distances have the same partners.
        if size > 3:
            nearest = speed("link", _shift(group, sent, received, distance=1))
            second = speed("link", _shift(group, sent, received, distance=2))
            speeds["link"] = max(nearest, second)
    return speeds, {}


def _buffers(device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    # Smaller on a CPU, where gloo takes longer for each byte.
    megabytes = 64
    if device.type == "cpu":
        megabytes = 4
    length = megabytes * _MIB // 4
    try:
        return torch.ones(length, device=device), torch.empty(length, device=device)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
    return None, None


def _shift(
    group: Group, sent: torch.Tensor, received: torch.Tensor, distance: int
) -> _Work:
    """Send to the rank ``distance`` places on, and receive from the one as far back."""
    target = (group.rank + distance) % group.size
    source = (group.rank - distance) % group.size

    def work() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, group=group.group, group_peer=target),
            dist.P2POp(dist.irecv, received, group=group.group, group_peer=source),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return work


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Compute without gradients and autocast, whatever surrounds the measurement."""
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


def _fastest(
    work: _Work,
    device: torch.device,
    repeats: int,
    before: Callable[[], None] | None = None,
) -> float:
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
        start = time.perf_counter()
        work()
        # sync point: the measurement
        wait()
        seconds.append(time.perf_counter() - start)
    # Without the first call, which warms up; never 0, where a clock is coarse.
    return max(min(seconds[1:]), 1e-9)


def _fastest_on_cuda(
    work: _Work,
    device: torch.device,
    repeats: int,
    before: Callable[[], None] | None = None,
) -> float:
    pairs = []
    for _ in range(1 + repeats):
        if before is not None:
            before()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
        finish = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
        start.record()
        work()
        finish.record()
        pairs.append((start, finish))
    # sync point: the measurement. Once, after all calls: a wait in between would let the clock of the device fall.
    torch.cuda.synchronize(device)
    milliseconds: float = min(start.elapsed_time(finish) for start, finish in pairs[1:])
    return max(milliseconds / 1000, 1e-9)


def clock_offsets(group: Group) -> list[tuple[float, float]]:
    """For each rank the bounds, in seconds, of its clock's offset from rank 0.

    No rank leaves an exchange before all have entered it. So the time at which one rank enters is before the time at
    which another one leaves, whatever the load, and each exchange narrows the bounds. Every rank must call it.

    Example:
        >>> from trainer_kit.strategies.single import Alone
        >>> clock_offsets(Alone())
        [(0.0, 0.0)]
    """
    entries: list[list[float]] = []
    exits_here: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        rows = group.agree([time.time()])
        exits_here.append(time.time())
        entries.append([row[0] for row in rows])
    exits = group.agree(exits_here)
    offsets = [(0.0, 0.0)]
    for rank in range(1, group.size):
        offsets.append(_bounds(entries, exits, rank))
    return offsets


def _bounds(
    entries: Sequence[Sequence[float]], exits: Sequence[Sequence[float]], rank: int
) -> tuple[float, float]:
    """Return the bounds of the offset of a rank's clock.

    Args:
        entries: by round and rank, the time at which the rank entered the exchange.
        exits: by rank and round, the time at which it left.
        rank: of the clock.
    """
    lows = [times[rank] - out for times, out in zip(entries, exits[0], strict=True)]
    highs = [out - times[0] for times, out in zip(entries, exits[rank], strict=True)]
    # A clock that is set during the exchanges makes the bounds cross; they are never returned so.
    low = max(lows)
    return low, max(low, min(highs))


def _disk_speed(directory: Path) -> float:
    """Bytes a second of a file that is written to the directory and flushed to the disk; at most 64 MiB.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> _disk_speed(Path(tempfile.gettempdir())) > 0
        True
    """
    # Random: some file systems compress.
    block = os.urandom(4 * _MIB)
    written = 0
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file:
        start = time.perf_counter()
        while written < _DISK_BYTES and time.perf_counter() - start < _DISK_SECONDS:
            written += file.write(block)
        # Without it the speed would be that of memory.
        os.fsync(file.fileno())
        return written / max(time.perf_counter() - start, 1e-9)
