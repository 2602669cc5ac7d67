"""What a loop of an `Accelerator` logs has a page like a Trainer's run."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import trainer_kit as tk
from tests.report.pages import curve, data_of
from trainer_kit.commands.main import main
from trainer_kit.loggers import read_journal
from trainer_kit.report import running
from trainer_kit.report.collect import find_runs

PAGE = Path("project/demo/report.html")


def started(log_with="csv", **options):
    accelerator = tk.Accelerator(
        cpu=True, log_with=log_with, project_dir="project", **options
    )
    accelerator.init_trackers(
        "demo", config={"lr": 0.5, "optim": {"betas": [0.9]}, "api_key": "sk-secret"}
    )
    return accelerator


def test_the_page_of_a_loop(tmp_path):
    accelerator = started()
    model, optimizer = accelerator.prepare(
        model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.5)
    )
    for step in range(4):
        accelerator.backward(model(torch.ones(3, 2)).mean())
        optimizer.step()
        accelerator.log(
            {
                "loss": torch.tensor(1.0 / (step + 1)),
                "nested": {"at": step},
                "note": "text",
            },
            step=step,
        )
    accelerator.end_training()
    (run,) = data_of(PAGE)["runs"]
    assert (run["title"], run["status"], run["step"]) == ("demo", "finished", 3)
    assert curve(run, "loss") == ([0, 1, 2, 3], pytest.approx([1, 1 / 2, 1 / 3, 1 / 4]))
    assert curve(run, "nested/at")[1] == [0, 1, 2, 3]
    rows = {
        (section, name): (value, origin)
        for section, name, value, origin in run["configuration"]
    }
    assert rows["config", "optim/betas"] == ([0.9], "init_trackers")
    assert rows["config", "api_key"][0] == "***"
    assert ("Accelerator", "mixed_precision") in rows
    assert "model: Linear" in run["explain"]
    assert dict(run["environment"])["torch"]
    assert [mark["kind"] for mark in run["marks"]] == ["start", "end"]
    for name in ("report.html", "events.jsonl"):
        file = PAGE.parent / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "sk-secret" not in file.read_text()
    PAGE.unlink()
    assert CliRunner().invoke(main, ["report", str(PAGE.parent)]).output == f"{PAGE}\n"
    assert data_of(PAGE)["runs"][0]["series"] == run["series"]


def test_the_journal_of_the_user_is_the_one_of_the_page(tmp_path):
    accelerator = started(["jsonl", "csv"])
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0})
    accelerator.end_training()
    assert [
        record["loss"]
        for record in read_journal(PAGE.parent / "journal.jsonl")
        if "loss" in record
    ] == [1.0, 2.0]
    assert curve(data_of(PAGE)["runs"][0], "loss") == ([0, 1], [1.0, 2.0])


@pytest.mark.parametrize(
    "options", [{"log_with": None, "project_dir": "project"}, {"log_with": ["mine"]}]
)
def test_runs_without_a_journal_write_no_report(tmp_path, options):
    @tk.accelerator.trackers.register_tracker_class
    class Mine(tk.accelerator.trackers.GeneralTracker):
        name, tracker = "mine", None

        def __init__(self, project):
            pass

    accelerator = tk.Accelerator(cpu=True, **options)
    accelerator.init_trackers("demo")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert not list(tmp_path.rglob("*.html"))
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_loaded_state_continues_the_curves_and_a_new_loop_is_another_run(tmp_path):
    def loop(first, last, load=False):
        accelerator = started()
        accelerator.prepare(torch.nn.Linear(2, 1))
        if load:
            accelerator.load_state("state")
        for step in range(first, last):
            accelerator.log({"loss": first + step / 8}, step=step)
            if step == 3:
                accelerator.save_state("state")
        accelerator.end_training()
        return data_of(PAGE)["runs"]

    loop(0, 6)
    (run,) = loop(4, 8, load=True)
    assert curve(run, "loss") == (
        list(range(8)),
        [0, 1 / 8, 2 / 8, 3 / 8, 4.5, 4.625, 4.75, 4.875],
    )
    assert [
        (mark["kind"], mark["step"])
        for mark in run["marks"]
        if mark["kind"] == "restart"
    ] == [("restart", 3)]
    (first,) = loop(0, 2)
    (second,) = data_of(PAGE.parent / "version_1" / "report.html")["runs"]
    assert (first["name"], second["name"]) == ("demo", "version_1")
    assert (len(curve(first, "loss")[0]), curve(second, "loss")[0]) == (8, [0, 1])
    assert find_runs([PAGE.parent]) == [PAGE.parent, PAGE.parent / "version_1"]


def test_a_page_while_the_loop_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_FIRST", 0.01)
    accelerator = started()
    accelerator.log({"loss": 1.0}, step=0)
    while not PAGE.exists():  # the test's own time limit ends it
        time.sleep(0.01)
    assert data_of(PAGE)["runs"][0]["status"] == "running"
    accelerator.end_training()
    assert data_of(PAGE)["runs"][0]["status"] == "finished"


LOOP = """
import sys, warnings
import trainer_kit as tk

