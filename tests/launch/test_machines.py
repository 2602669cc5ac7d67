"""Agents that meet: who comes twice, not at all, or was told something else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.failure import RankFailure
from trainer_kit.launch.machines import Machines, PeerFailed

ABOUT = {"processes": 2}


@pytest.fixture
def port() -> int:
    return free_port()


def on_each(port: int, *calls):
    """Call each with its machine, all at the same time; what each returned or raised."""
    machines = [Machines(len(calls), rank, "127.0.0.1", port, timeout=20) for rank in range(len(calls))]

    def one(rank: int):
        try:
            return calls[rank](machines[rank])
        except (LaunchError, PeerFailed) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, range(len(calls))))


def test_they_meet_fail_and_part(port: int) -> None:
    def first(machine: Machines):
        machine.meet(ABOUT)
        store, _ = machine.store(0)
        store.set("hello", "from 0")
        machine.check(0)
        found = machine.outcome(0, [RankFailure(0, -9, 5.0, host="a")], 137, 10)
        machine.leave(0)
        return found

    def second(machine: Machines):
        machine.meet(ABOUT)
        store, _ = machine.store(0)
        assert store.get("hello") == b"from 0"
        while True:
            try:
                machine.check(0)
            except PeerFailed:
                break
        found = machine.outcome(0, [RankFailure(2, None, 6.0, host="b", stopped=True)], 1, 10)
        machine.leave(0)
        return found

    (mine, status), (theirs, other_status) = on_each(port, first, second)
    assert status == other_status == 137
    assert {failure.rank for failure in mine} == {failure.rank for failure in theirs} == {0, 2}
    assert next(failure for failure in theirs if failure.rank == 0) == RankFailure(0, -9, 5.0, host="a")


def test_one_that_does_not_answer_is_gone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.launch.machines._HEARING", 0.3)

    def first(machine: Machines):
        machine.meet(ABOUT)
        failures, status = machine.outcome(0, [RankFailure(0, 1, 5.0)], 1, 60)
        machine.leave(0, grace=0.1)
        return failures, status, machine.gone

    failures, status, gone = on_each(port, first, lambda machine: machine.meet(ABOUT))[0]
    assert ([failure.rank for failure in failures], status, gone) == ([0], 1, [1])


def test_they_must_be_started_alike(port: int) -> None:
    told = on_each(port, lambda machine: machine.meet(ABOUT), lambda machine: machine.meet({"processes": 3}))
    assert all("not started alike" in str(error) for error in told)
    assert "processes=3 on machine 1, 2 on machine 0" in str(told[1])


def test_nobody_comes_twice(port: int) -> None:
    def twice(machine: Machines):
        machine.meet(ABOUT)
        again = Machines(2, 1, "127.0.0.1", port, timeout=20)
        with pytest.raises(LaunchError, match="machine_rank=1 twice"):
            again.meet(ABOUT)
        machine.outcome(0, [], 0, 10)
        machine.leave(0)
        return "came"

    def first(machine: Machines):
        machine.meet(ABOUT)
        machine.outcome(0, [], 0, 10)
        machine.leave(0)
        return "came"

    assert on_each(port, first, twice) == ["came", "came"]


def test_somebody_who_does_not_come_is_named(port: int) -> None:
    with pytest.raises(LaunchError, match=f"for machine 1, to come to 127.0.0.1:{port}"):
        Machines(2, 0, "127.0.0.1", port, timeout=0.2).meet(ABOUT)
    with pytest.raises(LaunchError, match=f"for machine 0 at 127.0.0.1:{port}"):
        Machines(2, 1, "127.0.0.1", port, timeout=0.2).meet(ABOUT)


def test_a_port_that_is_taken_and_an_address_of_somebody_else(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(LaunchError, match=f"cannot listen at 127.0.0.1:{port}") as caught:
            Machines(2, 0, "127.0.0.1", port, timeout=0.2).meet(ABOUT)
    assert "--main_process_port" in str(caught.value.fix)
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1") as caught:
        Machines(2, 0, "192.0.2.1", port, timeout=0.2).meet(ABOUT)
    assert "--main_process_ip" in str(caught.value.fix)
    with pytest.raises(LaunchError, match="none of them"):
        Machines(2, 2)
