"""Streams and lists: data without a sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.calls import python_calls
from trainer_kit.core.errors import DataError
from trainer_kit.data import EMPTY, Feed


def plain(batches: Any) -> list[Any]:
    return [
        batch.tolist() if isinstance(batch, torch.Tensor) else batch
        for batch in batches
    ]


def on_ranks(loader: Any, size: int) -> list[list[Any]]:
    return [plain(Feed(loader, rank=rank, size=size).epoch(0)) for rank in range(size)]


class Numbers(IterableDataset[int]):
    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.count


class TestStreams:
    def test_every_rank_keeps_each_nth_batch(self) -> None:
        loader = DataLoader(Numbers(), batch_size=2)
        assert on_ranks(loader, 1) == [[[0, 1], [2, 3], [4, 5], [6]]]
        assert on_ranks(loader, 3) == [[[0, 1], [6]], [[2, 3], EMPTY], [[4, 5], EMPTY]]
        feed = Feed(loader, rank=1, size=3)
        assert (feed.length, feed.even, feed.per_rank_batch_size, feed.samples(0)) == (
            None,
            False,
            2,
            None,
        )
        assert "keeps one batch in 3" in feed.describe()
        assert Feed(loader).even

    def test_the_claimed_length(self) -> None:
        loader = DataLoader(SizedNumbers(), batch_size=2)
        assert [Feed(loader, size=size).length for size in (1, 2, 3)] == [4, 2, 2]
        assert loader._IterableDataset_len_called is None  # type: ignore[attr-defined]

    def test_the_batch_size_can_be_replaced(self) -> None:
        feed = Feed(DataLoader(Numbers(), batch_size=2), batch_size=4)
        assert (feed.per_rank_batch_size, plain(feed.epoch(0))) == (
            4,
            [[0, 1, 2, 3], [4, 5, 6]],
        )

    def test_start_reads_and_throws_away_with_a_warning(self) -> None:
        feed = Feed(DataLoader(Numbers(), batch_size=2), rank=0, size=2)
        with pytest.warns(UserWarning, match="2 batches were read and discarded in"):
            assert plain(feed.epoch(0, start=1)) == [[4, 5]]

    def test_a_generator_can_be_read_once(self) -> None:
        feed = Feed(number for number in range(3))
        assert list(feed.epoch(0)) == [0, 1, 2]
        with pytest.raises(DataError, match="no batches left for another pass"):
            list(feed.epoch(1))

    def test_a_generator_before_its_end_continues(self) -> None:
        feed = Feed(number for number in range(4))
        first = feed.epoch(0)
        assert [next(first), next(first)] == [0, 1]
        assert list(feed.epoch(1)) == [2, 3]

    def test_an_object_with_iter_is_read_again(self) -> None:
        class Loader:
            epochs: list[int] = []  # noqa: RUF012

            def set_epoch(self, epoch: int) -> None:
                self.epochs.append(epoch)

            def __len__(self) -> int:
                return 3

            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        feed = Feed(Loader(), rank=1, size=2)
        assert [list(feed.epoch(epoch)) for epoch in (0, 1)] == [[1, EMPTY]] * 2
        assert (feed.length, Loader.epochs) == (2, [0, 1])

    def test_generators_are_untouched(self) -> None:
        before = torch.get_rng_state()
        list(Feed(DataLoader(Numbers())).epoch(0))
        assert torch.equal(torch.get_rng_state(), before)

    def test_workers(self) -> None:
        feed = Feed(
            DataLoader(
                Numbers(4), batch_size=2, num_workers=2, persistent_workers=True
            ),
            rank=1,
            size=2,
        )
        assert [plain(feed.epoch(epoch)) for epoch in (0, 1)] == [[[0, 1], [2, 3]]] * 2


class TestLists:
    def test_one_process_iterates_the_list_itself(self) -> None:
        batches = [1, 2, 3]
        feed = Feed(batches)
        list(
            Feed([torch.ones(2)]).sized_epoch(0)
        )  # what the first epoch of a process imports is not counted
        reads = [
            python_calls(lambda n=n: list(Feed([torch.ones(2)] * n).sized_epoch(0)))
            for n in (10, 30)
        ]
        assert reads[1] - reads[0] == 20  # of its size, once a batch
        assert (
            feed.length,
            feed.even,
            list(feed.epoch(0)),
            list(feed.epoch(1, start=2)),
        ) == (
            3,
            True,
            [1, 2, 3],
            [3],
        )

    def test_ranks_read_only_their_own(self) -> None:
        read = []

        class Lazy(list[int]):
            def __getitem__(self, index: Any) -> Any:
                read.append(index)
                return super().__getitem__(index)

        batches = Lazy([10, 11, 12, 13])
        assert [list(Feed(batches, rank=r, size=3).epoch(0)) for r in range(3)] == [
            [10, 13],
            [11, EMPTY],
            [12, EMPTY],
        ]
        assert read == [0, 3, 1, 2]
        assert [
            list(Feed(batches, rank=r, size=3).epoch(0, start=1)) for r in range(3)
        ] == [
            [13],
            [EMPTY],
            [EMPTY],
        ]
        assert list(Feed(batches, rank=2, size=3).epoch(0, start=2)) == []
        assert Feed(batches, size=3).length == 2
