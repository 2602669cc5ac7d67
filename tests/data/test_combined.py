"""Several loaders as one: Lightning's modes, divided among ranks, resumed at any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit.core.errors import DataError
from trainer_kit.data import EMPTY, CombinedLoader, Feed
from trainer_kit.data.combined import Mode


class Unsized:
    """A loader without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return (
        [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch
    )


MODES: tuple[Mode, ...] = ("min_size", "max_size_cycle", "max_size", "sequential")

# What Lightning 2.6 gives, its batch_idx and dataloader_idx left out.
REFERENCE: dict[Mode, tuple[int, list[Any]]] = {
    "min_size": (2, [{"a": [0, 0], "b": [0]}, {"a": [1, 1], "b": [1]}]),
    "max_size_cycle": (
        4,
        [
            {"a": [0, 0], "b": [0]},
            {"a": [1, 1], "b": [1]},
            {"a": [0, 2], "b": [2]},
            {"a": [1, 0], "b": [3]},
        ],
    ),
    "max_size": (
        4,
        [
            {"a": [0, 0], "b": [0]},
            {"a": [1, 1], "b": [1]},
            {"a": [None, 2], "b": [2]},
            {"a": [None, None], "b": [3]},
        ],
    ),
    "sequential": (9, [0, 1, 0, 1, 2, 0, 1, 2, 3]),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_lightnings(mode: Mode) -> None:
    combined = CombinedLoader({"a": [range(2), range(3)], "b": (range(4),)}, mode)
    length, batches = REFERENCE[mode]
    assert len(combined) == length
    assert [plain(batch) for batch in combined] == batches
    assert [plain(batch) for batch in combined] == batches  # and again
    assert mode == "sequential" or all(type(batch["b"]) is tuple for batch in combined)


def test_unknown_lengths() -> None:
    assert len(CombinedLoader([Unsized(9), range(4)], "min_size")) == 4
    assert [
        plain(batch)
        for batch in CombinedLoader([Unsized(3), range(4)], "max_size_cycle")
    ][-1] == [0, 3]
    for mode in ("max_size_cycle", "max_size", "sequential"):
        with pytest.raises(TypeError, match="length of a CombinedLoader"):
            len(CombinedLoader([Unsized(3), range(4)], mode))  # type: ignore[arg-type]


def test_nothing_to_combine_and_empty_loaders() -> None:
    for mode in MODES:
        assert (len(CombinedLoader([], mode)), list(CombinedLoader([], mode))) == (
            0,
            [],
        )
    assert list(CombinedLoader([range(0), range(3)], "max_size_cycle")) == []
    assert list(CombinedLoader([range(0), range(2)], "max_size")) == [
        [None, 0],
        [None, 1],
    ]


def test_loaders_that_end_together_are_not_started_again() -> None:
    starts = []

    class Counted(Unsized):
        def __iter__(self) -> Iterator[int]:
            starts.append(self.count)
            return super().__iter__()

    assert len(list(CombinedLoader([Counted(3), Counted(3)], "max_size_cycle"))) == 3
    assert starts == [3, 3]


def test_sequential_opens_a_loader_at_its_turn() -> None:
    opened = []

    class Counted(Unsized):
        def __iter__(self) -> Iterator[int]:
            opened.append(self.count)
            return super().__iter__()

    batches = iter(CombinedLoader([Counted(1), Counted(2)], "sequential"))
    assert (next(batches), opened) == (0, [1])
    assert (next(batches), opened) == (0, [1, 2])


def test_lists_of_batches_are_loaders() -> None:
    assert list(CombinedLoader({"a": [1, 2], "b": [(3, 4), (5, 6)]})) == [
        {"a": 1, "b": (3, 4)},
        {"a": 2, "b": (5, 6)},
    ]
    assert list(CombinedLoader(DataLoader([1, 2], batch_size=None))) == [1, 2]  # type: ignore[arg-type]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(DataError, match="unknown mode") as caught:
        CombinedLoader([], "min-size")  # type: ignore[arg-type]
    assert "did you mean 'min_size'?" in str(caught.value)


def loader(count: int, batch_size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(range(count), batch_size=batch_size, **options)  # type: ignore[arg-type]


def test_a_feed_takes_a_pytree_and_divides_each_leaf() -> None:
    tree = {"a": loader(12, 2), "b": [loader(8, 1)]}
    ranks = [
        [plain(batch) for batch in Feed(tree, rank=rank, size=2).epoch(0)]
        for rank in range(2)
    ]
    assert ranks[0][0] == {"a": [0, 1], "b": [[0]]}
    assert ranks[1][2] == {"a": [10, 11], "b": [[5]]}
    feed = Feed(tree, rank=1, size=2)
    assert ranks[1][3] == {"a": [2, 3], "b": [[7]]}  # "a" again, from its start
    assert (feed.length, feed.even, feed.per_rank_batch_size, feed.samples(0)) == (
        4,
        True,
        None,
        None,
    )
    assert feed.describe().startswith(
        "max_size_cycle (an epoch ends with the longest, the others restart) of: Data"
    )
    assert "; DataLoader over range, in order" in feed.describe()
    assert [len(rank) for rank in ranks] == [4, 4]


def test_a_list_of_batches_is_not_a_pytree() -> None:
    assert list(Feed([[1, 2], [3, 4]]).epoch(0)) == [[1, 2], [3, 4]]
    assert list(Feed([{"x": 1}]).epoch(0)) == [{"x": 1}]
    assert [plain(batch) for batch in Feed([loader(2, 1), loader(2, 1)]).epoch(0)] == [
        [[0], [0]],
        [[1], [1]],
    ]


def test_leaves_over_one_dataset_come_in_different_orders_that_are_reproducible() -> (
    None
):
    def read() -> list[Any]:
        torch.manual_seed(random.randrange(1000))
        return [
            plain(batch)
            for batch in Feed(
                {k: loader(30, 30, shuffle=True) for k in "ab"}, seed=1
            ).epoch(2)
        ]

    (batch,) = read()
    assert batch["a"] != batch["b"]
    assert sorted(batch["a"]) == sorted(batch["b"]) == list(range(30))
    assert read() == [batch]


def test_a_cycle_shuffles_each_pass() -> None:
    both = CombinedLoader(
        [loader(20, 20, shuffle=True), loader(3, 1)], "max_size_cycle"
    )
    passes = [plain(batch)[0] for batch in Feed(both).epoch(0)]
    assert len({str(order) for order in passes}) == 3
    assert all(sorted(order) == list(range(20)) for order in passes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2])
def test_start_continues_at_the_same_batch_as_a_whole_epoch(
    mode: Mode, size: int
) -> None:
    def feed(rank: int) -> Feed:
        leaves = [
            loader(13, 2, shuffle=True),
            loader(24, 1, shuffle=True),
            [1, 2, 3, 4],
        ]
        return Feed(CombinedLoader(leaves, mode), rank=rank, size=size)

    for rank in range(size):
        whole = [plain(batch) for batch in feed(rank).epoch(1)]
        assert len(whole) == feed(rank).length
        for start in range(len(whole) + 1):
            assert [plain(batch) for batch in feed(rank).epoch(1, start)] == whole[
                start:
            ]


@pytest.mark.parametrize("mode", MODES)
def test_start_reads_through_loaders_of_unknown_length(mode: Mode) -> None:
    feed = Feed(CombinedLoader([Unsized(3), loader(5, 1)], mode))
    whole = [plain(batch) for batch in feed.epoch(0)]
    for start in range(1, len(whole)):
        if mode in ("min_size", "max_size"):
            with pytest.warns(UserWarning, match="read and discarded"):
                assert [plain(batch) for batch in feed.epoch(0, start)] == whole[start:]
        else:
            assert [plain(batch) for batch in feed.epoch(0, start)] == whole[start:]


def test_a_rank_without_a_share_of_one_leaf() -> None:
    # Rank 1 has no share of the last batch of "short": samples 0, 1 | 2, 3 | 4.
    def last(mode: Mode) -> list[Any]:
        leaves = {"short": loader(5, 1), "long": loader(10, 1)}
        return [
            plain(batch)
            for batch in Feed(CombinedLoader(leaves, mode), rank=1, size=2).epoch(0)
        ]

    assert last("min_size")[2:] == [EMPTY]
    assert last("max_size")[2:] == [
        {"short": None, "long": [value]} for value in (5, 7, 9)
    ]
    assert last("max_size_cycle")[1:4] == [
        {"short": [3], "long": [3]},
        {"short": [3], "long": [5]},  # the batch before it, again
        {"short": [1], "long": [7]},
    ]
    assert last("sequential")[:4] == [[1], [3], EMPTY, [1]]
