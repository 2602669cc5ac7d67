"""What is due when: limits, validation, flushes; a function of progress alone."""

from __future__ import annotations

import pytest

from trainer_kit import Duration, Progress
from trainer_kit.data import EpochLength
from trainer_kit.step.schedule import Interval, Schedule


def schedule(batches=10, **given):
    defaults = {
        "length": EpochLength(
            expected=batches, limit=None, certain=batches is not None
        ),
        "max_epochs": None,
        "max_steps": None,
        "max_duration": None,
        "min_epochs": 0,
        "min_steps": 0,
        "validate_every": None,
        "across_epochs": False,
        "validate_epochs": 1,
        "validates": True,
        "log_every": 50,
        "agree_every": 0,
    }
    return Schedule(**{**defaults, **given})


def run(plan, batches=10, epochs=2, window=1, skip=True):
    """Walk through epochs as the loop does, looking only when ``due`` says so; (epoch, batch) of each validation."""
    progress, validations = Progress(), []
    for _ in range(epochs):
        plan.start_epoch(progress)
        due = plan.next_step_due(progress, window)
        while progress.epoch_batch < batches:
            taken = min(window, batches - progress.epoch_batch)
            progress.batch += taken
            progress.epoch_batch += taken
            progress.samples += 4 * taken
            progress.step += 1
            if not skip or progress.step >= due:
                if plan.take_due_validation(progress):
                    validations.append((progress.epoch, progress.epoch_batch))
                due = plan.next_step_due(progress, window)
        if plan.validates_at_epoch_end(progress):
            validations.append((progress.epoch, "end"))
        progress.epoch += 1
        progress.epoch_batch = 0
    return validations


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("every", "options", "window", "expected"),
    [
        (None, {}, 1, [(0, "end"), (1, "end")]),
        (None, {"validate_epochs": 2}, 1, [(1, "end")]),
        ("5ba", {}, 1, [(0, 5), (0, 10), (1, 5), (1, 10)]),
        ("3ba", {}, 1, [(0, 3), (0, 6), (0, 9), (1, 3), (1, 6), (1, 9)]),
        ("3ba", {}, 2, [(0, 4), (0, 6), (0, 10), (1, 4), (1, 6), (1, 10)]),
        ("3ba", {}, 4, [(0, 4), (0, 8), (0, 10), (1, 4), (1, 8), (1, 10)]),
        ("1ba", {}, 5, [(0, 5), (0, 10), (1, 5), (1, 10)]),
        ("5ba", {"validate_epochs": 2}, 1, [(1, 5), (1, 10)]),
        ("7ba", {"across_epochs": True}, 1, [(0, 7), (1, 4)]),
        ("15ba", {"across_epochs": True}, 1, [(1, 5)]),
        ("10ba", {"across_epochs": True}, 4, [(0, 10), (1, 10)]),
        ("4st", {}, 2, [(0, 8), (1, 6)]),
        ("24sp", {}, 1, [(0, 6), (1, 2), (1, 8)]),
        ("5ba", {"validates": False}, 1, []),
    ],
)
def test_validation_comes_at_the_first_end_of_a_window_at_or_after(
    every, options, window, expected, skip
):
    interval = None if every is None else Duration.parse(every)
    assert (
        run(schedule(validate_every=interval, **options), window=window, skip=skip)
        == expected
    )


def test_looking_only_when_due_misses_nothing():
    for every in range(1, 12):
        for window in range(1, 5):
            for across in (False, True):
                plans = [
                    schedule(validate_every=Duration(every, "ba"), across_epochs=across)
                    for _ in range(2)
                ]
                assert run(plans[0], window=window, epochs=3) == run(
                    plans[1], window=window, epochs=3, skip=False
                )


def test_a_resumed_run_over_epoch_borders_does_not_repeat_a_validation():
    plan = schedule(validate_every=Duration(20, "ba"), across_epochs=True)
    progress = Progress(epoch=5, batch=52, step=52, epoch_batch=2)
    plan.mark_validated(progress)
    plan.start_epoch(progress)
    progress.batch, progress.step, progress.epoch_batch = 55, 55, 5
    assert not plan.take_due_validation(progress)
    progress.batch, progress.step, progress.epoch_batch = 60, 60, 10
    assert plan.take_due_validation(progress)
    assert not plan.take_due_validation(progress)