accelerator = tk.Accelerator(cpu=True, log_with="csv", project_dir="project")
accelerator.init_trackers("demo")
for step in range(4):
    accelerator.log({"loss": float(step)}, step=step)
warnings.simplefilter("always")
warnings.warn("slow")
if sys.argv[1] == "raises":
    raise RuntimeError("broken")
if sys.argv[1] == "is interrupted":
    raise KeyboardInterrupt
if sys.argv[1].startswith("leaves"):
    sys.exit(int(sys.argv[1][-1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "status"),
    [
        ("raises", 1, "failed"),
        ("is interrupted", -2, "interrupted"),
        ("leaves with 3", 3, "exited"),
        ("leaves with 0", 0, "exited"),
        ("ends", 0, "exited"),
    ],
)
def test_a_script_that_does_not_reach_its_end(programs, tmp_path, how, code, status):
    assert programs.run_code(LOOP, how).returncode == code
    (run,) = data_of(PAGE)["runs"]
    assert run["status"] == status
    assert curve(run, "loss")[0] == [0, 1, 2, 3]
    assert [found["headline"] for found in run["exceptions"]] == [
        "RuntimeError: broken"
    ] * (how == "raises")
    assert "UserWarning: slow" in [mark["text"] for mark in run["marks"]]
    if how == "raises":
        assert 'raise RuntimeError("broken")' in run["exceptions"][0]["text"]


HANGS = """
import pathlib
import time
import torch
import trainer_kit as tk

accelerator = tk.Accelerator(cpu=True, log_with="csv", project_dir="project", hang_timeout=1.5)
accelerator.init_trackers("demo")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    accelerator.log({"loss": float(step)}, step=step)
    if step == 5 and accelerator.process_index == 1:
        journal = pathlib.Path("project/demo/journal.jsonl")  # rank 0 has queued its values, and may not have made it
        while not journal.exists() or '"step": 5,' not in journal.read_text():
            time.sleep(0.01)
        time.sleep(300)
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(8, 4)).mean())
    optimizer.step()
"""


@pytest.mark.slow
def test_a_loop_that_hangs(programs, tmp_path):
    (script := tmp_path / "loop.py").write_text(HANGS)
    ranks = programs.run_ranks(2, script)
    assert [rank.returncode for rank in ranks] == [75, 75], ranks[0].stderr
    (run,) = data_of(PAGE)["runs"]
    assert run["status"] == "hung"
    (found,) = run["exceptions"]
    assert found["headline"].startswith("rank 1 (")
    assert (PAGE.parent / run["home"] / found["stacks"] / "rank-0.txt").exists()
    assert curve(run, "loss")[0] == [0, 1, 2, 3, 4, 5]
