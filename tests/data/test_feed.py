"""What each rank reads: together exactly the global micro-batches of one process."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from trainer_kit.core.errors import DataError
from trainer_kit.core.seed import rng_state
from trainer_kit.data import EMPTY, Feed


class Recording(Dataset[int]):
    """Numbers, and which of them were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Careless(Sampler[int]):
    """A custom sampler that draws from every global generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield (
                random.randrange(100)
                + int(np.random.randint(100))
                + int(torch.randint(100, ()))
            ) % self.count


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(11)


def plain(batches: Any) -> list[Any]:
    return [batch if batch is EMPTY else batch.tolist() for batch in batches]


def on_ranks(
    loader: Any, size: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[Any]]:
    return [
        plain(Feed(loader, rank=rank, size=size, **options).epoch(epoch, start))
        for rank in range(size)
    ]


def together(ranks: list[list[Any]]) -> list[list[Any]]:
    """The global micro-batches; also checks that every rank has the same number of batches."""
    assert len({len(batches) for batches in ranks}) == 1
    return [
        [sample for part in parts if part is not EMPTY for sample in part]
        for parts in zip(*ranks, strict=True)
    ]


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(batches))


def globals_state() -> list[Any]:
    state = rng_state()
    return [
        state["python"],
        [str(part) for part in state["numpy"]],
        state["torch"].tolist(),
    ]


SAMPLERS = {
    "sequential": lambda data: SequentialSampler(data),
    "random": lambda data: RandomSampler(data),
    "replacement": lambda data: RandomSampler(data, replacement=True, num_samples=19),
    "weighted": lambda data: WeightedRandomSampler(
        [1.0 + i for i in range(len(data))], 17
    ),
    "custom": lambda data: Careless(len(data)),
    "unsized": lambda data: Unsized(),
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_ranks_together_read_the_samples_of_one_process(
    name: str, drop_last: bool
) -> None:
    data = range(11)
    for size in (1, 2, 3, 4):
        loader = DataLoader(
            data, batch_size=2, sampler=SAMPLERS[name](data), drop_last=drop_last
        )
        whole = DataLoader(
            data, batch_size=2 * size, sampler=SAMPLERS[name](data), drop_last=drop_last
        )
        for epoch in (0, 1):
            expected = plain(Feed(whole, seed=5).epoch(epoch))
            assert together(on_ranks(loader, size, epoch, seed=5)) == expected
            feed = Feed(loader, rank=size - 1, size=size, seed=5)
            assert feed.length == (None if name == "unsized" else len(expected))
            assert feed.even == (size == 1 or name != "unsized")
            assert feed.per_rank_batch_size == 2
            list(feed.epoch(epoch))
            assert [feed.samples(i) for i in range(len(expected) + 1)] == [
                *map(len, expected),
                None,
            ]


def test_a_short_last_batch_is_divided_evenly_in_contiguous_blocks() -> None:
    loader = DataLoader(range(13), batch_size=4)
    assert on_ranks(loader, 2) == [[[0, 1, 2, 3], [8, 9, 10]], [[4, 5, 6, 7], [11, 12]]]
    assert [part[-1] for part in on_ranks(loader, 3)] == [[12], EMPTY, EMPTY]
    assert together(on_ranks(DataLoader(range(3), batch_size=8), 4)) == [[0, 1, 2]]


def test_lengths_and_sample_counts_are_known_before_reading() -> None:
    feed = Feed(DataLoader(range(13), batch_size=4), rank=1, size=3)
    assert (feed.length, feed.even, feed.per_rank_batch_size) == (2, True, 4)
    assert [feed.samples(i) for i in range(3)] == [12, 1, None]
    dropping = Feed(DataLoader(range(13), batch_size=4, drop_last=True), rank=1, size=3)
    assert (dropping.length, dropping.samples(0), dropping.samples(1)) == (1, 12, None)


def test_epochs_differ_and_are_reproducible() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        torch.manual_seed(random.randrange(1000))  # whatever the global state
        return plain(
            Feed(DataLoader(range(50), batch_size=5, shuffle=True), seed=seed).epoch(
                epoch
            )
        )

    assert order(0, 0) == order(0, 0)
    assert order(0, 1) == order(0, 1)
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sorted(flat(order(0, 0))) == list(range(50))


def test_one_feed_gives_every_epoch_as_a_fresh_one_does() -> None:
    feed = Feed(DataLoader(range(20), batch_size=3, shuffle=True), rank=1, size=2)
    orders = [plain(feed.epoch(epoch)) for epoch in (0, 1, 0)]
    next(feed.epoch(2))  # broken off
    assert [*orders, plain(feed.epoch(1))] == [
        orders[0],
        orders[1],
        orders[0],
        orders[1],
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_global_generators_are_untouched(name: str) -> None:
    data = range(11)
    feed = Feed(
        DataLoader(data, batch_size=2, sampler=SAMPLERS[name](data)), rank=0, size=2
    )
    before = globals_state()
    for _ in feed.epoch(0):
        assert globals_state() == before
    assert globals_state() == before


def test_a_sampler_with_its_own_generator_is_obeyed() -> None:
    def raw(seed: int) -> DataLoader[int]:
        return DataLoader(
            range(12),
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
        )  # type: ignore[arg-type]

    loader, feed = raw(3), Feed(raw(3), seed=99)
    for epoch in range(3):  # the same order as a hand-written loop, epoch after epoch
        assert plain(feed.epoch(epoch)) == plain(loader)
    assert "its own generator" in feed.describe()


def test_endless_samplers_are_drawn_in_chunks() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield random.randrange(100)

    def parts(size: int) -> list[list[Any]]:
        feeds = [
            Feed(
                DataLoader(range(100), 4096 // size, sampler=Endless()),
                rank=r,
                size=size,
            )
            for r in range(size)
        ]
        assert feeds[0].length is None
        streams = [feed.epoch(0) for feed in feeds]
        return [
            [next(stream).tolist() for stream in streams] for _ in range(20)
        ]  # more than one chunk

    before = globals_state()
    one, two = parts(1), parts(2)
    assert [turn[0] for turn in one] == [turn[0] + turn[1] for turn in two]
    assert globals_state() == before


def test_a_batch_sampler_deals_whole_batches() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6], [7, 8]]
    loader = DataLoader(range(9), batch_sampler=batches)
    assert on_ranks(loader, 2) == [[[0, 1, 2], [4, 5], [7, 8]], [[3], [6], EMPTY]]
    feed = Feed(loader, rank=1, size=2)
    assert (feed.length, feed.even, feed.samples(0)) == (3, True, None)
    list(feed.epoch(0))
    assert [feed.samples(i) for i in range(4)] == [4, 3, 2, None]
    assert on_ranks(loader, 2, start=1) == [[[4, 5], [7, 8]], [[6], EMPTY]]

    shuffled = DataLoader(
        range(9), batch_sampler=BatchSampler(RandomSampler(range(9)), 2, False)
    )
    assert together(on_ranks(shuffled, 3)) == together(
        [plain(Feed(DataLoader(range(9), 6, shuffle=True)).epoch(0))]
    )


def test_a_distributed_sampler_is_obeyed_and_gets_the_epoch() -> None:
    data = range(10)
    for epoch in (0, 1):
        for rank in range(3):
            sampler: DistributedSampler[int] = DistributedSampler(
                data, num_replicas=3, rank=rank, seed=4
            )  # type: ignore[arg-type]
            feed = Feed(
                DataLoader(data, batch_size=2, sampler=sampler), rank=rank, size=3
            )
            got = plain(feed.epoch(epoch))
            sampler.set_epoch(epoch)
            assert flat(got) == list(sampler)
            assert (feed.length, feed.even, feed.samples(0), feed.samples(1)) == (
                2,
                True,
                6,
                6,
            )


def test_a_distributed_sampler_for_other_ranks_is_refused() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(
        range(10), num_replicas=4, rank=3
    )  # type: ignore[arg-type]
    with pytest.raises(DataError, match="shards the data differently from") as caught:
        Feed(DataLoader(range(10), sampler=sampler), rank=1, size=2)
    assert "num_replicas=4, rank=3 on data rank 1 of 2" in str(caught.value)


def test_evaluation_undoes_the_padding_of_a_distributed_sampler() -> None:
    data = range(10)
    ranks = []
    for rank in range(4):
        sampler: DistributedSampler[int] = DistributedSampler(
            data, num_replicas=4, rank=rank, shuffle=False
        )  # type: ignore[arg-type]
        ranks.append(
            plain(
                Feed(
                    DataLoader(data, batch_size=2, sampler=sampler),
                    rank=rank,
                    size=4,
                    ordered=True,
                ).epoch(0)
            )
        )
        assert sampler.num_replicas == 4
    assert together(ranks) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    assert [part[-1] for part in ranks] == [[8], [9], EMPTY, EMPTY]


def test_ordered_obeys_order_and_drop_last() -> None:
    assert together(on_ranks(DataLoader(range(11), batch_size=2), 3, ordered=True)) == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
    ]
    dropping = DataLoader(range(11), batch_size=2, drop_last=True)
    assert together(on_ranks(dropping, 3, ordered=True)) == [[0, 1, 2, 3, 4, 5]]


def test_without_sharding_every_rank_reads_everything() -> None:
    class Own(Sampler[int]):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    assert (
        on_ranks(
            DataLoader(range(4), batch_size=2, sampler=Own()), 2, epoch=3, shard=False
        )
        == [[[0, 1], [2, 3]]] * 2
    )
    assert Own.epochs == [3, 3]
    feed = Feed(DataLoader(range(4)), rank=0, size=2, shard=False)
    assert (feed.length, feed.even, feed.samples(0)) == (4, False, None)


def test_the_batch_size_can_be_replaced() -> None:
    loader = DataLoader(range(10), batch_size=5)
    feed = Feed(loader, rank=1, size=2, batch_size=2)
    assert (feed.per_rank_batch_size, feed.length, plain(feed.epoch(0))) == (
        2,
        3,
        [[2, 3], [6, 7], [9]],
    )
    assert loader.batch_size == 5
    for fixed in (DataLoader(range(4), batch_sampler=[[0], [1]]), [1, 2], iter([1])):
        with pytest.raises(DataError, match="cannot set the batch size of this"):
            Feed(fixed, batch_size=2)


def test_start_skips_by_index() -> None:
    for shuffle in (False, True):
        data = Recording(40)
        loader = DataLoader(data, batch_size=3, shuffle=shuffle)
        full = plain(Feed(loader, rank=1, size=2, seed=1).epoch(4))
        data.read.clear()
        assert plain(Feed(loader, rank=1, size=2, seed=1).epoch(4, start=3)) == full[3:]
        assert data.read == flat(full[3:])
    assert plain(Feed(loader).epoch(0, start=14)) == []


def test_loaders_that_do_not_collate_are_divided_by_index() -> None:
    data = Recording(7)
    loader = DataLoader(data, batch_size=None)
    assert [list(Feed(loader, rank=r, size=3).epoch(0)) for r in range(3)] == [
        [0, 3, 6],
        [1, 4, EMPTY],
        [2, 5, EMPTY],
    ]
    assert sorted(data.read) == list(range(7))
    data.read.clear()
    assert list(Feed(loader, rank=1, size=3).epoch(0, start=1)) == [4, EMPTY]
    assert data.read == [4]


def test_the_users_loader_is_not_changed() -> None:
    class Mine(DataLoader[int]):
        label = "mine"

    loader = Mine(range(10), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    loader.extra = object()  # type: ignore[attr-defined]
    before = copy.copy(loader.__dict__)
    feed = Feed(loader, rank=1, size=2)
    list(feed.epoch(0))
    assert loader.__dict__ == before
    rebuilt = feed._source.loader  # type: ignore[attr-defined]
    assert type(rebuilt) is Mine
    assert rebuilt.extra is loader.extra  # type: ignore[attr-defined]


def test_a_subclass_that_ignores_its_batch_sampler_is_an_error_not_a_silent_copy() -> (
    None
):
    class Deaf(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter([torch.tensor([1]), torch.tensor([2])])

    assert plain(Feed(Deaf(range(2))).epoch(0)) == [[1], [2]]  # type: ignore[arg-type]
    with pytest.raises(DataError, match="does not read its batch sampler"):
        list(Feed(Deaf(range(2)), size=2).epoch(0))  # type: ignore[arg-type]


class Stopping(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration
        return index


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_stop_iteration_from_a_dataset_is_an_error(workers: int) -> None:
    feed = Feed(DataLoader(Stopping(), batch_size=2, num_workers=workers))
    batches = feed.epoch(0)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(
        DataError,
        match="StopIteration from user code ended the data after 2 batches of 5",
    ) as caught:
        next(batches)
    assert "Stopping" in str(caught.value)
    del feed, batches, caught
    gc.collect()  # the traceback is a cycle that keeps the loader's workers, for which the leak check would wait


class Noisy(Dataset[Any]):
    """A sample and what was drawn for it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.rand()],
            dtype=torch.float64,
        )


