"""The table of docs/explain/scale.md is what the code exchanges in a world of so many ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# A process of its own: a process group stays with its process.
COUNT = """
import json, runpy, sys
scale = runpy.run_path(sys.argv[1])
print(json.dumps(scale["table"]({1000: scale["count"](1000)}).splitlines()))
"""


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1000 ** UNITS.index(unit)


def cells_of(lines: list[str], ranks: str) -> list[list[str]]:
    """The cells of the rows of this many ranks."""
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in lines if line.startswith("|")]
    return [row for row in rows if row[2] == ranks]


@pytest.mark.slow
def test_the_table_is_current() -> None:
    script = ROOT / "docs" / "generate_scale.py"
    arguments = [sys.executable, "-c", COUNT, str(script)]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True)
    counted = cells_of(json.loads(output.stdout.splitlines()[-1]), "1,000")
    page = (ROOT / "docs" / "explain" / "scale.md").read_text(encoding="utf-8")
    shown = cells_of(page.splitlines(), "1,000")
    assert len(shown) == len(counted) > 5
    for row, current in zip(shown, counted, strict=True):
        # What is done, who sends to whom, and the numbers of messages.
        for column in (0, 1, 3, 5):
            assert row[column] == current[column], "run `make docs`"
        # Some messages hold paths and names of machines.
        for column in (4, 6):
            expected = pytest.approx(in_bytes(current[column]), rel=0.25, abs=1000)
            assert in_bytes(row[column]) == expected, "run `make docs`"
