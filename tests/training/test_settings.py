"""Arguments of the loop are read once, and refused by name."""

from __future__ import annotations

from datetime import timedelta

import pytest

import trainer_kit as tk
from trainer_kit import Duration
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.training.settings import Settings, make_settings

NOTHING = {
    "fast_dev_run": False,
    "max_epochs": None,
    "max_steps": -1,
    "max_duration": None,
    "max_time": None,
    "min_epochs": None,
    "min_steps": None,
    "limits": {"train": None, "val": None, "test": None, "predict": None},
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
    "log_every_n_steps": None,
    "clip_val": None,
    "clip_algorithm": None,
    "overfit_batches": 0.0,
    "inference_mode": True,
    "shard": True,
    "loss_weighting": True,
    "global_batch_size": None,
}


def settings(**given):
    return make_settings(**{**NOTHING, **given})


def test_defaults_are_lightning_s():
    made = settings()
    assert (made.max_epochs, made.max_steps, made.max_duration) == (1000, None, None)
    assert (made.min_epochs, made.min_steps, made.sanity_steps, made.log_every) == (
        0,
        0,
        2,
        50,
    )
    assert (made.validate_every, made.validate_epochs, made.clip) == (1.0, 1, None)
    assert made.limits == {"train": 1.0, "val": 1.0, "test": 1.0, "predict": 1.0}


def test_settings_without_arguments_are_those_of_a_trainer_without_arguments():
    assert tk.Trainer(logger=False).settings == Settings()


@pytest.mark.parametrize(
    "limit",
    [
        {"max_steps": 5},
        {"max_steps": 0},
        {"max_duration": "5st"},
        {"max_time": "00:00:01:00"},
    ],
)
def test_another_limit_takes_the_place_of_a_thousand_epochs(limit):
    assert settings(**limit).max_epochs is None


def test_minus_one_means_no_limit():
    made = settings(max_epochs=-1)
    assert (made.max_epochs, made.max_steps) == (None, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("3ba", Duration(3, "ba")),
        ("3st", Duration(3, "st")),
        ("3sp", Duration(3, "sp")),
        ("3tok", Duration(3, "tok")),
        ("3min", Duration(180.0, "s")),
        (timedelta(seconds=3), Duration(3.0, "s")),
        (Duration(4, "ba"), Duration(4, "ba")),
    ],
)
def test_a_length_in_every_unit(given, expected):
    assert settings(max_duration=given).max_duration == expected


def test_a_length_in_epochs_is_a_number_of_epochs_and_the_smaller_limit_holds():
    assert settings(max_duration="3ep").max_epochs == 3
    assert settings(max_duration="3ep", max_epochs=2).max_epochs == 2
    assert settings(max_duration="3ep", max_epochs=5).max_epochs == 3
    assert settings(max_duration="3ep", max_epochs=-1).max_epochs == 3


def test_a_length_as_a_fraction_of_itself_is_refused():
    with pytest.raises(ConfigurationError, match="max_duration"):
        settings(max_duration="0.5dur")


def test_a_length_without_a_unit_is_refused():
    with pytest.raises(ConfigurationError, match="unit"):
        settings(max_duration=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_epochs", 2.5),
        ("max_epochs", -2),
        ("max_epochs", True),
        ("max_epochs", "3"),
        ("max_steps", -2),
        ("max_steps", 1.0),
        ("max_steps", "5st"),
        ("min_epochs", -1),
        ("min_steps", 0.5),
        ("log_every_n_steps", -1),
        ("log_every_n_steps", 0.5),
        ("log_every_n_steps", "5ba"),
        ("check_val_every_n_epoch", "5st"),
        ("check_val_every_n_epoch", 0),
        ("num_sanity_val_steps", -2),
        ("val_check_interval", 0),
        ("val_check_interval", -1),
        ("val_check_interval", 1.5),
        ("val_check_interval", True),
        ("val_check_interval", [1]),
        ("val_check_interval", "0ba"),
        ("val_check_interval", "0.5dur"),
        ("overfit_batches", 1.5),
        ("overfit_batches", -1),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=name):
        settings(**{name: value})


def test_an_interval_of_nothing_is_answered_with_its_limit():
    with pytest.raises(ConfigurationError, match=r"above zero(?s:.*)found: 0ba"):
        settings(val_check_interval="0ba")


