"""The benchmark runs and names its lines. It is never timed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "samples.py"


def test_every_line_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = ["--samples", "320", "--rounds", "1", "--json", str(out)]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert found["seeded sample"]["extra"] > 0
    assert all(name in ran.stdout for name in found)
    assert {line["per"] for line in found.values()} == {"sample", "batch"}
