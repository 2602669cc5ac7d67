"""What reproducible samples and resumable streams cost: ``python benchmarks/samples.py --help``.

CPU time of one thread, the median over rounds. ``by itself`` is the same reading without it.

lines:
  seeded sample        a loader's worker seeds Python, NumPy and torch before each sample (here: in this process)
  seeded sample, here  `Trainer(reproducible_workers=True)` without workers, which puts the generators back as well
  sample that draws    what a small augmentation takes: three draws, an image of 3 x 64 x 64
  stream with a state  a dataset with torchdata's protocol in a DataLoader, whose state is read after each batch
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_kit.data import Feed
from trainer_kit.data.order import SeededIndices

BATCH = 32


class Numbers(IterableDataset[int]):
    """0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.at, self.count):
            self.at = i + 1
            yield i
        self.at = 0


class Placed(Numbers):
    """The same with torchdata's protocol."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def seconds(read: Callable[[], Iterable[Any]]) -> float:
    """CPU time of reading it all."""
    items = read()
    began = time.thread_time()
    for _ in items:
        pass
    return time.thread_time() - began


def draws(count: int) -> Iterator[Any]:
    for _ in range(count):
        yield random.random(), np.random.rand(), torch.randn(3, 64, 64)


def lines(
    samples: int,
) -> dict[
    str, tuple[str, int, Callable[[], Iterable[Any]], Callable[[], Iterable[Any]]]
]:
    """Of each line: per what, how many of them, the reading without it and the one with it."""
    indices = list(range(samples))
    batches = samples // BATCH

    def indexed(reproducible: bool) -> Iterator[Any]:
        return Feed(DataLoader(range(samples), BATCH), reproducible=reproducible).epoch(
            0
        )

    def stream(kind: type[Numbers]) -> Iterator[Any]:
        return Feed(DataLoader(kind(samples), BATCH)).epoch(0)

    return {
        "seeded sample": (
            "sample",
            samples,
            lambda: indices,
            lambda: SeededIndices(indices, 1, 0),
        ),
        "seeded sample, here": (
            "sample",
            samples,
            lambda: indexed(False),
            lambda: indexed(True),
        ),
        "sample that draws": (
            "sample",
            samples,
            lambda: indices,
            lambda: draws(samples),
        ),
        "stream with a state": (
            "batch",
            batches,
            lambda: stream(Numbers),
            lambda: stream(Placed),
        ),
    }


def measure(samples: int, rounds: int) -> dict[str, dict[str, float | str]]:
    """Microseconds of each line, by itself and with it."""
    found: dict[str, dict[str, float | str]] = {}
    for name, (unit, count, without, within) in lines(samples).items():
        seconds(within)  # imports and caches
        taken = [(seconds(without), seconds(within)) for _ in range(rounds)]
        plain, whole = (
            1e6 * statistics.median(times) / count for times in zip(*taken, strict=True)
        )
        found[name] = {"per": unit, "by itself": plain, "extra": whole - plain}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.samples, options.rounds)
    print(f"{'':22}{'by itself':>12}{'extra':>12}")
    for name, line in found.items():
        print(
            f"{name:22}{line['by itself']:9.2f} us{line['extra']:9.2f} us  a {line['per']}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
