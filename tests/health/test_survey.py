"""What ranks measure, and which of them are named: slow ones do more work, others have another clock or version."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mounts import mounted
from trainer_kit.health import machine
from trainer_kit.health import survey as surveys
from trainer_kit.health.machine import Finding, check_disk, check_shared_memory
from trainer_kit.health.survey import RankHealth, Survey, slow_ranks, survey
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.single import Alone

CPU = torch.device("cpu")


def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local work is measured in seconds of this thread on a core, which other processes do not lengthen."""
    monkeypatch.setattr(
        surveys, "time", SimpleNamespace(perf_counter=time.thread_time, time=time.time)
    )


def times(monkeypatch: pytest.MonkeyPatch, name: str, factor: int) -> None:
    """Make the work really ``factor`` times as large, without the measurement knowing."""
    prepare: Callable[[torch.device], tuple[Callable[[], object], float]] = getattr(
        surveys, name
    )

    def larger(device: torch.device) -> tuple[Callable[[], object], float]:
        work, amount = prepare(device)
        return lambda: [work() for _ in range(factor)], amount

    monkeypatch.setattr(surveys, name, larger)


def slow_link(monkeypatch: pytest.MonkeyPatch, slow: int, factor: int) -> None:
    """Everything that goes to or from rank ``slow`` is sent ``factor`` times."""

    def shift(
        group: Any, sent: torch.Tensor, received: torch.Tensor, distance: int
    ) -> Callable[[], None]:
        to, source = (
            (group.rank + distance) % group.size,
            (group.rank - distance) % group.size,
        )

        def work() -> None:
            requests = [
                dist.isend(sent, group_dst=to, group=group.group)
                for _ in range(factor if slow in (to, group.rank) else 1)
            ] + [
                dist.irecv(received, group_src=source, group=group.group)
                for _ in range(factor if slow in (source, group.rank) else 1)
            ]
            for request in requests:
                request.wait()

        return work

    monkeypatch.setattr(surveys, "_shift", shift)


def about(made: Survey, subject: str) -> list[str]:
    return [found.text for found in made.unusual if found.about == subject]


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_slow_ranks_are_named_with_what_is_slow() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        own_time(monkeypatch)
        group = ProcessGroup(CPU)
        if group.rank == 2:
            times(monkeypatch, "_gemm", 8)
        if group.rank == 1:
            times(monkeypatch, "_copies", 8)
        made = survey(group, CPU, None)
        (gemm,), (copies,) = about(made, "GEMM"), about(made, "memory")
        assert gemm.startswith(f"rank 2 ({os.uname().nodename}, cpu): ")
        assert gemm.endswith(" times the median of the ranks")
        part = float(gemm.split()[-7])
        assert part == pytest.approx(1 / 8, rel=0.5)
        assert copies.startswith("rank 1 (")
        assert [set(rank.speeds) for rank in made.ranks] == [
            {"GEMM", "memory", "all-reduce", "link"}
        ] * 4
        assert group.all_gather_object([found.text for found in made.unusual])[0] == [
            found.text for found in made.unusual
        ]
        spoken = [
            found.text
            for found in made.findings
            if found.about == "versions" and found.level == "OK"
        ]
        assert spoken[0].startswith("equal on 4 ranks: trainer_kit ")


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_of_a_slow_link_the_rank_is_named_that_is_slow_with_every_partner() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_link(monkeypatch, slow=1, factor=16)
        made = survey(ProcessGroup(CPU), CPU, None)
        assert any(text.startswith("rank 1 (") for text in about(made, "link"))
        slowest = min(made.ranks, key=lambda rank: rank.speeds["link"])
        assert slowest.rank == 1


