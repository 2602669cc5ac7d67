"""What ranks exchange grows with their number, not with its square: the real code in worlds of two sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "generate_scale.py"
FEW = 16
SIZES = (128, 256)
# A process of its own: a process group stays with its process.
COUNT = f"""
import json, runpy, sys
scale = runpy.run_path(sys.argv[1])
counts = []
for size in {(FEW, *SIZES)}:
    scenes = scale["count"](size)
    counts.append({{name: [vars(e) for e in scene] for name, scene in scenes.items()}})
print(json.dumps(counts))
"""
RINGS = {
    # torch's DDP compares the parameters of all ranks.
    "start": 1,
    "start from a checkpoint": 1,
    # The values are on the device.
    "after a step: requests, signals, values that were logged": 1,
}


_Scenes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def all_scenes() -> list[_Scenes]:
    arguments = [sys.executable, "-c", COUNT, str(SCRIPT)]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True)
    counts: list[_Scenes] = json.loads(output.stdout.splitlines()[-1])
    return counts


@pytest.fixture(scope="module")
def scenes(all_scenes: list[_Scenes]) -> list[_Scenes]:
    """Of many ranks."""
    return all_scenes[1:]


def test_few_ranks_exchange_seldom_for_a_sharded_checkpoint(all_scenes: Any) -> None:
    """A save took 30 exchanges, and a read 25: each waits for the slowest rank."""
    counts = all_scenes[0]
    assert len(counts["a checkpoint that all ranks write, 100 tensors"]) == 20
    assert len(counts["reading it"]) == 20


def test_no_exchange_grows_with_the_square_of_the_ranks(scenes: Any) -> None:
    """Each message of each rank to each other one is one of these rings."""
    for counts in scenes:
        rings = {
            name: [e for e in exchanges if e["kind"] == "all_gather"]
            for name, exchanges in counts.items()
        }
        assert {name: len(found) for name, found in rings.items() if found} == RINGS
        for found in rings.values():
            assert all(exchange["size"] <= 64 for exchange in found), found


def test_a_rank_describes_its_chunks_alone_for_a_sharded_checkpoint(
    scenes: Any,
) -> None:
    """Each rank also sent names, shapes and dtypes of all tensors, which rank 0 has."""
    for counts in scenes:
        exchanges = counts["a checkpoint that all ranks write, 100 tensors"]
        sizes = [e["size"] for e in exchanges if e["kind"] == "gather"]
        assert max(sizes) < 100 * 50


def test_what_a_rank_sends_does_not_grow(scenes: Any) -> None:
    """But for what rank 0 sends to all: a row of numbers for each rank."""
    small, large = scenes
    for name, exchanges in large.items():
        for before, after in zip(small[name], exchanges, strict=True):
            assert before["kind"] == after["kind"], name
            limit = before["size"] * 1.25
            if after["kind"] == "broadcast":
                limit = before["size"] * 2
            assert after["size"] <= limit, (name, before, after)
