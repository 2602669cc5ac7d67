"""A stream continues with batches of another size, on another number of ranks, without losing a sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit.core.errors import CheckpointError
from trainer_kit.data import EMPTY, CombinedLoader, Feed, shuffle
from trainer_kit.testing import check_loader

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


class ByEnvironment:
    """Divides its data by the launcher's variables: no attribute tells."""

    def __iter__(self) -> Iterator[Any]:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        for index in range(int(os.environ.get("RANK", "0")), 12, ranks):
            yield torch.tensor([index])


class StatefulByEnvironment(ByEnvironment):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(super().__iter__(), self.position, None):
            self.position += 1
            yield batch
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Augments(StatefulByEnvironment):
    """Yields the same samples on every rank, changed by numbers of the global generator."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.position, 12):
            self.position += 1
            yield torch.tensor([index]) + torch.rand(1) / 2
        self.position = 0


def test_ranks_compare_batches_under_equal_generators_on_a_resume() -> None:
    """A stream that draws from the global generator differed from rank to rank, and was refused."""
    saved = Feed(Augments())
    list(islice(saved.epoch(0), 4))
    state = saved.loader_state.state_dict(0, 4)
    compared = []

    def agree(row: list[float]) -> list[list[float]]:
        compared.append(row)
        return [row, row]

    samples = []
    for rank in range(2):
        feed = Feed(Augments(), rank=rank, size=2, agree=agree)
        feed.loader_state.load_state_dict([state], rank)
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        batches = feed.epoch(0, 2)
        assert torch.equal(torch.get_rng_state(), before)
        samples.append([int(batch) for batch in batches])
    assert samples == [[4, 6, 8, 10], [5, 7, 9, 11]]
    assert compared[0] == compared[1]


@pytest.mark.parametrize("start", [0, 2])
def test_ranks_compare_loaders_one_after_the_other_at_one_time(start: int) -> None:
    """In the middle of an epoch each rank compared the second loader when it came to it: one waited for the other."""
    compared = []

    def agree(row: list[float]) -> list[list[float]]:
        compared.append(row)
        return [row, row]

    loader = CombinedLoader([ByEnvironment(), ByEnvironment()], "sequential")
    feed = Feed(loader, rank=1, size=2, agree=agree)
    batches = feed.epoch(0, start)
    assert len(compared) == 2
    shares = [1, 3, 5, 7, 9, 11] * 2
    assert [int(batch) for batch in batches] == shares[start:]
    assert len(compared) == 2


@pytest.mark.parametrize("kind", [ByEnvironment, StatefulByEnvironment])
def test_a_loader_that_divides_itself_does_not_continue_from_one_rank(
    kind: Any,
) -> None:
    """One rank had recorded that it does not divide itself: two ranks read half of the rest."""
    report = check_loader(lambda workers: kind(), workers=[0])
    report.raise_if_failed()
    (change,) = (check for check in report.checks if check.name == "other ranks")
    assert change.status == "refused"
    assert "its position is valid only for the same number of ranks" in change.text


@pytest.mark.filterwarnings("ignore:the first batch", "ignore:.* cannot skip by index")
def test_another_loader_that_divides_itself_continues_on_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has its own position in it, and it was refused as that of one rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def agree(row: list[float]) -> list[list[float]]:
        return [row, [row[0] + 1]]

    saved = Feed(StatefulByEnvironment(), size=2, agree=agree)
    list(islice(saved.epoch(0), 3))
    state = saved.loader_state.state_dict(0, 3)
    feed = Feed(ByEnvironment(), size=2, agree=agree)
    feed.loader_state.load_state_dict([state, state], 0)
    assert [int(batch) for batch in feed.epoch(0, 3)] == [6, 8, 10]
    other = Feed(ByEnvironment(), size=2, agree=agree)
    other.loader_state.load_state_dict([None], 0)
    with pytest.raises(
        CheckpointError, match="valid only for the same number of ranks"
    ):
        other.epoch(0, 3)
