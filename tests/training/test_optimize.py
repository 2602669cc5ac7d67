"""Optimizers and schedulers: every form `configure_optimizers` may return, and when each scheduler advances."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from trainer_kit import Trainer, TrainModule
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.step.optimizers import configure_optimizers
from trainer_kit.testing import TinyModule


class Net(TrainModule):
    def __init__(self, configure=None):
        super().__init__()
        self.layer, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
        self.configure = configure

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean() + self.other(batch).pow(2).mean()

    def configure_optimizers(self):
        return self.configure(self) if self.configure is not None else sgd(self)


def sgd(module, lr=1.0):
    return torch.optim.SGD(module.parameters(), lr=lr)


class Counting:
    """A scheduler that counts, and takes a metric or not."""

    def __init__(self, optimizer=None):
        self.optimizer, self.metrics = optimizer, []

    def step(self, metric=None):
        self.metrics.append(metric)

    def state_dict(self):
        return {}


def made(configure, manual=False):
    module = Net(configure)
    module.automatic_optimization = not manual
    return configure_optimizers(module)


def fit(module, batches=3, **options):
    trainer = Trainer(accelerator="cpu", barebones=True, **{"max_epochs": 2, **options})
    trainer.fit(module, [torch.zeros(2, 1)] * batches)
    return trainer


# -- forms ---------------------------------------------------------------------------------------------------------


def test_none_is_not_an_optimizer():
    found = made(lambda m: None)
    assert (found.optimizers, found.schedulers, found.names) == ([], [], None)


def test_training_without_an_optimizer_changes_nothing():
    module = Net(lambda m: None)
    before = [p.detach().clone() for p in module.parameters()]
    assert fit(module).global_step == 6
    assert all(
        torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "shape",
    [
        lambda o, s: ([o], [s]),
        lambda o, s: {"optimizer": o, "lr_scheduler": s},
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s}},
        lambda o, s: [{"optimizer": o, "lr_scheduler": s}],
        lambda o, s: ([o], [{"scheduler": s, "interval": "epoch"}]),
        lambda o, s: ((o,), (s,)),
    ],
)
def test_an_optimizer_with_a_scheduler_in_every_form(shape):
    seen = []

    def configure(module):
        optimizer = sgd(module)
        seen.append((optimizer, StepLR(optimizer, 1)))
        return shape(*seen[0])

    found = made(configure)
    assert found.optimizers == [seen[0][0]]
    assert [config.scheduler for config in found.schedulers] == [seen[0][1]]
    assert (found.schedulers[0].interval, found.schedulers[0].frequency) == ("epoch", 1)


@pytest.mark.parametrize(
    "shape", [lambda o: o, lambda o: [o], lambda o: (o,), lambda o: {"optimizer": o}]
)
def test_an_optimizer_alone_in_every_form(shape):
    found = made(lambda m: shape(sgd(m)))
    assert len(found.optimizers) == 1
    assert found.schedulers == []


def test_several_optimizers_in_manual_optimization():
    found = made(lambda m: [sgd(m.layer), sgd(m.other)], manual=True)
    assert len(found.optimizers) == 2


def test_named_optimizers_with_their_schedulers():
    def configure(m):
        first, second = sgd(m.layer), sgd(m.other)
        return {
            "a": first,
            "b": {"optimizer": second, "lr_scheduler": StepLR(second, 1)},
        }

    found = made(configure)
    assert found.names == ["a", "b"]
    assert len(found.schedulers) == 1


def test_options_of_a_scheduler():
    config = {
        "interval": "step",
        "frequency": 3,
        "monitor": "loss",
        "strict": False,
        "name": "mine",
    }
    found = made(
        lambda m: {
            "optimizer": sgd(m),
            "lr_scheduler": {"scheduler": Counting(), **config},
        }
    ).schedulers[0]
    assert {name: getattr(found, name) for name in config} == config


def test_a_plateau_scheduler_is_recognized_and_takes_a_monitor_outside_its_dict():
    def configure(m):
        optimizer = sgd(m)
        return {
            "optimizer": optimizer,
            "lr_scheduler": ReduceLROnPlateau(optimizer),
            "monitor": "loss",
        }

    found = made(configure).schedulers[0]
    assert (found.reduce_on_plateau, found.monitor) == (True, "loss")


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configure", "said"),
    [
        (lambda m: "adam", r"(?s)not an optimizer.*str"),
        (lambda m: ["adam"], r"configure_optimizers\(\)\[0\] is not an optimizer"),
        (lambda m: ([nn.Linear(1, 1)], []), "no optimizer"),
        (lambda m: {"optimizer": "adam"}, "no optimizer"),
        (
            lambda m: {"optimizer": sgd(m), "lr_schedule": None},
            r"(?s)unknown key.*'lr_schedule'",
        ),
        (
            lambda m: {"optimizer": sgd(m), "lr_scheduler": {"schedule": 1}},
            r"(?s)'schedule'.*did you mean 'scheduler'",
        ),
        (
            lambda m: {"optimizer": sgd(m), "lr_scheduler": {"interval": "step"}},
            "needs a key 'scheduler'",
        ),
        (lambda m: {"optimizer": sgd(m), "lr_scheduler": object()}, "step method"),
        (
            lambda m: _with(m, interval="batch"),
            r"(?s)interval must be 'epoch' or 'step'.*'batch'",
        ),
        (lambda m: _with(m, frequency=0), "frequency"),
        (lambda m: _with(m, frequency=1.5), "frequency"),
        (lambda m: _plateau(m), r"(?s)ReduceLROnPlateau needs a metric.*monitor"),
        (lambda m: [sgd(m.layer), sgd(m.other)], r"(?s)several optimizers.*names"),
        (
            lambda m: {"a": sgd(m), "b": sgd(m.other)},
            r"(?s)share a parameter.*'a' and 'b'",
        ),
    ],
)
def test_malformed_optimizer_configurations_are_refused(configure, said):
    with pytest.raises(ConfigurationError, match=said):
        made(configure)


def _with(module, **config):
    return {
        "optimizer": sgd(module),
        "lr_scheduler": {"scheduler": Counting(), **config},
    }


def _plateau(module):
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer)}


# -- schedulers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 4),
        ({"frequency": 2}, 2),
        ({"frequency": 3}, 1),
        ({"interval": "step"}, 12),
        ({"interval": "step", "frequency": 5}, 2),
        ({"interval": "step", "frequency": 4}, 3),
    ],
)
def test_a_scheduler_advances_every_so_often_counted_over_the_whole_run(
    config, expected
):
    """4 epochs of 3 steps; Lightning counts a step frequency anew in each epoch."""
    scheduler = Counting()
    fit(
        Net(
            lambda m: {
                "optimizer": sgd(m),
                "lr_scheduler": {"scheduler": scheduler, **config},
            }
        ),
        max_epochs=4,
    )
    assert len(scheduler.metrics) == expected


def test_a_step_is_an_optimizer_step():
    scheduler = Counting()
    module = Net(
        lambda m: {
            "optimizer": sgd(m),
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
    )
    fit(module, batches=5, max_epochs=1, accumulate_grad_batches=2)
    assert len(scheduler.metrics) == 3


def test_rates_follow_torch_s_schedulers():
    rates = []

    class Watches(Net):
        def on_train_epoch_start(self):
            rates.append(self.optimizers().param_groups[0]["lr"])

    def configure(m):
        optimizer = sgd(m)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    fit(Watches(configure), max_epochs=3)
    assert rates == [1.0, 0.5, 0.25]


class Logs(Net):
    def training_step(self, batch, batch_idx):
        self.log("loss", 3.0, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_on_a_metric_is_given_it(interval):
    scheduler = Counting()
    config = {
        "scheduler": scheduler,
        "monitor": "loss",
        "reduce_on_plateau": True,
        "interval": interval,
    }
    fit(Logs(lambda m: {"optimizer": sgd(m), "lr_scheduler": config}), max_epochs=2)
    assert [float(metric) for metric in scheduler.metrics] == [3.0] * (
        6 if interval == "step" else 2
    )


def test_a_scheduler_on_a_validation_metric_sees_this_epoch_s():
    scheduler = Counting()
    config = {"scheduler": scheduler, "monitor": "val_loss", "reduce_on_plateau": True}

    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.current_epoch))

    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=3)
    module = Validates(lambda m: {"optimizer": sgd(m), "lr_scheduler": config})
    trainer.fit(module, [torch.zeros(2, 1)], [torch.zeros(2, 1)])
    assert [float(metric) for metric in scheduler.metrics] == [0.0, 1.0, 2.0]


def test_a_missing_metric_is_an_error_that_lists_the_logged_ones():
    config = {"scheduler": Counting(), "monitor": "val_loss", "reduce_on_plateau": True}
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)'val_loss', which was not logged.*logged so far: loss",
    ):
        fit(Logs(lambda m: {"optimizer": sgd(m), "lr_scheduler": config}))


def test_a_missing_metric_is_skipped_if_strict_is_false():
    scheduler = Counting()
    config = {
        "scheduler": scheduler,
        "monitor": "val_loss",
        "reduce_on_plateau": True,
        "strict": False,
    }
    fit(Logs(lambda m: {"optimizer": sgd(m), "lr_scheduler": config}))
    assert scheduler.metrics == []


def test_a_skipped_batch_advances_no_scheduler():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    scheduler = Counting()
    module = Skips(
        lambda m: {
            "optimizer": sgd(m),
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
    )
    assert fit(module, max_epochs=1).global_step == 3
    assert len(scheduler.metrics) == 2


def test_the_user_may_advance_schedulers_himself():
    class Own(Logs):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step(("own", float(metric)))

    scheduler = Counting()
    config = {"scheduler": scheduler, "monitor": "loss", "reduce_on_plateau": True}
    fit(Own(lambda m: {"optimizer": sgd(m), "lr_scheduler": config}), max_epochs=1)
    assert scheduler.metrics == [("own", 3.0)]


# -- the step ------------------------------------------------------------------------------------------------------


def test_the_user_may_step_himself_and_is_given_the_loss_that_was_computed():
    steps, losses = [], []

    class Own(Net):
        computed = 0

        def training_step(self, batch, batch_idx):
            self.computed += 1
            return super().training_step(batch, batch_idx)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            steps.append((epoch, batch_idx))
            losses.append(float(optimizer_closure()))
            optimizer.step()

    module = Own()
    trainer = fit(module)
    assert steps == [(epoch, index) for epoch in range(2) for index in range(3)]
    assert all(loss >= 0 for loss in losses)
    assert module.computed == trainer.global_step == 6


def test_the_user_may_drop_gradients_himself():
    calls = []

    class Own(Net):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            calls.append((epoch, batch_idx))
            optimizer.zero_grad(set_to_none=False)

    module = Own()
    fit(module, max_epochs=1, accumulate_grad_batches=2)
    assert calls == [(0, 0), (0, 2)]


def test_the_user_may_clip_himself():
    given = []

    class Own(Net):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            given.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, 1e-3, "value")

        def on_train_batch_end(self, *_):
            given.append(max(float(p.grad.abs().max()) for p in self.parameters()))

    fit(
        Own(),
        batches=1,
        max_epochs=1,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="norm",
    )
    assert given == [(0.5, "norm"), pytest.approx(1e-3)]


def test_gradients_of_a_step_live_until_its_last_hook_and_are_new_in_the_next():
    seen = []

    class Looks(Net):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(self.layer.bias.grad is None)

        def on_train_batch_end(self, *_):
            seen.append(float(self.layer.bias.grad))

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean() + self.other(batch).mean()

    fit(Looks(), max_epochs=1)
    assert [value for value in seen if isinstance(value, float)] == [1.0] * 3


def test_an_optimizer_that_evaluates_again_runs_the_window_again():
    class Own(Net):
        computed = 0

        def training_step(self, batch, batch_idx):
            self.computed += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=5)

    module = Own()
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    trainer.fit(module, [torch.ones(2, 1)] * 2)
    assert trainer.global_step == 2
    assert module.computed > 2
    assert module.training_step(torch.ones(2, 1), 0).item() < 1e-6


@pytest.mark.parametrize(
    ("given", "algorithm"),
    [({}, "norm"), ({"gradient_clip_algorithm": "value"}, "value")],
)
def test_clip_gradients_without_a_value_uses_the_trainers_value(given, algorithm):
    """As in Lightning: an override may decide when, and leave to the Trainer how much."""
    seen = []

    class Overrides(TinyModule):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            self.clip_gradients(optimizer)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append([p.grad.clone() for p in self.parameters()])

    def train(module_class):
        torch.manual_seed(0)
        trainer = Trainer(
            max_steps=2,
            gradient_clip_val=1e-3,
            barebones=True,
            accelerator="cpu",
            **given,
        )
        module = module_class()
        trainer.fit(module, [torch.ones(2, 32)] * 2)
        return module.state_dict()

    torch.testing.assert_close(train(Overrides), train(TinyModule), rtol=0, atol=0)
    largest = torch.cat([g.flatten() for g in seen[0]])
    assert (
        largest.norm() if algorithm == "norm" else largest.abs().max()
    ) <= 1e-3 * 1.001
