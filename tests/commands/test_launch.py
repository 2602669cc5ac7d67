"""``trainer-kit launch`` and ``explain``: real processes, on one machine and on two agents of one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.launch.configurations import SAMPLES
from tests.ports import free_port
from tests.programs import Programs
from trainer_kit.commands.main import main
from trainer_kit.launch.configuration import read_configuration

pytestmark = pytest.mark.slow  # programs are started

ROOT = Path(__file__).parents[2]

RAW = """
import os, signal, sys, time
import torch
from torch import nn
from trainer_kit import Accelerator

accelerator = Accelerator()
rank = accelerator.process_index
mode = sys.argv[1] if len(sys.argv) > 1 else ""
if mode not in ("kill", "once", "wait", "until"):  # they end early, and need no optimizer, which imports for seconds
    model, data = nn.Linear(2, 1), [(torch.full((2,), float(i)), torch.ones(1)) for i in range(8)]
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), torch.utils.data.DataLoader(data, batch_size=2)
    )
    for inputs, target in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), target))
            optimizer.step()
            optimizer.zero_grad()
seen = accelerator.gather(torch.tensor([rank])).tolist()
print(f"rank {rank} of {accelerator.num_processes} saw {seen} {accelerator.precision.name} "
      f"steps={accelerator.gradient_accumulation_steps} machine={accelerator.environment.node_rank} "
      f"attempt={os.environ.get('TRAINER_KIT_RESTART_COUNT')} {sys.argv[1:]}", flush=True)
if mode == "kill" and rank == int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "once" and rank == int(sys.argv[2]) and os.environ["TRAINER_KIT_RESTART_COUNT"] == "0":
    raise ValueError("only at first")
if mode in ("wait", "until"):
    with open(f"pid-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"pid-{rank}", f"ready-{rank}")
while mode == "until" and not os.path.exists("go"):
    time.sleep(0.01)
if mode in ("kill", "wait"):
    time.sleep(600)
accelerator.wait_for_everyone()
"""

TRAINER = """
import torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule

trainer = tk.Trainer(max_epochs=1, barebones=True, devices="auto")
trainer.fit(TinyModule(), [torch.randn(4, 32)] * 4)
print(f"rank {trainer.global_rank} of {trainer.world_size} step {trainer.global_step}", flush=True)
"""


PLAIN = """
import os, signal, sys, time

if os.environ["RANK"] == sys.argv[2]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

ENGINE = """
import os
import torch
from trainer_kit import Accelerator


class Tiny(torch.nn.Linear):
    pass


accelerator = Accelerator()
model = Tiny(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
kind, where = accelerator.distributed_type.value, accelerator.device
print(f"{accelerator.process_index} of {accelerator.num_processes} {kind} {type(model).__name__} {where} "
      f"{os.environ['NCCL_DEBUG']}", flush=True)
"""


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    Path("raw.py").write_text(RAW)
    Path("fit.py").write_text(TRAINER)
    Path("plain.py").write_text(PLAIN)
    Path("hello.sh").write_text(
        '#!/bin/sh\necho "shell $RANK of $WORLD_SIZE: $1 $A"\nexit $2\n'
    )
    Path("hello.sh").chmod(0o755)


def environ() -> dict[str, str]:
    here = os.getcwd()
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTEST_CURRENT_TEST", "HF_HOME")
    }
    return {
        **own,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": here,
        "XDG_CONFIG_HOME": here,
        "XDG_CACHE_HOME": here,
    }


