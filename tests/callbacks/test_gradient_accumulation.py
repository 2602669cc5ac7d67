import pytest

from trainer_kit.callbacks import GradientAccumulation, GradientAccumulationScheduler
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.progress import Duration


class CountsTokens(TrainModule):
    def loss_weight(self, batch):
        return float(batch.numel())


def lengths_by_epoch(make_trainer, scheduling, epochs):
    trainer = make_trainer(GradientAccumulation(scheduling), batches=1).begin()
    lengths = []
    for _ in range(epochs):
        trainer.epoch()
        lengths.append(trainer.accumulation[-1])
    return lengths


@pytest.mark.parametrize(
    ("scheduling", "lengths"),
    [
        (1, [1, 1]),
        (4, [4, 4, 4]),
        ({0: 1, 2: 3, 4: 2}, [1, 1, 3, 3, 2, 2]),
        ({1: 5}, [1, 5, 5]),
    ],
)
def test_by_epoch(make_trainer, scheduling, lengths):
    assert lengths_by_epoch(make_trainer, scheduling, len(lengths)) == lengths


def test_in_the_middle_of_a_schedule(make_trainer):
    """A resumed run begins with the length of its epoch."""
    trainer = make_trainer(GradientAccumulation({0: 1, 3: 7}))
    trainer.progress.epoch = 3
    trainer.begin()
    assert trainer.accumulation == [7]


def test_the_users_schedule_is_left_alone():
    mine = {2: 3}
    callback = GradientAccumulation(mine)
    assert mine == {2: 3}
    assert (callback.scheduling, callback.epochs) == ({2: 3, 0: 1}, [0, 2])
    assert callback.going_to_accumulate_grad_batches()
    assert not GradientAccumulation(1).going_to_accumulate_grad_batches()


def test_the_references_name():
    assert isinstance(GradientAccumulationScheduler(scheduling={0: 1, 4: 2}), GradientAccumulation)


def test_a_target_in_samples(make_trainer):
    trainer = make_trainer(GradientAccumulation("100sp"), batches=1000).begin()
    assert trainer.accumulation == [1]
    trainer.step(samples=32)
    assert trainer.accumulation[-1] == 3  # 96 is nearer than 128
    trainer.step(samples=96, batches=3)
    trainer.step(samples=30, batches=3)
    assert trainer.accumulation[-1] == 10


def test_a_target_before_the_first_window(make_trainer):
    trainer = make_trainer(GradientAccumulation(Duration.parse("4096sp")), train_batch_samples=512).begin()
    assert trainer.accumulation == [8]


def test_a_target_in_tokens(make_trainer):
    trainer = make_trainer(GradientAccumulation("1e4tok"), batches=1000, module=CountsTokens()).begin()
    trainer.step(samples=1, tokens=3000)
    assert trainer.accumulation == [1, 3]
    trainer.step(samples=1, tokens=60000, batches=3)
    assert trainer.accumulation == [1, 3, 1]  # never less than one


def test_a_short_window_or_a_last_batch_says_nothing(make_trainer):
    trainer = make_trainer(GradientAccumulation("64sp"), batches=9, train_batch_samples=16).begin()
    assert trainer.accumulation == [4]
    trainer.step(samples=64, batches=4)
    trainer.step(samples=64, batches=4)
    trainer.step(samples=2, batches=1)  # one batch of two samples is left
    trainer.end_epoch()
    trainer.call("on_train_epoch_start")
    assert set(trainer.accumulation) == {4}


def test_the_state_survives_a_restart(make_trainer):
    before = GradientAccumulation("100sp")
    first = make_trainer(before, batches=1000).begin()
    first.step(samples=20)
    after = GradientAccumulation("100sp")
    second = make_trainer(after, batches=1000)
    second.progress.load_state_dict(first.progress.state_dict())
    second.begin([before.state_dict()])
    assert second.accumulation == [5]
    second.step(samples=50, batches=5)
    assert second.accumulation[-1] == 10
    assert after.state_dict() == {"per_batch": 10.0}
    assert GradientAccumulation(4).state_dict() == {}


@pytest.mark.parametrize(
    "scheduling", [0, -1, True, 2.0, {}, {-1: 2}, {0: 0}, {0: 1.5}, {"0": 1}, {True: 2}, "4ba", "0sp", "2ep", None]
)
def test_bad_schedules(scheduling):
    with pytest.raises(ConfigurationError):
        GradientAccumulation(scheduling)


def test_not_in_manual_optimization(make_trainer):
    trainer = make_trainer(GradientAccumulation(2))
    trainer.module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="manual optimization"):
        trainer.begin()
    trainer.callbacks = [GradientAccumulation(1)]
    trainer.begin()


def test_nobody_counts_tokens(make_trainer):
    with pytest.raises(ConfigurationError, match="loss_weight is not defined"):
        make_trainer(GradientAccumulation("1e6tok"), module=TrainModule()).begin()
