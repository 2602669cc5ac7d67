"""What the watchdogs of many ranks ask of their store when all of them wait: in proportion to the ranks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from trainer_kit.hang import hang_watchdog
from trainer_kit.hang.hang_watchdog import HangWatchdog
from trainer_kit.hang.position import Position

LIMIT = 100.0


class CountingStore:
    """The store of all ranks, which counts requests and the bytes of values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counters: Counter[str] = Counter()
        self.requests = 0
        self.size = 0

    def add(self, key: str, value: int) -> int:
        self.requests += 1
        self.counters[key] += value
        return self.counters[key]

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.requests += 1
        self.size += len(self.values[key])
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.size += len(value)
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests += 1
        return self.values.setdefault(key, desired.encode())


class World:
    """Ranks that wait in one exchange, at a time that the test sets; ``silent`` does not check."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, silent: int) -> None:
        self.now = 0.0
        self.store = CountingStore()
        self.lines: list[str] = []
        self.verdicts: list[object] = []
        position = Position("backward", "at train.py:3", "all_reduce", False, False, ())
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(hang_watchdog, "time", clock)
        monkeypatch.setattr(hang_watchdog, "find_position", lambda frames: position)
        monkeypatch.setattr(hang_watchdog, "issued_collectives", lambda: ({}, None))
        monkeypatch.setattr(
            hang_watchdog, "_start_thread", lambda *_: SimpleNamespace()
        )
        monkeypatch.setattr(
            hang_watchdog, "connect_to_store", lambda *arguments: self.store
        )
        monkeypatch.setattr(
            HangWatchdog, "_obey", lambda _, verdict, *silent: self.end(verdict)
        )
        self.steps = 10
        watchdogs = [
            HangWatchdog(
                rank,
                size,
                LIMIT,
                lambda: (self.steps, None),
                lambda: None,
                self.lines.append,
            )
            for rank in range(size)
        ]
        self.checking = [w for w in watchdogs if w.rank != silent]
        for _ in range(5):
            self.steps += 1
            self.check(0.2)
        self.store.requests = 0
        self.store.size = 0

    def end(self, verdict: object) -> None:
        self.verdicts.append(verdict)

    def check(self, seconds: float) -> None:
        """All ranks check, one after the other, within this time."""
        for watchdog in self.checking:
            watchdog.look()
            self.now += seconds / len(self.checking)


def requests_per_rank(
    monkeypatch: pytest.MonkeyPatch, size: int, seconds: float
) -> tuple[World, float, float]:
    world = World(monkeypatch, size, silent=size // 2)
    checks = 0
    while world.now < seconds and not world.verdicts:
        world.check(1.0)
        checks += 1
    store = world.store
    return world, store.requests / size / checks, store.size / size / checks


def test_ranks_that_wait_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them asked all others, and read their stacks: 10,000 ranks made 100 million reports."""
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", "30")
    world, requests, size = requests_per_rank(monkeypatch, 20, 60.0)
    assert len(world.lines) == 1, world.lines
    assert "process 10 is silent" in world.lines[0]
    large_world, more_requests, more_bytes = requests_per_rank(monkeypatch, 80, 60.0)
    assert len(large_world.lines) == 1
    assert more_requests < 1.1 * requests
    # The line of each rank is in the memory of one rank.
    assert more_bytes < 1.1 * size


def test_one_rank_ends_a_run_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", "1000")
    world, requests, _ = requests_per_rank(monkeypatch, 20, 2 * LIMIT)
    assert world.verdicts
    large_world, more_requests, _ = requests_per_rank(monkeypatch, 80, 2 * LIMIT)
    assert large_world.verdicts
    assert more_requests < 1.1 * requests


def test_another_rank_asks_if_the_first_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", "1000")
    world = World(monkeypatch, 8, silent=7)
    while not world.store.counters["asked"]:
        world.check(1.0)
    # The first of them, before it has read an answer.
    asker = next(w for w in world.checking if w._question is not None)
    world.checking.remove(asker)
    asked_at = world.now
    while not world.verdicts and world.now < asked_at + 60:
        world.check(1.0)
    assert world.verdicts
