"""The benchmark of saving runs, and reads back what it wrote. It is never timed here."""

from __future__ import annotations

import json
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


CASES = ("ours", "ours_waiting", "torch_save", "torch_async")


@pytest.mark.slow
def test_every_case_on_a_small_state(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = [
        "--layers",
        "1",
        "--steps",
        "9",
        "--every",
        "4",
        "--directory",
        str(tmp_path),
        "--json",
        str(out),
    ]
    cases = [word for case in CASES for word in ("--case", case)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options, *cases],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert set(found) == {"copy", *CASES, "whole", "100 MB"}
    assert found["copy"] > 0
    for case in CASES:
        assert found[case]["step"] > 0
        assert found[case]["peak_gb"] > 0.1
    assert found["whole"]["bytes"] == 3 * 4 * 2828**2
    assert found["whole"]["verify_gb_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.slow
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another malloc may keep what was freed"
)
def test_saves_take_one_copy_of_the_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    held = (
        bytearray(os.urandom(1 << 20)) * 1500
    )  # the peak of the process that measures is not that of the measured
    found = runpy.run_path(str(SCRIPT))["measure_memory"](1, tmp_path)
    assert found["without_gb"] > 0.2
    assert 0.95 <= found["copies"] <= 1.1
    assert list(tmp_path.iterdir()) == []
    assert len(held) == 1500 << 20
