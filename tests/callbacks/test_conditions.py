import pytest

from tests.callbacks.fits import fit
from trainer_kit.callbacks import (
    GradientAccumulation,
    HealthCheck,
    LambdaCallback,
    ModelCheckpoint,
)
from trainer_kit.callbacks.conditions import following, in_run, the_only
from trainer_kit.callbacks.lambda_callback import FunctionCallback
from trainer_kit.core.errors import ConfigurationError, DurationError
from trainer_kit.core.progress import Duration


def test_following():
    assert [following(n, 4) for n in (0, 1, 3, 4, 5, 8)] == [4, 4, 4, 8, 8, 12]
    assert following(1.5, 0.5) == 2.0


def test_a_fraction_of_the_run_becomes_steps():
    found = []

    def read(trainer, module):
        found.extend(
            in_run(Duration.parse(every), trainer)
            for every in ("0.5dur", "0.001dur", "3ba")
        )

    fit(LambdaCallback(on_train_start=read), batches=10, max_steps=5)
    assert found == [Duration(2, "st"), Duration(1, "st"), Duration(3, "ba")]
    with pytest.raises(DurationError, match="length is unknown"):
        fit(LambdaCallback(on_train_start=read), batches=1, unsized=True)


def test_only_one_interval():
    assert the_only(a=(0, "st"), b=(None, "ep")) is None
    assert the_only(a=(0, "st"), b=("2ep", "st")) == Duration(2, "ep")
    assert the_only(a=(0, "s")) == Duration(0, "s")
    with pytest.raises(ConfigurationError, match="a=1st, b=2ep"):
        the_only(a=(1, "st"), b=(2, "ep"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: HealthCheck(every="3tok"),
        lambda: ModelCheckpoint(every_n_train_steps="3tok"),
        lambda: ModelCheckpoint(every_n_epochs="3tok"),
        lambda: FunctionCallback(
            "train_step_end", lambda trainer, module: None, every="3tok"
        ),
        lambda: GradientAccumulation("3tok"),
    ],
)
def test_an_interval_of_tokens_needs_their_count(make):
    began = LambdaCallback(
        on_train_start=lambda trainer, module: pytest.fail("training began")
    )
    with pytest.raises(
        ConfigurationError, match="the number of tokens is unknown"
    ) as problem:
        fit(make(), began, batches=2)
    assert "'3tok', and Scripted has no loss_weight" in problem.value.found


def test_counted_tokens_are_an_interval():
    seen = []
    fit(
        FunctionCallback(
            "train_step_end",
            lambda trainer, module: seen.append(trainer.global_step),
            "6tok",
        ),
        batches=4,
        tokens=3,
    )
    assert seen == [2, 4]
