"""The quickstart of README.md is as short as it says, learns, and runs on two processes as the page tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Programs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = re.search(r"## Quickstart\n\n```python\n(.*?)```", README, re.S)
assert FOUND is not None
QUICKSTART = FOUND[1]
ACCURACY = re.compile(r"^accuracy ([\d.]+), checkpoint .*step-\d+$", re.M)


def run(tmp_path: Path, source: str, *launcher: str) -> list[str]:
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, (
        f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    )
    return ACCURACY.findall(ran.stdout)


def test_it_has_about_25_lines_of_code() -> None:
    assert len([line for line in QUICKSTART.splitlines() if line.strip()]) <= 25


def run_here(tmp_path: Path, source: str, programs: Programs) -> list[str]:
    """The same of a script that does not start itself again."""
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    ran = programs.run("train.py")
    assert ran.returncode == 0, (
        f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    )
    return ACCURACY.findall(ran.stdout)


def test_it_learns(tmp_path: Path, programs: Programs) -> None:
    (accuracy,) = run_here(tmp_path, QUICKSTART, programs)
    assert float(accuracy) > 0.9


@pytest.mark.parametrize(
    "launcher",
    [
        ("-W", "error"),
        pytest.param(
            ("-m", "torch.distributed.run", "--nproc-per-node=2"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_it_runs_on_two_processes(launcher: tuple[str, ...], tmp_path: Path) -> None:
    source = QUICKSTART.replace(
        "max_epochs=5", 'max_epochs=5, devices=2, accelerator="cpu"'
    )
    assert source != QUICKSTART
    accuracies = run(tmp_path, source, *launcher)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1
    assert float(accuracies[0]) > 0.8


def test_it_runs_in_a_notebook(tmp_path: Path, programs: Programs) -> None:
    source = QUICKSTART.replace(
        "max_epochs=5",
        'max_epochs=5, devices=2, accelerator="cpu", strategy="ddp_notebook"',
    )
    (accuracy,) = run_here(tmp_path, source, programs)
    assert float(accuracy) > 0.8
