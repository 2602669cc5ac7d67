"""A real SLURM of two virtual nodes: `make test-slurm` starts one, runs this beside it, and ends it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "slurm.sbatch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "TRAINER_KIT_TEST_SLURM" not in os.environ,
        reason="needs the SLURM that `make test-slurm` starts as root",
    ),
]

RAW = """
import os, signal, sys, time
import torch
from trainer_kit import Accelerator

accelerator = Accelerator()
here = accelerator.environment
seen = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
node = os.environ["SLURMD_NODENAME"]
print(f"rank {here.rank} of {here.world_size}, {here.local_rank} on {node} ({here.node_rank}), saw {seen}", flush=True)
if "kill" in sys.argv and here.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if "kill" in sys.argv:
    accelerator.wait_for_everyone()
    time.sleep(600)
"""

FIT = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
import trainer_kit as tk

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(float(sys.argv[1])), nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        if self.global_step == 9 and "wait" in sys.argv and "SLURM_RESTART_COUNT" not in os.environ:
            Path(f"waits-{self.trainer.global_rank}").touch()
            while not self.trainer.requests.signal:
                time.sleep(0.01)
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

tk.seed_everything(1)
trainer = tk.Trainer(
    max_steps=40, precision="64-true", logger="csv", enable_progress_bar=False, enable_model_summary=False,
    callbacks=tk.callbacks.ModelCheckpoint(every_n_train_steps=4),
)
size = 16 // int(os.environ.get("SLURM_NTASKS", 1))
data = torch.utils.data.DataLoader(torch.randn(200, 4).double(), batch_size=size, shuffle=True)
module = Net()
trainer.fit(module, data)
weights = [p.tolist() for p in module.parameters()]
Path(f"weights-{trainer.global_rank}").write_text(json.dumps(weights))
print("trained on", trainer.world_size, flush=True)
"""


def variables() -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_CURRENT_TEST"
    }
    binaries = str(Path(sys.executable).parent)
    return {
        **own,
        "PATH": f"{binaries}{os.pathsep}{own['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CONFIG_HOME": os.getcwd(),
        "XDG_CACHE_HOME": os.getcwd(),
    }


def run(*command: str, code: int = 0) -> str:
    done = subprocess.run(
        command,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert (done.returncode == 0) == (code == 0), said
    return said


def srun(tasks: int, *command: str, code: int = 0) -> str:
    return run("srun", "--nodes=2", f"--ntasks-per-node={tasks}", *command, code=code)


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    Path("raw.py").write_text(RAW)
    Path("fit.py").write_text(FIT)


def places(count: int) -> set[str]:
    each = count // 2
    return {
        f"rank {rank} of {count}, {rank % each} on node{rank // each + 1} ({rank // each}), saw {list(range(count))}"
        for rank in range(count)
    }


def ranks(said: str) -> set[str]:
    return {line for line in said.splitlines() if ", saw " in line}


@pytest.mark.parametrize("tasks", [1, 2])
def test_launch_needs_no_options(tasks: int) -> None:
    """One task on each node, or one for each process."""
    assert ranks(srun(tasks, "trainer-kit", "launch", "raw.py")) == places(2 * tasks)


def test_one_task_on_each_node_starts_the_processes_there() -> None:
    assert ranks(
        srun(1, "trainer-kit", "launch", "--num_processes", "4", "raw.py")
    ) == places(4)


def test_a_step_that_is_started_from_a_shell() -> None:
    """The tasks inherit the shell's name, and are not the shell."""
    said = run(
        "salloc",
        "--nodes=2",
        "srun",
        "--ntasks-per-node=1",
        "bash",
        "-c",
        "python raw.py; true",
    )
    assert ranks(said) == places(2)


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_killed_rank_ends_the_step(tasks: int) -> None:
    said = srun(
        tasks, "trainer-kit", "launch", "--num_processes", "4", "raw.py", "kill", code=1
    )
    assert ranks(said) == places(4)
    if tasks == 1:
        assert "rank 3 of 4 failed" in said


def weights(rank: int = 0, directory: str = ".") -> list[list[float]]:
    found: list[list[float]] = json.loads(
        Path(directory, f"weights-{rank}").read_text()
    )
    return found


def flat(values: object) -> list[float]:
    return (
        [number for value in values for number in flat(value)]
        if isinstance(values, list)
        else [values]
    )  # type: ignore[list-item]


def test_a_trainer_on_two_nodes_trains_as_one_process() -> None:
    assert srun(2, "python", "fit.py", "0").count("trained on 4") == 4
    everywhere = [weights(rank) for rank in range(4)]
    assert everywhere[1:] == everywhere[:1] * 3
    assert "trained on 1" in run("python", "fit.py", "0")
    assert flat(weights()) == pytest.approx(flat(everywhere[0]), rel=1e-9)


def wait_until(true, seconds: float, job: str) -> None:  # type: ignore[no-untyped-def]
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > seconds:
            output = Path(f"train-{job}.out")
            pytest.fail(
                f"{run('scontrol', 'show', 'job', job)}\n{output.read_text() if output.exists() else ''}"
            )
        time.sleep(0.2)


def state(job: str) -> str:
    found = re.search(r"JobState=(\w+)", run("scontrol", "show", "job", job))
    return found[1] if found else ""


def test_usr1_saves_and_requeues_the_job_which_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    """On two ranks, where a sum has one order: DDP's buckets are laid out anew after the first step of a start."""
    job = run(
        "sbatch",
        "--parsable",
        "--ntasks-per-node=1",
        EXAMPLE,
        str(tmp_path / "fit.py"),
        "0.5",
        "wait",
    ).strip()
    wait_until(
        lambda: all(Path(f"waits-{rank}").exists() for rank in range(2)), 60, job
    )
    run("scancel", "--signal=USR1", job)
    wait_until(lambda: state(job) == "COMPLETED", 90, job)
    said = Path(f"train-{job}.out").read_text()
    saved = re.search(
        rf"^SIGUSR1: saved step (\d+) in .*, job {job} is requeued, exiting 138$",
        said,
        re.MULTILINE,
    )
    assert saved is not None, said
    assert 10 <= int(saved[1]) < 40
    where = tmp_path / "trainer_kit_logs" / "version_0"
    assert f"\nresuming from step {saved[1]} (verified) of run {where}\n" in said
    assert said.count("trained on 2") == 2
    assert os.listdir("trainer_kit_logs") == ["version_0"]

    disturbed = [weights(rank) for rank in range(2)]
    srun(1, "python", "fit.py", "0.5")
    assert disturbed == [weights(rank) for rank in range(2)]
