"""Where the time of a run went, over real kills: every second is in one part, and each part has what belongs to it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.report.pages import curve, data_of
from trainer_kit.commands.main import main
from trainer_kit.core.progress import Progress
from trainer_kit.report import RunDirectory
from trainer_kit.report.events import append_event, read_events
from trainer_kit.report.goodput import account_of_run
from trainer_kit.report.pulse import Pulse, record_account, take_pulse
from trainer_kit.step.time_account import PARTS, TimeAccount

RUN = """
import json, os, pathlib, signal, sys, time
import torch
import trainer_kit as tk
from trainer_kit.loggers import JSONLLogger
from trainer_kit.testing import TinyModule

STEPS, FAULT, AT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def wait_for_record(step):
    # What is recorded once a second must have this step: the kill then loses no time that the test knows of.
    while json.loads(pathlib.Path("run/account.json").read_text())["step"] < step:
        time.sleep(0.01)

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        step = self.global_step
        if step == AT and FAULT != "none":
            wait_for_record(step)
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            pathlib.Path("hung").write_text(str(time.time()))
            time.sleep(300)
        time.sleep(0.03)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.04)
        return super().validation_step(batch, batch_idx)

    def teardown(self, stage):
        pathlib.Path("left").write_text(str(time.time()))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * STEPS
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((32,), index / 100)

class Slow(tk.callbacks.ModelCheckpoint):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        time.sleep(0.02)
        super().on_save_checkpoint(trainer, module, checkpoint)

