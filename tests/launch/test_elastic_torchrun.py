"""A run under torchrun loses machines and gains them: it ends with the weights of a run that lost nothing."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ports import free_port

psutil = pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "elastic-torchrun.md"

SCRIPT = """
import os, time
import torch
import trainer_kit as tk
from torch.utils.data import DataLoader, TensorDataset

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()

    def training_step(self, batch, batch_idx):
        ranks = self.trainer.world_size
        if self.global_rank == 0:
            with open("steps", "a") as file:
                file.write(f"{self.global_step} {ranks}\\n")
        if ranks == 2:
            open("joined", "w").close()
        elif os.environ.get("WAIT") == "join" and not os.path.exists("joined"):
            # SIGTERM, which tells that a machine joins, takes effect between two steps.
            time.sleep(2)
        if self.global_step == 9 and "WAIT" in os.environ and ranks == 2:
            while not os.path.exists("killed"):
                time.sleep(0.05)
        samples, targets = batch
        return torch.nn.functional.mse_loss(self.net(samples), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(96, 8, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(samples, samples.sum(1, keepdim=True))
    tk.seed_everything(3)
    trainer = tk.Trainer(
        max_steps=24,
        global_batch_size=12,
        resume="auto",
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[tk.callbacks.ModelCheckpoint(every_n_train_steps=2)],
        default_root_dir="runs",
    )
    module = Net()
    trainer.fit(module, DataLoader(dataset, batch_size=12, shuffle=True))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), "end.pt")
"""


def test_the_page_names_the_settings_that_the_test_runs() -> None:
    variables, words = command_of_the_page("localhost:1")
    assert variables == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert words[0] == "--nnodes=1:3"
    assert words[-1] == "train.py"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_machine_joins_and_is_lost(tmp_path: Path) -> None:
    reference = start_directory(tmp_path / "reference")
    subprocess.run(
        [sys.executable, "train.py"], cwd=reference, env=environment({}), check=True
    )
    place = start_directory(tmp_path / "elastic")
    endpoint = f"localhost:{free_port()}"
    with agent(place, endpoint) as first:
        # The agent that has the endpoint's port holds the meeting point.
        wait_for(place, lambda step, ranks: step >= 0)
        with agent(place, endpoint) as second:
            wait_for(place, lambda step, ranks: ranks == 2 and step == 9)
            kill_with_children(second)
            (place / "killed").touch()
        assert first.wait(300) == 0
    ranks = [ranks for _, ranks in read_steps(place)]
    assert [count for count, _ in itertools.groupby(ranks)] == [1, 2, 1]
    steps = [step for step, _ in read_steps(place)]
    assert set(steps) == set(range(24))
    repeated = len(steps) - 24
    # Of the lost machine: the steps since the newest checkpoint. A machine that joins repeats none.
    assert repeated <= 2
    expected = torch.load(reference / "end.pt")
    for name, weight in torch.load(place / "end.pt").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_process_changes_no_bit_on_the_same_ranks(tmp_path: Path) -> None:
    ends = []
    for name in ("whole", "killed"):
        place = start_directory(tmp_path / name)
        words = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", "train.py"]
        variables = {"WAIT": "kill"} if name == "killed" else {}
        with running(place, words, variables) as process:
            if name == "killed":
                wait_for(place, lambda step, ranks: step == 9)
                workers = psutil.Process(process.pid).children()
                workers[-1].send_signal(signal.SIGKILL)
                (place / "killed").touch()
            assert process.wait(300) == 0
        ends.append(torch.load(place / "end.pt"))
        restarts = sum(
            step <= before
            for (before, _), (step, _) in itertools.pairwise(read_steps(place))
        )
        assert restarts == (name == "killed")
    whole, killed = ends
    for name, weight in killed.items():
        assert torch.equal(weight, whole[name]), name


def command_of_the_page(endpoint: str) -> tuple[dict[str, str], list[str]]:
    """The variables and torchrun's arguments that the page shows, for agents of one process at ``endpoint``."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    block = block.replace("\\\n", " ").replace("first-machine:29500", endpoint)
    block = block.replace("--nproc-per-node=8", "--nproc-per-node=1")
    export, command = block.strip().splitlines()
    name, _, value = export.removeprefix("export ").partition("=")
    program, *words = shlex.split(command)
    assert program == "torchrun"
    return {name: value}, words


def start_directory(place: Path) -> Path:
    place.mkdir()
    (place / "train.py").write_text(SCRIPT)
    return place


def environment(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **variables, "PYTHONPATH": str(ROOT)}


@contextmanager
def agent(place: Path, endpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a machine's torchrun."""
    variables, words = command_of_the_page(endpoint)
    with running(place, words, {**variables, "WAIT": "join"}) as process:
        yield process


@contextmanager
def running(
    place: Path, words: list[str], variables: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun; afterwards nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=place,
        env=environment(variables),
    )
    try:
        yield process
    finally:
        kill_with_children(process)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    root = psutil.Process(process.pid)
    children = root.children(recursive=True)
    root.kill()
    for child in children:
        child.kill()
    process.wait()


def read_steps(place: Path) -> list[tuple[int, int]]:
    """The steps in the order in which rank 0 ran them, each with the number of ranks."""
    path = place / "steps"
    if not path.exists():
        return []
    steps = []
    for line in path.read_text().splitlines():
        step, ranks = line.split()
        steps.append((int(step), int(ranks)))
    return steps


def wait_for(place: Path, condition: Callable[[int, int], bool]) -> None:
    """Wait until the newest step and its number of ranks meet ``condition``."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        steps = read_steps(place)
        if steps and condition(*steps[-1]):
            return
        time.sleep(0.05)
    raise AssertionError(f"not seen: {read_steps(place)}")
