"""Runs that other libraries carry, with the real packages (`make test-carriers`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer_kit.checkpoint import read_checkpoint
from trainer_kit.report.events import read_events

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("submitit") is None,
        reason="submitit is not installed: `make test-carriers`",
    ),
]

JOB = """
import json, os, pathlib, signal, sys, time
import submitit
import torch
from torch.utils.data import DataLoader
import trainer_kit as tk
from trainer_kit.testing import TinyModule

FAULT, TASKS = sys.argv[1], int(sys.argv[2])
samples = torch.randn(96, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

class Net(TinyModule):
    fault = ""

    def training_step(self, batch, batch_idx):
        marker = pathlib.Path("fault")
        if self.global_step == 5 and self.fault and not marker.exists():
            if self.fault == "kill" and self.global_rank == 1:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "preempt" and self.global_rank == 0:
                marker.touch()
                time.sleep(300)  # until the signal, whose handler ends this process
        return super().training_step(batch, batch_idx)

class Train:
    def __init__(self, fault):
        self.fault = fault

    def __call__(self):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        module = Net().double()
        module.fault = self.fault
        trainer = tk.Trainer(
            max_steps=16, global_batch_size=12, resume="auto", accelerator="cpu", strategy="auto",
            precision="64-true", default_root_dir="runs", enable_progress_bar=False, enable_model_summary=False,
            callbacks=[tk.callbacks.ModelCheckpoint("checkpoints", every_n_train_steps=2)],
        )
        pathlib.Path(f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
        trainer.fit(module, DataLoader(samples, batch_size=12, shuffle=True))
        return trainer.global_rank, trainer.world_size, trainer.log_dir

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)

def submit():
    executor = submitit.LocalExecutor("jobs")
    executor.update_parameters(tasks_per_node=TASKS, timeout_min=5)
    return executor.submit(Train(FAULT))

job = submit()
if FAULT == "preempt":
    while not pathlib.Path("fault").exists():
        time.sleep(0.05)
    # As the executor does shortly before the time limit, and SLURM at a preemption.
    for rank in range(TASKS):
        os.kill(int(pathlib.Path(f"pid-{rank}").read_text()), signal.SIGUSR2)
if FAULT == "kill":
    job.wait()
    print("failed", [task.state for task in (job.task(0), job.task(1))], file=sys.stderr)
    assert job.exception() is not None
    job = submit()
print(json.dumps(job.results()))
"""


def run_job(directory: Path, fault: str, tasks: int) -> list[list[object]]:
    """What the tasks of a job return, whose last start was not disturbed."""
    directory.mkdir()
    (directory / "job.py").write_text(JOB)
    finished = subprocess.run(
        [sys.executable, "job.py", fault, str(tasks)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    logs = [path.read_text() for path in sorted(directory.glob("jobs/*.err"))]
    assert finished.returncode == 0, "\n".join([finished.stderr, *logs])
    results: list[list[object]] = json.loads(finished.stdout)
    return results


def weights_of(directory: Path) -> torch.Tensor:
    state = read_checkpoint(directory / "checkpoints" / "step-00000016", ["model"])
    return torch.cat([tensor.flatten() for tensor in state["model"].values()])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The weights of an undisturbed job of one task."""
    directory = tmp_path_factory.mktemp("alone") / "job"
    ((rank, world_size, _),) = run_job(directory, "", 1)
    assert (rank, world_size) == (0, 1)
    return weights_of(directory)


@pytest.mark.parametrize(("fault", "starts"), [("", 1), ("kill", 2), ("preempt", 2)])
def test_the_tasks_of_a_submitit_job_are_the_ranks_of_one_run(
    tmp_path: Path, expected: torch.Tensor, fault: str, starts: int
) -> None:
    """Also where one is killed and the job is submitted again, and where the job is preempted and requeued."""
    directory = tmp_path / "job"
    results = run_job(directory, fault, 2)
    assert [result[:2] for result in results] == [[0, 2], [1, 2]]
    # Both ranks name one directory, and no other run has begun.
    (run,) = directory.glob("runs/*/version_*")
    assert {result[2] for result in results} == {str(run.relative_to(directory))}
    resumed = [
        event["step"]
        for event in read_events(run)
        if event["event"] == "start" and event["stage"] == "fit"
    ]
    assert resumed == [0, 4][:starts]
    torch.testing.assert_close(weights_of(directory), expected, rtol=0, atol=1e-12)
