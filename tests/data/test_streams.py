"""Shuffled and mixed streams: their order, their shares, and a position that is exact and small."""

from __future__ import annotations

import io
import math
import os
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.data.streaming import Sharded
from trainer_kit.core.errors import CheckpointError, DataError
from trainer_kit.data import mix, pack, shuffle
from trainer_kit.data.shuffled import Permutation
from trainer_kit.data.streams import ReplayedCursor, integers_from_bytes
from trainer_kit.testing import check_loader

# Found again when torchdata's loader starts.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Loads(Dataset[int]):
    """Records which samples were loaded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Plain(IterableDataset[int]):
    """No state, and another order in each epoch."""

    def __init__(self, count: int = 23) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class DividesAmongWorkers(IterableDataset[int]):
    """Each worker would read its own samples."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, 23, step))


SOURCES: dict[str, Any] = {
    "map-style": lambda: range(23),
    "iterable": Plain,
    "iterable with a state": lambda: Sharded(23),
    "iterable that divides itself among workers": DividesAmongWorkers,
}


def streams(source: Any) -> dict[str, Any]:
    """Every way to combine streams."""
    return {
        "buffer": lambda: shuffle(source(), 5, seed=3),
        "mixture": lambda: mix({"a": source(), "b": range(100, 107)}, until="all"),
        "nested": lambda: shuffle(
            mix(
                {"a": shuffle(source(), 4), "b": shuffle(range(100, 107))},
                {"a": 3, "b": 1},
                until=40,
            ),
            6,
        ),
    }


@pytest.mark.parametrize("combination", ["buffer", "mixture", "nested"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_resume_is_exact(source: Any, combination: str) -> None:
    make = streams(source)[combination]
    report = check_loader(
        lambda workers: DataLoader(make(), batch_size=3),
        workers=[0],
        positions=None,
    )
    report.raise_if_failed()
    assert {check.status for check in report.checks} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ranks"),
    [
        (range(23), 1),
        pytest.param(range(23), 2, marks=pytest.mark.long),
        pytest.param(DividesAmongWorkers(), 1, marks=pytest.mark.long),
        (DividesAmongWorkers(), 2),
    ],
)
def test_a_resume_is_exact_in_workers(source: Any, ranks: int) -> None:
    make = streams(lambda: source)["nested"]
    report = check_loader(
        lambda workers: DataLoader(make(), batch_size=3, num_workers=workers),
        workers=[2],
        ranks=[ranks],
        positions=1,
    )
    report.raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_number_of_workers_does_not_change_the_order_of_samples(
    source: Any,
) -> None:
    make = streams(source)["nested"]
    orders = [
        list(DataLoader(make(), batch_size=None, num_workers=workers))
        for workers in (0, 1, 2)
    ]
    assert orders[0] == orders[1] == orders[2]


def state_after(stream: Any, count: int) -> Any:
    samples = iter(stream)
    for _ in range(count):
        next(samples)
    return stream.state_dict()


def test_a_shuffle_buffer_holds_positions_and_no_samples() -> None:
    source = Loads(1000)
    stream = shuffle(source, 20)
    state = state_after(stream, 500)["cursor"]["source"]
    needed = integers_from_bytes(state["needed"])
    assert len(needed) == 19
    assert state["read"] == 519
    assert 0 < state["anchor"] <= min(needed)
    # At most what the buffer's oldest sample is old, and the distance of two anchors.
    assert state["read"] - state["anchor"] <= 6 * 20
    assert len(source.loaded) == 500


def test_a_resume_knows_that_a_shuffled_source_has_ended() -> None:
    """The resumed mixture went on until the turn of the source that had ended."""

    def mixture() -> Any:
        sources = {"a": shuffle(range(10), 4), "b": range(100, 190)}
        return mix(sources, {"a": 1, "b": 9}, until="all")

    order = list(mixture())
    for position in range(len(order) - 15, len(order) + 1):
        state = state_after(mixture(), position)
        resumed = mixture()
        resumed.load_state_dict(state)
        assert list(resumed) == order[position:]


def test_a_resume_loads_no_sample_twice() -> None:
    state = state_after(shuffle(Loads(1000), 20), 500)
    source = Loads(1000)
    resumed = shuffle(source, 20)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert source.loaded == rest
    assert len(rest) == 500


def test_no_sample_stays_in_the_buffer_for_long() -> None:
    order = list(shuffle(range(2000), 10))
    assert sorted(order) == list(range(2000))
    delays = [place - sample for place, sample in enumerate(order)]
    assert max(delays) <= 4 * 10 + 1
    assert min(delays) >= -10


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    for options in ({"buffer": 8}, {}):
        orders = []
        for seed, epoch in ((0, 0), (0, 1), (1, 0)):
            stream = shuffle(range(40), seed=seed, **options)
            stream.set_epoch(epoch)
            orders.append(tuple(stream))
            assert sorted(stream) == list(range(40))
        assert len(set(orders)) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100])
