"""A survey of all ranks: each measures itself, and the result names those that differ from the others."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high, median_low
from typing import Final, final

import torch

from trainer_kit.core.display import in_units
from trainer_kit.core.protocols import Group
from trainer_kit.health.machine import Finding
from trainer_kit.health.measure import clock_offsets, disk_speed, group_speeds, local_speeds, versions

__all__ = ["RankHealth", "Survey", "slow_ranks", "survey"]

_ROUNDS: Final = 3
_SLOW: Final = {"GEMM": 0.7, "memory": 0.7, "link": 0.5, "disk": 0.25}
"""By measurement, the part of the median below which a rank is slow; see docs/decisions/0150."""
_SLOW_ON_CPU: Final = 0.5
_SLOW_DISK: Final = 20e6
_CLOCKS: Final = 1.0
_MUST_BE_EQUAL: Final = ("trainer_kit", "torch", "NCCL")
_UNITS: Final = {"GEMM": "FLOP/s"}
_FIXES: Final = {
    "cuda": "look at its clock, temperature and other processes (nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE); if it"
    " stays slow, train without it",
    "cpu": "look for other processes on its cores (top), and at the CPU limit of its container",
    "link": "look at its network card and cable (ethtool, ibstat), and at NCCL_SOCKET_IFNAME; if it stays slow, train"
    " without that machine",
    "disk": "use a faster directory: a checkpoint of 10 GB takes minutes here",
    "clocks": "synchronise the clocks of all machines with NTP (chronyc tracking)",
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
        return [found for found in self.findings if found.level != "OK"]

    def describe(self) -> str:
        """One line: the speeds, from the slowest to the fastest rank."""
        parts = [f"{name} {_range(values, name)}" for name, values in _columns(self.ranks).items() if name != "link"]
        count = len(self.ranks)
        return f"{count} rank{'s' * (count > 1)}, {', '.join(parts)} ({self.seconds:.1f} s)"


def survey(group: Group, device: torch.device, directory: Path | None, beside: Sequence[Finding] = ()) -> Survey:
    """Measure every rank, and compare them. Every rank must call it; a sync point of some tenths of a second.

    A rank that looks slow is measured again, together with all others, and is named if it is slow each time. Random
    state, gradients and settings of torch stay as they are.

    Args:
        group: of all ranks.
        device: of this rank.
        directory: whose disk the first rank of each machine measures; None: no disk.
        beside: further findings of this rank.
    """
    began, host = time.monotonic(), socket.gethostname()
    first = group.all_gather_object(host).index(host) == group.rank
    offsets = clock_offsets(group)
    speeds, missing = dict[str, float](), dict[str, str]()
    notes = [replace(found, host=host) for found in beside]
    if first and directory is not None:
        try:
            speeds["disk"] = disk_speed(directory)
        except OSError as error:
            wrong = f"{directory} cannot be written to: {error.strerror}"
            notes.append(Finding("disk", wrong, "fix", "make room, or use another directory", host))
    own = RankHealth(
        rank=group.rank, host=host, device=str(device), versions=versions(device), speeds=speeds, missing=missing
    )
    ranks: list[RankHealth] = []
    for _ in range(_ROUNDS):
        for now, without in (local_speeds(device), group_speeds(group, device)):
            speeds.update({name: max(speed, speeds.get(name, 0.0)) for name, speed in now.items()})
            missing.update(without)
        ranks = group.all_gather_object(own)
        if not slow_ranks(ranks):
            break
    beside_all = [found for each in group.all_gather_object(notes) for found in each]
    findings = (*beside_all, *_compare(ranks, offsets))
    return Survey(ranks=tuple(ranks), findings=findings, seconds=time.monotonic() - began)


def slow_ranks(ranks: Sequence[RankHealth]) -> list[tuple[str, RankHealth, float]]:
    """Measurement, rank and part of the median of all ranks, for each rank that is slow.

    The median of an even number is the higher of the two: of two ranks the slower one is named.

    Example:
        >>> fast, slow = [
        ...     RankHealth(rank=at, host="a", device="cuda:0", versions={}, speeds={"GEMM": speed}, missing={})
        ...     for at, speed in enumerate((100.0, 60.0))
        ... ]
        >>> [(name, str(rank), part) for name, rank, part in slow_ranks([fast, slow])]
        [('GEMM', 'rank 1 (a, cuda:0)', 0.6)]
    """
    found = []
    for name, values in _columns(ranks).items():
        usual = median_high(values)
        for rank in ranks:
            limit = _limit(name, rank.device)
            if name in rank.speeds and rank.speeds[name] < limit * usual:
                found.append((name, rank, rank.speeds[name] / usual))
    return found


def _limit(name: str, device: str) -> float:
    limit = _SLOW.get(name, 0.0)
    return min(limit, _SLOW_ON_CPU) if device == "cpu" else limit


def _columns(ranks: Sequence[RankHealth]) -> dict[str, list[float]]:
    """By measurement, the speeds of the ranks that have it."""
    found: dict[str, list[float]] = {}
    for name in ("GEMM", "memory", "all-reduce", "link", "disk"):
        values = [rank.speeds[name] for rank in ranks if name in rank.speeds]
        if values:
            found[name] = values
    return found


def _compare(ranks: Sequence[RankHealth], offsets: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    yield from _speeds(ranks)
    if len(ranks) > 1:
        yield from _clocks(ranks, offsets)
        yield from _versions(ranks)


def _speeds(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    slow = slow_ranks(ranks)
    for name, values in _columns(ranks).items():
        yield Finding(name, _range(values, name) + (f" on {len(values)} ranks" if len(values) > 1 else ""))
        for which, rank, part in slow:
            if which == name:
                text = f"{rank}: {_rate(rank.speeds[name], name)}, {part:.2g} times the median of the ranks"
                fix = _FIXES.get(name, _FIXES["cpu" if rank.device == "cpu" else "cuda"])
                yield Finding(name, text, "warning", fix, rank.host)
    for rank in ranks:
        if rank.speeds.get("disk", _SLOW_DISK) < _SLOW_DISK and ("disk", rank.rank) not in {
            (which, each.rank) for which, each, _ in slow
        }:
            yield Finding("disk", f"{rank}: {_rate(rank.speeds['disk'], 'disk')}", "warning", _FIXES["disk"], rank.host)
        for name, why in rank.missing.items():
            yield Finding(name, f"{rank}: {why}", "warning", "measure before training", rank.host)


def _range(values: Sequence[float], name: str) -> str:
    low, high = _rate(min(values), name), _rate(max(values), name)
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low} to {high}"


def _rate(value: float, name: str) -> str:
    """A speed in words."""
    return f"{in_units(value)[:-1]}{_UNITS.get(name, 'B/s')}"


def _clocks(ranks: Sequence[RankHealth], offsets: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    usual = median_low([(low + high) / 2 for low, high in offsets])
    wrong = False
    for rank, (low, high) in zip(ranks, offsets, strict=True):
        nearest = max(low - usual, usual - high)  # seconds by which it is off at least
        if nearest > _CLOCKS:
            wrong = True
            ahead = (low + high) / 2 - usual
            text = f"{rank}: {ahead:+.1f} s from the median of the ranks"
            yield Finding("clocks", text, "warning", _FIXES["clocks"], rank.host)
    if not wrong:
        most = max(high for _, high in offsets) - min(low for low, _ in offsets)
        yield Finding("clocks", f"of {len(ranks)} ranks are equal within {max(most, 0.001) * 1000:.0f} ms")


def _versions(ranks: Sequence[RankHealth]) -> Iterator[Finding]:
    names: dict[str, None] = {name: None for rank in ranks for name in rank.versions}
    equal = []
    for name in names:
        counts = Counter(rank.versions.get(name, "none") for rank in ranks)
        (usual, most), *others = counts.most_common()
        if not others:
            equal.append(f"{name} {usual}")
        for version, _ in others:
            where = ", ".join(str(rank) for rank in ranks if rank.versions.get(name, "none") == version)
            text = f"{name} {version} on {where}, and {usual} on {most} rank{'s' * (most > 1)}"
            yield Finding("versions", text, "fix" if name in _MUST_BE_EQUAL else "warning", _FIXES["versions"])
    if equal:
        yield Finding("versions", f"equal on {len(ranks)} ranks: {', '.join(equal)}")
