"""The benchmark of saving runs, and reads back what it wrote. It is never timed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.slow
def test_every_case_on_a_small_state(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--layers", "1", "--steps", "9", "--every", "4", "--directory", str(tmp_path), "--json", str(out)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert set(found) == {"copy", "ours", "ours_waiting", "torch_save", "torch_async", "whole", "100 MB"}
    assert found["copy"] > 0
    for case in ("ours", "ours_waiting", "torch_save", "torch_async"):
        assert found[case]["step"] > 0
        assert found[case]["peak_gb"] > 0.1
    assert found["whole"]["bytes"] == 3 * 4 * 2828**2
    assert found["whole"]["verify_gb_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
