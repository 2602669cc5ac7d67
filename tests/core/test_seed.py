"""Random state: seeding all of it, and putting it aside."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trainer_kit import seed_everything
from trainer_kit.core import seed
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.seed import order_seed, preserved_rng, restore_rng, rng_state


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(seed, "_last_seed", None)
    with preserved_rng():
        yield


def draw():
    return (
        random.random(),
        float(np.random.rand()),
        float(torch.rand(())),
        random.gauss(0, 1),
        np.random.randn(),
    )


def test_the_same_seed_gives_the_same_numbers_everywhere():
    assert seed_everything(3) == 3
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_the_order_of_the_data_takes_the_last_seed_or_torch_s_own():
    torch.manual_seed(4)
    assert order_seed() == 4
    seed_everything(5)
    torch.manual_seed(6)
    assert order_seed() == 5


def test_a_missing_seed_is_drawn_and_returned():
    chosen = seed_everything()
    first = draw()
    seed_everything(chosen)
    assert draw() == first
    assert order_seed() == chosen


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="0 to"):
        seed_everything(wrong)
    assert seed._last_seed is None


def test_lightning_s_other_arguments_are_taken():
    assert seed_everything(7, workers=True, verbose=False) == 7


def test_preserved_rng_restores_the_generators():
    seed_everything(1)
    first = draw()
    seed_everything(1)
    with preserved_rng():
        draw()
    assert draw() == first


def test_state_is_put_back_after_an_exception():
    seed_everything(1)
    first = draw()
    seed_everything(1)

    def fails():
        with preserved_rng():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert draw() == first


def test_state_goes_through_a_checkpoint(tmp_path):
    """Also with a cached second normal number, which Python and NumPy both keep."""
    from trainer_kit.checkpoint.commit import write_checkpoint
    from trainer_kit.checkpoint.read import read_checkpoint

    draw()
    random.gauss(0, 1)
    write_checkpoint(tmp_path / "c", {"rng": rng_state()}, info={})
    after = draw()
    seed_everything(9)
    restore_rng(read_checkpoint(tmp_path / "c")["rng"])
    assert draw() == after


def test_a_part_that_is_missing_is_left_alone():
    state = rng_state()
    expected = draw()
    restore_rng({"python": state["python"]})
    assert random.random() == expected[0]
    assert float(torch.rand(())) != expected[2]
