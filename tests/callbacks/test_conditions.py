from types import SimpleNamespace

import pytest

from trainer_kit.callbacks.conditions import following, in_run, the_only
from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.progress import Duration


def test_following():
    assert [following(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [4, 4, 4, 8, 8, 12]
    assert following(1.5, 0.5) == 2.0


def test_a_fraction_of_the_run_becomes_steps():
    trainer = SimpleNamespace(estimated_stepping_batches=50)
    assert in_run(Duration.parse("0.1dur"), trainer) == Duration(5, "st")
    assert in_run(Duration.parse("0.001dur"), trainer) == Duration(1, "st")
    assert in_run(Duration.parse("3ba"), trainer) == Duration(3, "ba")
    with pytest.raises(DurationError, match="length is not known"):
        in_run(Duration.parse("0.1dur"), SimpleNamespace(estimated_stepping_batches=float("inf")))


def test_only_one_interval():
    assert the_only(a=(0, "st"), b=(None, "ep")) is None
    assert the_only(a=(0, "st"), b=("2ep", "st")) == Duration(2, "ep")
    assert the_only(a=(0, "s")) == Duration(0, "s")
    with pytest.raises(ConfigurationError, match="a=1st, b=2ep"):
        the_only(a=(1, "st"), b=(2, "ep"))