def test_a_permutation_has_every_index_once(count: int) -> None:
    permutation = Permutation(count, seed=5)
    assert sorted(map(permutation, range(count))) == list(range(count))


def test_a_permutation_moves_every_index_anywhere() -> None:
    """The places of one index over many seeds are uniform, to four standard deviations."""
    places = Counter(Permutation(10, seed)(0) for seed in range(2000))
    assert len(places) == 10
    assert all(abs(count - 200) < 4 * math.sqrt(180) for count in places.values())


def test_a_billion_indices_take_no_memory() -> None:
    stream = shuffle(range(10**9), seed=1)
    state = state_after(stream, 3)
    assert state["cursor"] == 3
    assert len(set(islice(stream, 100))) == 100


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_shares_hold_at_every_prefix(count: int) -> None:
    draw = random.Random(count)
    weights = {str(number): draw.random() ** 3 + 1e-6 for number in range(count)}
    total = sum(weights.values())
    samples = Counter[str]()
    names = {name: [name] for name in weights}
    for drawn, name in enumerate(mix(names, weights, until=3000), 1):
        samples[name] += 1
        for source, weight in weights.items():
            deviation = samples[source] - drawn * weight / total
            assert -1 - math.log(count) < deviation < 1


def ramp(drawn: int) -> dict[str, float]:
    """From the first source to the second one within 100 samples."""
    second = min(drawn / 100, 1.0)
    return {"a": 1 - second, "b": second}


def test_weights_may_change_on_a_schedule() -> None:
    def make() -> Any:
        return mix({"a": range(7), "b": range(50, 57)}, ramp, until=150)

    order = list(make())
    shares = [sum(sample >= 50 for sample in order[i : i + 50]) for i in (0, 50, 100)]
    assert shares == [pytest.approx(12, abs=1), pytest.approx(37, abs=1), 50]
    resumed = make()
    resumed.load_state_dict(state_after(make(), 70))
    assert list(resumed) == order[70:]


def test_weights_may_change_between_two_runs() -> None:
    sources = {"a": range(50), "b": range(50, 100)}
    resumed = mix(sources, {"a": 0, "b": 1}, until=20)
    resumed.load_state_dict(state_after(mix(sources, {"a": 1, "b": 0}, until=20), 10))
    assert list(resumed) == list(range(50, 60))


@pytest.mark.parametrize(
    ("until", "expected", "epochs"),
    [
        ("first", "AaBbCcD", {"small": 0, "large": 0}),
        ("all", "AaBbCcDdAeBfCg", {"small": 1, "large": 0}),
        (3, "AaB", {"small": 0, "large": 0}),
    ],
)
def test_where_an_epoch_ends(until: Any, expected: str, epochs: Any) -> None:
    mixture = mix({"large": list("abcdefg"), "small": list("ABCD")}, until=until)
    assert "".join(mixture) == expected
    assert mixture.epochs == epochs
    assert sum(mixture.counts.values()) == len(expected)


def test_weights_may_be_tensors() -> None:
    weights = {"a": torch.tensor(3), "b": torch.tensor(1.0)}
    mixture = mix({"a": [1], "b": [2]}, weights, until=8)
    assert Counter(mixture) == {1: 6, 2: 2}


def test_a_mixture_without_an_end() -> None:
    mixture = mix({"a": [1, 2], "b": [3]}, until=None)
    assert len(list(islice(mixture, 100))) == 100
    assert mixture.counts == {"a": 50, "b": 50}
    assert mixture.epochs == {"a": 24, "b": 49}


def test_a_source_that_begins_again_has_the_next_epoch() -> None:
    mixture = mix({"a": Plain(4)}, until=12)
    passes = [list(islice(mixture, first, first + 4)) for first in (0, 4, 8)]
    assert all(sorted(samples) == [0, 1, 2, 3] for samples in passes)
    assert len(set(map(tuple, passes))) > 1


