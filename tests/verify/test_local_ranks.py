"""Ranks that are threads compute in bits what processes compute, and none waits for a rank that has failed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import LaunchError, RankError
from trainer_kit.core.seed import order_seed, seed_everything, swap_last_seed
from trainer_kit.launch.processes import run_forked
from trainer_kit.verify.local_ranks import run_local


def state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        dict(os.environ),
    )


def test_each_rank_has_random_numbers_and_variables_of_its_own():
    """torch's threads share one generator, so the draws of a rank depended on what the others drew before."""
    draws = {}

    def rank(rank):
        seed_everything(rank)
        os.environ["MINE"] = str(rank)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        for _ in range(3):
            draws[rank] = torch.rand(1).item(), random.random(), np.random.rand()
            dist.barrier()
        assert (os.environ["MINE"], order_seed(), Environment.detect().rank) == (
            str(rank),
            rank,
            rank,
        )
        assert torch.get_default_dtype() == (torch.float64 if rank else torch.float32)

    before, seed = state(), order_seed()
    run_local(rank, 2)
    assert state() == before
    assert (order_seed(), torch.get_default_dtype(), dist.is_initialized()) == (
        seed,
        torch.float32,
        False,
    )
    for one in range(2):
        seed_everything(one)
        torch.set_default_dtype(torch.float64 if one else torch.float32)
        alone = [
            (torch.rand(1).item(), random.random(), np.random.rand()) for _ in range(3)
        ]
        torch.set_default_dtype(torch.float32)
        assert draws[one] == alone[2]
    swap_last_seed(None)


def everything(rank):
    """One call of each collective; returns all that a rank has then."""
    torch.manual_seed(rank)
    size, found = dist.get_world_size(), []

    def fresh(*shape):
        found.append(torch.rand(*shape or (5,)))
        return found[-1]

    dist.all_reduce(fresh())
    dist.all_reduce(fresh(), dist.ReduceOp.MAX)
    dist.broadcast(fresh(), 1)
    dist.reduce(fresh(), 1)
    dist.all_gather([fresh() for _ in range(size)], fresh())
    new = hasattr(dist, "all_gather_single")  # torch 2.13
    (dist.all_gather_single if new else dist.all_gather_into_tensor)(
        fresh(5 * size), fresh()
    )
    (dist.reduce_scatter_single if new else dist.reduce_scatter_tensor)(
        fresh(), fresh(5 * size)
    )
    dist.gather(fresh(), [fresh() for _ in range(size)] if rank == 0 else None, 0)
    dist.scatter(fresh(), [fresh() for _ in range(size)] if rank == 0 else None, 0)
    dist.all_to_all([fresh() for _ in range(size)], [fresh() for _ in range(size)])
    dist.all_to_all_single(fresh(size), fresh(size))
    dist.all_reduce(fresh(), async_op=True).wait()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(fresh(), group=pair)
        moves = [
            dist.P2POp(dist.irecv, fresh(), 1 - rank, pair),
            dist.P2POp(dist.isend, fresh(), 1 - rank, pair),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    box = [None]
    dist.scatter_object_list(box, list(range(size)) if rank == 0 else None, 0)
    dist.monitored_barrier()
    return [tensor.tolist() for tensor in found], objects, box


@pytest.mark.slow
def test_collectives_are_those_of_processes(tmp_path):
    def rank(rank):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.save(everything(rank), tmp_path / str(rank))

    results = []
    for run in (run_forked, run_local):
        run(rank, 3)
        results.append([torch.load(tmp_path / str(one)) for one in range(3)])
    assert results[0] == results[1]


def test_a_rank_that_fails_ends_the_others():
    ended = []

    def rank(rank):
        try:
            dist.barrier()
            if rank == 1:
                raise ValueError("bad label")
            dist.barrier()
        finally:
            ended.append(rank)

    before = threading.active_count(), state()
    with pytest.raises(ValueError, match="bad label") as caught:
        run_local(rank, 3)
    assert sorted(ended) == [0, 1, 2]
    assert (
        str(caught.traceback[-1].statement).strip() == 'raise ValueError("bad label")'
    )
    assert caught.value.__notes__ == ["raised on rank 1 of 3, a thread of this process"]
    assert (threading.active_count(), state()) == before


def test_an_exit_of_a_rank_is_an_error_unless_its_code_is_zero():
    run_local(lambda rank: sys.exit(0), 2)
    with pytest.raises(RankError, match=r"sys\.exit\(3\)"):
        run_local(lambda rank: sys.exit(3) if rank else dist.barrier(), 2)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (
            lambda rank: (
                dist.all_reduce(torch.ones(3))
                if rank
                else dist.broadcast(torch.ones(3), 0)
            ),
            r"rank 0: broadcast\(float32\[3\]\); rank 1: allreduce\(float32\[3\]\)",
        ),
        (
            lambda rank: dist.all_reduce(torch.ones(3 + rank)),
            r"rank 0: allreduce\(float32\[3\]\); rank 1: allreduce\(float32\[4\]\)",
        ),
        (
            lambda rank: rank or dist.barrier(),
            "rank 0 waits in barrier; rank 1 has ended",
        ),
        (
            lambda rank: rank or dist.recv(torch.ones(1), 1),
            "rank 0 waits in recv from rank 1 to rank 0; rank 1 has",
        ),
    ],
    ids=["other", "shape", "ended", "not sent"],
)
def test_collectives_that_do_not_match_are_named_at_once(call, found):
    """Processes hang here until a timeout."""
    with pytest.raises(RankError, match=found):
        run_local(call, 2)


def test_a_thread_of_a_rank_has_no_world():
    """Its `get_world_size` would be that of one process, without a word."""
    errors = []

    def ask():
        try:
            dist.get_world_size()
        except RankError as error:
            errors.append(str(error))

    def rank(rank):
        thread = threading.Thread(target=ask, name=f"helper-{rank}")
        thread.start()
        thread.join()

    run_local(rank, 2)
    assert [error.splitlines()[1].strip() for error in errors] == [
        "found: helper-0",
        "found: helper-1",
    ]


def test_a_rank_starts_no_ranks():
    with pytest.raises(LaunchError, match="a rank cannot start ranks"):
        run_local(lambda rank: run_local(print, 2), 2)


def test_one_rank_has_no_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    found = []
    run_local(
        lambda rank: found.append((rank, dist.is_initialized(), "RANK" in os.environ)),
        1,
    )
    assert found == [(0, False, False)]
    assert os.environ["RANK"] == "0"


def test_a_second_interrupt_ends_a_rank_that_does_not_end_by_itself():
    """Ctrl-C reaches the main thread, which is rank 0, and here waits for rank 1."""
    running = threading.Event()

    def interrupt():
        running.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def rank(rank):
        if rank == 0:
            dist.barrier()
        running.set()
        while True:
            time.sleep(0.001)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        run_local(rank, 2)
    helper.join()
