"""Programs with the calls of Lightning's Fabric examples train to the same bits here and under Lightning.

They need Lightning's wheel: ``make test-lightning``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("LIGHTNING_FILES", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not SITE, reason="needs Lightning's wheel: make test-lightning"),
]
ROOT = Path(__file__).resolve().parents[2]


def results(package: str, site: str) -> dict[str, list[float]]:
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fabric_examples.py")), package],
        env={**os.environ, "PYTHONPATH": site},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULTS")]
    numbers: dict[str, list[float]] = json.loads(line.removeprefix("RESULTS"))
    return numbers


def test_the_examples_of_fabric_train_to_the_same_bits() -> None:
    ours = results("trainer_kit", str(ROOT))
    theirs = results("lightning.fabric", SITE)
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []
