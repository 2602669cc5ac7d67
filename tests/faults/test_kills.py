"""Killed at any moment, any number of times, a run ends as the one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainer_kit as tk
from tests.faults.supervised import Server
from trainer_kit.checkpoint.read import read_checkpoint, verify_checkpoint
from trainer_kit.checkpoint.store import lookup
from trainer_kit.loggers.journal import read_journal
from trainer_kit.testing import TinyModule

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="orphans are adopted by prctl"
)

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import trainer_kit as tk

class Points(Dataset):
    def __len__(self):
        return 26
    def __getitem__(self, index):
        return index, torch.full((8,), index / 26) + 0.1 * torch.randn(8), index % 3

class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    def training_step(self, batch, batch_idx):
        index, x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True)
        with open(f"steps-{self.trainer.global_rank}", "a") as file:
            file.write(f"{self.global_step} {index.tolist()} {loss.item().hex()}\\n")
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

tk.seed_everything(7)
keeper = tk.callbacks.ModelCheckpoint("kept", monitor="loss", every_n_train_steps=1, save_last=True, save_top_k=2)
trainer = tk.Trainer(
    max_epochs=3, accelerator="cpu", devices=int(sys.argv[1]), callbacks=keeper, log_every_n_steps=1,
    logger=tk.loggers.JSONLLogger(".", name="", version=""), enable_progress_bar=False,
    strategy=(*sys.argv[2:], "auto")[0],
)
trainer.fit(Net(), DataLoader(Points(), batch_size=4, shuffle=True, num_workers=2), ckpt_path="last")
"""
STEPS = {1: 21, 2: 12}
"""By number of ranks: 26 samples in batches of 4 a rank, 3 epochs."""

if "KILLS" in os.environ:
    KILLS = [
        pytest.param(
            int(os.environ["KILLS"]) // 2, marks=pytest.mark.timeout(0), id="soak"
        )
    ]
    MOMENTS = [pytest.param(1, marks=pytest.mark.timeout(0), id="soak")]
else:
    KILLS = [3, pytest.param(15, marks=pytest.mark.slow)]
    MOMENTS = [17, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]


def plain(value: Any, root: Path) -> Any:
    """A state that can be compared: bits in place of numbers, paths relative to the run."""
    if isinstance(value, dict):
        return {plain(key, root): plain(item, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, root) for item in value]
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().numpy().tobytes(),
        )
    if isinstance(value, float):
        return value.hex()
    if hasattr(value, "tobytes"):
        return value.tobytes()
    return value.replace(str(root), "") if isinstance(value, str) else value


def steps(root: Path) -> dict[int, list[str]]:
    """By rank, a line for each batch that was trained on: step, ids of samples, bits of the loss."""
    return {
        rank: file.read_text().splitlines()
        for rank in (0, 1)
        if (file := root / f"steps-{rank}").exists()
    }


def outcome(root: Path) -> dict[str, Any]:
    """Everything that two runs must agree in, after every checkpoint was verified."""
    kept = root / "kept"
    names = sorted(os.listdir(kept))
    states = {}
    for name in names:
        if name != "index.json":
            verify_checkpoint(kept / name)
            state = read_checkpoint(kept / name)
            del state["progress"]["seconds"]
            states[name] = plain(state, root)
    journal = [
        {k: v for k, v in record.items() if k != "time"}
        for record in read_journal(root / "journal.jsonl")
    ]
    return {
        "names": names,
        "index": json.loads((kept / "index.json").read_text()),
        "states": states,
        "journal": sorted(
            {json.dumps(plain(record, root), sort_keys=True) for record in journal}
        ),
        "steps": {rank: sorted(set(lines)) for rank, lines in steps(root).items()},
        "taken": {
            int(line.split()[0]) for lines in steps(root).values() for line in lines
        },
    }


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Names the first place where they differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other), at
        for key in one:
            assert_same(one[key], other[key], f"{at}.{key}")
    else:
        assert one == other, at


@pytest.fixture(scope="module")
def undisturbed(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Any, float]]:
    """By the number of ranks, and a strategy: how a run ends that nobody kills, and how many seconds it takes."""

    @cache
    def run(ranks: int, *words: str) -> tuple[Any, float]:
        directory = tmp_path_factory.mktemp("undisturbed") / "run"
        answer = server.run(directory, SCRIPT, ranks, words)
        assert answer["ended"] == [0] * ranks, said(directory)
        whole = outcome(directory)
        count = STEPS[
            1 if "pp" in words else ranks
        ]  # the stages of a pipeline take the same batches
        assert {len(lines) for lines in whole["steps"].values()} == {count}, (
            "every step once"
        )
        assert len(whole["states"]) <= 3, "the best two and the last"
        return whole, answer["seconds"]

    return run


def said(directory: Path) -> str:
    return "".join(file.read_text() for file in sorted(directory.glob("said-*")))


