"""`run_distributed`: results, errors, hangs, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import LaunchError, RankError
from trainer_kit.testing import run_distributed


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _sum(start: float, step: float = 1.0) -> tuple[int, float, int]:
    value = torch.tensor(start + step * dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), torch.get_num_threads()


def _place() -> tuple[Environment, str, str | None, bool]:
    return (
        Environment.detect(),
        os.getcwd(),
        os.environ.get("OF_THE_TEST"),
        dist.is_initialized(),
    )


def _fail(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("bad label")
        if how == "unpicklable":
            raise Unpicklable(1, 2)
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "warn":
            warnings.warn("mind the gap", stacklevel=1)
    dist.barrier()


def _hang_in_one_place() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def _start_child(directory: str) -> None:
    Path(directory, f"{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def _tensor() -> torch.Tensor:
    return torch.full((300_000,), float(dist.get_rank()))


def test_results_come_in_rank_order() -> None:
    assert run_distributed(_sum, 3, 1.0, step=2.0) == [
        (rank, 9.0, 1) for rank in range(3)
    ]


def test_one_rank_and_large_results() -> None:
    assert run_distributed(_sum, 1, 4.0) == [(0, 4.0, 1)]
    first, second = run_distributed(_tensor, 2)
    assert first.sum() == 0
    assert second.sum() == 300_000


def test_ranks_start_in_the_callers_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "here")
    for rank, (here, directory, variable, group) in enumerate(
        run_distributed(_place, 2, process_group=False)
    ):
        assert (here.rank, here.local_rank, here.world_size, here.local_world_size) == (
            rank,
            rank,
            2,
            2,
        )
        assert here.master_addr == "127.0.0.1"
        assert (directory, variable, group) == (str(tmp_path), "here", False)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_exception_is_raised_with_its_traceback(rank: int) -> None:
    with pytest.raises(ValueError, match="bad label") as caught:
        run_distributed(_fail, 2, rank, "raise")
    note = "".join(caught.value.__notes__)
    assert note.startswith(f"rank {rank} of 2 failed")
    assert 'raise ValueError("bad label")' in note
    assert "processes.py" not in note
    assert f"after it: rank {1 - rank} lost the connection" in note


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("unpicklable", "Unpicklable: 1 and 2"),
        ("exit", "exited with code"),
        ("kill", "killed by SIGKILL"),
    ],
)
def test_values_that_cannot_be_pickled_are_named(how: str, told: str) -> None:
    with pytest.raises(RankError, match=told) as caught:
        run_distributed(_fail, 2, 1, how)
    assert str(caught.value).startswith("rank 1 of 2 failed")


def test_warnings_are_errors_in_ranks_too() -> None:
    with pytest.raises(UserWarning, match="mind the gap"):
        run_distributed(_fail, 2, 0, "warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_distributed(_fail, 2, 0, "warn")


@pytest.mark.slow
def test_a_hang_ends_with_every_stack() -> None:
    with pytest.raises(
        RankError, match=r"2 of 2 ranks did not finish within 3 s"
    ) as caught:
        run_distributed(_hang_in_one_place, 2, timeout=3)
    told = str(caught.value)
    assert "rank 0 (pid" in told
    assert "rank 1 (pid" in told
    assert told.count("_hang_in_one_place") == 2
    assert "barrier" in told


class _SlowToStart:
    """Takes longer to reach a rank than the function has time."""

    def __setstate__(self, state: dict[str, int]) -> None:
        time.sleep(2)

    def __getstate__(self) -> dict[str, int]:
        return {"seconds": 2}


@pytest.mark.slow
def test_the_start_of_the_ranks_is_not_time_of_the_function() -> None:
    assert run_distributed(isinstance, 2, _SlowToStart(), object, timeout=1) == [
        True,
        True,
    ]


@pytest.mark.slow
def test_no_process_is_left_after_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_distributed(_start_child, 2, str(tmp_path), timeout=2)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_arguments_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(LaunchError, match="must be picklable"):
        run_distributed(lambda: None, 2)
    with pytest.raises(LaunchError, match="at least one rank"):
        run_distributed(_sum, 0)
