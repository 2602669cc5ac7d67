"""Agents that meet: who comes twice, not at all, or was told something else."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.ports import free_port
from tests.programs import Programs
from trainer_kit.core.errors import LaunchError
from trainer_kit.launch.failure import RankFailure
from trainer_kit.launch.machines import (
    Machines,
    PeerFailed,
    SignedStore,
    local_address_towards,
)

ABOUT = {"processes": 2}


@pytest.fixture
def port() -> int:
    return free_port()


def on_each(port: int, *calls):
    """Call each with its machine, all at the same time; what each returned or raised."""
    machines = [
        Machines(len(calls), rank, "127.0.0.1", port, timeout=20)
        for rank in range(len(calls))
    ]

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
        found = machine.outcome(
            0, [RankFailure(2, None, 6.0, host="b", stopped=True)], 1, 10
        )
        machine.leave(0)
        return found

    (mine, status), (theirs, other_status) = on_each(port, first, second)
    assert status == other_status == 137
    assert (
        {failure.rank for failure in mine}
        == {failure.rank for failure in theirs}
        == {0, 2}
    )
    assert next(failure for failure in theirs if failure.rank == 0) == RankFailure(
        0, -9, 5.0, host="a"
    )


def test_a_machine_that_does_not_answer_is_lost(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_kit.launch.machines._REPLY_TIME", 0.3)

    def first(machine: Machines):
        machine.meet(ABOUT)
        failures, status = machine.outcome(0, [RankFailure(0, 1, 5.0)], 1, 60)
        machine.leave(0, grace=0.1)
        return failures, status, machine.gone

    failures, status, gone = on_each(port, first, lambda machine: machine.meet(ABOUT))[
        0
    ]
    assert ([failure.rank for failure in failures], status, gone) == ([0], 1, [1])


def test_they_must_be_started_alike(port: int) -> None:
    told = on_each(
        port,
        lambda machine: machine.meet(ABOUT),
        lambda machine: machine.meet({"processes": 3}),
    )
    assert all("started with different options" in str(error) for error in told)
    assert "processes=3 on machine 1, 2 on machine 0" in str(told[1])


def test_no_process_registers_twice(port: int) -> None:
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


def test_a_missing_machine_is_named(port: int) -> None:
    with pytest.raises(
        LaunchError, match=f"for machine 1, to come to 127.0.0.1:{port}"
    ):
        Machines(2, 0, "127.0.0.1", port, timeout=0.2).meet(ABOUT)
    with pytest.raises(LaunchError, match=f"for machine 0 at 127.0.0.1:{port}"):
        Machines(2, 1, "127.0.0.1", port, timeout=0.2).meet(ABOUT)


def test_a_used_port_and_a_foreign_address_are_errors(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(
            LaunchError, match=f"cannot listen at 127.0.0.1:{port}"
        ) as caught:
            Machines(2, 0, "127.0.0.1", port, timeout=0.2).meet(ABOUT)
    assert "--main_process_port" in str(caught.value.fix)
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1") as caught:
        Machines(2, 0, "192.0.2.1", port, timeout=0.2).meet(ABOUT)
    assert "--main_process_ip" in str(caught.value.fix)
    with pytest.raises(LaunchError, match="rank of this machine is out of range"):
        Machines(2, 2)


def test_a_stranger_in_the_store_has_no_say(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_KIT_RUN_TOKEN", "secret")

    def first(machine: Machines):
        machine.meet(ABOUT)
        stranger = TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=20), False
        )
        stranger.set("failed/0", "1")
        for _ in range(5):
            machine.check(0)
        stranger.set("outcome/0/1", '{"status": 137, "failures": []}')
        found = machine.outcome(0, [], 0, 10)
        machine.leave(0)
        return found

    def second(machine: Machines):
        machine.meet(ABOUT)
        time.sleep(0.5)  # what the stranger has written stands there before this
        machine.check(0)
        found = machine.outcome(0, [], 0, 10)
        machine.leave(0)
        return found

    assert on_each(port, first, second) == [([], 0), ([], 0)]


def test_machines_with_different_tokens_do_not_meet(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_KIT_RUN_TOKEN", "secret")
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), False)
    SignedStore(store).set("here/0", json.dumps(ABOUT))
    for other in ("guess", ""):
        monkeypatch.setenv("TRAINER_KIT_RUN_TOKEN", other)
        with pytest.raises(LaunchError, match="share one token") as caught:
            Machines(3, 2 if other else 1, "127.0.0.1", port, timeout=20).meet(ABOUT)
        assert "export the same TRAINER_KIT_RUN_TOKEN" in str(caught.value.fix)


RANK = """
import os, re, sys
from datetime import timedelta
from pathlib import Path
from trainer_kit.core.environment import Environment
from trainer_kit.launch.startup_timeout import meet_without_agent

store = meet_without_agent(Environment.detect(), timedelta(seconds=20))
store.set("from", os.environ["RANK"])
links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
inodes = set(re.findall(r"socket:.(\\d+)", " ".join(links)))
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            print(fields[1].partition(":")[0], flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("address", ["own", "service", "unknown"])
def test_rank_0_listens_at_one_address(
    address: str, port: int, tmp_path: Path, programs: Programs
) -> None:
    own = local_address_towards("192.0.2.200")
    if address == "service" and own in (None, "192.0.2.200"):
        pytest.skip("this machine has no network")
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    master = {
        "own": "127.0.0.1",
        "service": "192.0.2.200",
        "unknown": "no-such-host.invalid",
    }[address]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
    ran = programs.run(script, environment={**os.environ, **place})
    if address == "unknown":
        assert ran.returncode == 1
        assert "set MASTER_ADDR to an address of the machine of rank 0" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    listens = {"own": "127.0.0.1", "service": str(own)}[address]
    assert ran.stdout.split() == [
        f"{int.from_bytes(socket.inet_aton(listens), 'little'):08X}"
    ]
    said = f"rank 0 listens at {own}:{port}: MASTER_ADDR=192.0.2.200 is not an address of this machine\n"
    assert ran.stderr == (said if address == "service" else "")
