"""Windows: which micro-batches make one step, and what each of them weighs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_kit import Progress
from trainer_kit.core.errors import DataError
from trainer_kit.data import Ahead, Feed
from trainer_kit.step.accumulation_window import WindowLoader


class Runner:
    """What windows run with; these are only loaded."""

    def __init__(self):
        self.progress = Progress()


class One:
    rank, size = 0, 1

    def agree(self, values):
        raise AssertionError("one rank has nobody to ask")


def windows(loader, length=1, **options):
    divisor = options.pop("divisor", 1)
    return WindowLoader(
        Feed(loader), Runner(), One(), divisor, length=length, **options
    )


def turns(made, progress=None):
    """(first index, batches as lists, factors, sizes) of each window."""
    found = []
    for window in made.epoch(progress or Progress()):
        assert window.count == len(window.batches) == len(window.sizes)
        factors = (
            None
            if window.factors is None
            else [pytest.approx(f) for f in window.factors]
        )
        found.append(
            (
                window.first,
                [torch.as_tensor(b).flatten().tolist() for b in window.batches],
                factors,
                list(window.sizes),
            )
        )
    return found


def loader(count=7, batch_size=2):
    return DataLoader(torch.arange(count), batch_size=batch_size)


def test_a_window_of_one_has_no_factor():
    assert turns(windows(loader(5))) == [
        (0, [[0, 1]], None, [2]),
        (1, [[2, 3]], None, [2]),
        (2, [[4]], None, [1]),
    ]


def test_a_window_weighs_its_batches_by_samples():
    assert turns(windows(loader(7), 2)) == [
        (0, [[0, 1], [2, 3]], [0.5, 0.5], [2, 2]),
        (2, [[4, 5], [6]], [2 / 3, 1 / 3], [2, 1]),
    ]


def test_a_short_last_window_is_averaged_over_its_batches():
    assert turns(windows(loader(10), 3))[-1] == (
        3,
        [[6, 7], [8, 9]],
        [0.5, 0.5],
        [2, 2],
    )
    assert turns(windows(loader(14), 3))[-1] == (6, [[12, 13]], None, [2])


def test_without_weighting_each_batch_counts_once():
    assert turns(windows(loader(7), 2, weighting=False))[-1] == (
        2,
        [[4, 5], [6]],
        [0.5, 0.5],
        [2, 1],
    )


def test_an_engine_that_divides_gets_it_back():
    assert turns(windows(loader(8), 2, divisor=4))[0][2] == [2.0, 2.0]


def test_factors_of_one_are_left_out():
    assert turns(windows(loader(8), 2, divisor=2))[0][2] is None


def test_the_user_s_weights():
    made = windows(loader(7), 2, loss_weight=lambda batch: float(batch.sum()))
    found = turns(made)
    assert found[0][2] == [1 / 6, 5 / 6]
    assert found[1][2] == [9 / 15, 6 / 15]
    assert made.window.tokens == 15


def test_weights_may_be_tensors():
    assert turns(windows(loader(4), 2, loss_weight=lambda batch: batch.sum()))[0][
        2
    ] == [
        1 / 6,
        5 / 6,
    ]


def test_a_single_batch_of_any_weight_has_no_factor():
    assert [
        factors
        for _, _, factors, _ in turns(windows(loader(7), loss_weight=lambda batch: 5.0))
    ] == [None] * 4


def test_a_batch_that_weighs_nothing_adds_nothing():
    made = windows(loader(4), 2, loss_weight=lambda batch: float(batch[0] > 0))
    assert turns(made)[0][2] == [0.0, 1.0]


def test_a_window_that_weighs_nothing_is_an_error():
    with pytest.raises(DataError, match=r"(?s)sum to zero.*loss_weight"):
        turns(windows(loader(4), 2, loss_weight=lambda batch: 0.0))
    with pytest.raises(DataError, match=r"(?s)sum to zero or less.*-1\.0"):
        turns(windows(loader(4), 2, loss_weight=lambda batch: -1.0))


def test_an_epoch_continues_at_the_position_in_progress():
    assert turns(windows(loader(10), 2), Progress(epoch_batch=3)) == [
        (3, [[6, 7], [8, 9]], [0.5, 0.5], [2, 2]),
    ]


def test_a_limit_holds_from_the_start_of_the_epoch():
    assert [first for first, *_ in turns(windows(loader(20), limit=4))] == [0, 1, 2, 3]
    assert [
        first
        for first, *_ in turns(windows(loader(20), limit=4), Progress(epoch_batch=2))
    ] == [2, 3]
    assert turns(windows(loader(20), limit=0)) == []


def test_each_window_is_complete_and_an_object_of_its_own():
    made = windows(loader(7), 2)
    first, second = made.epoch(Progress())
    assert made.window is second
    assert [(window.first, window.count) for window in (first, second)] == [
        (0, 2),
        (2, 2),
    ]
    assert [batch.tolist() for batch in first.batches] == [[0, 1], [2, 3]]
    assert first.factors == [0.5, 0.5]


def test_windows_never_cross_epochs():
    made = windows(loader(6), 2)
    assert [
        len(batches)
        for _, batches, _, _ in turns(made) + turns(made, Progress(epoch=1))
    ] == [
        2,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("loss_weight", [None, len])
def test_the_length_can_change_between_windows(loss_weight):
    made = windows(loader(20), loss_weight=loss_weight)
    counts = []
    for window in made.epoch(Progress()):
        counts.append(window.count)
        made.set_length(len(counts) + 1)
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_nothing_is_read_before_it_is_needed(length):
    read = []

    def stream():
        for index in range(100):
            read.append(index)
            yield torch.zeros(1)

    epoch = windows(stream(), length).epoch(Progress())
    for n in range(1, 4):
        next(epoch)
        assert len(read) == n * length


def test_prefetch_does_not_pass_the_end_of_the_run():
    read = []

    def stream():
        for index in range(100):
            read.append(index)
            yield torch.zeros(1)

    def ahead(items):
        items = list(items)  # as eager as can be
        yield from items

    made = windows(stream(), 2, ahead=ahead)
    made.start_epoch(steps_left=3)
    epoch = made.epoch(Progress())
    for _ in range(3):
        next(epoch)
    assert len(read) == 6


def test_batches_without_a_tensor_weigh_one():
    assert [sizes for *_, sizes in turns(windows([1, 2, 3], 2))] == [[1, 1], [1]]


class Placed:
    """A stream with a place."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        start, self.at = self.at, 0
        for index in range(start, 12):
            self.at = index + 1
            yield torch.tensor([index])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_state_is_that_of_the_last_finished_window_however_far_reading_is(length):
    made = windows(
        Placed(), length, ahead=lambda items: iter(Ahead(items, lambda item: item))
    )
    for window in made.epoch(Progress()):
        done = window.first + window.count
        again = windows(Placed(), length)
        again.feed.loader_state.load_state_dict(
            [made.feed.loader_state.state_dict(0, done)], 0
        )
        rest = [
            batch
            for _, batches, *_ in turns(again, Progress(epoch_batch=done))
            for batch in batches
        ]
        assert rest == [[index] for index in range(done, 12)]
        # A window that is under way runs again.
        inside = windows(Placed(), length)
        inside.feed.loader_state.load_state_dict(
            [made.feed.loader_state.state_dict(0, window.first)], 0
        )
        assert next(inside.epoch(Progress(epoch_batch=window.first))).batches[
            0
        ].tolist() == [window.first]
