"""Which rank is to blame, and how that reads."""

from __future__ import annotations

import pytest

from trainer_kit.launch.failure import RankFailure, describe, root_first

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3822"
NCCL = "NCCL error: remote process exited or there was a network error. ncclRemoteError: ..."


def _order(*failures: RankFailure) -> list[int]:
    return [failure.rank for failure in root_first(failures)]


@pytest.mark.parametrize(
    ("kind", "message", "echo"),
    [
        ("RuntimeError", GLOO, True),
        ("torch.distributed.DistBackendError", NCCL, True),
        ("torch.distributed.DistNetworkError", "failed to connect to 10.0.0.1", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("requests.exceptions.ConnectionError", "Connection refused", False),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", False),
    ],
)
def test_broken_connections_of_the_ranks_are_echoes(
    kind: str, message: str, echo: bool
) -> None:
    assert RankFailure(0, 1, 0, kind, message).followed is echo


def test_order() -> None:
    echo = RankFailure(0, 1, 1, "RuntimeError", GLOO)
    own = RankFailure(1, 1, 2, "ValueError", "bad")
    later = RankFailure(2, 1, 3, "ValueError", "bad")
    ended = RankFailure(3, -15, 0, stopped=True)
    assert _order(ended, later, echo, own) == [1, 2, 0, 3]
    assert _order(ended, echo) == [0, 3]
    assert _order(echo, RankFailure(4, -11, 9)) == [4, 0]


def test_words() -> None:
    own = RankFailure(
        1,
        1,
        2,
        "ValueError",
        "bad\nmore",
        "Traceback:\n  here\nValueError: bad\nmore\n",
        "host-a",
        77,
        "step 3",
    )
    others = [RankFailure(rank, -15, 3, stopped=True) for rank in range(2, 14)]
    told = describe(
        [*others, RankFailure(0, 1, 1, "RuntimeError", GLOO), own], 14
    ).splitlines()
    assert told[0] == "rank 1 of 14 failed at step 3 (host-a, pid 77): ValueError: bad"
    assert told[1:5] == ["  Traceback:", "    here", "  ValueError: bad", "  more"]
    assert (
        told[5]
        == "after it: rank 0 lost the connection; ranks 2, 3, 4, 5, 6, 7, 8, 9 and 4 more stopped"
    )


@pytest.mark.parametrize(
    ("failure", "cause", "status"),
    [
        (RankFailure(0, 1, 0, "ValueError", ""), "ValueError", 1),
        (RankFailure(0, -11, 0), "killed by SIGSEGV", 139),
        (RankFailure(0, 75, 0), "exited with code 75", 75),
        (
            RankFailure(0, 143, 0, "SystemExit", "143"),
            "ended by SIGTERM (exit code 143)",
            143,
        ),
        (RankFailure(0, 3, 0, "SystemExit", "3"), "exited with code 3", 3),
        (
            RankFailure(0, 1, 0, "SystemExit", "no data"),
            "exited with code 1 (no data)",
            1,
        ),
        (RankFailure(0, None, 0, "ValueError", "x"), "ValueError: x", 1),
    ],
)
def test_causes(failure: RankFailure, cause: str, status: int) -> None:
    assert (failure.cause, failure.exit_status) == (cause, status)