trainer = tk.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, log_every_n_steps=1, val_check_interval=4, resume="auto",
    logger=JSONLLogger("run", "", ""), enable_progress_bar=False, enable_model_summary=False,
    hang_timeout=1.0 if FAULT == "hang" else False, num_sanity_val_steps=0,
    callbacks=[Slow("checkpoints", every_n_train_steps=4), tk.callbacks.ThroughputMonitor(flops_per_batch=1.0)],
)
trainer.fit(Net(), torch.utils.data.DataLoader(Data(), batch_size=2), [torch.ones(2, 32)])
"""


def run_with_faults(programs, tmp_path: Path, steps: int, kills: list[int]):
    """The account of a run of ``steps`` steps that was killed in each step after ``kills``; when it began and ended."""
    script = tmp_path / "run.py"
    script.write_text(RUN)
    begun = time.time()
    for at in kills:
        killed = programs.run(script, str(steps), "kill", str(at))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = programs.run(script, str(steps), "none", "0")
    assert finished.returncode == 0, finished.stderr
    return begun, read_account(tmp_path / "run")


def read_account(directory: Path):
    run = RunDirectory(directory)
    run.read()
    (goodput,) = run.goodputs()
    return goodput


def check_total(goodput, directory: Path) -> None:
    """The parts are measured by the clock of intervals; what they add up to is compared with the time of day."""
    end = read_events(directory)[-1]
    assert (end["event"], end["status"]) == ("end", "finished")
    # The last record is made after the last hook, and before the event.
    shortest = float((directory.parent / "left").read_text()) - goodput.begun
    longest = end["time"] - goodput.begun
    assert 0.999 * shortest <= goodput.total <= 1.001 * longest


def check_account(goodput, begun: float, directory: Path, steps: int, kills: list[int]):
    check_total(goodput, directory)
    events = read_events(directory)
    # A process cannot have begun before it was started; the kernel counts in hundredths of a second.
    assert begun - 0.02 <= goodput.begun
    starts = [event for event in events if event["event"] == "start" and "run" in event]
    assert goodput.starts == len(starts) == len(kills) + 1
    resumed = [event["step"] for event in starts]
    assert resumed == [0, *(at // 4 * 4 for at in kills)]
    repeated = sum(at - at // 4 * 4 for at in kills)
    # At least what each part is known to have slept; they add up, so none can have what belongs to another one.
    trained = steps + repeated
    least = {
        "useful": 0.03 * steps,
        "repeated": 0.03 * repeated,
        "data": 0.02 * trained,
        "evaluation": 0.04 * (steps // 4),
        "checkpoint": 0.02 * (steps // 4),
    }
    for part, seconds in least.items():
        assert goodput.seconds[part] >= seconds, (part, goodput)
    assert goodput.seconds["hang"] == 0.0
    assert (goodput.seconds["repeated"] > 0.0) == (repeated > 0)
    assert (goodput.seconds["down"] > 0.0) == bool(kills)


def test_the_parts_of_a_run_that_was_killed_add_up(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kills = [6, 9]
    begun, goodput = run_with_faults(programs, tmp_path, 12, kills)
    check_account(goodput, begun, tmp_path / "run", 12, kills)
    assert not (tmp_path / "run" / "account.json").exists()
    # The command prints the same, and the page shows it.
    result = CliRunner().invoke(main, ["report", "run", "--goodput"])
    lines = result.output.splitlines()
    assert (
        lines[0]
        == f"run: {goodput.share:.1%} of {goodput.total:.1f} s in useful steps, 3 starts"
    )
    assert len(lines) == len(PARTS) + 2
    (page,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert [row[0] for row in page["goodput"]][:2] == ["useful steps", "repeated steps"]
    assert [row[1] for row in page["goodput"]] == list(goodput.seconds.values())
    # The last logged value counts the time of all starts, before the end of the last one.
    logged = curve(page, "run/goodput")[1][-1]
    useful = goodput.seconds["useful"]
    assert useful / goodput.total <= logged + 1e-6
    assert logged <= useful / (goodput.total - goodput.seconds["startup"])


@pytest.mark.long
def test_the_parts_add_up_over_ten_kills(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kills = [3, 6, 9, 13, 13, 18, 22, 27, 31, 35]
    begun, goodput = run_with_faults(programs, tmp_path, 40, kills)
    check_account(goodput, begun, tmp_path / "run", 40, kills)


def test_a_hang_is_counted_from_the_last_progress(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    hung = programs.run(script, "6", "hang", "5")
    assert hung.returncode == 75, hung.stderr
    (end,) = (
        event for event in read_events(tmp_path / "run") if event["event"] == "end"
    )
    assert end["status"] == "hung"
    known = end["time"] - float((tmp_path / "hung").read_text())
    # What the process has left tells it already before a restart.
    seconds = read_account(tmp_path / "run").seconds
    assert seconds["hang"] >= known
    assert seconds["down"] == 0.0
    finished = programs.run(script, "6", "none", "0")
    assert finished.returncode == 0, finished.stderr
    after = read_account(tmp_path / "run")
    assert after.seconds["hang"] == seconds["hang"]
    assert after.starts == 2
    check_total(after, tmp_path / "run")


def test_an_evaluation_after_the_fit_is_a_part_and_one_beside_it_is_not(tmp_path):
    seconds = dict.fromkeys(PARTS, 0.0)

    def account(begun, until):
        return {
            "event": "account",
            "begun": begun,
            "time": until,
            "until": until,
            "step": 1,
            "category": "startup",
            "seconds": {**seconds, "useful": until - begun},
        }

    def event(kind, time, stage):
        return {"event": kind, "time": time, "stage": stage, "status": "finished"}

    events = [
        event("start", 1.0, "fit"),
        event("start", 2.0, "validate"),
        event("end", 4.0, "validate"),
        account(0.0, 10.0),
        event("end", 10.0, "fit"),
        event("start", 12.0, "test"),
        event("end", 15.0, "test"),
        event("start", 20.0, "fit"),
        account(18.0, 28.0),
    ]
    goodput = account_of_run(events)
    assert goodput is not None
    assert {part: value for part, value in goodput.seconds.items() if value} == {
        "useful": 20.0,
        "evaluation": 3.0,
        "down": 5.0,
    }
    assert goodput.total == 28.0


def test_records_that_are_damaged_cost_their_own_time(tmp_path):
    events = [
        {"event": "account", "begun": "then", "seconds": {}},
        {"event": "account", "seconds": None, "category": "useful"},
        {"event": "start", "stage": "fit"},
        {"event": "end", "time": None},
    ]
    assert account_of_run(events) is None
    (tmp_path / "account.json").write_text("{")
    append_event(tmp_path, "start", 0, stage="fit", run="r")
    run = RunDirectory(tmp_path)
    run.read()
    assert run.goodputs() == [None]
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--goodput"])
    assert (result.exit_code, "no account of time" in result.output) == (0, True)


@pytest.mark.parametrize(
    "words", [["--open"], ["--watch"], ["--every", "5"], ["--output", "page.html"]]
)
def test_the_table_replaces_the_page(tmp_path, words):
    append_event(tmp_path, "start", 0, stage="fit", run="r")
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--goodput", *words])
    assert result.exit_code == 2
    assert f"writes no page: leave {words[0]} out" in result.output


FRAGILE = """
import os, pathlib, signal, sys, threading, warnings
import torch
import trainer_kit as tk
from trainer_kit.loggers import JSONLLogger
from trainer_kit.report import pulse
from trainer_kit.report.running import RunReport
from trainer_kit.testing import TinyModule

FAULT = sys.argv[1]
unlink = pathlib.Path.unlink
keep_account = RunReport.keep_account