def attempt(server: Server, directory: Path, **kill: Any) -> bool:
    """Start the script once more. Whether it was killed; if not, it has ended well."""
    found = (
        lookup(directory / "kept", "last") if (directory / "kept").exists() else None
    )
    newest = (
        0 if found is None else read_checkpoint(found, ["progress"])["progress"]["step"]
    )
    before = len(steps(directory).get(0, []))
    [ended] = server.run(directory, SCRIPT, **kill)["ended"]
    assert ended in (0, -signal.SIGKILL), said(directory)
    # A loader's worker that was about to hand over a file when its parent was killed says so.
    _, *tracebacks = said(directory).split("Traceback (most recent call last):")
    tracebacks = [text for text in tracebacks if "resource_sharer.py" not in text]
    assert not tracebacks, said(directory)
    trained = steps(directory).get(0, [])[before:]
    assert not trained or int(trained[0].split()[0]) == newest, (
        f"not from the newest checkpoint\n{said(directory)}"
    )
    return ended != 0


@pytest.mark.parametrize("aimed", [False, True], ids=["at any time", "inside saves"])
@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_run_ends_as_the_uninterrupted_one(
    server: Server, undisturbed: Any, tmp_path: Path, kills: int, aimed: bool
) -> None:
    whole, seconds = undisturbed(1)
    draw = random.Random(f"{kills} {aimed}")
    directory, number, killed = tmp_path / "killed", 1, 0
    while killed < kills:
        # Runs are killed again and again until one ends; then another one begins.
        shutil.rmtree(directory, ignore_errors=True)
        while True:
            kill: dict[str, Any] = (
                {"point": draw.randint(1, 150)}
                if aimed
                else {"delay": draw.uniform(0, seconds / 2)}
            )
            was_killed = attempt(server, directory, **(kill if killed < kills else {}))
            killed += was_killed
            if not was_killed:
                break
        assert_same(outcome(directory), whole, f"run {number}")
        number += 1


def test_a_replaced_checkpoint_is_deleted_at_the_next_start(
    tmp_path: Path, monkeypatch: Any
) -> None:
    kept = tmp_path / "kept"

    def fit() -> None:
        keeper = tk.callbacks.ModelCheckpoint(kept, every_n_train_steps=1)
        options = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = tk.Trainer(
            max_steps=3, accelerator="cpu", callbacks=keeper, **options
        )
        trainer.fit(TinyModule(), [torch.ones(2, 32)] * 3, ckpt_path="last")

    def die(path: str) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("trainer_kit.checkpoint.commit.remove_checkpoint", die)
        with pytest.raises(SystemExit):
            fit()
    assert sorted(os.listdir(kept)) == [
        "index.json",
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    fit()
    assert sorted(os.listdir(kept)) == ["index.json", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("every", MOMENTS)
def test_every_moment_from_the_last_step_to_the_end(
    server: Server, undisturbed: Any, tmp_path: Path, every: int
) -> None:
    whole, _ = undisturbed(1)
    directory, before = tmp_path / "killed", tmp_path / "before"
    # Killed before it writes the line of its last step.
    assert server.run(directory, SCRIPT, point=STEPS[1], within="steps-0")["ended"] == [
        -signal.SIGKILL
    ]
    directory.rename(before)
    for point in range(1, 10_000, every):
        shutil.copytree(before, directory)
        killed = attempt(server, directory, point=point)
        if killed:
            assert not attempt(server, directory)
        assert_same(outcome(directory), whole, f"point {point}")
        shutil.rmtree(directory)
        if not killed:
            break
    assert point > 60, "a start, a save and three deletions"


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(word, marks=pytest.mark.slow) for word in ("fsdp", "pp"))],
)
def test_a_rank_is_killed_and_the_job_is_started_again(
    server: Server, undisturbed: Any, tmp_path: Path, strategy: str
) -> None:
    whole, _ = undisturbed(2, strategy)
    directory = tmp_path / "killed"
    kept = str(directory / "kept")
    # Under DDP rank 1 writes no checkpoint: its points are the steps that it trains on.
    points = (
        [(1, 3, "steps-1"), (0, 90, kept)]
        if strategy == "ddp"
        else [(1, 7, kept), (0, 90, kept)]
    )
    for victim, point, within in points:
        ended = server.run(
            directory, SCRIPT, 2, (strategy,), victim=victim, point=point, within=within
        )["ended"]
        assert ended[victim] == -signal.SIGKILL, said(directory)
        assert ended[1 - victim] not in (0, "hung"), said(directory)
    assert server.run(directory, SCRIPT, 2, (strategy,))["ended"] == [0, 0], said(
        directory
    )
    assert_same(outcome(directory), whole)


def rank_of(agent: int, rank: int) -> int | None:
    """The process that an agent started as this rank."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (
                (process / "environ").read_bytes().split(b"\0")
                if parent == agent
                else []
            )
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables:
            return int(process.name)
    return None


@pytest.mark.slow
def test_a_rank_of_a_plain_command_is_killed(undisturbed: Any, tmp_path: Path) -> None:
    whole, _ = undisturbed(2)
    (directory := tmp_path / "killed").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), "2"]
    for victim, lines in [(1, 3), (0, 7)]:
        with subprocess.Popen(
            command, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True
        ) as agent:
            while len(steps(directory).get(victim, [])) < lines:
                assert agent.poll() is None, agent.communicate()[1]
                time.sleep(0.01)
            pid = rank_of(agent.pid, victim)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            errors = agent.communicate()[1]
        assert agent.returncode == 128 + signal.SIGKILL
        assert re.search(
            rf"^rank {victim} of 2 failed \(.*\): killed by SIGKILL",
            errors,
            re.MULTILINE,
        ), errors
    subprocess.run(command, cwd=directory, env=environment, check=True)
    assert_same(outcome(directory), whole)