def test_workers_give_the_same_samples_and_augmentations() -> None:
    def read(workers: int, size: int, start: int = 0) -> list[Any]:
        """Two epochs, by sample."""
        found = []
        persistent = workers > 1
        loader = DataLoader(
            Noisy(),
            12 // (2 * size),
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent,
        )
        feeds = [Feed(loader, rank=rank, size=size) for rank in range(size)]
        for epoch in (0, 1):
            parts = zip(*(feed.epoch(epoch, start) for feed in feeds), strict=True)
            found.append(
                [row for part in parts for batch in part for row in batch.tolist()]
            )
        return found

    before = globals_state()
    one = read(workers=1, size=1)
    assert read(workers=2, size=1) == one
    assert read(workers=2, size=2) == one
    assert [rows[6:] for rows in one] == read(workers=2, size=1, start=1)
    assert globals_state() == before
    drawn = [row[1] for rows in one for row in rows]
    assert len(set(drawn)) == 24  # another draw for each sample, in each epoch


def test_without_workers_the_same_samples_are_seeded_alike() -> None:
    def read(
        workers: int, reproducible: bool = True, size: int = 1, start: int = 0
    ) -> list[Any]:
        loader = DataLoader(Noisy(), 6 // size, shuffle=True, num_workers=workers)
        feeds = [
            Feed(loader, rank=rank, size=size, reproducible=reproducible)
            for rank in range(size)
        ]
        parts = zip(*(feed.epoch(1, start) for feed in feeds), strict=True)
        return [row for part in parts for batch in part for row in batch.tolist()]

    before = globals_state()
    one = read(workers=0)
    assert globals_state() == before
    assert one == read(workers=2) == read(workers=2, reproducible=False)
    assert one == read(workers=0, size=2)
    assert one[6:] == read(workers=0, start=1)
    assert globals_state() == before
    assert one != read(workers=0, reproducible=False)
    assert globals_state() != before


def test_seeding_a_stream_by_sample_is_refused() -> None:
    with pytest.warns(UserWarning, match="a generator is a stream"):
        Feed((i for i in range(3)), reproducible=True)


def test_describe_is_one_line() -> None:
    lines = {
        Feed(DataLoader(range(4))).describe(),
        Feed(DataLoader(range(4), 2, shuffle=True), size=2).describe(),
        Feed([1, 2, 3], size=2).describe(),
        Feed(iter([1])).describe(),
    }
    assert lines == {
        "DataLoader over range, in order (SequentialSampler)",
        "DataLoader over range, shuffled by (seed, epoch) (RandomSampler),"
        " 2 consecutive blocks of 2 samples to 2 ranks",
        "list of 3 batches, in its order, one in 2 by index",
        "list_iterator, in its order",
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_is_fed_like_any_other() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def ranks() -> list[list[Any]]:
        return [
            plain(
                Feed(
                    module.StatefulDataLoader(range(10), batch_size=2, shuffle=True),
                    rank=r,
                    size=2,
                ).epoch(0)
            )
            for r in range(2)
        ]

    first = ranks()
    assert first == ranks()
    assert sorted(flat(together(first))) == list(range(10))


@pytest.mark.parametrize(
    ("thing", "fix"),
    [(range(3).__len__, "call it"), (Recording(3), "a DataLoader"), ("abc", "list")],
)
def test_an_object_that_is_not_a_loader_is_refused(thing: Any, fix: str) -> None:
    with pytest.raises(DataError, match="not a loader") as caught:
        Feed(thing)
    assert fix in str(caught.value)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(DataError, match="0 to size - 1"):
        Feed([1], rank=2, size=2)


def test_a_pickled_empty_is_the_same_object() -> None:
    assert copy.deepcopy(EMPTY) is EMPTY


@pytest.mark.parametrize(
    ("loader", "draws"),
    [
        ([torch.ones(2)], False),
        (DataLoader(range(4)), True),
        (DataLoader(range(4), num_workers=1), False),
        ({"a": [1, 2], "b": DataLoader(range(4), num_workers=1)}, False),
        ({"a": [1, 2], "b": DataLoader(range(4))}, True),
        (range(3), True),
    ],
)
def test_loaders_that_draw_in_this_process_are_not_prefetched(
    loader: Any, draws: bool
) -> None:
    """A checkpoint has the generators as they are after a step: a batch that was read by then draws again."""
    assert Feed(loader).draws is draws
    assert not Feed(loader, reproducible=True).draws
