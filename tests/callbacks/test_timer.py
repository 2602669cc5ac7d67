from datetime import timedelta

import pytest

from trainer_kit.callbacks import Timer
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


@pytest.mark.parametrize("duration", ["1:2:3:4", "12:00", "3ep", {"dogs": 7}, "soon", 60])
def test_bad_durations(duration):
    with pytest.raises(ConfigurationError):
        Timer(duration)


def test_bad_names():
    with pytest.raises(ConfigurationError, match="did you mean 'step'"):
        Timer(interval="steps")
    with pytest.raises(ConfigurationError, match="did you mean 'validate'"):
        Timer().time_elapsed("validat")


def test_it_stops_at_the_first_step_after_its_time(make_trainer, clock):
    trainer = make_trainer(Timer(timedelta(seconds=10)), batches=100).begin()
    for _ in range(3):
        clock(4)
        trainer.step()
        clock(0)
    assert trainer.stops == ["training took 0:00:12 of 0:00:10"]


def test_it_asks_again_until_it_is_heard_and_says_it_once(make_trainer, clock):
    trainer = make_trainer(Timer("1s"), batches=100).begin()
    clock(2)
    trainer.step()
    trainer.step()
    assert len(trainer.stops) == 2
    assert trainer.printed == ["time is up: training took 0:00:02 of 0:00:01"]


def test_by_epochs(make_trainer, clock):
    trainer = make_trainer(Timer("10s", interval="epoch", verbose=False)).begin()
    clock(20)
    trainer.step()
    assert trainer.stops == []
    trainer.end_epoch()
    assert len(trainer.stops) == 1


def test_what_was_used_before_a_restart_counts(make_trainer, clock):
    before = Timer("10s")
    first = make_trainer(before).begin()
    clock(7)
    state = before.state_dict()
    assert state == {"time_elapsed": {"train": 7.0, "validate": 0.0, "test": 0.0, "predict": 0.0}}
    after = Timer("10s")
    second = make_trainer(after).begin([state])
    assert (after.time_elapsed(), after.time_remaining()) == (7.0, 3.0)
    clock(2)
    second.step()
    assert not second.stops
    clock(2)
    second.step()
    assert second.stops == ["training took 0:00:11 of 0:00:10"]
    assert not first.stops


def test_a_restart_without_time_left_stops_before_the_first_step(make_trainer, clock):
    state = {"time_elapsed": {"train": 50.0}}
    trainer = make_trainer(Timer("10s")).begin([state])
    assert trainer.stops == ["training took 0:00:50 of 0:00:10"]


def test_another_fit_has_all_of_its_time(make_trainer, clock):
    timer = Timer("10s")
    make_trainer(timer).begin([{"time_elapsed": {"train": 6.0}}])
    clock(5)
    again = make_trainer(timer).begin()
    assert (again.stops, timer.time_remaining()) == ([], 10.0)
    clock(9)
    again.step()
    assert not again.stops
    clock(2)
    again.step()
    assert again.stops


def test_stages(make_trainer, clock):
    timer = Timer()
    trainer = make_trainer(timer)
    assert timer.start_time() is None
    assert timer.end_time() is None
    assert timer.time_elapsed() == 0.0
    trainer.begin()
    clock(1)
    for stage, seconds in (("validation", 2), ("test", 3), ("predict", 4)):
        trainer.call(f"on_{stage}_start")
        clock(seconds)
        trainer.call(f"on_{stage}_end")
    trainer.call("on_train_end")
    clock(100)
    assert [timer.time_elapsed(stage) for stage in ("train", "validate", "test", "predict")] == [10.0, 2.0, 3.0, 4.0]
    assert (timer.start_time("train"), timer.end_time("train")) == (100.0, 110.0)
    assert not trainer.stops
