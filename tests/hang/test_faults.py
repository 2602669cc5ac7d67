"""Each hang is injected for real, in two processes: text, exit code, time and stacks are checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 1.5
TIMES = {"TRAINER_KIT_PATIENCE": "60"}

HEADLINES = {
    "sleep": r"rank 1 \([^)]*pid \d+\) hangs at step 5 in {phase}, at {script}:\d+.* and has not entered all_reduce"
    r"\[\d+\] #\d+ \(a bucket of gradients, \d+ bytes\); rank 0 waits \d+ s",
    "stop": r"rank 1 \([^)]*pid \d+\) does not answer: its process is stopped \(SIGSTOP, or a debugger\) and has not "
    r"entered all_reduce\[\d+\] #\d+ \(a bucket of gradients, \d+ bytes\); rank 0 waits \d+ s",
    "locked": r"rank 1 \([^)]*pid \d+\) does not answer: its interpreter is locked by C code and has not entered "
    r"all_reduce\[\d+\] #\d+ \(a bucket of gradients, \d+ bytes\); rank 0 waits \d+ s",
    "other": r"rank 1 \([^)]*pid \d+\) issued all_gather\[\d+\] as collective #\d+ at step 5, where rank 0 issued "
    r"all_reduce\[\d+\]",
}
HEADLINES["compiling"] = HEADLINES["stop"]
PHASES = {"fit.py": "forward", "loop.py": "your code"}


def check_text(text: str, script: str, fault: str) -> None:
    expected = (
        HEADLINES[fault]
        .replace("{phase}", PHASES[script])
        .replace("{script}", re.escape(script))
    )
    assert re.search(expected, text), text
    if fault == "other":
        assert re.search(
            rf"rank 1: all_gather\[\d+\] at {re.escape(script)}:\d+", text
        ), text
        assert re.search(
            rf"rank 0: all_reduce\[\d+\] at {re.escape(script)}:\d+", text
        ), text


def check_stacks(directory: Path, script: str, fault: str) -> None:
    (found,) = directory.rglob("hang-5")
    assert "_engine_run_backward" in (found / "rank-0.txt").read_text()
    other = (found / "rank-1.txt").read_text()
    assert (script in other) == (fault not in ("stop", "compiling")), (
        other
    )  # a stopped process cannot write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("fit.py", "sleep"),
        ("fit.py", "stop"),
        ("fit.py", "locked"),
        ("fit.py", "other"),
        ("loop.py", "stop"),
        ("loop.py", "compiling"),
        ("loop.py", "other"),
    ],
)
def test_the_rank_that_hangs_is_named(programs, tmp_path, script, fault, monkeypatch):
    """Without an agent: the ranks themselves say it and end."""
    monkeypatch.setenv("TRAINER_KIT_PATIENCE", "60")
    waits, hangs = programs.run_ranks(2, HERE / script, fault, str(LIMIT), "1")
    ended = time.time()
    queued = programs.queued
    check_text(waits.stderr + hangs.stderr, script, fault)
    assert waits.returncode == 75
    assert hangs.returncode == (
        75 if fault in ("sleep", "other") else -9
    )  # the others cannot end by themselves
    check_stacks(tmp_path, script, fault)
    began = float(re.search(r"fault at (\S+)", hangs.stdout)[1])
    assert ended - began - queued < LIMIT + 2 + 4, "at most 2 s on a free machine"
    assert ended - began > LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluations_are_watched(programs, tmp_path, stage):
    waits, hangs = programs.run_ranks(
        2, HERE / "fit.py", "sleep", str(LIMIT), "1", stage
    )
    assert (waits.returncode, hangs.returncode) == (75, 75)
    assert re.search(
        r"rank 1 \(.* hangs at batch 6 in validation, at fit.py:\d+",
        waits.stderr + hangs.stderr,
    )
    (found,) = tmp_path.rglob("hang-6")
    assert {path.name for path in found.iterdir()} == {"rank-0.txt", "rank-1.txt"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["sleep", pytest.param("stop", marks=pytest.mark.long)]
)
def test_rank_0_hangs(programs, tmp_path, fault):
    """It serves the store of the ranks here, which does not answer either where the process is stopped."""
    hangs, waits = programs.run_ranks(2, HERE / "fit.py", fault, str(LIMIT), "0")
    assert (hangs.returncode, waits.returncode) == (75 if fault == "sleep" else -9, 75)
    does = {
        "sleep": "hangs at step 5 in forward",
        "stop": "does not answer: its process is stopped",
    }[fault]
    assert re.search(
        rf"rank 0 \([^)]*\) {does}.* has not entered .*; rank 1 waits \d+ s",
        hangs.stderr + waits.stderr,
    )
    (found,) = tmp_path.rglob("hang-5")
    assert "_engine_run_backward" in (found / "rank-1.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "fault", "torchrun"),
    [
        ("fit.py", "sleep", False),
        ("fit.py", "stop", False),
        ("fit.py", "locked", False),
        ("fit.py", "other", False),
        ("fit.py", "stop", True),
        ("loop.py", "sleep", True),
        ("loop.py", "stop", True),
        ("loop.py", "other", True),
    ],
)
def test_under_launchers(tmp_path, script, torchrun, fault):
    words = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if torchrun
        else []
    )
    environment = {
        **os.environ,
        **TIMES,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *words, str(HERE / script), fault, "3", "1"]
    ran = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    check_text(ran.stderr, script, fault)
    check_stacks(tmp_path, script, fault)
    if torchrun:
        assert ran.returncode == 1  # always
        root = ran.stderr.partition("Root Cause")[2]
        assert re.search(r"rank +: 1 ", root), ran.stderr
        assert "rank 1 (" in root
    else:
        assert ran.returncode == 75
        assert re.search(
            r"^rank 1 of 2 failed at step \d \(", ran.stderr, re.MULTILINE
        ), ran.stderr
        assert "after it: rank 0" in ran.stderr


@pytest.mark.slow
def test_different_sizes_are_named_with_the_line(programs, tmp_path):
    """Gloo aborts the process; the launcher's ranks show where Python was."""
    ran = programs.run(HERE / "fit.py", "sizes", "60", "1", anew=True)
    assert ran.returncode == 134
    assert "3000 vs 4" in ran.stderr, "gloo's own words for the bytes of both"
    line = next(
        i
        for i, text in enumerate((HERE / "fit.py").read_text().splitlines(), 1)
        if "all_reduce(" in text
    )
    assert re.search(rf'fit.py", line {line} in training_step', ran.stderr), ran.stderr
    assert re.search(
        r"^rank 1 of 2 failed .*: killed by SIGABRT", ran.stderr, re.MULTILINE
    ), ran.stderr


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_with_its_index(programs, tmp_path):
    ran = programs.run(HERE / "fit.py", "worker", str(LIMIT))
    assert ran.returncode == 75
    expected = r"hangs at step 8 in data, .*: worker 0 \(pid \d+\) of the data loader reads index 33 of the dataset"
    assert re.search(expected, ran.stderr), ran.stderr


@pytest.mark.slow
def test_sigterm_ends_a_step_that_hangs(programs, tmp_path):
    ran = programs.run(HERE / "fit.py", "term", "2")
    began = float(re.search(r"fault at (\S+)", ran.stdout)[1])
    assert (
        time.time() - began - programs.queued < 8
    )  # other processes may have the cores
    assert ran.returncode == 143
    assert "SIGTERM came, and the step does not end: rank 0 (" in ran.stderr, ran.stderr


@pytest.mark.slow
def test_a_sound_run_is_left_alone(programs, tmp_path):
    """Also where its steps take longer than the limit at first: libraries load and compile there."""
    ran = programs.run(HERE / "fit.py", "none", "0.3")
    assert ran.returncode == 0, ran.stderr
    assert "trained" in ran.stdout
