"""The benchmark of engines runs, and refuses to compare loops that did different work. It is never timed here."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "engines.py"
SMALL = [
    "--rounds",
    "1",
    "--width",
    "32",
    "--layers",
    "1",
    "--length",
    "4",
    "--batch",
    "2",
    "--steps",
    "7",
]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(SCRIPT))


@pytest.mark.slow
def test_one_round_of_the_trainer_and_the_loop_by_hand(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = [
        "--engine",
        "fsdp",
        "--loops",
        "by hand",
        "trainer_kit",
        *SMALL,
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
    plain, ours = json.loads(out.read_text())
    assert (plain["loop"], ours["loop"]) == ("by hand", "trainer_kit")
    assert plain["rounds"][0]["ratio"] == 1
    assert ours["rounds"][0]["ms"] > 0
    assert ours["rounds"][0]["ratio"] > 0


def test_refuses_different_weights(engines: dict[str, Any]) -> None:
    weights = [torch.zeros(2), torch.ones(3)]
    engines["check"](weights, weights)
    for other in (1.5, float("nan")):
        with pytest.raises(RuntimeError, match=r"final weights differ by (0\.5|nan)"):
            engines["check"]([torch.zeros(2), torch.tensor([1.0, 1.0, other])], weights)


def test_a_failed_measurement_is_reported(
    engines: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    engines["show"](
        "ddp",
        [
            engines["Result"](
                "ddp", "raw", refused="Traceback\nfinal weights differ by 0.5"
            )
        ],
    )
    assert "not reported: final weights differ by 0.5" in capsys.readouterr().out