def start(*words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer_kit", "launch", *words],
        env={**environ(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch(programs: Programs) -> Launch:
    """``trainer-kit launch``, forked from a server that has imported torch; its ranks are new interpreters."""

    def run(*words: str, **more: str) -> tuple[int, str, str]:
        ended = programs.run_command(
            "launch", *words, environment={**environ(), **more}
        )
        return ended.returncode, ended.stdout, ended.stderr

    return run


def on_two_machines(*words: str) -> list[tuple[int, str, str]]:
    shared = (
        "--cpu",
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(free_port()),
    )
    agents = [start(*shared, "--machine_rank", rank, *words) for rank in "10"]
    ended = []
    for agent in reversed(agents):
        with agent:
            out, err = agent.communicate(timeout=100)
        ended.append((agent.returncode, out, err))
    return ended


def listening(pids: set[int]) -> set[str]:
    """The addresses at which these processes listen, in the kernel's own words."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    below = {int(child) for task in tasks for child in task.read_text().split()}
    return below.union(*(children(child) for child in below))


def ranks_that_listen_to_nobody_outside(
    agents: list[subprocess.Popen[str]], processes: int
) -> None:
    """Two ranks have begun; whatever their agents and they listen at is of this machine only."""
    deadline = time.monotonic() + 60
    while not all(Path(f"ready-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if sys.platform != "linux":  # reads /proc
        return
    pids = {agent.pid for agent in agents}.union(
        *(children(agent.pid) for agent in agents)
    )
    addresses = listening(pids)
    assert len(pids) == processes
    assert addresses
    # 127.0.0.1, ::ffff:127.0.0.1 and ::1
    loopback = {
        "0100007F",
        "0000000000000000FFFF00000100007F",
        "00000000000000000000000001000000",
    }
    assert addresses <= loopback


def call(*words: str, **more: str) -> tuple[int, str]:
    result = CliRunner(
        env={"XDG_CONFIG_HOME": os.getcwd(), "XDG_CACHE_HOME": os.getcwd(), **more}
    ).invoke(main, words)
    return result.exit_code, result.output


def test_one_process_and_the_scripts_own_words(launch: Launch) -> None:
    code, out, err = launch(
        "--cpu", "--mixed-precision", "bf16", "raw.py", "--cpu", "--", "-x"
    )
    assert (code, err) == (0, "")
    assert (
        out
        == "rank 0 of 1 saw [0] bf16-mixed steps=1 machine=0 attempt=None ['--cpu', '--', '-x']\n"
    )


def test_two_processes_with_a_configuration(launch: Launch) -> None:
    Path("two.yaml").write_text(
        "distributed_type: MULTI_CPU\nnum_processes: 2\ngradient_accumulation_steps: 4\n"
    )
    code, out, err = launch("--config_file", "two.yaml", "raw.py")
    assert (code, err) == (0, "trainer-kit: configuration from two.yaml\n")
    assert sorted(out.splitlines()) == [
        f"rank {rank} of 2 saw [0, 1] 32-true steps=4 machine=0 attempt=0 []"
        for rank in range(2)
    ]


def test_a_trainer_on_two_processes_as_a_module(launch: Launch) -> None:
    code, out, err = launch("--cpu", "--num_processes=2", "-q", "-m", "fit")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["rank 0 of 2 step 2", "rank 1 of 2 step 2"]


@pytest.mark.parametrize(
    ("words", "kind", "wraps"),
    [
        (
            ["--config_file", "fsdp2.yaml", "--cpu", "--tee", "3", "--role", "worker"],
            "FSDP",
            "FSDPTiny",
        ),
        pytest.param(
            [
                "--cpu",
                "--use_deepspeed",
                "--num_processes",
                "2",
                "--env",
                "NCCL_DEBUG=INFO",
            ],
            "DEEPSPEED",
            "EngineModule",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_engine_on_the_cpu_is_that_engine(
    words: list[str], kind: str, wraps: str, launch: Launch
) -> None:
    Path("fsdp2.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\nenvironment: {NCCL_DEBUG: INFO}\n"
    )
    Path("engine.py").write_text(ENGINE)
    code, out, err = launch(
        "--log_dir", "logs", "--monitor_interval", "0.05", *words, "engine.py"
    )
    assert code == 0, err
    role = "worker" if "--role" in words else "rank"
    lines = [f"{rank} of 2 {kind} {wraps} cpu INFO" for rank in range(2)]
    assert sorted(line for line in out.splitlines() if line.startswith("[")) == [
        f"[{role}{rank}]:{line}" for rank, line in enumerate(lines)
    ]
    files = sorted(Path("logs").glob("*/attempt_0/*/stdout.log"))
    assert [file.read_text().splitlines()[-1] for file in files] == lines
    assert not list(Path("logs").rglob("error.json"))


def test_a_program_of_any_language(launch: Launch) -> None:
    shared = ("--no_python", "--env", "A=1")
    code, out, err = launch(
        "--cpu", "--num_processes", "2", *shared, "./hello.sh", "x", "0"
    )
    assert (code, err, sorted(out.splitlines())) == (
        0,
        "",
        ["shell 0 of 2: x 1", "shell 1 of 2: x 1"],
    )
    code, out, _ = launch("--cpu", *shared, "./hello.sh", "-q", "3")
    assert (code, out) == (3, "shell  of : -q 1\n")


def test_an_environment_variable_overrides_a_default_of_the_wizard(
    launch: Launch,
) -> None:
    file = Path("huggingface/accelerate/default_config.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(SAMPLES["plain.yaml"])
    Path("debug.py").write_text(
        "from trainer_kit import Accelerator\nprint(Accelerator().state.debug)\n"
    )
    said = f"debug=True (environment ACCELERATE_DEBUG_MODE, before the default in {file.absolute()}:2)"
    code, out, err = launch("debug.py", ACCELERATE_DEBUG_MODE="1")
    assert (code, out.splitlines()[-1]) == (0, "True"), err
    assert f"trainer-kit: {said}\n" in err
    code, output = call("explain", "debug.py", ACCELERATE_DEBUG_MODE="1")
    assert code == 0
    assert re.search(rf"^debug +true +{re.escape(said[12:-1])}$", output, re.M)


def test_accelerates_default_file_is_read_and_named(launch: Launch) -> None:
    file = Path("huggingface/accelerate/default_config.yaml")
    file.parent.mkdir(parents=True)
    file.write_text("use_cpu: true\ndistributed_type: MULTI_CPU\nnum_processes: 2\n")
    code, out, err = launch("--no_python", "./hello.sh", "x", "0")
    assert (code, err) == (0, f"trainer-kit: configuration from {file.absolute()}\n")
    assert sorted(out.splitlines()) == ["shell 0 of 2: x ", "shell 1 of 2: x "]


def test_one_rank_killed() -> None:
    with start("--cpu", "--num_processes", "2", "raw.py", "wait") as agent:
        ranks_that_listen_to_nobody_outside([agent], processes=3)
        os.kill(int(Path("ready-1").read_text()), signal.SIGKILL)
        _, err = agent.communicate(timeout=100)
    assert agent.returncode == 128 + signal.SIGKILL
    assert re.search(r"^rank 1 of 2 failed \(.*\): killed by SIGKILL", err, re.M)
    assert "after it: rank 0 stopped" in err


@pytest.mark.long
def test_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KIT_RUN_TOKEN", "secret")
    (code, out, err), (other_code, other_out, other_err) = on_two_machines(
        "--num_processes", "4", "raw.py"
    )
    assert (code, other_code, err, other_err) == (0, 0, "", "")
    said = [
        f"rank {rank} of 4 saw [0, 1, 2, 3] 32-true steps=1 machine={rank // 2} attempt=0 []"
        for rank in range(4)
    ]
    assert (sorted(out.splitlines()), sorted(other_out.splitlines())) == (
        said[:2],
        said[2:],
    )


@pytest.mark.parametrize(
    "script", ["plain.py", pytest.param("raw.py", marks=pytest.mark.long)]
)
def test_one_rank_killed_on_one_of_two_machines(script: str) -> None:
    (code, _, err), (other_code, _, other_err) = on_two_machines(
        "--num_processes", "2", script, "kill", "1"
    )
    assert code == other_code == 128 + signal.SIGKILL
    for told in (err, other_err):
        assert re.search(r"^rank 1 of 2 failed \(.*\): killed by SIGKILL", told, re.M)
    assert "after it: rank 0" in other_err


@pytest.mark.long
def test_two_machines_restart_together() -> None:
    (code, out, err), (other_code, other_out, other_err) = on_two_machines(
        "--num_processes", "2", "--max_restarts", "1", "raw.py", "once", "1"
    )
    assert (code, other_code) == (0, 0)
    assert "restart 1 of 1" in err
    assert "restart 1 of 1" in other_err
    assert "Traceback" not in err
    assert other_err.count("ValueError: only at first") == 2
    assert "attempt=1" in out
    assert "attempt=1" in other_out
    line = "any host that reaches 127.0.0.1 can send commands to this run; set TRAINER_KIT_RUN_TOKEN"
    assert line in err
    assert line not in other_err


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "said"),
    [("SIGKILL", "machine 0 is gone"), ("SIGTERM", "received a stop signal")],
)
def test_a_machine_that_ends_ends_the_others(number: str, said: str) -> None:
    shared = (
        "--cpu",
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(free_port()),
    )
    words = ("--num_processes", "2", "--max_restarts", "2", "raw.py", "wait")
    agents = [start(*shared, "--machine_rank", rank, *words) for rank in "01"]
    ranks_that_listen_to_nobody_outside(agents, processes=4)
    agents[0].send_signal(signal.Signals[number])
    agents[0].communicate(timeout=60)
    _, err = agents[1].communicate(timeout=60)
    assert said in err.splitlines()[-1]
    assert "restart" not in err
    assert agents[1].returncode == (1 if number == "SIGKILL" else 128 + signal.SIGTERM)


def slurm(rank: int, nodes: int) -> dict[str, str]:
    """What srun says to one of two tasks, on one node or on two."""
    return {
        "SLURM_JOB_ID": str(os.getpid() % 10000),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank if nodes == 1 else 0),
        "SLURM_NODEID": str(rank if nodes == 2 else 0),
        "SLURM_STEP_TASKS_PER_NODE": "2" if nodes == 1 else "1(x2)",
        "SLURM_STEP_NODELIST": "localhost" if nodes == 1 else "localhost,other",
    }


def mpi(rank: int) -> dict[str, str]:
    """What mpirun says to one of two processes."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, 2, rank, 2)
    return {
        f"OMPI_COMM_WORLD_{name}": str(value)
        for name, value in zip(names, values, strict=True)
    }


def all_out(tasks: list[subprocess.Popen[str]]) -> list[str]:
    outputs = [task.communicate(timeout=100) for task in tasks]
    assert [
        (task.returncode, err) for task, (_, err) in zip(tasks, outputs, strict=True)
    ] == [(0, "")] * len(tasks)
    return sorted(line for out, _ in outputs for line in out.splitlines())


@pytest.mark.long
def test_one_task_of_slurm_for_each_process_needs_no_options() -> None:
    tasks = [
        start("raw.py", "until", TRAINER_KIT_USE_CPU="1", **slurm(rank, nodes=1))
        for rank in range(2)
    ]
    ranks_that_listen_to_nobody_outside(tasks, processes=2)
    Path("go").touch()
    said = [
        f"rank {rank} of 2 saw [0, 1] 32-true steps=1 machine=0 attempt=None ['until']"
        for rank in range(2)
    ]
    assert all_out(tasks) == said


@pytest.mark.long
def test_one_task_of_slurm_on_each_node_starts_the_processes_there() -> None:
    words = ("--cpu", "--num_processes", "4", "raw.py")
    one = {"TRAINER_KIT_RUN_TOKEN": "one for both nodes"}
    said = all_out([start(*words, **slurm(rank, nodes=2), **one) for rank in range(2)])
    assert said == [
        f"rank {rank} of 4 saw [0, 1, 2, 3] 32-true steps=1 machine={rank // 2} attempt=0 []"
        for rank in range(4)
    ]


@pytest.mark.long
def test_mpi_needs_no_options() -> None:
    port = str(free_port())
    tasks = [
        start("fit.py", TRAINER_KIT_USE_CPU="1", MASTER_PORT=port, **mpi(rank))
        for rank in range(2)
    ]
    assert all_out(tasks) == ["rank 0 of 2 step 2", "rank 1 of 2 step 2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["none.py"], "the script does not exist"),
        (["--num_proceses", "2", "raw.py"], "No such option '--num_proceses'"),
        (["--num_processes", "two", "raw.py"], "is an integer, not 'two'"),
        (["--mixed_precision", "bf17", "raw.py"], "is one of no, fp16, bf16, fp8"),
        (["--tpu", "--num_machines", "2", "raw.py"], "TPU pods are not supported yet"),
        (["--tpu_cluster", "raw.py"], "TPU pods are not supported yet"),
        (["--cpu", "--no_python", "-m", "raw"], "--no_python runs a program"),
        (["--cpu", "--no_python", "no-such-program"], "no program no-such-program"),
        (["--cpu", "--tee", "4", "raw.py"], "is 0 to 3 (none, stdout, stderr, both)"),
        (
            ["--cpu", "--monitor_interval", "0", "raw.py"],
            "is a number of seconds above 0",
        ),
        (["--cpu", "--env", "A", "raw.py"], "a variable is written as NAME=TEXT"),
        (["--cpu", "--rdzv_conf", "is_host=1", "raw.py"], "not by torch's rendezvous"),
        (
            ["--cpu", "--use_parallelism_config", "raw.py"],
            "a parallelism_config needs an axis above 1",
        ),
        (
            ["--multi_gpu", "--use_deepspeed", "raw.py"],
            "this machine has no accelerator",
        ),
        (["--cpu", "--multi_gpu", "raw.py"], "only one kind of run can be chosen"),
        (
            ["--config_file", "bad.yaml", "raw.py"],
            "bad.yaml:2: num_proceses: unknown key, did you mean 'num_processes'?",
        ),
        (["--config_file", "tpu.yaml", "raw.py"], "tpu.yaml:"),
        (
            ["--config_file", "none.yaml", "raw.py"],
            "the configuration file none.yaml does not exist",
        ),
        (
            ["--config_file", "fsdp.yaml", "--cpu", "none.py"],
            "the script does not exist",
        ),
    ],
)
def test_wrong_calls_leave_with_2(words: list[str], said: str) -> None:
    Path("bad.yaml").write_text("debug: no\nnum_proceses: 2\n")
    for name in ("fsdp.yaml", "tpu.yaml"):
        Path(name).write_text(SAMPLES[name])
    code, output = call("launch", *words)
    assert code == 2
    assert said in output
    assert "Traceback" not in output


def test_a_wrong_file_is_one_line() -> None:
    Path("bad.yaml").write_text("debug: no\nnum_proceses: 2\n")
    assert call("launch", "--config_file", "bad.yaml", "raw.py")[1] == (
        "Error: bad.yaml:2: num_proceses: unknown key, did you mean 'num_processes'?\n"
    )


@pytest.mark.parametrize("command", ["launch", "explain"])
def test_help_fits_one_screen(command: str) -> None:
    code, output = call(command, "--help")
    assert code == 0
    assert len(output.splitlines()) <= 50
    assert "--fsdp_version" not in output


def test_options_without_effect_are_named() -> None:
    code, output = call(
        "explain",
        "--cpu",
        "--vm",
        "one",
        "--vm",
        "two",
        "--rdzv_backend",
        "c10d",
        "raw.py",
    )
    assert code == 0
    assert (
        "has no effect yet: tpu_vm=['one', 'two'] (flag --tpu_vm): the machines of a TPU pod are not started"
        in output
    )
    assert "has no effect yet: rdzv_backend=c10d (flag --rdzv_backend)" in output
    shared = (
        "--cpu",
        "--num_machines",
        "2",
        "--num_processes",
        "2",
        "--main_process_ip",
        "10.0.0.7",
    )
    assert (
        "run token: none (TRAINER_KIT_RUN_TOKEN)"
        in call("explain", *shared, "raw.py")[1]
    )
    assert (
        "run token: given"
        in call("explain", *shared, "raw.py", TRAINER_KIT_RUN_TOKEN="x")[1]
    )
    code, output = call("explain", "--cpu", "--env", "WANDB_API_KEY=hush", "raw.py")
    assert code == 0
    assert "the script receives WANDB_API_KEY=***" in output
    assert "hush" not in output


def test_explain_shows_values_and_origins() -> None:
    Path("two.yaml").write_text("mixed_precision: bf16\nnum_processes: 4\n")
    code, output = call(
        "explain",
        "--cpu",
        "--num-processes",
        "2",
        "--config_file",
        "two.yaml",
        "raw.py",
        "-x",
    )
    assert code == 0
    rows = {
        line.split()[0]: line.split(maxsplit=2)[1:]
        for line in output.splitlines()
        if len(line.split()) > 2
    }
    assert rows["num_processes"] == ["2", "flag --num_processes"]
    assert rows["mixed_precision"] == ["bf16", "two.yaml:1"]
    assert rows["num_machines"] == ["1", "default"]
    assert "processes here: 2, by an agent" in output
    assert "the script receives TRAINER_KIT_MIXED_PRECISION=bf16" in output
    assert output.endswith("runs: raw.py -x\n")


def test_the_guides_commands_and_file() -> None:
    page = (ROOT / "docs/guide/command-line.md").read_text()
    Path("train.py").touch()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.S))
    calls = [
        line.partition("#")[0].split()[2:]
        for line in blocks.splitlines()
        if line.startswith("trainer-kit launch")
    ]
    Path("two_gpus.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert len(calls) == 7
    for words in calls:
        code, output = call("explain", *words)
        assert code == 0 or "than devices on this machine" in output, output
    (file,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    Path("two_gpus.yaml").write_text(file)
    assert read_configuration(Path("two_gpus.yaml")).values["num_processes"] == 4
    Path("two_gpus.yaml").write_text(file.replace("num_processes", "num_proceses"))
    error = re.findall(r"```text\n(.*?)```", page[page.index(file) :], re.S)[0]
    assert call("launch", "--config_file", "two_gpus.yaml", "train.py") == (2, error)


def test_a_refused_plan_shows_the_source_of_each_value() -> None:
    code, output = call(
        "explain", "--num_machines", "2", "--rdzv_conf", "a=1", "raw.py"
    )
    assert code != 0
    assert "flag --num_machines" in output
