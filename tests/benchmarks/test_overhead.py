"""The benchmark runs, counts exactly, and refuses to compare loops that did different work. It is never timed here."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "overhead.py"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(SCRIPT))


def test_one_round_of_our_own_loop(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = [
        "--case",
        "bare",
        "--frameworks",
        "trainer_kit",
        "--rounds",
        "1",
        "--steps",
        "100",
        "--json",
        str(out),
    ]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (result,) = json.loads(out.read_text())
    (measured,) = result["rounds"]
    # A plain step of this model makes 100 calls: with another number the clock would be counting something else.
    assert measured["plain_calls"] == 100
    assert 0 < measured["calls"] <= 52
    assert measured["ratio"] > 0


def test_refuses_different_weights(overhead: dict[str, Any]) -> None:
    weights = [torch.zeros(2), torch.ones(3)]
    other = [torch.zeros(2), torch.tensor([1.0, 1.0, 1.5])]
    overhead["_check"]([(weights, {}), (weights, {})])
    with pytest.raises(SystemExit, match=r"final weights differ by 0\.5"):
        overhead["_check"]([(weights, {}), (other, {}), (weights, {})])


def test_refuses_different_means(overhead: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match=r"the mean of loss is 2\.0, by hand 1\.0"):
        overhead["_check"](
            [([], {"loss": 1.0}), ([], {"loss": 2.0}), ([], {"loss": 1.0})]
        )


def test_a_failed_measurement_is_reported_and_fails(
    overhead: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = overhead["Result"](
        "bare", "trainer_kit", refused="Traceback\nfinal weights differ by 0.5"
    )
    overhead["show"]("bare", [result])
    assert "not reported: final weights differ by 0.5" in capsys.readouterr().out
