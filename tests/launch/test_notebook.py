"""Ranks by forking: what a notebook uses."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import LaunchError, RankError
from trainer_kit.launch import run_forked
from trainer_kit.strategies import FSDPStrategy
from trainer_kit.strategies.process_group import swap_world_cache


def _place(rank: int) -> Environment:
    return Environment.detect()


def test_closures_and_the_world() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    seen = {"untouched": True}

    def train(rank: int) -> dict[str, torch.Tensor]:
        dist.init_process_group("gloo")
        seen.clear()
        with torch.no_grad():
            model.weight.fill_(rank + 1.0)
            dist.all_reduce(model.weight)
        dist.destroy_process_group()
        return model.state_dict()

    model.load_state_dict(run_forked(train, 3))
    assert model.weight.tolist() == [[6.0, 6.0]]
    assert seen == {"untouched": True}


def test_a_store_that_this_process_has_forgotten_hangs_no_rank() -> None:
    """torch's destructor of a store waits for its thread; in a fork, another thread may have its place."""

    class Node:
        pass

    kept, dropped = Node(), Node()
    for one in (kept, dropped):
        one.myself, one.store = (
            one,
            dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
        )
    del one, dropped

    def collect(rank: int) -> int:
        nonlocal kept
        for _ in range(
            4
        ):  # one of them gets the stack of the store's thread, and its name
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        del kept
        return gc.collect()

    run_forked(collect, 2)


def test_ranks_can_be_forked_after_a_process_group_was_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The destructor of a group joins its threads, which a forked process does not have: ranks aborted or hung."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it

    def start(rank: int) -> int:
        strategy = FSDPStrategy()
        strategy.start()
        # Rank 0 has the store of the group: it must not end while the other one still joins.
        dist.barrier()
        return strategy.world.size

    try:
        assert start(0) == 1
        dist.destroy_process_group()
        assert run_forked(start, 2) == 2
    finally:
        swap_world_cache({})


def test_a_process_in_a_group_forks_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks used the parent's group as their own, and hung."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LaunchError, match="world size 1") as caught:
            run_forked(_place, 2)
        assert "destroy_process_group()" in str(caught.value)
    finally:
        dist.destroy_process_group()


def test_forked_ranks_compute_although_this_process_has_used_its_threads() -> None:
    def work(rank: int) -> float:
        values = torch.ones(3_000_000)
        return float((values + 1).sum())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        work(0)
        assert run_forked(work, 2) == 6_000_000
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start(method: str) -> None:
    here = run_forked(_place, 2, method)  # type: ignore[arg-type]
    assert (here.rank, here.world_size, here.local_world_size, here.source) == (
        0,
        2,
        2,
        "torchrun",
    )
    with pytest.raises(LaunchError, match=f"started by {method}"):
        run_forked(lambda rank: rank, 2, method)  # type: ignore[arg-type]


def test_only_rank_0_needs_a_result_that_can_travel() -> None:
    assert run_forked(lambda rank: 5 if rank == 0 else (lambda: 0), 2) == 5
    with pytest.raises(Exception, match="pickle"):
        run_forked(lambda rank: lambda: 0, 2)


def test_the_first_exception_arrives_and_the_others_are_ended(tmp_path: Path) -> None:
    def fail(rank: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            raise KeyError("missing")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    with pytest.raises(KeyError, match="missing") as caught:
        run_forked(fail, 2)
    note = "".join(caught.value.__notes__)
    assert 'raise KeyError("missing")' in note
    assert note.endswith("after it: rank 0 stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)


def test_a_rank_that_dies() -> None:
    def die(rank: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_forked(die, 1)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="at least one rank"):
        run_forked(_place, 0)

    class Used:
        @staticmethod
        def is_initialized() -> bool:
            return True

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: Used)
    with pytest.raises(LaunchError, match="can no longer be forked") as caught:
        run_forked(_place, 2)
    assert caught.value.found is not None
    assert "'cuda'" in caught.value.found or "cuda device" in caught.value.found
