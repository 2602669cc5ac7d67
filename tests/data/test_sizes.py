"""Sizes of batches, limits on their number."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainer_kit.core.errors import DataError
from trainer_kit.data import limit_batches
from trainer_kit.data.sizes import batch_size_of, size_reader

Pair = namedtuple("Pair", "x y")


@dataclass
class Fields:
    name: str
    x: Any


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, 3)


BATCHES = [
    (rows(4), 4),
    ((rows(4), torch.zeros(4)), 4),
    ({"scale": torch.tensor(1.0), "x": rows(5)}, 5),
    ({"a": [{"b": (rows(6),)}], "c": rows(2)}, 6),
    (UserDict(x=rows(3)), 3),
    (Pair(rows(2), 1), 2),
    (Fields("abc", rows(7)), 7),
    ([["a", "b", "c"], 1], 3),
    ((["a", "b"], rows(5)), 5),
    (pack_sequence([torch.zeros(3), torch.zeros(2), torch.zeros(1)]), 3),
    ({"n": 1, "x": None}, 1),
    (torch.tensor(3.0), 1),
    (rows(0), 0),
    ("text", 1),
    (3, 1),
]


@pytest.mark.parametrize(("batch", "size"), BATCHES, ids=str)
def test_batch_size_of(batch: Any, size: int) -> None:
    assert batch_size_of(batch) == size
    found, count = size_reader(batch)(batch)
    assert found is batch
    assert count == size


@pytest.mark.parametrize(("seen", "_"), BATCHES, ids=str)
def test_a_reader_made_for_one_structure_reads_all_others(seen: Any, _: int) -> None:
    read = size_reader(seen)
    for batch, size in BATCHES:
        assert read(batch)[1] == size


def test_a_reader_does_not_walk_the_batch() -> None:
    class Watched(dict[str, Any]):
        walks = 0

        def items(self) -> Any:
            self.walks += 1
            return super().items()

    read = size_reader(Watched(scale=torch.tensor(1.0), x=rows(5)))
    batch = Watched(scale=torch.tensor(1.0), x=rows(4))
    assert (read(batch)[1], batch.walks) == (4, 0)


@pytest.mark.parametrize(
    ("length", "limit", "left"),
    [
        (10, None, 10),
        (10, 1.0, 10),
        (10, 0.25, 2),
        (10, 0.0, 0),
        (10, 0, 0),
        (10, 1, 1),
        (10, 25, 10),
        (0, 0.5, 0),
        (None, None, None),
        (None, 1.0, None),
        (None, 0.0, 0),
        (None, 5, 5),
    ],
)
def test_limits(length: int | None, limit: float | None, left: int | None) -> None:
    assert limit_batches(length, limit, "limit_val_batches") == left


@pytest.mark.parametrize(
    ("length", "limit", "problem"),
    [
        (
            None,
            0.5,
            "limit_val_batches is a fraction, but the number of batches is unknown",
        ),
        (10, 1.5, "limit_val_batches as a float must be a fraction"),
        (10, float("nan"), "limit_val_batches as a float must be a fraction"),
        (10, -1, "limit_val_batches must be a number of batches"),
        (10, True, "limit_val_batches must be a number of batches"),
        (10, "5", "limit_val_batches must be a number of batches"),
        (3, 0.1, "limit_val_batches selects no batch"),
    ],
)
def test_limits_that_are_refused(length: int | None, limit: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        limit_batches(length, limit, "limit_val_batches")
