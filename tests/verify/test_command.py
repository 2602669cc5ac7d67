"""``trainer-kit verify``: a script's training in a configuration, against a plain loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
import trainer_kit as tk
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Classifier(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if "wrong" in sys.argv and torch.distributed.is_initialized():
            loss = loss / 2
        if "break" in sys.argv and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            breakpoint()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    print("hello")
    tk.seed_everything(1)
    data = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    trainer = tk.Trainer(max_epochs=100, accelerator="cpu", accumulate_grad_batches=2)
    trainer.fit(Classifier(), DataLoader(data, batch_size=4, shuffle=True))
    print("trained")
"""


@pytest.fixture
def verify(tmp_path, programs):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")

    def call(*arguments, lines=""):
        words = map(str, arguments)
        return programs.run_command(
            "verify", "train.py", *words, given=lines, timeout=240
        )

    return call


def test_a_right_configuration(verify, tmp_path):
    page = tmp_path / "page.html"
    ran = verify(
        "--strategy", "ddp", "--devices", 2, "--steps", 2, "--json", "--html", page
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["ok"]
    assert found["findings"] == []
    assert found["configuration"] == "strategy ddp, precision 32-true, 2 processes"
    assert len(found["curve"]) == 2
    assert "trained" not in ran.stderr
    drawn = page.read_text(encoding="utf-8")
    assert "all equal, as far as checked" in drawn
    assert drawn.count("<polyline") == 2


def test_a_wrong_one(verify):
    ran = verify("--strategy", "ddp", "--devices", 2, "--steps", 2, "--", "wrong")
    assert ran.returncode == 1, ran.stderr
    last = ran.stdout.splitlines()[-1]
    assert last.startswith("first difference: step 0: loss is ")
    assert (
        "every loss is 0.5 times the reference: averaged over the 2 ranks twice" in last
    )


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)]
)
def test_ranks_of_this_process(verify, strategy):
    ran = verify(
        "--strategy", strategy, "--devices", 2, "--steps", 2, "--local", "--json"
    )
    assert ran.returncode == 0, ran.stderr
    assert (
        json.loads(ran.stdout)["configuration"]
        == f"strategy {strategy}, precision 32-true, 2 processes"
    )
    ran = verify(
        "--strategy", strategy, "--devices", 2, "--steps", 2, "--local", "--", "wrong"
    )
    assert ran.returncode == 1, ran.stderr
    assert "averaged over the 2 ranks twice" in ran.stdout.splitlines()[-1]


def test_a_breakpoint_in_a_rank(verify):
    commands = "p 'rank', torch.distributed.get_rank(), batch[0].shape\nq\n"
    ran = verify(
        "--strategy", "ddp", "--devices", 2, "--local", "--", "break", lines=commands
    )
    assert "('rank', 1, torch.Size([4, 8]))" in ran.stderr
    assert (ran.returncode, "could not check: BdbQuit" in ran.stderr) == (2, True), (
        ran.stderr
    )


def test_what_could_not_be_checked(verify, tmp_path):
    ran = verify("--strategy", "nonsense", "--devices", 2)
    assert (ran.returncode, "could not check" in ran.stderr) == (2, True)
    ran = verify("--html", "none/page.html")
    assert (ran.returncode, "is not a writable directory" in ran.stderr) == (2, True)
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("batch[1])", "batch[2])"), encoding="utf-8"
    )
    ran = verify("--strategy", "ddp", "--devices", 2)
    line = (
        SCRIPT.splitlines().index(
            "        loss = F.cross_entropy(self.net(batch[0]), batch[1])"
        )
        + 1
    )
    assert ran.returncode == 2
    assert (
        "could not check: IndexError: list index out of range\n  found: " in ran.stderr
    )
    assert ran.stderr.rstrip().endswith(f"train.py, line {line}, in training_step")
    (tmp_path / "train.py").write_text("raise ValueError('broken')\n", encoding="utf-8")
    ran = verify()
    assert (ran.returncode, "broken" in ran.stderr) == (2, True)


def test_a_killed_verify_leaves_its_files_until_the_next_one(verify, tmp_path):
    """Each killed run left its checkpoints and records in the temporary directory for ever."""
    place = tmp_path / "temporary"
    place.mkdir()
    environment = {**os.environ, "TMPDIR": str(place)}
    command = [
        sys.executable,
        "-m",
        "trainer_kit",
        "verify",
        "train.py",
        "--steps",
        "1000000",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    while not list(place.glob("trainer_kit-verify-*")):
        assert process.poll() is None
        time.sleep(0.05)
    left = next(place.glob("trainer_kit-verify-*"))
    (place / "trainer_kit-verify-of-another").write_text(
        "no directory", encoding="utf-8"
    )
    code = "from trainer_kit.verify.runs import locked_directory\nwith locked_directory() as one: print(one)"
    start = [sys.executable, "-c", code]
    subprocess.run(start, env=environment, check=True, timeout=120)
    assert left.is_dir()  # of a process that runs
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    deadline = time.monotonic() + 60
    while left.exists():  # its ranks hold the lock until the kernel has ended them too
        subprocess.run(start, env=environment, check=True, timeout=120)
        assert time.monotonic() < deadline
    assert [each.name for each in place.glob("trainer_kit-*")] == [
        "trainer_kit-verify-of-another"
    ]
