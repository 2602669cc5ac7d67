"""Ranks that wait for others say for whom."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

import pytest

from tests.ports import free_port
from trainer_kit.core.environment import Environment
from trainer_kit.core.errors import ConfigurationError, LaunchError
from trainer_kit.launch import startup_timeout
from trainer_kit.launch.startup_timeout import patience

SCRIPT = """
import os, signal, sys
import torch.distributed
from datetime import timedelta
from trainer_kit.strategies import DDPStrategy
if sys.argv[2] == os.environ["RANK"]:
    torch.distributed.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
strategy = DDPStrategy(timeout=timedelta(seconds=float(sys.argv[1])))
strategy.start()
print("started", strategy.world.rank, flush=True)
strategy.stop()
"""


def started(
    ranks: Iterable[int],
    world: int,
    seconds: float = 60,
    port: int | None = None,
    dies: int | None = None,
) -> list[subprocess.Popen[str]]:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    made = []
    for rank in ranks:
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"TRAINER_KIT_PATIENCE": "0.5"}
        command = [sys.executable, "-c", SCRIPT, str(seconds), str(dies)]
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        made.append(subprocess.Popen(command, env=own, **pipes))
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "world", "missing"),
    [((0, 2), 4, "ranks 1, 3 of 4"), ((1, 2), 3, "rank 0 at 127.0.0.1:")],
)
def test_missing_ranks_are_named(
    ranks: tuple[int, ...], world: int, missing: str
) -> None:
    port = free_port()
    [speaker] = started(ranks[:1], world, 20, port)
    assert speaker.stderr is not None
    said = (
        speaker.stderr.readline()
    )  # the other begins when this one is known to be the first
    [other] = started(ranks[1:], world, 20, port)
    lines = [said, *speaker.communicate(timeout=100)[1].splitlines()]
    quiet = other.communicate(timeout=100)[1]
    assert (speaker.returncode, other.returncode) == (1, 1), (lines, quiet)
    assert [line for line in lines if line.startswith("waiting for")][-1].startswith(
        f"waiting for {missing}"
    ), lines
    assert "waiting for" not in quiet, "one speaks"
    assert any("not every process has connected" in line for line in lines), lines
    assert any(f"without {missing}" in line for line in lines), lines


@pytest.mark.slow
def test_a_late_rank_is_waited_for() -> None:
    port = free_port()
    [first] = started([0], 2, port=port)
    assert first.stderr is not None
    line = first.stderr.readline()
    [second] = started([1], 2, port=port)
    assert [one.communicate(timeout=60)[0] for one in (first, second)] == [
        "started 0\n",
        "started 1\n",
    ]
    assert line.startswith("waiting for rank 1 of 2: not there after")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_all_connect_is_named() -> None:
    first, second = started([0, 1], 2, dies=1)
    assert second.wait(60) == -signal.SIGKILL
    assert first.stderr is not None
    while (line := first.stderr.readline()).startswith(
        "waiting for rank 1 of 2: not there"
    ):
        pass
    first.kill()
    first.communicate()
    second.communicate()
    assert line.startswith("waiting for rank 1 of 2 to connect")


class CountingStore:
    """A store in which all ranks have set their keys, but for those that are missing."""

    def __init__(self, size: int, missing: Collection[int]) -> None:
        self.size = size
        self.missing = missing
        self.requests = 0

    def clone(self) -> CountingStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.requests += 1

    def add(self, key: str, value: int) -> int:
        self.requests += 1
        return self.size - len(self.missing)

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        ranks = [key.rpartition("/")[2] for key in keys]
        return not any(not r.isdigit() or int(r) in self.missing for r in ranks)


def requests_while_connecting(rank: int, size: int, missing: Collection[int]) -> int:
    store = CountingStore(size, missing)
    here = Environment(rank=rank, world_size=size, local_rank=0, local_world_size=1)
    waits = iter([False, False, True])

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return next(waits)

    startup_timeout._name_gone(store, here, Over(), 0.5)
    return store.requests


@pytest.mark.parametrize("size", [100, 10_000])
def test_ranks_that_connect_do_not_look_for_each_other(
    capsys: pytest.CaptureFixture[str], size: int
) -> None:
    """Each looked for each other one, while the store of all was busy with connecting them."""
    assert requests_while_connecting(0, size, missing=[7]) < 3 * math.log2(size)
    assert f"waiting for rank 7 of {size} to connect" in capsys.readouterr().err
    assert requests_while_connecting(size - 1, size, missing=[7]) == 2
    assert requests_while_connecting(size - 1, size, missing=[0, 1]) == 4
    assert not capsys.readouterr().err


@pytest.mark.parametrize("size", [100, 10_000])
def test_ranks_that_give_up_find_the_missing_ones_by_halves(size: int) -> None:
    """Each of them asked for each key when the time was over."""
    store = CountingStore(size, missing=range(50, 75))
    here = Environment(rank=1, world_size=size, local_rank=0, local_world_size=1)
    with pytest.raises(LaunchError) as raised:
        startup_timeout.wait_for_all(store, here, timedelta(0))
    named = ", ".join(map(str, range(50, 66)))
    assert f"without ranks {named} and 9 more of {size}" in str(raised.value)
    assert store.requests < 100


@pytest.mark.parametrize("said", ["30s", "0", "-1"])
def test_patience_is_a_number_of_seconds(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", said)
    with pytest.raises(
        ConfigurationError, match="TRAINER_KIT_PATIENCE must be a number of seconds"
    ):
        patience()