def die(*values, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_account(path, *values, **options):
    if path.name == "account.json":
        die()
    unlink(path, *values, **options)

def keep_account_and_die_at_end(self, *values):
    keep_account(self, *values)
    if FAULT == "before unlink at end":
        pathlib.Path.unlink = die_at_account
    else:
        pulse.append_event = die

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        if FAULT == "step" and self.global_step == 3:
            die()
        return super().training_step(batch, batch_idx)

if FAULT == "before unlink at begin":
    pathlib.Path.unlink = die_at_account
if FAULT == "before keep_account":
    RunReport.keep_account = die
if FAULT.endswith("at end"):
    RunReport.keep_account = keep_account_and_die_at_end

trainer = tk.Trainer(
    max_steps=5, accelerator="cpu", devices=1, logger=JSONLLogger("run", "", ""), enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Net(), [torch.zeros(2, 32)] * 5)
files = [os.readlink(file) for file in map(str, pathlib.Path("/proc/self/fd").iterdir()) if os.path.lexists(file)]
print("open:", [file for file in files if file.endswith("account.json")])
print("threads:", [thread.name for thread in threading.enumerate() if "time account" in thread.name])
"""


@pytest.mark.parametrize(
    ("faults", "starts"),
    [
        (["step", "before unlink at begin"], 2),
        (["step", "before keep_account", "before keep_account"], 2),
        (["before unlink at end"], 2),
        (["before append at end"], 2),
    ],
)
def test_a_kill_between_two_records_counts_no_start_twice_and_loses_none(
    programs, tmp_path, faults, starts
):
    script = tmp_path / "run.py"
    script.write_text(FRAGILE)
    begun = time.time()
    for fault in faults:
        killed = programs.run(script, fault)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = programs.run(script, "none")
    assert finished.returncode == 0, finished.stderr
    assert "could not be written" not in finished.stdout
    run = RunDirectory(tmp_path / "run")
    run.read()
    # Each start begins at step 0 here, so each may be a fit of its own in the directory.
    accounts = [account for account in run.goodputs() if account is not None]
    assert sum(account.starts for account in accounts) == starts
    assert sum(account.total for account in accounts) <= time.time() - begun + 0.02
    assert not (tmp_path / "run" / "account.json").exists()


def test_an_account_that_cannot_be_written_ends_no_run_and_says_so(programs, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(FRAGILE)
    (tmp_path / "run" / "account.json").mkdir(parents=True)
    finished = programs.run(script, "none")
    assert finished.returncode == 0, finished.stderr
    text = finished.stdout + finished.stderr
    assert "the time account could not be written: IsADirectoryError" in text
    assert "report.html could not be written" not in text
    assert "open: []" in text
    assert "threads: []" in text
    # Only a kill would have lost it.
    assert read_account(tmp_path / "run").starts == 1


def test_an_account_is_written_as_soon_as_that_is_possible(tmp_path):
    (tmp_path / "account.json").mkdir()
    account = TimeAccount(Progress(), lambda: (0.0, 0.0, False))
    pulse = Pulse(tmp_path, account, time.time())
    assert isinstance(pulse.problem, IsADirectoryError)
    (tmp_path / "account.json").rmdir()
    while take_pulse(tmp_path) is None:
        time.sleep(0.01)
    record = pulse.stop()
    assert pulse.problem is None
    # It stays until its event is recorded.
    assert take_pulse(tmp_path) == record
    record_account(tmp_path, record)
    assert take_pulse(tmp_path) is None
    assert read_events(tmp_path)[-1]["seconds"] == record["seconds"]


def test_a_journal_of_events_that_cannot_be_written_ends_no_run(programs, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(FRAGILE)
    (tmp_path / "run" / "events.jsonl").mkdir(parents=True)
    finished = programs.run(script, "none")
    assert finished.returncode == 0, finished.stderr
    assert "could not be written: IsADirectoryError" in finished.stdout
    assert "open: []" in finished.stdout
    assert "threads: []" in finished.stdout


OPEN = """
import json, os, pathlib, signal, sys, time
import torch
import trainer_kit as tk
from trainer_kit.loggers import JSONLLogger
from trainer_kit.testing import TinyModule

FAULT, AT = sys.argv[1], int(sys.argv[2])
begun = time.perf_counter()

def die():
    pathlib.Path("before").write_text(str(time.perf_counter() - begun))
    # The record of the last second has all of this but its end.
    time.sleep(1.5)
    record = pathlib.Path("run/account.json")
    before = json.loads(record.read_text())["until"]
    while json.loads(record.read_text())["until"] == before:
        time.sleep(0.01)
    if FAULT == "raise":
        raise RuntimeError("lost")
    os.kill(os.getpid(), signal.SIGKILL)

class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        if FAULT != "data" and self.global_step == AT:
            die()
        return super().training_step(batch, batch_idx)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if FAULT == "data" and index == AT:
            die()
        return torch.zeros(32)

trainer = tk.Trainer(
    max_steps=5, accelerator="cpu", devices=1, logger=JSONLLogger("run", "", ""), enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Net(), torch.utils.data.DataLoader(Data(), batch_size=2))
"""


@pytest.mark.parametrize(
    ("fault", "at", "part"),
    [
        ("kill", 0, "startup"),
        ("kill", 3, "repeated"),
        ("raise", 3, "repeated"),
        ("data", 0, "data"),
        ("data", 6, "data"),
    ],
)
def test_a_step_that_is_never_completed_is_not_useful(
    programs, tmp_path, fault, at, part
):
    script = tmp_path / "run.py"
    script.write_text(OPEN)
    assert programs.run(script, fault, str(at)).returncode != 0
    seconds = read_account(tmp_path / "run").seconds
    assert seconds[part] >= 1.5
    completed = {"startup": 0, "repeated": 3, "data": at // 2}[part]
    assert (seconds["useful"] > 0.0) == (completed > 0)
    others = sum(seconds[name] for name in ("repeated", "data") if name != part)
    # Both lie before what was never completed.
    assert seconds["useful"] + others <= float((tmp_path / "before").read_text())
