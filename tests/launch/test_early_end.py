"""A rank that leaves the others, or fails first: the headline, the page and the journal name it, not its victims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.core.errors import RankError
from trainer_kit.launch.failure import (
    RankFailure,
    find_cause,
    note_end,
    with_early_ends,
)
from trainer_kit.launch.processes import run_forked

ROOT = Path(__file__).resolve().parents[2]
LOST = RankFailure(
    0, 1, 20, "RuntimeError", "Connection closed by peer [127.0.0.1]", where="step 6"
)

SCRIPT = """
import os, sys, torch
import trainer_kit as tk
from trainer_kit.testing import TinyModule

class Leaving(TinyModule):
    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.global_rank == 1:
            if sys.argv[1] == "raise":
                raise RuntimeError("the disk is on fire")
            if sys.argv[1] == "os._exit":
                os._exit(0)
            sys.exit(0)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    trainer = tk.Trainer(max_steps=6, devices=2, accelerator="cpu", enable_progress_bar=False, default_root_dir=".")
    trainer.fit(Leaving(), [torch.randn(4, 32)] * 16)
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise", "sys.exit", "os._exit"])
def test_headline_page_and_journal_name_the_rank_that_left(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run_program(tmp_path, [str(script), way])
    verb, cause = CAUSES[way]
    headline = next(
        line for line in ended.stderr.splitlines() if line.startswith("rank")
    )
    assert headline.startswith(f"rank 1 of 2 {verb} at step 2 (")
    assert headline.endswith(f": {cause}")
    assert ended.returncode == 1
    check_page_and_journal(tmp_path, headline, cause)


@pytest.mark.long
@pytest.mark.parametrize("way", ["sys.exit", "os._exit"])
def test_under_torchrun_the_others_name_the_rank_that_left(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = run_program(tmp_path, [*torchrun, str(script), way])
    cause = "its process has ended without an exception, while other ranks train"
    headlines = [
        line
        for line in ended.stderr.splitlines()
        if "rank 1 of 2 ended at step 2 (" in line and line.endswith(f": {cause}")
    ]
    # Below the traceback of rank 0, and in what torchrun prints of it.
    assert headlines, ended.stderr
    assert ended.returncode == 1
    headline = headlines[0][headlines[0].index("rank 1 of 2") :]
    check_page_and_journal(tmp_path, headline, cause)


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise", "sys.exit", "os._exit"])
def test_page_and_journal_of_forked_ranks_name_the_rank_that_left(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace('accelerator="cpu"', 'accelerator="cpu", strategy="ddp_fork"')
    )
    ended = run_program(tmp_path, [str(script), way])
    verb, cause = CAUSES[way]
    assert ended.returncode == 1
    assert f"rank 1 of 2 {verb} at step 2 (" in ended.stderr
    check_page_and_journal(tmp_path, f"rank 1 of 2 {verb} at step 2 (", cause)


LOOP = """
import os, sys, torch
from trainer_kit import Accelerator

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=".")
    accelerator.init_trackers("run")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        if number == 2 and accelerator.process_index == 1:
            if sys.argv[1] == "raise":
                raise RuntimeError("the disk is on fire")
            os._exit(0)
        loss = model(batch).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        # A step behind that of the optimizer, as many loops count.
        accelerator.log({"loss": loss}, step=number)
    accelerator.end_training()
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise", "os._exit"])
def test_under_torchrun_a_custom_loop_names_the_rank_that_left(
    tmp_path: Path, way: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    # It looks at its ranks after they have ended: before, it may end rank 0 while that computes.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = run_program(
        tmp_path, [*torchrun, "--monitor-interval", "30", str(script), way]
    )
    assert ended.returncode == 1
    verb, cause = CAUSES[way]
    if way == "os._exit":
        cause = "its process has ended without an exception, while other ranks train"
    lines = ended.stderr.splitlines()
    # Below the traceback of rank 0, and in what torchrun prints of it.
    headlines = {
        line[line.index("rank 1 of 2") :] for line in lines if "rank 1 of 2" in line
    }
    (headline,) = headlines
    assert headline.startswith(f"rank 1 of 2 {verb} at step 2 (")
    assert headline.endswith(f": {cause}")
    check_page_and_journal(tmp_path, headline, cause)
    if way == "raise":
        root = lines[lines.index("Root Cause (first observed failure):") :]
        assert any("rank      : 1" in line for line in root)
        assert any("RuntimeError: the disk is on fire" in line for line in root)


CAUSES = {
    "raise": ("failed", "RuntimeError: the disk is on fire"),
    "sys.exit": ("ended", "with exit code 0, while other ranks train"),
    "os._exit": ("ended", "with exit code 0, while other ranks train"),
}


def run_program(place: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def check_page_and_journal(place: Path, headline: str, cause: str) -> None:
    (page,) = place.rglob("report.html")
    assert cause in page.read_text()
    lines = page.with_name("events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line]
    (end,) = [event for event in events if event["event"] == "end"]
    assert end["exception"]["headline"].startswith(headline)
    assert end["exception"]["headline"].endswith(f": {cause}")
    assert "after it, on this rank:" in end["exception"]["text"]


def leave(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from trainer_kit.strategies import DDPStrategy

    strategy = DDPStrategy()
    strategy.start()
    if rank == 0:
        for _ in range(100):
            dist.all_reduce(torch.ones(1))


def test_a_forked_rank_that_returns_early_is_the_headline() -> None:
    with pytest.raises(
        RankError, match=r"rank 1 of 2 ended .*with exit code 0"
    ) as problem:
        run_forked(leave, 2)
    assert "after it: rank 0 lost the connection" in str(problem.value)


def test_an_end_is_the_cause_only_where_every_failure_is_a_broken_connection() -> None:
    end = RankFailure(1, 0, 10, pid=7)
    first, *others = with_early_ends([LOST], [end, RankFailure(2, 0, 15)])
    assert (first.rank, first.where, others) == (1, "step 6", [LOST])
    bug = RankFailure(0, 1, 20, "ValueError", "bad label")
    assert with_early_ends([LOST, bug], [end]) == [LOST, bug]
    assert with_early_ends([LOST], []) == [LOST]


def test_a_rank_reads_why_its_connection_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "trainer_kit-x"
    report = agent / "attempt_0" / "0" / "error.json"
    report.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("RANK", "0")
    note_end(agent, RankFailure(1, 0, 10, host="node", pid=7))
    cause = find_cause(RuntimeError(LOST.message), "RuntimeError", "step 6")
    assert cause == RankFailure(1, 0, 10, host="node", pid=7, where="step 6")
    assert find_cause(ValueError("bad label"), "ValueError", "step 6") is None
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert find_cause(RuntimeError(LOST.message), "RuntimeError", "step 6") is None