def test_samples_carry_the_name_of_their_source() -> None:
    sources = {name: [{"x": torch.ones(1)}] for name in ("web", "code")}
    loader = DataLoader(mix(sources, until=4, key="source"), batch_size=4)
    (batch,) = loader
    assert Counter(batch["source"]) == {"web": 2, "code": 2}
    with pytest.raises(DataError, match=r"must be a dict\n  found: int from web"):
        list(mix({"web": [1]}, key="source"))


def test_names_in_another_order_keep_their_positions() -> None:
    state = state_after(mix({"a": range(9), "b": range(10, 19)}, until=12), 6)
    resumed = mix({"b": range(10, 19), "a": range(9)}, until=12)
    resumed.load_state_dict(state)
    assert sorted(resumed) == [3, 4, 5, 13, 14, 15]


class Divided(Plain):
    """Reads the part of one of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2
        self.rank = 0


SHARED = Plain()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shuffle(Plain()), "only a map-style dataset can be permuted"),
        (lambda: shuffle(range(3), 0), "at least one sample"),
        (lambda: shuffle(iter(range(3)), 2), "can be read only once"),
        (lambda: shuffle("text", 2), "found: str"),
        (lambda: shuffle({"a": 1}, 2), "found: dict"),
        (lambda: shuffle(3, 2), "found: int"),
        (lambda: mix({}), "at least one source"),
        (lambda: mix({"a": range(3)}, until="last"), "until='last'"),
        (lambda: mix({"a": range(3)}, {"b": 1}), "for the sources a"),
        (lambda: mix({"a": range(3)}, {"a": -1}), "not negative"),
        (lambda: mix({"a": range(3)}, {"a": 0}), "one above zero"),
        (lambda: mix({"a": range(3)}, {"a": math.nan}), "not negative"),
        (
            lambda: mix({"a": [1], "b": [2]}, {"a": 1, "b": 0}, until="all"),
            "every source must be read",
        ),
        (lambda: list(mix({"a": []}, until=3)), "has no samples"),
        (lambda: list(mix({"a": [], "b": [1, 2]}, until="all")), "has no samples"),
        (
            lambda: mix({"a": SHARED, "b": shuffle(SHARED, 2)}),
            "one Plain in a and in b",
        ),
        (
            lambda: mix({"a": range(9), "b": mix({"c": SHARED}), "d": SHARED}),
            "one Plain in b and in d",
        ),
        (
            lambda: list(mix({"a": shuffle(Divided(), 2), "b": range(9)})),
            "a sharded, b read by every rank",
        ),
    ],
)
def test_mistakes_are_errors(make: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def test_another_mixture_or_shorter_data_are_refused_on_a_resume() -> None:
    state = state_after(mix({"a": range(9), "b": range(9)}), 5)
    resumed = mix({"a": range(9), "c": range(9)})
    resumed.load_state_dict(state)
    with pytest.raises(CheckpointError, match="has the sources a, c, and had a, b"):
        list(resumed)
    shorter = shuffle(Plain(10), 4)
    shorter.load_state_dict(state_after(shuffle(Plain(20), 4), 15))
    with pytest.raises(CheckpointError, match=r"Plain ended after \d+ samples; the"):
        list(shorter)


def test_a_shorter_mixture_ends_where_a_longer_one_was_saved() -> None:
    """It read on for ever: its end was already behind it."""
    sources = {"a": range(100), "b": range(100)}
    mixture = mix(sources, until=20)
    list(islice(mixture, 10))
    shorter = mix(sources, until=5)
    shorter.load_state_dict(mixture.state_dict())
    assert list(islice(shorter, 30)) == []


@pytest.mark.parametrize("until", [-1, 2.5, "last"])
def test_an_end_of_a_mixture_that_never_comes_is_refused(until: Any) -> None:
    with pytest.raises(DataError, match="an epoch of a mixture ends"):
        mix({"a": range(3)}, until=until)


class ResetsLate(IterableDataset[int]):
    """Its generator begins with the first sample: until then its state is that of the pass before."""

    def __init__(self, count: int = 6) -> None:
        self.count = count
        self.position = 0
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        self.position = self.first
        self.first = 0
        while self.position < self.count:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["position"]


def test_a_state_before_the_first_sample_of_a_second_pass() -> None:
    """It was the end of the first pass: the resumed epoch had no samples."""
    stream = shuffle(ResetsLate(), 2)
    list(stream)
    iter(stream)
    resumed = shuffle(ResetsLate(), 2)
    resumed.load_state_dict(stream.state_dict())
    assert len(list(resumed)) == 6


def test_a_resumed_source_keeps_its_position_until_it_is_read() -> None:
    """Two resumes without a sample between them: the second one began at the start."""
    stream = mix({"a": ResetsLate(), "b": range(10, 40)}, {"a": 1, "b": 5})
    state = state_after(stream, 10)
    second = mix({"a": ResetsLate(), "b": range(10, 40)}, {"a": 1, "b": 5})
    second.load_state_dict(state)
    state = state_after(second, 1)
    third = mix({"a": ResetsLate(), "b": range(10, 40)}, {"a": 1, "b": 5})
    third.load_state_dict(state)
    expected = list(mix({"a": ResetsLate(), "b": range(10, 40)}, {"a": 1, "b": 5}))
    assert list(third) == expected[11:]


def test_positions_to_read_from_do_not_accumulate_without_a_state() -> None:
    for stream in (shuffle(range(5000), 10), pack([[1, 2, 3]] * 5000, 8, open_rows=2)):
        rows = iter(stream)
        for _ in range(1000):
            next(rows)
        replayed = vars(vars(rows)["_cursor"])["_source"]
        assert isinstance(replayed, ReplayedCursor)
        assert len(vars(replayed)["_anchors"]) < 10


def test_a_permutation_of_few_indices_is_uniform() -> None:
    """Chi-square over all orders of 4 indices and over places in 16; 4 rounds failed."""
    seeds = 4800
    orders = Counter(
        tuple(map(Permutation(4, seed), range(4))) for seed in range(seeds)
    )
    # 23 degrees of freedom: above 49.7 with a probability of 0.001.
    assert chi_square(orders, 24, seeds) < 49.7
    pairs = Counter(tuple(map(Permutation(16, seed), (0, 1))) for seed in range(seeds))
    # 239 degrees of freedom.
    assert chi_square(pairs, 240, seeds) < 312


def chi_square(counts: Counter[Any], cells: int, total: int) -> float:
    expected = total / cells
    missing = cells - len(counts)
    deviations = [(count - expected) ** 2 for count in counts.values()]
    return (sum(deviations) + missing * expected**2) / expected


def test_a_stream_is_pickled_after_it_was_read() -> None:
    """Its pass holds a generator."""
    stream = mix({"a": shuffle(ResetsLate(), 3), "b": range(20)})
    first = list(stream)
    next(iter(stream))
    assert list(pickle.loads(pickle.dumps(stream))) == first


def test_torch_loads_a_state_with_weights_only() -> None:
    stream = pack(shuffle([[1, 2, 3]] * 50, 10), 8, open_rows=2)
    state = state_after(stream, 7)
    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    assert torch.load(content, weights_only=True) == state


def test_a_state_in_the_main_process_is_refused_by_workers() -> None:
    """Every epoch of the workers began at it."""
    stream = shuffle(range(20), 4)
    stream.load_state_dict(state_after(shuffle(range(20), 4), 5))
    with pytest.raises(DataError, match="would hold for every epoch of the workers"):
        list(DataLoader(stream, num_workers=1))


def test_a_state_is_read_in_another_process_without_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that a launcher forks has a copy of a stream whose position was loaded before."""
    stream = shuffle(range(20), 4)
    stream.load_state_dict(state_after(shuffle(range(20), 4), 5))
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert list(stream) == list(shuffle(range(20), 4))[5:]


def test_positions_of_another_kind_are_refused() -> None:
    """The first one would be taken for their number, and left out."""
    stream = shuffle(range(20), 4)
    state = state_after(shuffle(range(20), 4), 5)
    source_state = state["cursor"]["source"]
    source_state["needed"] = torch.tensor(integers_from_bytes(source_state["needed"]))
    stream.load_state_dict(state)
    with pytest.raises(CheckpointError, match="saved as bytes, and here they are"):
        iter(stream)


def to_zero(drawn: int) -> dict[str, float]:
    return {"a": 1.0, "b": 0.9 if drawn < 3 else 0.0}


def test_a_source_whose_weight_falls_to_zero_is_not_read_again() -> None:
    """It was read once more where it was behind its former share."""
    for seed in range(4):
        mixture = mix({"a": range(50), "b": range(100, 150)}, to_zero, seed=seed)
        assert all(sample < 100 for sample in list(mixture)[3:])
