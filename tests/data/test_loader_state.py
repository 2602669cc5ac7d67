"""A loader goes on in another process with the very batch that comes next."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests.data.streaming import Endless, Resetting, Rewinding, Sharded
from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.data import EMPTY, CombinedLoader, Feed

# Found again when torchdata's loader starts.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return (
        [plain(value) for value in batch] if isinstance(batch, (list, tuple)) else batch
    )


def saved(state: Any) -> Any:
    """Through the bytes of a checkpoint."""
    tensors: dict[str, Any] = {}
    tree = encode(state, tensors)
    return decode(tree, tensors)


class Reader:
    """Reads epochs as `Windows` does, ``ahead`` batches further than what is done; each process has its own."""

    def __init__(
        self,
        make: Callable[[], Any],
        limit: int | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.feed, self.limit = Feed(make(), rank=rank, size=size, seed=4), limit
        self.rank = rank

    def epoch(
        self, epoch: int, start: int = 0, ahead: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """(batch, the state once it is done)."""
        batches = self.feed.epoch(epoch, start)
        if self.limit is not None:
            batches = islice(batches, self.limit - start)
        waiting: list[Any] = []
        for at, batch in enumerate(batches, start + 1):
            waiting.append(batch)
            if len(waiting) > ahead:
                yield self._done(epoch, at - ahead, waiting.pop(0))
        for left in range(len(waiting), 0, -1):
            yield self._done(epoch, at - left + 1, waiting.pop(0))

    def _done(self, epoch: int, at: int, batch: Any) -> tuple[Any, Any]:
        self.feed.loader_state.forget(at - 1)
        return plain(batch), saved(self.feed.loader_state.state_dict(epoch, at))

    def at_end(self, epoch: int) -> Any:
        return saved(self.feed.loader_state.state_dict(epoch + 1, 0))


def undisturbed(
    make: Callable[[], Any], epochs: int, **options: Any
) -> list[list[Any]]:
    reader = Reader(make, **options)
    return [[batch for batch, _ in reader.epoch(epoch)] for epoch in range(epochs)]


def assert_resumes(
    make: Callable[[], Any], epochs: int = 3, ahead: int = 0, **options: Any
) -> None:
    """From inside each epoch and from the end of each, twice in a row."""
    whole = undisturbed(make, epochs, **options)
    assert sum(map(len, whole)) > epochs
    for epoch in range(epochs):
        count = len(whole[epoch])
        for at in range(1, count + 1):
            if at < count and at % 2 == 0 and count > 6:
                continue
            first = Reader(make, **options)
            state = None
            for e in range(epoch):
                assert [batch for batch, _ in first.epoch(e, ahead=ahead)] == whole[e]
            read = list(islice(first.epoch(epoch, ahead=ahead), at))
            assert [batch for batch, _ in read] == whole[epoch][:at]
            state = read[-1][1]
            second = Reader(make, **options)
            second.feed.loader_state.load_state_dict([state], 0)
            found = [batch for batch, _ in second.epoch(epoch, at, ahead)]
            assert found == whole[epoch][at:], (epoch, at)
            again = second.at_end(epoch)
            for e in range(epoch + 1, epochs):
                third = Reader(make, **options)
                third.feed.loader_state.load_state_dict([again], 0)
                assert [batch for batch, _ in third.epoch(e)] == whole[e], (
                    epoch,
                    at,
                    e,
                )
                again = third.at_end(e)


class SquareSampler(Sampler[int]):
    """Draws from a generator of NumPy's."""

    def __init__(self) -> None:
        self.rng, self.other, self.older = (
            np.random.default_rng(3),
            random.Random(4),
            np.random.RandomState(5),
        )

    def __iter__(self) -> Iterator[int]:
        order = self.rng.permutation(9).tolist()
        self.other.shuffle(order)
        self.older.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 9


def shuffled(**options: Any) -> Any:
    return DataLoader(
        range(11),
        2,
        shuffle=True,
        generator=torch.Generator().manual_seed(8),
        **options,
    )


def weighted() -> Any:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(
        range(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 9, generator=generator)
    )


def replaced() -> Any:
    sampler = RandomSampler(
        range(9),
        replacement=True,
        num_samples=70,
        generator=torch.Generator().manual_seed(2),
    )
    return DataLoader(range(9), batch_sampler=BatchSampler(sampler, 10, False))