@pytest.mark.parametrize("value", [1.5, -1, True, "all"])
@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_a_limit_out_of_range_is_refused_by_name(stage, value):
    with pytest.raises(ConfigurationError, match=f"limit_{stage}_batches"):
        settings(limits={**NOTHING["limits"], stage: value})


@pytest.mark.parametrize("value", [-1, "1", float("nan"), float("inf")])
def test_a_clip_that_is_not_a_length_is_refused(value):
    with pytest.raises(ConfigurationError, match="gradient_clip_val"):
        settings(clip_val=value)


def test_clipping():
    assert settings(clip_val=1).clip == (1.0, "norm")
    assert settings(clip_val=0.5, clip_algorithm="value").clip == (0.5, "value")
    assert settings(clip_val=0).clip is None
    with pytest.raises(
        ConfigurationError, match=r"(?s)gradient_clip_algorithm.*norm or value"
    ):
        settings(clip_val=1, clip_algorithm="nrom")


def test_validation_over_epoch_borders_needs_a_count():
    assert (
        settings(check_val_every_n_epoch=None, val_check_interval=7).validate_epochs
        is None
    )
    for interval in (None, 0.5):
        with pytest.raises(ConfigurationError, match="check_val_every_n_epoch=None"):
            settings(check_val_every_n_epoch=None, val_check_interval=interval)


def test_a_fast_run_is_one_epoch_of_so_many_batches():
    made = settings(
        fast_dev_run=3,
        max_epochs=9,
        max_steps=100,
        num_sanity_val_steps=5,
        overfit_batches=4,
    )
    assert (made.max_epochs, made.max_steps, made.sanity_steps, made.overfit) == (
        1,
        3,
        0,
        0,
    )
    assert set(made.limits.values()) == {3}
    assert settings(fast_dev_run=True).max_steps == 1
    assert settings(fast_dev_run=False).fast == 0
    for wrong in (-1, 1.5, "yes"):
        with pytest.raises(ConfigurationError, match="fast_dev_run"):
            settings(fast_dev_run=wrong)


def test_settings_cannot_change_later():
    with pytest.raises(AttributeError):
        settings().max_epochs = 3


def test_intervals_of_one_unit_take_it_in_words():
    made = settings(log_every_n_steps="100st", check_val_every_n_epoch="2ep")
    assert (made.log_every, made.validate_epochs) == (100, 2)


@pytest.mark.parametrize("value", ["400tok", "5ba", "8sp", "2h", "1ep"])
def test_the_interval_of_logs_says_why_it_takes_steps_only(value):
    with pytest.raises(ConfigurationError) as error:
        settings(log_every_n_steps=value)
    assert error.value.problem == (
        "log_every_n_steps takes optimizer steps (st) only: logged values are written after whole steps"
    )
    # Its number in steps is another length.
    assert error.value.fix == 'pass a number of steps, such as 50 or "50st"'
    assert value in str(error.value)


def test_the_interval_in_epochs_names_the_argument_for_other_units():
    with pytest.raises(ConfigurationError, match="takes epochs") as error:
        settings(check_val_every_n_epoch="400tok")
    assert 'val_check_interval="500ba"' in error.value.fix
    assert settings(val_check_interval="400tok").validate_every == Duration.parse(
        "400tok"
    )


@pytest.mark.parametrize("value", ["100tok", "100sp", "5st", "2h"])
def test_a_quick_try_says_why_it_takes_batches_only(value):
    with pytest.raises(ConfigurationError, match="fast_dev_run must be an") as error:
        settings(fast_dev_run=value)
    assert error.value.fix == (
        "pass a number of batches, the unit that every stage has: validation and test count no steps, samples or tokens"
    )


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("fast_dev_run", "5ba", "fast_dev_run=5"),
        ("min_steps", "5st", "min_steps=5"),
        ("min_steps", "5tok", "pass a number of optimizer steps"),
        ("min_epochs", "3st", "pass a number of epochs"),
        ("num_sanity_val_steps", "8sp", "pass a number of validation batches"),
    ],
)
def test_a_length_in_another_unit_is_not_suggested_as_a_number(name, value, fix):
    with pytest.raises(ConfigurationError, match=name) as error:
        settings(**{name: value})
    assert error.value.fix == fix