def test_a_run_resumed_in_the_middle_of_an_epoch_does_not_repeat_a_validation():
    plan = schedule(validate_every=Duration(2, "ba"))
    plan.start_epoch(Progress(epoch=1, batch=15, step=15, epoch_batch=5))
    assert not plan.take_due_validation(
        Progress(epoch=1, batch=15, step=15, epoch_batch=5)
    )
    assert plan.take_due_validation(Progress(epoch=1, batch=16, step=16, epoch_batch=6))


@pytest.mark.parametrize(
    ("limit", "before", "at"),
    [
        ({"max_epochs": 2}, Progress(epoch=1), Progress(epoch=2)),
        ({"max_steps": 3}, Progress(step=2), Progress(step=3)),
        ({"max_duration": Duration(3, "ba")}, Progress(batch=2), Progress(batch=3)),
        ({"max_duration": Duration(3, "sp")}, Progress(samples=2), Progress(samples=4)),
        ({"max_duration": Duration(3, "tok")}, Progress(tokens=2), Progress(tokens=4)),
        (
            {"max_duration": Duration(3.0, "s")},
            Progress(seconds=2.9),
            Progress(seconds=3.1),
        ),
    ],
)
def test_a_limit_ends_the_run_and_is_named(limit, before, at):
    plan = schedule(**limit)
    assert plan.finished(before) is None
    assert next(iter(limit)) in plan.finished(at)


def test_the_first_limit_that_is_reached_ends_the_run():
    plan = schedule(max_epochs=2, max_steps=5)
    assert "max_steps" in plan.finished(Progress(epoch=1, step=5))
    assert "max_epochs" in plan.finished(Progress(epoch=2, step=4))


def test_without_batches_there_is_nothing_to_run():
    assert "no batches" in schedule(batches=0).finished(Progress())


def test_both_minima_have_to_be_reached():
    plan = schedule(min_epochs=2, min_steps=5)
    assert not plan.may_stop(Progress(epoch=2, step=4))
    assert not plan.may_stop(Progress(epoch=1, step=9))
    assert plan.may_stop(Progress(epoch=2, step=5))


def test_it_is_due_at_each_flush_and_at_the_last_step_and_never_in_the_past():
    plan = schedule(log_every=7, max_steps=10)
    assert [
        plan.next_step_due(Progress(step=step), 1) for step in (0, 6, 7, 9, 10)
    ] == [
        7,
        7,
        10,
        10,
        11,
    ]


def test_it_is_due_at_its_interval_without_other_events():
    assert schedule(log_every=10**9).next_step_due(Progress(step=1000), 1) <= 1256


def test_unpredictable_limits_are_checked_after_each_step():
    for unit in ("sp", "tok", "s"):
        plan = schedule(max_duration=Duration(1000, unit), log_every=100)
        assert plan.next_step_due(Progress(step=3), 1) == 4


def test_ranks_agree_at_their_own_interval():
    plan = schedule(agree_every=10, log_every=25)
    assert [plan.next_step_due(Progress(step=step), 1) for step in (0, 10, 20, 25)] == [
        10,
        20,
        25,
        30,
    ]
    assert [plan.agrees(Progress(step=step)) for step in (9, 10, 25)] == [
        False,
        True,
        False,
    ]
    assert schedule().agrees(Progress(step=3))


def test_an_epoch_of_unknown_length_is_never_over_beforehand():
    assert not schedule(batches=None).epoch_is_over(Progress(epoch_batch=10**9))
    assert schedule().epoch_is_over(Progress(epoch_batch=10))


def test_steps_that_are_left():
    assert schedule().steps_left(Progress(step=3)) is None
    assert schedule(max_steps=5).steps_left(Progress(step=3)) == 2
    assert (
        schedule(max_steps=9, max_duration=Duration(5, "st")).steps_left(
            Progress(step=3)
        )
        == 2
    )


def test_an_interval_ends_at_the_next_multiple() -> None:
    """The loop settles only there: an end that is too early costs time in every step and changes no result."""
    interval = Interval(Duration.parse("3st"), act=lambda: None)
    ends = [interval.next_end(Progress(step=step)) for step in range(8)]
    assert ends == [3, 3, 3, 6, 6, 6, 9, 9]
    # A resumed run has completed some of them before.
    interval.done = 4
    assert interval.next_end(Progress(step=5)) == 15
