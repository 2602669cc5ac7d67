import pytest

from tests.callbacks.fits import fit
from trainer_kit.callbacks import LambdaCallback
from trainer_kit.callbacks.conditions import following, in_run, the_only
from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.progress import Duration


def test_following():
    assert [following(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [4, 4, 4, 8, 8, 12]
    assert following(1.5, 0.5) == 2.0


def test_a_fraction_of_the_run_becomes_steps():
    found = []

    def read(trainer, module):
        found.extend(in_run(Duration.parse(every), trainer) for every in ("0.5dur", "0.001dur", "3ba"))

    fit(LambdaCallback(on_train_start=read), batches=10, max_steps=5)
    assert found == [Duration(2, "st"), Duration(1, "st"), Duration(3, "ba")]
    with pytest.raises(DurationError, match="length is not known"):
        fit(LambdaCallback(on_train_start=read), batches=1, unsized=True)


def test_only_one_interval():
    assert the_only(a=(0, "st"), b=(None, "ep")) is None
    assert the_only(a=(0, "st"), b=("2ep", "st")) == Duration(2, "ep")
    assert the_only(a=(0, "s")) == Duration(0, "s")
    with pytest.raises(ConfigurationError, match="a=1st, b=2ep"):
        the_only(a=(1, "st"), b=(2, "ep"))