@pytest.mark.world_size(2)
def test_a_rank_that_was_slow_once_is_measured_again_and_not_named() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        group = ProcessGroup(CPU)
        measured: list[float] = []

        def speeds(device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
            measured.append(
                10.0 if group.rank == 1 and not measured else 100.0 - len(measured)
            )
            return {"GEMM": measured[-1]}, {}

        monkeypatch.setattr(surveys, "_local_speeds", speeds)
        monkeypatch.setattr(surveys, "group_speeds", lambda group, device: ({}, {}))
        made = survey(group, CPU, None)
        assert len(measured) == 2
        assert [rank.speeds["GEMM"] for rank in made.ranks] == [
            100.0,
            99.0,
        ]  # the fastest of both
        assert about(made, "GEMM") == []


@pytest.mark.world_size(2)
def test_clocks_and_versions_that_differ() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        group = ProcessGroup(CPU)
        offsets = surveys.clock_offsets(group)
        assert offsets[0] == (0.0, 0.0)
        low, high = offsets[1]
        assert low <= 0 <= high, "one clock: no load can move the bounds past the truth"
        if group.rank == 1:
            ahead = SimpleNamespace(
                time=lambda: time.time() + 90, perf_counter=time.perf_counter
            )
            monkeypatch.setattr(surveys, "time", ahead)
            monkeypatch.setattr(surveys.platform, "python_version", lambda: "2.7.18")
            monkeypatch.setattr(surveys.torch, "__version__", "1.13.1")
        low, high = surveys.clock_offsets(group)[1]
        assert low <= 90 <= high
        made = survey(group, CPU, None)
        (clock,) = about(made, "clocks")
        assert "rank 1 (" in clock
        assert float(clock.split("): ")[1].split(" s ")[0]) == pytest.approx(90, abs=5)
        python, torchs = (
            next(t for t in about(made, "versions") if t.startswith(name))
            for name in ("Python", "torch")
        )
        assert python.startswith("Python 2.7.18 on rank 1 (")
        assert torchs.startswith("torch 1.13.1 on rank 1 (")
        levels = {
            found.text.split()[0]: found.level
            for found in made.unusual
            if found.about == "versions"
        }
        assert levels == {"Python": "warning", "torch": "fix"}


@pytest.mark.world_size(2)
def test_a_full_disk_is_found_on_the_machine_that_has_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        group = ProcessGroup(CPU)
        monkeypatch.setattr(surveys, "_REPEATS", dict.fromkeys(surveys._REPEATS, 1))
        named = f"machine-{group.rank}"
        monkeypatch.setattr(
            "trainer_kit.health.survey.socket",
            SimpleNamespace(gethostname=lambda: named),
        )

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if group.rank == 1:
            monkeypatch.setattr(surveys.os, "fsync", full)
        made = survey(group, CPU, tmp_path)
        (text,) = about(made, "disk")
        assert "No space left on device" in text
        (found,) = [found for found in made.unusual if found.about == "disk"]
        assert (found.level, found.host) == ("fix", "machine-1")
        assert "disk" in made.ranks[0].speeds
        assert "disk" not in made.ranks[1].speeds


def test_a_disk_of_one_megabyte(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        made = survey(Alone(), CPU, tmp_path / "small")
        (found,) = [found for found in made.unusual if found.about == "disk"]
        assert found.level == "fix"
        assert "No space left on device" in found.text
        levels = {
            finding.level
            for finding in check_disk(tmp_path / "small")
            if finding.about == "disk"
        }
        assert levels == {"fix"}


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.fsync

    def slow(descriptor: int) -> None:
        plain(descriptor)
        time.sleep(
            0.5
        )  # at least: 4 MiB take longer than the limit allows, on any machine

    monkeypatch.setattr(surveys, "_DISK_BYTES", 4 * 2**20)
    monkeypatch.setattr(surveys.os, "fsync", slow)
    (text,) = about(survey(Alone(), CPU, tmp_path), "disk")
    assert float(text.split("): ")[1].split(" MB/s")[0]) < 8.4
    assert list(tmp_path.iterdir()) == []


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda place: usage(64 * 2**20, 0, 64 * 2**20)
    )
    assert shutil.disk_usage("/dev/shm").free == 64 * 2**20
    (found,) = check_shared_memory()
    assert found.level == "fix"
    assert "--shm-size" in found.fix


def ranks(**columns: list[float]) -> list[RankHealth]:
    device = columns.pop("device", ["cuda:0"] * 64)
    rows = zip(*columns.values(), strict=True)
    return [
        RankHealth(
            rank=rank,
            host="a",
            device=device[rank],
            versions={},
            speeds=dict(zip(columns, row, strict=True)),
            missing={},
        )
        for rank, row in enumerate(rows)
    ]


def test_limits_are_parts_of_the_median() -> None:
    def named(*speeds: float, name: str = "GEMM", device: str = "cuda:0") -> list[int]:
        return [
            rank.rank
            for _, rank, _ in slow_ranks(
                ranks(**{name: list(speeds), "device": [device] * 64})
            )
        ]

    assert named(100, 71) == []
    assert named(100, 69) == [1]
    assert named(69, 100) == [0]
    assert named(100, 100, 50, 50) == [2, 3]
    assert named(100, 69, device="cpu") == []
    assert named(100, 49, device="cpu") == [1]
    assert named(100, 69, name="link") == []
    assert named(100, 100, 100, 10, name="all-reduce") == [], (
        "every rank waits for the slowest link"
    )
    assert named(100) == []
    assert named() == []


def test_a_measurement_that_finds_no_memory_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(surveys, "_gemm", full)
    made = survey(Alone(), CPU, None)
    assert about(made, "GEMM") == [
        f"{made.ranks[0]}: not enough free memory to measure it"
    ]
    assert "memory" in made.ranks[0].speeds
    monkeypatch.setattr(surveys, "_gemm", lambda device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        survey(Alone(), CPU, None)


@pytest.mark.world_size(2)
def test_a_rank_without_memory_for_the_exchange_leaves_no_rank_waiting() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        group = ProcessGroup(CPU)
        if group.rank == 1:
            monkeypatch.setattr(surveys, "_buffers", lambda device: (None, None))
        speeds, missing = surveys.group_speeds(group, CPU)
        assert speeds == {}
        assert missing == {
            "all-reduce": "not enough free memory on a rank to measure it"
        }


def test_random_state_and_settings_stay(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        survey(Alone(), CPU, tmp_path)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_cuda_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording stand-in for CUDA's events: no GPU is needed, and none is shown to work."""
    calls: list[str] = []
    durations = iter([9.0, 3.0, 2.0, 4.0])  # milliseconds; the first call warms up

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")

        def elapsed_time(self, end: Event) -> float:
            assert calls[-1] == "synchronize"
            return next(durations)

    next(durations)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: calls.append("synchronize")
    )
    took = surveys._fastest(
        lambda: calls.append("work"),
        torch.device("cuda", 0),
        3,
        lambda: calls.append("before"),
    )
    assert took == 0.002
    assert calls == ["before", "record", "work", "record"] * 4 + ["synchronize"]
    assert all(one != two for one, two in pairwise(calls))


def test_a_survey_says_what_it_found_in_one_line() -> None:
    rows = tuple(ranks(GEMM=[5e12, 6e12], memory=[2e12, 999e9]))
    made = Survey(ranks=rows, findings=(Finding("GEMM", "all well"),), seconds=0.84)
    assert (
        made.describe()
        == "2 ranks, GEMM 5 to 6 TFLOP/s, memory 999 GB/s to 2 TB/s (0.8 s)"
    )
    assert made.unusual == []
