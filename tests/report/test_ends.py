"""The page of a run that could not write its own end: the watchdog ended it, or the kernel."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.report.pages import curve, data_of
from trainer_kit.commands.main import main
from trainer_kit.report import RunDirectory
from trainer_kit.report.events import append_event, this_process

RUN = """
import os, pathlib, signal, sys, time
import torch
import trainer_kit as tk
from trainer_kit.loggers import JSONLLogger
from trainer_kit.testing import TinyModule

FAULT, VICTIM = sys.argv[1], int(sys.argv[2])

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.trainer.global_rank == VICTIM and FAULT in ("sleep", "stop"):
            journal = pathlib.Path("run/journal.jsonl")  # rank 0 has queued its values, and may not have made it
            while not journal.exists() or '"step": 5,' not in journal.read_text():
                time.sleep(0.01)
            if FAULT == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(300)
        return super().training_step(batch, batch_idx)

    def on_checkpoint_committed(self, path):
        if FAULT == "kill" and path.name == "step-00000004":
            if self.trainer.global_rank:
                time.sleep(300)
            for rank in (1, 0):
                os.kill(int(open(f"pid-{rank}").read()), signal.SIGKILL)

open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
trainer = tk.Trainer(
    max_steps=8, devices=2, strategy="ddp", accelerator="cpu", log_every_n_steps=1,
    logger=JSONLLogger("run", "", ""), enable_progress_bar=False, enable_model_summary=False,
    hang_timeout=False if FAULT == "kill" else 1.5,
    callbacks=tk.callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
)
trainer.fit(Net(), [torch.full((2, 32), i / 8) for i in range(8)], ckpt_path="last" if FAULT == "none" else None)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "run.py"
    file.write_text(RUN)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "victim"), [("sleep", 0), ("sleep", 1), ("stop", 0)])
def test_a_hang_is_on_the_last_page(programs, tmp_path, script, fault, victim):
    """Also where rank 0, which writes the other pages, is the one that is stopped."""
    ranks = programs.run_ranks(2, script, fault, str(victim))
    assert ranks[1 - victim].returncode == 75, ranks[1 - victim].stderr
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert run["status"] == "hung"
    (found,) = run["exceptions"]
    assert found["headline"].startswith(f"rank {victim} (")
    assert "fix: " in found["text"]
    assert found["stacks"] == "hang-5"
    assert (tmp_path / "run" / run["home"] / found["stacks"] / "rank-0.txt").exists()
    (mark,) = (mark for mark in run["marks"] if mark["kind"] == "hang")
    assert (mark["step"], mark["text"]) == (5, found["headline"])
    assert curve(run, "train_loss")[0] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_killed_run_of_two_ranks_is_completed_by_the_command_and_by_its_resume(
    programs, tmp_path, script
):
    assert [rank.returncode for rank in programs.run_ranks(2, script, "kill", "0")] == [
        -signal.SIGKILL
    ] * 2
    page = tmp_path / "run" / "report.html"
    page.unlink(missing_ok=True)
    assert (
        CliRunner().invoke(main, ["report", "run", "--watch"]).output
        == f"{Path('run') / 'report.html'}\n"
    )
    (run,) = data_of(page)["runs"]
    last = max(curve(run, "train_loss")[0])
    text = f"ended from outside (SIGKILL, or its machine); the last logged values are of step {last:.0f}"
    assert (run["status"], [found["headline"] for found in run["exceptions"]]) == (
        "killed",
        [text],
    )
    assert [
        (mark["step"], mark["text"])
        for mark in run["marks"]
        if mark["kind"] == "killed"
    ] == [(last, text)]
    assert last >= 4, "the journal is durable with the checkpoint"

    assert [rank.returncode for rank in programs.run_ranks(2, script, "none", "0")] == [
        0,
        0,
    ]
    (run,) = data_of(page)["runs"]
    assert curve(run, "train_loss")[0] == list(range(1, 9))
    assert (run["status"], [found["headline"] for found in run["exceptions"]]) == (
        "finished",
        [text],
    )
    kinds = [
        mark["kind"]
        for mark in run["marks"]
        if mark["kind"] in ("start", "killed", "restart", "end")
    ]
    assert kinds == ["start", "killed", "restart", "end"]
    (restart,) = (mark for mark in run["marks"] if mark["kind"] == "restart")
    assert restart["text"].startswith("restart 1 at step 4, 2 processes on ")


def test_a_run_of_a_living_process_is_running(tmp_path):
    append_event(tmp_path, "start", 0, stage="fit", run="r", process=this_process())
    run = RunDirectory(tmp_path)
    run.read()
    assert (run.described()[0]["status"], run.finished) == ("running", False)
    host, boot, pid, started = this_process()
    for other in ([host, boot, pid, started + 1], [host, "another", pid, started]):
        append_event(tmp_path, "start", 0, stage="fit", run="r", process=other)
        run.read()
        assert (run.described()[0]["status"], run.finished) == ("killed", True)
    append_event(
        tmp_path,
        "start",
        0,
        stage="fit",
        run="r",
        process=["elsewhere", boot, pid, started],
    )
    run.read()
    assert (run.described()[0]["status"], run.finished) == ("running", False)
