"""Where a process stands, from every launcher's variables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trainer_kit.core.environment import (
    Environment,
    available_devices,
    count_devices,
    first_host,
    list_devices,
    pick_device,
)
from trainer_kit.core.errors import LaunchError, StrategyError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "4000",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_NODELIST": "node[03-05,7]",
    "SLURM_JOB_NAME": "train",
    "SLURM_RESTART_COUNT": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}


def test_plain() -> None:
    here = Environment.detect({})
    assert here == Environment()
    assert not here.launched
    assert (here.rank, here.world_size, here.num_nodes) == (0, 1, 1)


def test_world_size_alone_is_plain() -> None:
    assert not Environment.detect({"WORLD_SIZE": "1"}).launched


def test_torchrun() -> None:
    here = Environment.detect(TORCHRUN)
    assert here == Environment(5, 8, 1, 4, 1, "node7", 4000, "torchrun", 2)
    assert here.launched
    assert here.num_nodes == 2


def test_torchrun_comes_before_slurm() -> None:
    assert Environment.detect({**SLURM, **TORCHRUN}).source == "torchrun"


def test_one_process_a_machine_needs_no_local_variables() -> None:
    given = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "pod-0",
        "MASTER_PORT": "23456",
    }
    here = Environment.detect(given)
    assert (here.local_rank, here.local_world_size, here.node_rank, here.num_nodes) == (
        0,
        1,
        1,
        2,
    )


def test_local_ranks_on_loopback_are_one_machine() -> None:
    here = Environment.detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert (
        here.local_world_size,
        here.node_rank,
        here.master_addr,
        here.master_port,
    ) == (
        2,
        0,
        "127.0.0.1",
        29500,
    )


def test_slurm() -> None:
    here = Environment.detect(SLURM)
    assert here == Environment(3, 5, 1, 2, 1, "node03", 15000 + 123 * 31, "slurm", 1)
    assert here.num_nodes == 3


def test_slurm_step_nodes_win_and_ports_agree_over_ranks() -> None:
    step = {
        **SLURM,
        "SLURM_STEP_NODELIST": "node[04-05],x",
        "SLURM_STEP_TASKS_PER_NODE": "2,3",
    }
    first, second = (
        Environment.detect({**step, "SLURM_PROCID": rank}) for rank in ("0", "3")
    )
    assert first.master_addr == second.master_addr == "node04"
    assert first.master_port == second.master_port
    assert second.local_world_size == 3


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "40397"},
        {"SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_PROCID": ""},
    ],
)
def test_a_batch_script_and_a_shell_in_slurm_are_plain(change: dict[str, str]) -> None:
    assert not Environment.detect({**SLURM, **change}).launched


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_NAME": "bash"}, {"SLURM_JOB_NAME": "interactive"}]
)
def test_a_step_that_a_shell_starts_is_launched(change: dict[str, str]) -> None:
    """``srun bash -c ...``, and ``srun`` typed into the shell of ``salloc``: its tasks must not train alone."""
    assert Environment.detect({**SLURM, **change}).source == "slurm"


def test_a_step_of_one_task_is_launched() -> None:
    one = {
        **SLURM,
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    here = Environment.detect({**one, "SLURM_TASKS_PER_NODE": "1"})
    assert (here.source, here.world_size) == ("slurm", 1)


def test_a_local_job_of_submitit() -> None:
    """Also without ``TorchDistributedEnvironment().export()``: its tasks must not train alone."""
    task = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "4711",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
    }
    here = Environment.detect(task)
    assert here == Environment(1, 2, 1, 2, 0, "127.0.0.1", here.master_port, "submitit")
    first = Environment.detect({**task, "SUBMITIT_LOCAL_GLOBALID": "0"})
    assert (first.rank, first.master_port) == (0, here.master_port)
    other = Environment.detect({**task, "SUBMITIT_LOCAL_JOB_ID": "4712"})
    assert other.master_port != here.master_port
    # What the script exports, or a launcher inside the task, counts more.
    exported = {**task, "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    assert Environment.detect(exported).source == "torchrun"
    assert not Environment.detect({**task, "SUBMITIT_LOCAL_NTASKS": "1"}).launched


def test_mpi() -> None:
    here = Environment.detect(OMPI)
    assert here == Environment(3, 4, 1, 2, 1, "head", 29500, "mpi")
    local = Environment.detect({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (
        local.rank,
        local.local_rank,
        local.local_world_size,
        local.master_addr,
    ) == (
        1,
        1,
        2,
        "127.0.0.1",
    )
    assert not Environment.detect({"PMI_RANK": "0", "PMI_SIZE": "1"}).launched


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "1"}, "RANK"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=2, WORLD_SIZE=2",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "--standalone"),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n"},
            "LOCAL_WORLD_SIZE",
        ),
        ({**SLURM, "SLURM_NODEID": "3"}, "SLURM_NODEID=3"),
        ({**SLURM, "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE=two"),
        ({**OMPI, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Environment.detect(environ)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("node[03-05,7]", "node03"),
        ("node[7,03-05],login1", "node7"),
        ("node[9]", "node9"),
        ("r[1-2]n[08-11,3]-ib,x", "r1n08-ib"),
        ("a.b-c.d,e", "a.b-c.d"),
        (" gpu[001-128] ", "gpu001"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", ",a", "node[3"])
def test_first_host_of_nothing(hosts: str) -> None:
    with pytest.raises(LaunchError):
        first_host(hosts)


class _Accelerators:
    """Stands in for what torch sees, so that machines without an accelerator test the rest."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int
    ) -> None:
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: device,
        )
        monkeypatch.setattr(
            torch,
            "get_device_module",
            lambda _: SimpleNamespace(device_count=lambda: count),
        )


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_devices_equal_the_ones_torch_reports(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _Accelerators(monkeypatch, kind, 4)
    for word in ("auto", "gpu", kind):
        assert pick_device(word, 2) == torch.device(kind, 2)
        assert available_devices(word) == 4
    assert pick_device("cpu", 2) == torch.device("cpu")
    assert pick_device("auto", 1, [0, 2]) == torch.device(kind, 2)
    assert list_devices("0,3") == [0, 3]
    assert list_devices("3,") == [3]
    assert count_devices("auto") == count_devices(-1) == count_devices("-1") == 4
    assert count_devices("2") == count_devices(2) == count_devices([1, 3]) == 2
    for wrong in (5, [0, 4], "9,"):
        with pytest.raises(StrategyError, match="more devices are requested"):
            count_devices(wrong)
    with pytest.raises(StrategyError, match="more processes than devices"):
        pick_device("auto", 4)
    with pytest.raises(StrategyError, match=f"torch sees '{kind}'"):
        pick_device("mps")


def test_slurm_shows_a_task_only_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _Accelerators(monkeypatch, "cuda", 1)
    with pytest.raises(StrategyError):
        pick_device("auto", 1)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert pick_device("auto", 1) == torch.device("cuda", 0)


def test_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    _Accelerators(monkeypatch, None, 0)
    assert pick_device("auto") == torch.device("cpu")
    assert (
        count_devices("auto"),
        count_devices(-1),
        count_devices(3),
        count_devices("2"),
    ) == (
        1,
        1,
        3,
        2,
    )
    with pytest.raises(StrategyError, match="no accelerator") as caught:
        pick_device("gpu")
    assert caught.value.fix == 'use accelerator="auto" or "cpu"'
    with pytest.raises(StrategyError, match="single CPU cores") as caught:
        list_devices([0, 2], "cpu")
    assert caught.value.fix == "use devices=2"


@pytest.mark.parametrize(
    "devices", [0, -2, True, "", "two", [], [0, 0], [-1], [True], None, 1.5, ","]
)
def test_unreadable_devices(devices: object) -> None:
    with pytest.raises(StrategyError, match="devices= is not understood"):
        count_devices(devices, "cpu")  # type: ignore[arg-type]