KINDS: dict[str, Any] = {
    "rewinds": lambda: Rewinding(6),
    "resets": lambda: Resetting(6),
    "dataset": lambda: DataLoader(Sharded(), batch_size=4),
    "rolling dataset": lambda: DataLoader(Sharded(rolls=True), batch_size=4),
    "unbatched": lambda: DataLoader(Sharded(5), batch_size=None),
    "generator": shuffled,
    "generators of NumPy and Python": lambda: DataLoader(
        range(9), 2, sampler=SquareSampler()
    ),
    "weighted": weighted,
    "with replacement": replaced,
}


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("limit", [None, 2, 4])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_the_next_batch_is_the_next_batch(
    make: Any, limit: int | None, ahead: int
) -> None:
    assert_resumes(make, limit=limit, ahead=ahead)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_endless_stream_continues_over_epochs(ahead: int) -> None:
    assert undisturbed(Endless, 2, limit=3) == [[[0], [1], [2]], [[3], [4], [5]]]
    assert_resumes(Endless, limit=3, ahead=ahead)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rolls", "persistent", "limit"),
    [
        (False, False, None),
        pytest.param(False, False, 3, marks=pytest.mark.long),
        pytest.param(False, True, None, marks=pytest.mark.long),
        (True, True, 3),
    ],
)
def test_states_that_live_in_workers(
    rolls: bool, persistent: bool, limit: int | None
) -> None:
    def make() -> Any:
        return DataLoader(
            Sharded(rolls=rolls),
            batch_size=3,
            num_workers=2,
            persistent_workers=persistent,
        )

    assert_resumes(make, epochs=2, limit=limit)


def stateful_loader(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **options)


def test_torchdata_s_own_loader_resumes_from_its_state() -> None:
    assert_resumes(lambda: stateful_loader(Sharded(), batch_size=3))
    assert_resumes(lambda: stateful_loader(range(9), batch_size=2, shuffle=True))


def test_a_loader_of_torchdata_s_nodes_resumes_from_its_state() -> None:
    from torchdata.nodes import Batcher, IterableWrapper, Loader

    assert_resumes(lambda: Loader(Batcher(IterableWrapper(range(9)), 2)))


