from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from trainer_kit import Trainer
from trainer_kit.callbacks import LearningRateMonitor, ModelCheckpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


def parameter():
    return [torch.nn.Parameter(torch.zeros(1))]


def groups(**names):
    return [{"params": parameter(), "lr": 0.1 * (i + 1), **extra} for i, extra in enumerate(names.values())]


def config(scheduler, interval="epoch", name=None):
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name)


def names(trainer):
    return sorted({name for _, values in trainer.logged for name in values})


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        (lambda: [Adam(parameter())], ["lr-Adam"]),
        (lambda: [Adam(groups(a={}, b={}))], ["lr-Adam/pg1", "lr-Adam/pg2"]),
        (lambda: [Adam(groups(a={"name": "body"}, b={"name": "head"}))], ["lr-Adam/body", "lr-Adam/head"]),
        (lambda: [SGD(groups(a={"name": "all"}))], ["lr-SGD/all"]),
        (
            lambda: [Adam(parameter()), SGD(parameter()), Adam(groups(a={}, b={}))],
            ["lr-Adam", "lr-Adam-1/pg1", "lr-Adam-1/pg2", "lr-SGD"],
        ),
    ],
)
def test_names(make_trainer, optimizers, expected):
    trainer = make_trainer(LearningRateMonitor(), optimizers=optimizers()).begin()
    assert names(trainer) == expected
    assert sorted(trainer.callbacks[0].lrs) == expected


def test_names_of_schedulers(make_trainer):
    optimizers = [SGD(parameter(), lr=0.1), SGD(parameter(), lr=0.2), Adam(parameter())]
    configs = [config(StepLR(optimizers[0], 1), name="mine"), config(StepLR(optimizers[1], 1))]
    callback = LearningRateMonitor(logging_interval="step")
    trainer = make_trainer(callback, optimizers=optimizers, lr_scheduler_configs=configs).begin()
    assert trainer.logged == [(0, {"mine": 0.1, "lr-SGD": 0.2, "lr-Adam": 0.001})]


def test_values_at_steps_follow_the_scheduler(make_trainer):
    optimizer = SGD(parameter(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    callback = LearningRateMonitor(logging_interval="step")
    trainer = make_trainer(callback, batches=20, optimizers=[optimizer], log_every_n_steps=3)
    trainer.lr_scheduler_configs = [config(scheduler, "step")]
    trainer.begin()
    trainer.call("on_train_epoch_start")
    for _ in range(7):
        optimizer.step()
        scheduler.step()
        trainer.step()
    assert trainer.logged == [(step, {"lr-SGD": 0.5**step}) for step in (0, 3, 6)]
    assert callback.lrs == {"lr-SGD": [1.0, 0.125, 0.015625]}


def test_a_resumed_run_logs_the_same_steps(make_trainer):
    trainer = make_trainer(LearningRateMonitor("step"), batches=20, optimizers=[SGD(parameter())], log_every_n_steps=3)
    trainer.progress.step = 3
    trainer.begin()
    for _ in range(4):
        trainer.step()
    assert [step for step, _ in trainer.logged] == [6]


@pytest.mark.parametrize(
    ("interval", "logged"),
    [
        (None, [(0, {"lr-SGD"}), (0, {"lr-Adam"}), (2, {"lr-SGD"}), (4, {"lr-SGD"}), (4, {"lr-Adam"})]),
        ("epoch", [(0, {"lr-SGD", "lr-Adam"}), (4, {"lr-SGD", "lr-Adam"})]),
        ("step", [(0, {"lr-SGD", "lr-Adam"}), (2, {"lr-SGD", "lr-Adam"}), (4, {"lr-SGD", "lr-Adam"})]),
    ],
)
def test_intervals(make_trainer, interval, logged):
    sgd, adam = SGD(parameter(), lr=0.1), Adam(parameter())
    configs = [config(StepLR(sgd, 1), "step"), config(StepLR(adam, 1), "epoch")]
    trainer = make_trainer(
        LearningRateMonitor(interval), optimizers=[sgd, adam], lr_scheduler_configs=configs, log_every_n_steps=2
    ).begin()
    trainer.epoch()
    trainer.call("on_train_epoch_start")
    assert [(step, set(values)) for step, values in trainer.logged] == logged


def test_momentum_and_weight_decay(make_trainer):
    optimizers = [
        SGD(parameter(), lr=0.1, momentum=0.9, weight_decay=0.01),
        Adam(parameter(), betas=(0.8, 0.99)),
        torch.optim.Adagrad(parameter()),
    ]
    callback = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    trainer = make_trainer(callback, optimizers=optimizers).begin()
    ((_, values),) = trainer.logged
    assert values == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.9,
        "lr-SGD-weight_decay": 0.01,
        "lr-Adam": 0.001,
        "lr-Adam-momentum": 0.8,
        "lr-Adam-weight_decay": 0.0,
        "lr-Adagrad": 0.01,
        "lr-Adagrad-momentum": 0.0,
        "lr-Adagrad-weight_decay": 0.0,
    }


def test_a_rate_that_is_a_tensor(make_trainer):
    optimizer = Adam(parameter(), lr=torch.tensor(0.25))
    callback = LearningRateMonitor("step")
    trainer = make_trainer(callback, optimizers=[optimizer], log_every_n_steps=1).begin()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    trainer.step()
    assert trainer.logged == [(0, {"lr-Adam": 0.25}), (1, {"lr-Adam": 0.5})]
    assert callback.lrs == {"lr-Adam": [0.25, 0.5]}


def test_loggers_hear_of_it_on_rank_0_and_monitors_on_every_rank(make_trainer):
    for rank, logged in ((0, [(0, {"lr-SGD": 0.001})]), (1, [])):
        trainer = make_trainer(
            LearningRateMonitor("step"), optimizers=[SGD(parameter())], rank=rank, world_size=2
        ).begin()
        assert (trainer.logged, trainer.callback_metrics) == (logged, {"lr-SGD": pytest.approx(0.001)})


def test_nothing_without_logging(make_trainer):
    trainer = make_trainer(LearningRateMonitor("step"), optimizers=[SGD(parameter())], log_every_n_steps=0).begin()
    trainer.epoch()
    assert (trainer.logged, trainer.callback_metrics) == ([], {})


def test_a_rate_can_be_monitored(tmp_path):
    class Module(TinyModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="lr-SGD", mode="min")
    trainer = Trainer(
        max_epochs=2, callbacks=[LearningRateMonitor("epoch"), keeper], logger=False, enable_progress_bar=False
    )
    trainer.fit(Module(lr=0.5), [torch.randn(2, 32)])
    assert (trainer.callback_metrics["lr-SGD"].item(), keeper.best_model_score.item()) == (0.25, 0.25)


def test_bad_arguments(make_trainer):
    with pytest.raises(ConfigurationError, match="steps or epochs"):
        LearningRateMonitor("batch")
    same = Adam(groups(a={"name": "x"}, b={"name": "x"}))
    with pytest.raises(ConfigurationError, match="lr-Adam have the same name"):
        make_trainer(LearningRateMonitor(), optimizers=[same]).begin()


def test_a_scheduler_that_names_no_optimizer_hides_none(make_trainer):
    class Steps:
        def step(self): ...

    optimizer = SGD(parameter(), lr=0.5)
    trainer = make_trainer(LearningRateMonitor("step"), optimizers=[optimizer], lr_scheduler_configs=[config(Steps())])
    trainer.begin()
    assert trainer.logged == [(0, {"lr-SGD": 0.5})]
