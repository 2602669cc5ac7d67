from datetime import timedelta

import pytest

from tests.callbacks.fits import BATCH, Timed, trainer
from trainer_kit.callbacks import LambdaCallback, Timer
from trainer_kit.core.errors import ConfigurationError


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainer_kit.callbacks.timer.monotonic", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    return pass_time


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("00:12:00:00", 43200.0),
        ("33:01:02:03", 33 * 86400 + 3723.0),
        ("2h", 7200.0),
        ("1.5min", 90.0),
        (timedelta(weeks=1), 604800.0),
        ({"weeks": 4, "days": 2}, 30 * 86400.0),
        (None, None),
    ],
)
def test_durations(duration, seconds):
    assert Timer(duration).time_remaining() == seconds


@pytest.mark.parametrize(
    "duration", ["1:2:3:4", "12:00", "3ep", {"dogs": 7}, "soon", 60]
)
def test_bad_durations(duration):
    with pytest.raises(ConfigurationError):
        Timer(duration)


def test_bad_names():
    with pytest.raises(ConfigurationError, match="did you mean 'step'"):
        Timer(interval="steps")
    with pytest.raises(ConfigurationError, match="did you mean 'validate'"):
        Timer().time_elapsed("validat")


def timed(clock, *callbacks, ckpt_path=None, batches=100, seconds, **options):
    """A fit of which each batch takes as many seconds."""
    made = trainer(*callbacks, **{"max_epochs": 1, **options})
    made.fit(Timed(clock, train=seconds), [BATCH] * batches, ckpt_path=ckpt_path)
    return made


def test_it_stops_at_the_first_step_after_its_time(clock):
    made = timed(clock, Timer(timedelta(seconds=10)), seconds=4)
    assert (made.stops, made.global_step) == (["training took 0:00:12 of 0:00:10"], 3)


def test_it_requests_the_stop_at_each_step_and_prints_it_once(clock):
    made = timed(clock, Timer("1s"), seconds=2, min_steps=3)
    assert (len(made.stops), made.global_step) == (3, 3)
    assert [line for line in made.printed if "time limit reached" in line] == [
        "time limit reached: training took 0:00:02 of 0:00:01",
    ]


def test_by_epochs(clock):
    made = timed(
        clock,
        Timer("10s", interval="epoch", verbose=False),
        seconds=20,
        batches=2,
        max_epochs=3,
    )
    assert (len(made.stops), made.global_step) == (1, 2)
    assert not any("time limit reached" in line for line in made.printed)


def test_time_before_a_restart_counts(clock, tmp_path):
    before, after, restored = Timer("10s"), Timer("10s"), []
    first = timed(clock, before, seconds=7, max_steps=1)
    assert before.state_dict() == {
        "time_elapsed": {"train": 7.0, "validate": 0.0, "test": 0.0, "predict": 0.0}
    }
    assert not first.stops
    first.save_checkpoint(tmp_path / "one")
    note = LambdaCallback(
        on_fit_start=lambda *_: restored.append(
            (after.time_elapsed(), after.time_remaining())
        )
    )
    second = timed(clock, after, note, seconds=2, ckpt_path=tmp_path / "one")
    assert restored == [(7.0, 3.0)]
    assert (second.stops, second.global_step) == (
        ["training took 0:00:11 of 0:00:10"],
        3,
    )


def test_a_restart_without_time_left_stops_before_the_first_step(clock, tmp_path):
    timed(clock, Timer("60s"), seconds=50, max_steps=1).save_checkpoint(
        tmp_path / "one"
    )
    made = timed(clock, Timer("10s"), seconds=1, ckpt_path=tmp_path / "one")
    assert (made.stops, made.global_step) == (["training took 0:00:50 of 0:00:10"], 1)


def test_another_fit_has_all_of_its_time(clock):
    timer, remaining = Timer("10s"), []
    timed(clock, timer, seconds=6, max_steps=1)
    clock(5)
    note = LambdaCallback(
        on_train_start=lambda *_: remaining.append(timer.time_remaining())
    )
    again = timed(clock, timer, note, seconds=[9, 2, 1])
    assert remaining == [10.0]
    assert (again.stops, again.global_step) == (["training took 0:00:11 of 0:00:10"], 2)


def test_stages(clock):
    timer = Timer()
    assert timer.start_time() is None
    assert timer.end_time() is None
    assert timer.time_elapsed() == 0.0
    made, module = (
        trainer(timer, max_epochs=1),
        Timed(clock, train=1, val=2, test=3, predict=4),
    )
    made.fit(module, [BATCH], [BATCH])
    made.test(module, [BATCH], verbose=False)
    made.predict(module, [BATCH])
    clock(100)
    assert [
        timer.time_elapsed(stage) for stage in ("train", "validate", "test", "predict")
    ] == [
        3.0,
        2.0,
        3.0,
        4.0,
    ]
    assert (timer.start_time("train"), timer.end_time("train")) == (100.0, 103.0)
    assert not made.stops
