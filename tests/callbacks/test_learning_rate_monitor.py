import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tests.callbacks.fits import fit, trainer
from trainer_kit import Trainer
from trainer_kit.callbacks import LearningRateMonitor, ModelCheckpoint
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


def parameter():
    return [torch.nn.Parameter(torch.zeros(1))]


def groups(**names):
    return [
        {"params": parameter(), "lr": 0.1 * (i + 1), **extra}
        for i, extra in enumerate(names.values())
    ]


class Rates(TinyModule):
    """Has the given optimizers and schedulers; each batch is a step of the first optimizer."""

    automatic_optimization = False

    def __init__(self, optimizers, schedulers=(), rate=None):
        super().__init__()
        self.given, self.rate = (optimizers, list(schedulers)), rate
        self.own = torch.nn.ParameterList(
            each
            for optimizer in optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        )

    def training_step(self, batch, batch_idx):
        first = self.trainer.optimizers[0]
        for group in first.param_groups:
            for each in group["params"]:
                each.grad = torch.zeros_like(each)
        if self.rate is not None:
            first.param_groups[0]["lr"].fill_(self.rate)
        optimizers = self.optimizers()
        (optimizers[0] if isinstance(optimizers, list) else optimizers).step()
        for scheduler in self.given[1]:
            if isinstance(scheduler, dict) and scheduler.get("interval") == "step":
                scheduler["scheduler"].step()

    def configure_optimizers(self):
        return self.given


def monitored(
    callback,
    optimizers,
    schedulers=(),
    *,
    batches=1,
    epochs=1,
    rate=None,
    ckpt_path=None,
    **options,
):
    """A fit with these optimizers, whose ``logged`` has what the callback logged."""
    made = trainer(callback, max_epochs=epochs, **options)
    made.fit(
        Rates(optimizers, schedulers, rate),
        [torch.ones(2, 32)] * batches,
        ckpt_path=ckpt_path,
    )
    return made


def names(trainer):
    return sorted({name for _, values in trainer.logged for name in values})


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        (lambda: [Adam(parameter())], ["lr-Adam"]),
        (lambda: [Adam(groups(a={}, b={}))], ["lr-Adam/pg1", "lr-Adam/pg2"]),
        (
            lambda: [Adam(groups(a={"name": "body"}, b={"name": "head"}))],
            ["lr-Adam/body", "lr-Adam/head"],
        ),
        (lambda: [SGD(groups(a={"name": "all"}))], ["lr-SGD/all"]),
        (
            lambda: [Adam(parameter()), SGD(parameter()), Adam(groups(a={}, b={}))],
            ["lr-Adam", "lr-Adam-1/pg1", "lr-Adam-1/pg2", "lr-SGD"],
        ),
    ],
)
def test_names(optimizers, expected):
    callback = LearningRateMonitor()
    assert names(monitored(callback, optimizers())) == expected
    assert sorted(callback.lrs) == expected


def test_names_of_schedulers():
    optimizers = [SGD(parameter(), lr=0.1), SGD(parameter(), lr=0.2), Adam(parameter())]
    schedulers = [
        {"scheduler": StepLR(optimizers[0], 1), "name": "mine"},
        StepLR(optimizers[1], 1),
    ]
    made = monitored(
        LearningRateMonitor(logging_interval="step"), optimizers, schedulers
    )
    assert made.logged == [(0, {"mine": 0.1, "lr-SGD": 0.2, "lr-Adam": 0.001})]


def test_values_at_steps_follow_the_scheduler():
    optimizer = SGD(parameter(), lr=1.0)
    schedulers = [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]
    callback = LearningRateMonitor(logging_interval="step")
    made = monitored(callback, [optimizer], schedulers, batches=7, log_every_n_steps=3)
    assert made.logged == [(step, {"lr-SGD": 0.5**step}) for step in (0, 3, 6)]
    assert callback.lrs == {"lr-SGD": [1.0, 0.125, 0.015625]}