class Unsized:
    """Neither a length nor a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(self.count).unsqueeze(1))


LEAVES: dict[str, Any] = {
    "indexed": lambda: {
        "a": DataLoader(range(7), 2, shuffle=True),
        "b": [DataLoader(range(5), 1, shuffle=True)],
    },
    "a generator of its own": lambda: {
        "a": shuffled(),
        "b": DataLoader(range(5), 2, shuffle=True),
    },
    "stateful": lambda: {
        "a": DataLoader(Sharded(7), 2),
        "b": (Rewinding(3), DataLoader(range(5), 2, shuffle=True)),
    },
    "stateful and longer": lambda: [
        Rewinding(7),
        DataLoader(range(5), 2, shuffle=True),
    ],
    "no length": lambda: [Unsized(3), DataLoader(range(9), 2, shuffle=True)],
    "nested": lambda: [
        CombinedLoader(
            [Rewinding(2), DataLoader(range(5), 2, shuffle=True)], "max_size_cycle"
        ),
        Rewinding(5),
    ],
}


@pytest.mark.parametrize(
    "mode", ["min_size", "max_size_cycle", "max_size", "sequential"]
)
@pytest.mark.parametrize("leaves", LEAVES.values(), ids=LEAVES)
@pytest.mark.filterwarnings("ignore:Unsized cannot skip by index")
def test_loaders_that_are_read_together(leaves: Any, mode: Any) -> None:
    assert_resumes(lambda: CombinedLoader(leaves(), mode), epochs=2, ahead=1)


def test_read_batches_of_a_combined_loader_are_not_read_again() -> None:
    read: list[int] = []

    class Noting(Rewinding):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                read.append(int(batch))
                yield batch

    def make() -> Any:
        return CombinedLoader([Noting(3), DataLoader(range(9), 1)], "max_size_cycle")

    first = Reader(make)
    state = list(islice(first.epoch(0), 5))[-1][1]
    read.clear()
    second = Reader(make)
    second.feed.loader_state.load_state_dict([state], 0)
    assert len(list(second.epoch(0, 5))) == 4
    assert read == [1, 2, 0, 1, 2]  # in its second pass, and its last batch again


# -- several ranks ----------------------------------------------------------------------------------------------------


def ranks(make: Any, size: int, **options: Any) -> list[Reader]:
    return [Reader(make, rank=rank, size=size, **options) for rank in range(size)]


def rounds(
    readers: list[Reader], epoch: int, start: int = 0
) -> list[tuple[list[Any], list[Any]]]:
    """What all of them have in each micro-batch, and their states."""
    turns = zip(*(list(reader.epoch(epoch, start)) for reader in readers), strict=True)
    return [
        (
            [batch for batch, _ in turn if batch is not EMPTY],
            [state for _, state in turn],
        )
        for turn in turns
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_a_stream_that_all_ranks_read(size: int) -> None:
    def make() -> Any:
        return DataLoader(Sharded(16), batch_size=2)

    whole = rounds(ranks(make, size), 0)
    assert [i for batches, _ in whole for batch in batches for i in batch] == list(
        range(16)
    )
    for at, (_, states) in enumerate(whole, 1):
        readers = ranks(make, size)
        for reader in readers:
            reader.feed.loader_state.load_state_dict(states, reader.rank)
        assert [batches for batches, _ in rounds(readers, 0, at)] == [
            batches for batches, _ in whole[at:]
        ]


@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 1)])
def test_a_stream_resumes_on_another_number_of_ranks(then: int, now: int) -> None:
    def make() -> Any:
        return DataLoader(Sharded(24), batch_size=1)

    at = 4
    states = rounds(ranks(make, then), 0)[at - 1][1]
    readers = ranks(make, now)
    for reader in readers:
        reader.feed.loader_state.load_state_dict(states, reader.rank)
    found = [
        i
        for batches, _ in rounds(readers, 0, at * then // now)
        for batch in batches
        for i in batch
    ]
    assert found == list(range(at * then, 24))


def test_a_stream_divided_by_each_rank_needs_the_same_number_of_ranks() -> None:
    feed = Feed(Rewinding(9), shard=False, size=2)
    next(feed.epoch(0))
    state = saved(feed.loader_state.state_dict(0, 1))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)each rank read its own Rewinding.*the same number of ranks",
    ):
        Feed(Rewinding(9), shard=False).loader_state.load_state_dict([state, state], 0)
    again = Feed(Rewinding(9), shard=False, size=2)
    again.loader_state.load_state_dict([state, state], 0)
    assert next(again.epoch(0, 1)).tolist() == [1]


def test_a_rank_whose_data_ended_has_no_data_after_a_resume() -> None:
    feed = Feed(Rewinding(3), shard=False)
    assert len(list(feed.epoch(0))) == 3
    state = saved(
        feed.loader_state.state_dict(0, 5)
    )  # the other ranks are further by now
    again = Feed(Rewinding(3), shard=False)
    again.loader_state.load_state_dict([state], 0)
    assert list(again.epoch(0, 5)) == []
    assert [int(batch) for batch in again.epoch(1)] == [0, 1, 2]


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_another_number_of_workers_is_refused() -> None:
    feed = Feed(DataLoader(Sharded(), batch_size=2))
    next(feed.epoch(0))
    state = saved(feed.loader_state.state_dict(0, 1))
    with pytest.raises(
        CheckpointError, match=r"(?s)num_workers=0, and it is 2.*num_workers=0"
    ):
        Feed(
            DataLoader(Sharded(), batch_size=2, num_workers=2)
        ).loader_state.load_state_dict([state], 0)


def test_a_loader_in_place_of_another_begins_at_the_position() -> None:
    def state(loader: Any) -> Any:
        feed = Feed(loader)
        batches = feed.epoch(0)
        next(batches), next(batches)
        return saved(feed.loader_state.state_dict(0, 2))

    loaders: list[Callable[[], Any]] = [
        lambda: Rewinding(4),
        lambda: shuffled(),
        lambda: Unsized(4),
        lambda: CombinedLoader([Rewinding(4), Rewinding(4)]),
        lambda: CombinedLoader([Rewinding(4)], "max_size"),
        lambda: [1, 2, 3, 4],
    ]
    for then in loaders:
        for now in loaders:
            whole = [plain(batch) for batch in Feed(now()).epoch(0)]
            feed = Feed(now())
            feed.loader_state.load_state_dict([state(then())], 0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some read up to there
                assert [plain(batch) for batch in feed.epoch(0, 2)] == whole[2:]


def test_reading_on_does_not_change_a_state_that_was_taken() -> None:
    class Live(Rewinding):
        def __init__(self) -> None:
            super().__init__(9)
            self.seen: dict[str, list[int]] = {"all": []}

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                self.seen["all"].append(int(batch))
                yield batch

        def state_dict(self) -> dict[str, Any]:
            return {"i": self.i, "seen": self.seen}

    feed = Feed(Live())
    batches = feed.epoch(0)
    next(batches), next(batches), next(batches)
    state = feed.loader_state.state_dict(0, 2)
    assert state is not None
    assert state["state"]["loader"]["seen"] == {"all": [0]}


def test_plain_loaders_keep_nothing() -> None:
    for loader in (
        [1, 2],
        DataLoader(range(3)),
        {"a": DataLoader(range(3)), "b": [1, 2]},
    ):
        feed = Feed(loader)
        assert not feed.stateful
        list(feed.epoch(0))
        assert (
            feed.loader_state.state_dict(0, 2)
            is feed.loader_state.state_dict(1, 0)
            is None
        )


def test_an_iterator_resumes_over_epochs_by_reading_to_its_position() -> None:
    def stream() -> Iterator[Any]:
        while True:
            yield torch.rand(1)  # what is read and thrown away draws nothing

    torch.manual_seed(3)
    feed = Feed(stream())
    whole = [
        [next(batches).item() for _ in range(3)]
        for batches in (feed.epoch(0), feed.epoch(1))
    ]
    state = saved(feed.loader_state.state_dict(1, 1, read=4))
    again = Feed(iter(torch.tensor(whole).flatten()))
    again.loader_state.load_state_dict([state], 0)
    before = torch.get_rng_state()
    with pytest.warns(
        UserWarning, match="to start at batch 4, 4 batches were read and discarded"
    ):
        assert [batch.item() for batch in again.epoch(1, 1)] == whole[1][1:]
    assert torch.equal(torch.get_rng_state(), before)


class Drawing(IterableDataset[Any]):
    """Its order, and what a sample looks like, are drawn from the generators of this process."""

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(12).tolist():
            yield torch.tensor([i, random.random(), np.random.rand()])


def test_a_stream_that_is_read_again_draws_its_order_as_it_did() -> None:
    torch.manual_seed(5)
    whole, states = Reader(lambda: DataLoader(Drawing(), batch_size=2)), []
    rows = []
    for epoch in range(2):
        for row, state in whole.epoch(epoch):
            rows.append(row)
            states.append((saved(rng_state()), state))
    for epoch, at in ((0, 1), (0, 4), (1, 3)):
        rng, state = states[6 * epoch + at - 1]
        again = Reader(lambda: DataLoader(Drawing(), batch_size=2))
        again.feed.loader_state.load_state_dict([state], 0)
        restore_rng(rng)
        with pytest.warns(
            UserWarning,
            match=f"to start at batch {at}, {at} batch(es were| was) read and discarded",
        ):
            found = [row for row, _ in again.epoch(epoch, at)]
        assert found == rows[6 * epoch + at : 6 * epoch + 6]


def test_loaders_that_make_their_batches_in_their_own_way_are_left_alone() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1, 2, 3])

    for loader in (
        Own(Sharded()),
        DataLoader(Sharded(), num_workers=2, in_order=False),
    ):
        feed = Feed(loader)
        assert (type(feed._source.loader), feed.stateful) == (type(loader), False)  # type: ignore[attr-defined]


def test_workers_end_with_the_reading() -> None:
    feed = Feed(DataLoader(Sharded(), batch_size=2, num_workers=1))
    batches = feed.epoch(0)
    next(batches)
    del batches
    assert vars(feed._source.loader)["_iterator"] is None  # type: ignore[attr-defined]


class Slow:
    """A stream that takes its time."""

    def __iter__(self) -> Iterator[int]:
        for i in range(12):
            time.sleep(0.25)
            yield i


@pytest.mark.slow
def test_reading_for_long_shows_a_bar_on_one_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(
        UserWarning,
        match=r"10 batches were read and discarded in 2\.\d s\. With state_dict\(\)",
    ):
        assert next(Feed(Slow()).epoch(0, 10)) == 10
    assert "reading up to where it was" in capsys.readouterr().err
    assert next(Feed(Slow(), rank=1, size=2, shard=False).epoch(0, 9)) == 9
    assert capsys.readouterr().err == ""
