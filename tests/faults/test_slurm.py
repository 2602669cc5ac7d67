"""What a batch system does to a run: a signal ahead of the end, a requeue, a restart. No SLURM is needed.

`scontrol` is a stand-in on PATH that records how it was called; variables are those of SLURM 22.05.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer_kit.checkpoint.store import checkpoints

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import trainer_kit as tk

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    def setup(self, stage):
        if "setup" in sys.argv:
            Path("step-0").touch()
            time.sleep(60)
    def training_step(self, batch, batch_idx):
        step = self.global_step
        if step == int(os.environ.get("CODE_AT", -1)):
            sys.exit(int(os.environ["CODE"]))
        if step == 9 and "wait" in os.environ:
            Path(f"step-{self.trainer.global_rank}").touch()
            while not self.trainer.requests.signal:
                time.sleep(0.002)
        with open(f"trained-{self.trainer.global_rank}", "a") as file:
            print(step, file=file)
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

tk.seed_everything(1)
keeps = {} if "none" in sys.argv else {"callbacks": tk.callbacks.ModelCheckpoint(every_n_train_steps=4)}
trainer = tk.Trainer(
    max_steps=120, accelerator="cpu", devices=int(sys.argv[1]), logger="csv",
    enable_checkpointing="none" not in sys.argv, enable_progress_bar=False, enable_model_summary=False,
    log_every_n_steps=1, **keeps,
)
data = torch.utils.data.DataLoader(torch.randn(200, 4), batch_size=2, shuffle=True)
module = Net()
trainer.fit(module, data)
if trainer.is_global_zero:
    Path("weights").write_text(str([p.tolist() for p in module.parameters()]))
"""
JOB = {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1"}


@pytest.fixture
def batch(tmp_path):
    """Start the script as SLURM would, from a directory with a stand-in for its command."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    stand_in = tmp_path / "bin" / "scontrol"
    stand_in.write_text(
        '#!/bin/sh\n[ -f refuses ] && { echo "Requested operation is presently disabled for job 71" >&2; exit 1; }\n'
        'sleep 0.5\necho "$@" >> asked\n'
    )
    stand_in.chmod(0o755)

    @contextmanager
    def start(*words, **variables):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLURM_")
        }
        environment = {
            **inherited,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        environment["PATH"] = variables.get(
            "PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "script.py", *words]
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, **pipes
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


def wait_for(*files):
    while not all(Path(file).exists() for file in files):
        time.sleep(0.01)


def told(process, number):
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return out, err


def asked():
    return Path("asked").read_text().splitlines() if Path("asked").exists() else []


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "71"), ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "70_3")],
    ids=["job", "array"],
)
def test_usr1_saves_and_requeues_once_and_the_requeued_job_continues(
    batch, variables, name
):
    with batch("1", **JOB, **variables, wait="1") as process:
        wait_for("step-0")
        out, err = told(process, signal.SIGUSR1)
    assert process.returncode == 138, err
    (line,) = out.splitlines()
    assert line.startswith("SIGUSR1: saved step 10 in ")
    assert line.endswith(f", job {name} is requeued, exiting 138")
    assert asked() == [f"requeue {name}"]
    assert checkpoints("trainer_kit_logs/version_0/checkpoints")[-1].step == 10
    with batch("1", **JOB, **variables, SLURM_RESTART_COUNT="1") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (
        out
        == f"resuming from step 10 (verified) of run {Path.cwd() / 'trainer_kit_logs' / 'version_0'}\n"
    )
    assert os.listdir("trainer_kit_logs") == ["version_0"]
    disturbed, trained = Path("weights").read_text(), Path("trained-0").read_text()
    Path("trained-0").unlink()
    with batch("1") as process:
        process.communicate(timeout=60)
    assert Path("weights").read_text() == disturbed
    assert Path("trained-0").read_text() == trained


def test_two_ranks_of_our_agent(batch):
    with batch("2", **JOB, wait="1") as agent:
        wait_for("step-0", "step-1")
        out, err = told(agent, signal.SIGUSR1)
    assert agent.returncode == 138, err
    (line,) = out.splitlines()
    assert line.endswith(", job 71 is requeued, exiting 138")
    assert err.splitlines()[-1] == "SIGUSR1: 2 ranks ended"
    assert "failed" not in err
    assert asked() == ["requeue 71"]
    step = checkpoints("trainer_kit_logs/version_0/checkpoints")[-1].step
    assert f"SIGUSR1: saved step {step} in " in line
    with batch("2", **JOB, SLURM_RESTART_COUNT="1") as agent:
        out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert (
        out
        == f"resuming from step {step} (verified) of run {Path.cwd() / 'trainer_kit_logs' / 'version_0'}\n"
    )
    assert [int(line) for line in Path("trained-1").read_text().splitlines()] == list(
        range(120)
    )


def test_sigterm_is_never_a_reason_to_requeue(batch):
    with batch("1", **JOB, wait="1") as process:
        wait_for("step-0")
        out, _ = told(process, signal.SIGTERM)
    assert process.returncode == 143
    assert "requeue" not in out
    assert asked() == []


def test_a_job_that_may_not_run_again(batch):
    Path("refuses").touch()
    with batch("1", **JOB, wait="1") as process:
        wait_for("step-0")
        out, _ = told(process, signal.SIGUSR1)
    assert process.returncode == 138
    assert (
        "job 71 is not requeued: Requested operation is presently disabled for job 71, exiting 138"
        in out
    )


def test_without_scontrol(batch):
    Path("bin/scontrol").unlink()
    with batch(
        "1", **JOB, wait="1", PATH=str(Path("bin").resolve())
    ) as process:  # the machine may have SLURM
        wait_for("step-0")
        out, _ = told(process, signal.SIGUSR1)
    assert "job 71 is not requeued: this machine has no scontrol" in out


def test_outside_of_a_job_nothing_is_asked(batch):
    with batch("1", wait="1") as process:
        wait_for("step-0")
        out, _ = told(process, signal.SIGUSR1)
    assert process.returncode == 138
    assert "requeue" not in out
    assert asked() == []


def test_a_run_without_checkpoints_is_not_requeued(batch):
    with batch("1", "none", **JOB, wait="1") as process:
        wait_for("step-0")
        out, _ = told(process, signal.SIGUSR1)
    assert (process.returncode, out) == (138, "SIGUSR1: nothing to save, exiting 138\n")
    assert asked() == []


def test_before_the_first_step(batch):
    with batch("1", "setup", **JOB) as process:
        wait_for("step-0")
        out, err = told(process, signal.SIGUSR1)
    assert process.returncode == 138, err
    assert out == "job 71 is requeued\n"
    assert asked() == ["requeue 71"]


def test_a_code_of_75_is_restarted_by_the_agent_and_resumed(batch):
    """Without ``resume``, and with a seed that nobody gave: the restart is the same run."""
    text = Path("script.py").read_text().replace("tk.seed_everything(1)\n", "")
    once = 'step == int(os.environ.get("CODE_AT", -1)) and os.environ["TRAINER_KIT_RESTART_COUNT"] == "0"'
    Path("script.py").write_text(
        text.replace('step == int(os.environ.get("CODE_AT", -1))', once)
    )
    with batch("2", CODE_AT="6", CODE="75", TRAINER_KIT_MAX_RESTARTS="1") as agent:
        out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    assert "restart 1 of 1" in err
    assert (
        out
        == f"resuming from step 4 (verified) of run {Path.cwd() / 'trainer_kit_logs' / 'version_0'}\n"
    )
    assert os.listdir("trainer_kit_logs") == ["version_0"]


def test_a_restart_before_the_first_checkpoint_is_the_same_run(batch):
    Path("script.py").write_text(
        SCRIPT.replace("tk.seed_everything(1)\n", "").replace(
            "trainer.fit(module, data)",
            'count = os.environ.get("TRAINER_KIT_RESTART_COUNT")\n'
            'if count is not None: os.environ["CODE_AT"] = "2" if count == "0" else "-1"\n'
            "trainer.fit(module, data)\n"
            "print(trainer.data_seed, trainer.files.record.id, flush=True) if trainer.is_global_zero else None",
        )
    )
    with batch("2", CODE="75", TRAINER_KIT_MAX_RESTARTS="1") as agent:
        out, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    where = Path.cwd() / "trainer_kit_logs" / "version_0"
    assert (
        out.splitlines()[0]
        == f"run {where} has no checkpoint yet: starting it from the beginning"
    )
    assert os.listdir("trainer_kit_logs") == ["version_0"]


def test_a_code_of_128_and_more_is_final(batch):
    with batch("2", CODE_AT="6", CODE="143", TRAINER_KIT_MAX_RESTARTS="3") as agent:
        _, err = agent.communicate(timeout=60)
    assert agent.returncode == 143
    assert "restart" not in err


def test_an_invalid_number_of_restarts_is_refused(batch):
    with batch("2", TRAINER_KIT_MAX_RESTARTS="many") as agent:
        _, err = agent.communicate(timeout=60)
    assert agent.returncode == 1
    assert "TRAINER_KIT_MAX_RESTARTS is not an integer" in err


def test_torchrun_restarts_the_same_run(batch, tmp_path):
    """One rank: torch's own restart of several over gloo may meet addresses of the ranks before."""
    once = 'step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    Path("script.py").write_text(
        SCRIPT.replace('step == int(os.environ.get("CODE_AT", -1))', once)
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    command += ["--max-restarts", "1", "script.py", "1"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"resuming from step 4 (verified) of run {tmp_path / 'trainer_kit_logs' / 'version_0'}\n"
        in done.stdout
    )
    assert os.listdir("trainer_kit_logs") == ["version_0"]
