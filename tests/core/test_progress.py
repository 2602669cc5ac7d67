"""Progress goes into a checkpoint and comes back; durations: every unit, every form, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import fields
from datetime import timedelta

import pytest

import trainer_kit as tk
from trainer_kit import Duration, Progress
from trainer_kit.core.errors import DurationError


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("3ep", 3, "ep"),
        ("5000ba", 5000, "ba"),
        ("500st", 500, "st"),
        ("1e6sp", 1_000_000, "sp"),
        ("1.5e9tok", 1_500_000_000, "tok"),
        ("10_000tok", 10_000, "tok"),
        ("90s", 90.0, "s"),
        ("1.5min", 90.0, "s"),
        ("2h", 7200.0, "s"),
        ("1d", 86400.0, "s"),
        ("0.3dur", 0.3, "dur"),
        (".5dur", 0.5, "dur"),
        (" 3 EP ", 3, "ep"),
        ("0st", 0, "st"),
    ],
)
def test_text_is_read(text, value, unit):
    duration = Duration.parse(text)
    assert (duration.value, duration.unit) == (value, unit)
    assert type(duration.value) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ep",
        "3",
        "3 epochs",
        "-3ep",
        "three ep",
        "3ep4",
        "1e400tok",
        "nan s",
        "inf h",
    ],
)
def test_text_that_is_not_a_duration_is_refused(text):
    with pytest.raises(DurationError):
        Duration.parse(text)


def test_an_unknown_unit_is_refused_with_the_known_ones():
    with pytest.raises(
        DurationError, match=r"(?s)'week'.*ep, ba, st, sp, tok, s, min, h, d, dur"
    ):
        Duration.parse("3week")


@pytest.mark.parametrize("unit", ["ep", "ba", "st", "sp", "tok"])
def test_counted_units_take_whole_numbers_only(unit):
    with pytest.raises(DurationError, match="integers only"):
        Duration.parse(f"1.5{unit}")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_negative_and_endless_values_are_refused(value):
    with pytest.raises(DurationError):
        Duration(value, "s")


def test_numbers_count_the_natural_unit_of_the_argument():
    assert Duration.parse(7, "st") == Duration(7, "st")
    assert Duration.parse(7.0, "st") == Duration(7, "st")
    assert type(Duration.parse(7.0, "st").value) is int
    with pytest.raises(DurationError, match="integers only"):
        Duration.parse(7.5, "st")


def test_a_bare_number_without_a_unit_is_refused_with_an_example():
    with pytest.raises(DurationError, match=r'write "7ep"'):
        Duration.parse(7)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1])
def test_numbers_that_are_not_a_length_are_refused(value):
    with pytest.raises(DurationError):
        Duration.parse(value, "st")


@pytest.mark.parametrize("value", [True, None, [3], object()])
def test_other_types_are_refused(value):
    with pytest.raises(DurationError):
        Duration.parse(value, "st")


def test_durations_and_timedeltas_are_taken():
    assert Duration.parse(Duration(3, "ep")) == Duration(3, "ep")
    assert Duration.parse(timedelta(minutes=2)) == Duration(120.0, "s")


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        ("2ep", "epoch"),
        ("2ba", "batch"),
        ("2st", "step"),
        ("2sp", "samples"),
        ("2tok", "tokens"),
        ("2s", "seconds"),
    ],
)
def test_each_unit_is_held_against_its_own_counter(text, counter):
    duration = Duration.parse(text)
    assert duration.counter == counter
    assert not duration.reached(Progress(**{counter: 1}))
    assert duration.reached(Progress(**{counter: 2}))
    assert duration.reached(Progress(**{counter: 3}))


def test_a_fraction_of_the_run_is_held_against_no_counter():
    with pytest.raises(DurationError, match="is not a count"):
        Duration.parse("0.25dur").reached(Progress())


def test_text_and_repr_can_be_read_back():
    for text in ("3ep", "1e6sp", "2h", "0.3dur"):
        duration = Duration.parse(text)
        assert Duration.parse(str(duration)) == duration
        assert eval(repr(duration).replace("Duration(", "Duration.parse(")) == duration


def test_durations_are_values():
    assert (
        len({Duration.parse("2h"), Duration.parse("120min"), Duration.parse("7200s")})
        == 1
    )
    assert pickle.loads(pickle.dumps(Duration.parse("3ep"))) == Duration(3, "ep")
    with pytest.raises(AttributeError):
        Duration(3, "ep").value = 4


FULL = Progress(
    epoch=1, batch=12, step=6, samples=48, tokens=480, epoch_batch=2, seconds=1.5
)


def test_it_starts_at_nothing():
    assert all(getattr(Progress(), field.name) == 0 for field in fields(Progress))


def test_every_count_is_kept_and_restored():
    state = FULL.state_dict()
    assert set(state) == {field.name for field in fields(Progress)}
    restored = Progress()
    restored.load_state_dict(state)
    assert restored == FULL


def test_the_state_is_a_copy():
    progress = Progress(step=3)
    state = progress.state_dict()
    progress.step = 4
    assert state["step"] == 3


def test_a_count_that_an_older_state_lacks_stays():
    progress = Progress(tokens=5)
    progress.load_state_dict({"step": 7})
    assert (progress.step, progress.tokens) == (7, 5)


def test_an_unknown_count_is_not_changed():
    progress = Progress()
    progress.load_state_dict({"step": 7, "from_the_future": 1})
    assert progress == Progress(step=7)


def test_a_misspelled_count_is_an_error():
    with pytest.raises(AttributeError):
        Progress().steps = 1


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("3 epochs", "3ep"),
        ("1e6 samples", "1e6sp"),
        ("5000 batches", "5000ba"),
        ("20steps", "20st"),
        ("2 hours", "2h"),
    ],
)
def test_a_unit_in_full_is_answered_with_its_abbreviation(text, written):
    with pytest.raises(DurationError, match="abbreviated") as caught:
        Duration.parse(text)
    assert caught.value.fix == f'write "{written}"'
    with pytest.raises(DurationError, match=f'write "{written}"'):
        tk.Trainer(max_duration=text)
    assert Duration.parse(written)