def test_a_resumed_run_logs_the_same_steps(tmp_path):
    options = {"batches": 20, "log_every_n_steps": 3}
    first = fit(LearningRateMonitor("step"), max_steps=3, **options)
    assert [step for step, _ in first.logged] == [0, 3]
    first.save_checkpoint(tmp_path / "three")
    resumed = fit(
        LearningRateMonitor("step"),
        max_steps=7,
        ckpt_path=tmp_path / "three",
        **options,
    )
    assert [step for step, _ in resumed.logged] == [6]


@pytest.mark.parametrize(
    ("interval", "logged"),
    [
        (
            None,
            [
                (0, {"lr-SGD"}),
                (0, {"lr-Adam"}),
                (2, {"lr-SGD"}),
                (4, {"lr-SGD"}),
                (4, {"lr-Adam"}),
            ],
        ),
        ("epoch", [(0, {"lr-SGD", "lr-Adam"}), (4, {"lr-SGD", "lr-Adam"})]),
        (
            "step",
            [
                (0, {"lr-SGD", "lr-Adam"}),
                (2, {"lr-SGD", "lr-Adam"}),
                (4, {"lr-SGD", "lr-Adam"}),
            ],
        ),
    ],
)
def test_intervals(interval, logged):
    sgd, adam = SGD(parameter(), lr=0.1), Adam(parameter())
    schedulers = [
        {"scheduler": StepLR(sgd, 1), "interval": "step"},
        {"scheduler": StepLR(adam, 1)},
    ]
    made = monitored(
        LearningRateMonitor(interval),
        [sgd, adam],
        schedulers,
        batches=4,
        epochs=2,
        max_steps=5,
        log_every_n_steps=2,
    )
    assert [(step, set(values)) for step, values in made.logged] == logged


def test_momentum_and_weight_decay():
    optimizers = [
        SGD(parameter(), lr=0.1, momentum=0.9, weight_decay=0.01),
        Adam(parameter(), betas=(0.8, 0.99)),
        torch.optim.Adagrad(parameter()),
    ]
    callback = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    ((_, values),) = monitored(callback, optimizers).logged
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


def test_a_rate_that_is_a_tensor():
    optimizer = Adam(parameter(), lr=torch.tensor(0.25))
    callback = LearningRateMonitor("step")
    made = monitored(callback, [optimizer], log_every_n_steps=1, rate=0.5)
    assert made.logged == [(0, {"lr-Adam": 0.25}), (1, {"lr-Adam": 0.5})]
    assert callback.lrs == {"lr-Adam": [0.25, 0.5]}


class Records:
    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step):
        self.logged += [(step, name) for name in metrics if name.startswith("lr-")]


@pytest.mark.world_size(2)
def test_rank_0_writes_to_the_loggers_and_every_rank_has_the_value_to_monitor():
    logger = Records()
    made = Trainer(
        max_steps=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[LearningRateMonitor("step")],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(TinyModule(lr=0.125), [torch.ones(2, 32)] * 4)
    assert made.callback_metrics["lr-SGD"] == 0.125
    assert logger.logged == ([(0, "lr-SGD")] if made.global_rank == 0 else [])


def test_nothing_without_logging():
    made = fit(LearningRateMonitor("step"), log_every_n_steps=0)
    assert (made.global_step, made.logged) == (4, [])
    assert "lr-SGD" not in made.callback_metrics


def test_a_rate_can_be_monitored(tmp_path):
    class Module(TinyModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="lr-SGD", mode="min")
    trainer = Trainer(
        max_epochs=2,
        callbacks=[LearningRateMonitor("epoch"), keeper],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(lr=0.5), [torch.randn(2, 32)])
    assert (
        trainer.callback_metrics["lr-SGD"].item(),
        keeper.best_model_score.item(),
    ) == (
        0.25,
        0.25,
    )


def test_bad_arguments():
    with pytest.raises(ConfigurationError, match="steps or epochs"):
        LearningRateMonitor("batch")
    same = Adam(groups(a={"name": "x"}, b={"name": "x"}))
    with pytest.raises(ConfigurationError, match="lr-Adam have the same name"):
        monitored(LearningRateMonitor(), [same])


def test_a_scheduler_that_names_no_optimizer_hides_none():
    class Steps:
        def step(self): ...

    made = monitored(LearningRateMonitor("step"), [SGD(parameter(), lr=0.5)], [Steps()])
    assert made.logged == [(0, {"lr-SGD": 0.5})]
