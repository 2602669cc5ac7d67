"""Progress goes into a checkpoint and comes back."""

from __future__ import annotations

from dataclasses import fields

import pytest

from trainer_kit import Progress

FULL = Progress(epoch=1, batch=12, step=6, samples=48, tokens=480, epoch_batch=2, seconds=1.5)


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


def test_a_count_that_nobody_knows_is_left_alone():
    progress = Progress()
    progress.load_state_dict({"step": 7, "from_the_future": 1})
    assert progress == Progress(step=7)


def test_a_misspelt_count_is_an_error():
    with pytest.raises(AttributeError):
        Progress().steps = 1
