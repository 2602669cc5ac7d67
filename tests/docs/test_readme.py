"""The quickstart of README.md is as short as it says, learns, and runs on two processes as the page tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOUND = re.search(r"## Quickstart\n\n```python\n(.*?)```", README, re.S)
assert FOUND is not None
QUICKSTART = FOUND[1]


def run(tmp_path: Path, source: str, *launcher: str) -> list[str]:
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return re.findall(r"^accuracy ([\d.]+), checkpoint .*step-\d+$", ran.stdout, re.M)


def test_it_has_about_25_lines_of_code() -> None:
    assert len([line for line in QUICKSTART.splitlines() if line.strip()]) <= 25


def test_it_learns(tmp_path: Path) -> None:
    (accuracy,) = run(tmp_path, QUICKSTART, "-W", "error")
    assert float(accuracy) > 0.9


@pytest.mark.parametrize(
    "launcher",
    [("-W", "error"), pytest.param(("-m", "torch.distributed.run", "--nproc-per-node=2"), marks=pytest.mark.slow)],
)
def test_it_runs_on_two_processes(launcher: tuple[str, ...], tmp_path: Path) -> None:
    source = QUICKSTART.replace("max_epochs=5", 'max_epochs=5, devices=2, accelerator="cpu"')
    assert source != QUICKSTART
    accuracies = run(tmp_path, source, *launcher)
    assert len(accuracies) == 2
    assert len(set(accuracies)) == 1
    assert float(accuracies[0]) > 0.8


def test_it_runs_in_a_notebook(tmp_path: Path) -> None:
    source = QUICKSTART.replace("max_epochs=5", 'max_epochs=5, devices=2, accelerator="cpu", strategy="ddp_notebook"')
    (accuracy,) = run(tmp_path, source, "-W", "error")
    assert float(accuracy) > 0.8
