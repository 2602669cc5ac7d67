"""A stream continues with batches of another size, on another number of ranks, without losing a sample."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import pytest
from torch.utils.data import DataLoader

from trainer_kit.core.errors import CheckpointError
from trainer_kit.data import EMPTY, Feed, shuffle

# Found again when torchdata's loader starts.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def feeds(ranks: int, batch_size: int, workers: int = 0) -> list[Feed]:
    return [
        Feed(
            DataLoader(shuffle(range(60), 7), batch_size=1, num_workers=workers),
            rank=rank,
            size=ranks,
            batch_size=batch_size,
        )
        for rank in range(ranks)
    ]


def read(feed: Feed, start: int = 0, stop: int | None = None) -> list[int]:
    batches = islice(feed.epoch(0, start), stop)
    return list(chain(*(batch.tolist() for batch in batches if batch is not EMPTY)))


def resume(
    before: tuple[int, int], position: int, now: tuple[int, int], workers: int = 0
) -> list[int]:
    """The samples after a position of ``before`` (ranks, batch size), read by ``now``."""
    saved = feeds(*before, workers)
    for feed in saved:
        read(feed, stop=position)
    states: list[Any] = [feed.loader_state.state_dict(0, position) for feed in saved]
    start, remainder = divmod(position * before[0] * before[1], now[0] * now[1])
    assert not remainder
    samples = []
    for rank, feed in enumerate(feeds(*now, workers)):
        feed.loader_state.load_state_dict(states, rank)
        samples += read(feed, start)
    return samples


@pytest.mark.parametrize("position", [2, 4])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((2, 4), (1, 8)),
        ((1, 8), (2, 4)),
        ((1, 8), (1, 4)),
        ((2, 8), (2, 4)),
        ((2, 6), (3, 4)),
        ((2, 6), (3, 2)),
        ((2, 4), (2, 8)),
    ],
)
def test_no_sample_is_lost(
    before: tuple[int, int], now: tuple[int, int], position: int
) -> None:
    order = read(feeds(1, 1)[0])
    expected = order[position * before[0] * before[1] :]
    assert sorted(resume(before, position, now)) == sorted(expected)


def test_a_size_that_no_state_fits_is_refused() -> None:
    with pytest.raises(CheckpointError, match="for steps of 4 over all ranks, not for"):
        resume((1, 4), 2, (1, 8))


@pytest.mark.parametrize(
    ("before", "now"), [((1, 8), (1, 4)), ((1, 8), (2, 4)), ((2, 4), (1, 8))]
)
def test_batches_of_another_size_from_several_workers(
    before: tuple[int, int], now: tuple[int, int]
) -> None:
    """One batch of a worker would be two of now, from two workers: samples were lost, and others came twice."""
    with pytest.raises(CheckpointError, match="2 workers read is known for batches"):
        resume(before, 2, now, workers=2)


def test_batches_of_the_same_size_from_several_workers() -> None:
    order = read(feeds(1, 8, workers=2)[0])
    assert sorted(order) == list(range(60))
    assert resume((1, 8), 2, (1, 8), workers=2) == order[16:]
