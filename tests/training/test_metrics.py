"""`self.log`: which values appear where, when and under which name; Lightning's semantics unless a test says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.core.errors import LogError
from trainer_kit.core.progress import Progress
from trainer_kit.loggers import read_journal
from trainer_kit.metrics.metrics import Metrics


class Rows:
    """A logger that keeps (step, values) in memory."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        assert all(
            type(value) is float for name, value in metrics.items() if name != "epoch"
        )
        self.rows.append(
            (step, {name: value for name, value in metrics.items() if name != "epoch"})
        )

    def of(self, name):
        return [(step, values[name]) for step, values in self.rows if name in values]


class Net(TrainModule):
    """The mean of a batch is the value to log; the loss leaves the weights where they are."""

    def __init__(self, train=None, val=None, **hooks):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_log, self.val_log, self.hooks = train, val, hooks

    def training_step(self, batch, batch_idx):
        if self.train_log is not None:
            self.train_log(self, batch.float().mean())
        return self.weight.sum() ** 2

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.val_log is not None:
            self.val_log(self, batch.float().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count=5, batch_size=2):
    """Means 0.5, 2.5, 4.0 of batches with 2, 2 and 1 samples: the mean over samples is 2.0."""
    return DataLoader(torch.arange(count), batch_size=batch_size)


def make_trainer(**options):
    rows = Rows()
    defaults = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": rows,
        "num_sanity_val_steps": 0,
    }
    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu", **dict.fromkeys(off, False), **{**defaults, **options}
    )
    trainer.rows = rows
    return trainer


def fit(module, val=None, train=None, **options):
    trainer = make_trainer(**options)
    trainer.fit(module, loader() if train is None else train, val)
    return trainer


def numbers(metrics):
    return {
        name: pytest.approx(float(value), abs=1e-6) for name, value in metrics.items()
    }


# -- names and defaults --------------------------------------------------------------------------------------------


def test_a_training_step_logs_single_steps_by_default():
    trainer = fit(Net(lambda m, v: m.log("a", v)))
    assert trainer.rows.of("a") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert trainer.callback_metrics["a"] == 4.0


def test_a_validation_step_logs_the_epoch_by_default():
    trainer = fit(Net(val=lambda m, v: m.log("a", v)), loader())
    assert trainer.rows.of("a") == [(3, 2.0)]
    assert set(trainer.callback_metrics) == {"a"}


def test_both_in_training_gives_two_names_and_the_plain_one_for_monitors():
    trainer = fit(Net(lambda m, v: m.log("a", v, on_step=True, on_epoch=True)))
    assert trainer.rows.of("a_step") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert trainer.rows.of("a_epoch") == [(3, 2.0)]
    assert trainer.rows.of("a") == []
    assert numbers(trainer.callback_metrics) == {
        "a": 2.0,
        "a_step": 4.0,
        "a_epoch": 2.0,
    }
    assert numbers(trainer.logged_metrics) == {"a_step": 4.0, "a_epoch": 2.0}


def test_epoch_alone_in_training():
    trainer = fit(
        Net(lambda m, v: m.log("a", v, on_step=False, on_epoch=True)), max_epochs=2
    )
    assert trainer.rows.of("a") == [(3, 2.0), (6, 2.0)]


def test_single_batches_of_validation_have_their_own_count_over_all_validations():
    trainer = fit(
        Net(val=lambda m, v: m.log("a", v, on_step=True)),
        loader(),
        max_epochs=2,
        num_sanity_val_steps=2,
    )
    expected = [(1, 0.5), (2, 2.5), (3, 4.0), (4, 0.5), (5, 2.5), (6, 4.0)]
    assert trainer.rows.of("a_step") == expected
    assert trainer.rows.of("a_epoch") == [(3, 2.0), (6, 2.0)]


def test_a_step_value_that_first_appears_in_a_later_batch_of_validation_is_handed_on():
    trainer = fit(
        Net(val=lambda m, v: v > 2 and m.log("a", v, on_step=True, on_epoch=False)),
        loader(),
    )
    assert [value for _, value in trainer.rows.of("a")] == [2.5, 4.0]


def test_neither_step_nor_epoch_is_an_error():
    with pytest.raises(
        LogError,
        match=r"(?s)'a' would never be shown or logged.*on_step nor on_epoch in training_step",
    ):
        fit(Net(lambda m, v: m.log("a", v, on_step=False, on_epoch=False)))


# -- which step, and how often -------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 4, 7, 100])
def test_steps_are_handed_on_every_n_optimizer_steps(every):
    trainer = fit(
        Net(lambda m, v: m.log("a", v)), train=loader(10, 1), log_every_n_steps=every
    )
    assert trainer.rows.of("a") == [(n, float(n - 1)) for n in range(every, 11, every)]


def test_zero_hands_on_no_step_but_epochs():
    log = lambda m, v: m.log("a", v, on_step=True, on_epoch=True)  # noqa: E731
    trainer = fit(Net(log), log_every_n_steps=0)
    assert [row for _, row in trainer.rows.rows] == [{"a_epoch": 2.0}]


def test_steps_count_over_epochs():
    trainer = fit(Net(lambda m, v: m.log("a", v)), max_epochs=2, log_every_n_steps=2)
    assert trainer.rows.of("a") == [(2, 2.5), (4, 0.5), (6, 4.0)]


def test_a_window_hands_on_its_last_micro_batch_under_its_optimizer_step():
    trainer = fit(
        Net(lambda m, v: m.log("a", v)), train=loader(8, 2), accumulate_grad_batches=2
    )
    assert trainer.rows.of("a") == [(1, 2.5), (2, 6.5)]


def test_values_between_two_flushes_are_in_the_mean_of_the_epoch():
    trainer = fit(Net(lambda m, v: m.log("a", v, on_epoch=True)), log_every_n_steps=100)
    assert trainer.rows.of("a_epoch") == [(3, 2.0)]


def test_the_epoch_s_number_is_with_every_training_value():
    class Epochs(Rows):
        def log_metrics(self, metrics, step):
            self.rows.append((step, metrics["epoch"]))

    epochs = Epochs()
    fit(
        Net(lambda m, v: m.log("a", v, on_epoch=True)),
        max_epochs=2,
        log_every_n_steps=3,
        logger=epochs,
    )
    assert epochs.rows == [(3, 0), (3, 0), (6, 1), (6, 1)]


def test_a_value_that_a_user_hands_to_the_loggers_himself():
    class Own(Net):
        def on_train_epoch_end(self):
            self.trainer.log_metrics({"own": torch.tensor(3.0)})
            self.trainer.log_metrics({"later": 4}, step=17)

    trainer = fit(Own())
    assert trainer.rows.of("own") == [(3, 3.0)]
    assert trainer.rows.of("later") == [(17, 4.0)]


def test_nothing_logged_means_nothing_handed_on():
    assert fit(Net(), loader()).rows.rows == []


# -- reductions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean", 2.0),
        ("avg", 2.0),
        (torch.mean, 2.0),
        ("sum", 7.0),
        (sum, 7.0),
        (torch.sum, 7.0),
        ("min", 0.5),
        (min, 0.5),
        (torch.min, 0.5),
        ("max", 4.0),
        (max, 4.0),
        (torch.max, 4.0),
        ("SUM", 7.0),
        ("Max", 4.0),
        ("AVG", 2.0),
        (lambda values: values[1], 2.5),
        (torch.median, 2.5),
        (lambda values: values.numel(), 3.0),
    ],
)
def test_reductions_over_the_epoch(kind, expected):
    log = lambda m, v: m.log("a", v, on_step=False, on_epoch=True, reduce_fx=kind)  # noqa: E731
    trainer = fit(Net(log, log), loader())
    assert trainer.rows.of("a") == [
        (3, pytest.approx(expected)),
        (3, pytest.approx(expected)),
    ]


@pytest.mark.parametrize("kind", ["total", None, 3, ["sum"]])
def test_a_reduction_that_does_not_exist_is_refused_in_words(kind):
    with pytest.raises(
        LogError, match=r"(?s)unknown reduce_fx for 'a'.*fix: +use mean, sum, min"
    ):
        fit(Net(lambda m, v: m.log("a", v, reduce_fx=kind)), loader())


def test_a_mean_is_weighted_by_the_size_of_the_batch():
    assert (
        fit(Net(val=lambda m, v: m.log("a", v)), loader(5, 4)).callback_metrics["a"]
        == 2.0
    )


def test_a_given_batch_size_is_the_weight():
    log = lambda m, v: m.log("a", v, on_step=False, on_epoch=True, batch_size=1)  # noqa: E731
    trainer = fit(Net(log))
    assert float(trainer.callback_metrics["a"]) == pytest.approx(7 / 3)


def test_the_default_weight_is_the_loss_weight():
    """Ours: decision 17."""

    class Weighted(Net):
        def loss_weight(self, batch):
            return float(batch[0]) + 1  # 1, 3, 5

    trainer = fit(Weighted(lambda m, v: m.log("a", v, on_step=False, on_epoch=True)))
    assert float(trainer.callback_metrics["a"]) == pytest.approx(
        (0.5 * 1 + 2.5 * 3 + 4.0 * 5) / 9
    )


def test_the_default_weight_is_the_loss_weight_in_evaluation_too():
    class Weighted(Net):
        def loss_weight(self, batch):
            return float(batch[0]) + 1

    by_samples = fit(
        Net(val=lambda m, v: m.log("a", v)), loader(5, 4)
    ).callback_metrics["a"]
    assert (
        fit(Weighted(val=lambda m, v: m.log("a", v)), loader(5, 4)).callback_metrics[
            "a"
        ]
        != by_samples
    )


@pytest.mark.parametrize("kind", ["mean", "sum", "min", "max"])
def test_more_values_than_are_kept_at_once_fold_right(kind):
    values = torch.randn(700, dtype=torch.float64)

    def log(m, v):
        m.log("a", values[int(v)], on_step=True, on_epoch=True, reduce_fx=kind)

    trainer = fit(
        Net(log, log), loader(700, 1), train=loader(700, 1), log_every_n_steps=100
    )
    expected = pytest.approx(float(getattr(values, kind)()), abs=1e-12)
    assert trainer.rows.of("a_epoch") == [(700, expected), (700, expected)]
    steps = trainer.rows.of("a_step")
    assert [step for step, _ in steps] == [*range(100, 701, 100), *range(1, 701)]
    assert [value for _, value in steps] == pytest.approx(
        [*values[99::100].tolist(), *values.tolist()]
    )


@pytest.mark.slow
def test_a_mean_of_very_many_small_values_does_not_drift():
    """Sums are float64, whatever was logged."""
    log = lambda m, v: m.log("a", torch.tensor(0.1), on_step=False, on_epoch=True)  # noqa: E731
    trainer = fit(Net(log), train=[torch.zeros(1)] * 3000)
    assert float(trainer.callback_metrics["a"]) == float(torch.tensor(0.1))


def test_several_values_in_one_step_count_once_each():
    def log(m, v):
        for k in range(3):
            m.log("a", v + k, on_step=False, on_epoch=True, reduce_fx="sum")

    assert fit(Net(log)).callback_metrics["a"] == 3 * 7 + 3 * (0 + 1 + 2)


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        True,
        np.float32(3),
        np.int64(3),
        torch.tensor(3),
        torch.tensor([3.0]),
        torch.tensor([[3.0]]).half(),
    ],
)
def test_numbers_of_all_kinds(value):
    trainer = fit(Net(lambda m, v: m.log("a", value, on_step=True, on_epoch=True)))
    assert trainer.callback_metrics["a_epoch"] == float(value)
    assert trainer.callback_metrics["a_step"] == float(value)


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(0)])
def test_a_tensor_of_several_numbers_is_refused_with_its_shape(value):
    with pytest.raises(LogError, match=r"(?s)'a' is not a single number.*shape"):
        fit(Net(lambda m, v: m.log("a", value)))


@pytest.mark.parametrize(
    "value", ["3 apples", None, [1.0], {"b": 1}, np.zeros(2), object()]
)
def test_values_that_are_not_numbers_are_refused(value):
    with pytest.raises(LogError, match="'a' is not a number"):
        fit(Net(lambda m, v: m.log("a", value)))


def test_a_name_is_a_string():
    with pytest.raises(LogError, match="string"):
        fit(Net(lambda m, v: m.log(3, v)))


def test_a_logged_value_keeps_no_graph():
    seen = []

    class Keeps(Net):
        def training_step(self, batch, batch_idx):
            loss = (self.weight * batch.float().mean()).sum()
            self.log("a", loss)
            seen.append(self.trainer.callback_metrics["a"].requires_grad)
            return loss

    fit(Keeps())
    assert seen == [False] * 3


@pytest.mark.parametrize("kind", ["buffer", "parameter", "view"])
def test_a_value_that_changes_in_place_later_keeps_its_logged_value(kind):
    class Moves(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("buffer", torch.zeros(()))
            self.parameter = torch.nn.Parameter(torch.zeros(()))
            self.table = torch.nn.Parameter(torch.zeros(3))

        def training_step(self, batch, batch_idx):
            value = {
                "buffer": self.buffer,
                "parameter": self.parameter,
                "view": self.table[1],
            }[kind]
            with torch.no_grad():
                for moving in (self.buffer, self.parameter, self.table):
                    moving += 1
            self.log("a", value, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Moves(), train=[torch.zeros(1)] * 3)
    assert trainer.rows.of("a_epoch") == [(3, 2.0)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64]
)
def test_a_value_between_two_flushes_keeps_its_dtype(dtype):
    """A float32 tensor on the CPU is kept as a number, others as tensors."""
    seen = []

    class Looks(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(self.trainer.callback_metrics["a"])

    value = torch.tensor(7 / 3).to(dtype)
    fit(
        Looks(lambda m, v: m.log("a", value)),
        train=[torch.zeros(1)] * 2,
        log_every_n_steps=50,
    )
    assert [(one.dtype, one.item()) for one in seen] == [(dtype, value.item())] * 2


def test_a_value_of_a_run_in_float64_is_not_rounded_between_two_flushes():
    """torch's default dtype is float64 in the step only."""
    seen = []

    class Looks(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(self.trainer.callback_metrics["a"])

    value = torch.tensor(7 / 3, dtype=torch.float64)
    fit(
        Looks(lambda m, v: m.log("a", value)), precision="64-true", log_every_n_steps=50
    )
    assert [(one.dtype, one.item()) for one in seen] == [(torch.float64, 7 / 3)] * 3


def test_numbers_and_tensors_under_one_name_are_averaged_in_float64():
    values = iter(
        [
            7 / 3,
            torch.tensor(7 / 3, dtype=torch.float64),
            torch.tensor(0.5, dtype=torch.bfloat16),
        ]
    )
    net = Net(
        lambda m, v: m.log(
            "a", next(values), on_step=False, on_epoch=True, batch_size=1
        )
    )
    assert fit(net).rows.of("a") == [(3, (7 / 3 + 7 / 3 + 0.5) / 3)]


def test_nan_is_a_value():
    trainer = fit(Net(lambda m, v: m.log("a", math.nan)))
    assert math.isnan(trainer.callback_metrics["a"])


def test_log_dict_is_log_for_each():
    trainer = fit(
        Net(
            lambda m, v: m.log_dict(
                {"a": v, "b": 2 * v}, on_step=False, on_epoch=True, prog_bar=True
            )
        )
    )
    assert numbers(trainer.callback_metrics) == {"a": 2.0, "b": 4.0}
    assert numbers(trainer.progress_bar_metrics) == {"a": 2.0, "b": 4.0}


# -- who gets it ---------------------------------------------------------------------------------------------------


def test_logger_false_keeps_a_value_from_the_loggers_only():
    trainer = fit(Net(lambda m, v: m.log("a", v, logger=False, prog_bar=True)))
    assert trainer.rows.of("a") == []
    assert trainer.logged_metrics == {}
    assert trainer.callback_metrics["a"] == 4.0
    assert trainer.progress_bar_metrics == {"a": 4.0}


def test_only_values_with_prog_bar_are_in_the_bar():
    def log(m, v):
        m.log("a", v, prog_bar=True, on_epoch=True)
        m.log("b", v)

    trainer = fit(Net(log))
    assert numbers(trainer.progress_bar_metrics) == {"a_step": 4.0, "a_epoch": 2.0}


def test_every_logger_gets_every_value():
    first, second = Rows(), Rows()
    fit(Net(lambda m, v: m.log("a", v)), logger=[first, second])
    assert first.rows == second.rows != []


def test_a_value_named_step_is_logged_like_the_others():
    rows = Rows()

    def log(m, v):
        m.log("a", v, on_step=False, on_epoch=True)
        m.log("step", 70.0 + m.current_epoch, on_step=False, on_epoch=True)

    fit(Net(log), logger=rows, max_epochs=2)
    assert [step for step, _ in rows.of("a")] == [70, 71]
    assert rows.of("step") == []


def test_the_journal_has_values_that_a_logger_fails_on(tmp_path, capsys):
    class Down(Rows):
        log_dir = str(tmp_path / "run")

        def log_metrics(self, metrics, step):
            raise ConnectionError("no answer")

    fit(Net(lambda m, v: m.log("time", v)), logger=Down(), log_every_n_steps=1)
    assert (
        "Down: ConnectionError: no answer; training continues"
        in capsys.readouterr().out
    )
    record, *_ = read_journal(tmp_path / "run" / "journal.jsonl")
    assert (record["step"], record["metric/time"]) == (1, 0.5)


def test_callback_metrics_are_tensors_on_the_host_and_a_copy():
    trainer = fit(Net(lambda m, v: m.log("a", v)))
    value = trainer.callback_metrics["a"]
    assert isinstance(value, torch.Tensor)
    assert value.shape == ()
    trainer.callback_metrics.clear()
    assert "a" in trainer.callback_metrics


# -- when values are there -----------------------------------------------------------------------------------------


def snapshots(names):
    """A callback that notes ``callback_metrics`` in the hooks ``names``."""
    seen = []

    def hook(name):
        return lambda self, trainer, *_: seen.append(
            (name, {k: float(v) for k, v in trainer.callback_metrics.items()})
        )

    return type(
        "Seen", (Callback,), {"seen": seen, **{name: hook(name) for name in names}}
    )()


def test_the_value_of_a_step_is_there_at_once_also_between_flushes():
    seen = snapshots(["on_train_batch_end"])
    fit(
        Net(lambda m, v: m.log("a", v, on_epoch=True)),
        callbacks=seen,
        log_every_n_steps=100,
    )
    assert [values["a"] for _, values in seen.seen] == [0.5, 2.5, 4.0]
    assert [values["a_step"] for _, values in seen.seen] == [0.5, 2.5, 4.0]


def test_during_validation_the_latest_training_values_are_there():
    seen = snapshots(
        ["on_validation_start", "on_validation_batch_end", "on_validation_end"]
    )
    module = Net(lambda m, v: m.log("a", v), lambda m, v: m.log("b", v))
    fit(module, loader(), callbacks=seen, log_every_n_steps=100)
    assert {values["a"] for _, values in seen.seen} == {4.0}


@pytest.mark.parametrize("log_every", [1, 2, 100])
def test_hooks_at_the_end_of_an_epoch_see_it_reduced(log_every):
    seen = snapshots(["on_train_epoch_end", "on_validation_epoch_end"])
    log = {"on_step": True, "on_epoch": True}
    module = Net(lambda m, v: m.log("a", v, **log), lambda m, v: m.log("b", v, **log))
    fit(module, loader(), callbacks=seen, log_every_n_steps=log_every)
    (_, validation), (_, training) = seen.seen
    assert {"b": 2.0, "b_epoch": 2.0}.items() <= validation.items()
    assert training == pytest.approx(
        {
            "a": 2.0,
            "a_step": 4.0,
            "a_epoch": 2.0,
            "b": 2.0,
            "b_epoch": 2.0,
            "b_step": 4.0,
        }
    )


def test_a_metric_object_is_reduced_for_hooks_at_the_end_of_an_epoch():
    seen = snapshots(["on_train_epoch_end"])
    fit(WithMetric(), callbacks=seen)
    assert seen.seen[0][1]["mean"] == 2.0


@pytest.mark.parametrize("order", ["early", "normal", "late"])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_epoch_end"])
def test_values_logged_at_the_end_of_an_epoch_belong_to_that_epoch(hook, order):
    def log(self, trainer, module):
        module.log("from_callback", float(trainer.current_epoch))

    callback = type("Logs", (Callback,), {hook: log, "order": order})()
    trainer = fit(Net(), loader(), callbacks=callback, max_epochs=2)
    assert trainer.rows.of("from_callback") == [(3, 0.0), (6, 1.0)]
    assert trainer.callback_metrics["from_callback"] == 1.0


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_epoch_end"])
def test_values_logged_at_the_end_of_an_epoch_reach_its_monitors(hook):
    seen = []

    class Monitor(Callback):
        order = "late"

        def on_train_epoch_end(self, trainer, module):
            seen.append(float(trainer.callback_metrics["b"]))

    class Logs(Net):
        pass

    setattr(Logs, hook, lambda self: self.log("b", float(self.current_epoch)))
    fit(Logs(), loader(), callbacks=Monitor(), max_epochs=3)
    assert seen == [0.0, 1.0, 2.0]


def test_a_value_that_is_not_logged_again_is_not_published_again():
    def log(m, v):
        if m.current_epoch == 0:
            m.log("once", v, on_step=False, on_epoch=True)

    trainer = fit(Net(log), max_epochs=3)
    assert trainer.rows.of("once") == [(3, 2.0)]
    assert trainer.callback_metrics["once"] == 2.0


def test_a_step_value_that_is_not_logged_again_is_not_published_again():
    trainer = fit(Net(lambda m, v: v < 1 and m.log("once", v)), max_epochs=1)
    assert trainer.rows.of("once") == [(1, 0.5)]


def test_validation_does_not_leak_into_the_next_one():
    trainer = fit(
        Net(val=lambda m, v: m.log("a", v + 10 * m.current_epoch)),
        loader(),
        max_epochs=3,
    )
    assert [value for _, value in trainer.rows.of("a")] == [2.0, 12.0, 22.0]


def test_validation_inside_an_epoch_does_not_touch_the_epoch_s_training_values():
    log = {"on_step": False, "on_epoch": True}
    module = Net(
        lambda m, v: m.log("a", v, **log), lambda m, v: m.log("a", v + 100, **log)
    )
    trainer = fit(module, loader(), val_check_interval=1)
    assert [value for _, value in trainer.rows.of("a")] == [102.0, 102.0, 102.0, 2.0]


def test_the_sanity_check_leaves_no_value_and_hands_nothing_on():
    seen = snapshots(["on_train_start"])
    module = Net(val=lambda m, v: m.log("a", v, on_step=True, prog_bar=True))
    trainer = fit(
        module, loader(), callbacks=seen, num_sanity_val_steps=2, limit_train_batches=0
    )
    assert seen.seen == [("on_train_start", {})]
    assert trainer.rows.rows == []
    assert trainer.progress_bar_metrics == {}


def test_a_test_starts_without_the_values_of_training():
    trainer = fit(
        Net(lambda m, v: m.log("a", v, prog_bar=True), lambda m, v: m.log("b", v))
    )
    assert set(trainer.callback_metrics) == {"a"}
    trainer.test(trainer.module, loader(), verbose=False)
    assert set(trainer.callback_metrics) == {"b"}
    assert set(trainer.logged_metrics) == {"b"}
    assert trainer.progress_bar_metrics == {}


# -- several loaders -----------------------------------------------------------------------------------------------


def test_several_loaders_have_a_name_each():
    trainer = fit(Net(val=lambda m, v: m.log("a", v)), [loader(), loader(3, 1)])
    assert numbers(trainer.callback_metrics) == {
        "a/dataloader_idx_0": 2.0,
        "a/dataloader_idx_1": 1.0,
    }


def test_step_and_epoch_precede_the_loader_in_a_name():
    trainer = fit(
        Net(val=lambda m, v: m.log("a", v, on_step=True)), [loader(), loader(3, 1)]
    )
    assert trainer.rows.of("a_step/dataloader_idx_0") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert trainer.rows.of("a_step/dataloader_idx_1") == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert trainer.rows.of("a_epoch/dataloader_idx_1") == [(3, 1.0)]
    assert trainer.callback_metrics["a/dataloader_idx_0"] == 2.0


def test_names_of_one_s_own_for_each_loader():
    class Own(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log(
                f"a{dataloader_idx}", batch.float().mean(), add_dataloader_idx=False
            )

    trainer = fit(Own(), [loader(), loader(3, 1)])
    assert numbers(trainer.callback_metrics) == {"a0": 2.0, "a1": 1.0}


def test_the_same_name_of_one_s_own_for_two_loaders_is_an_error():
    with pytest.raises(LogError, match="'a' comes from several loaders"):
        fit(
            Net(val=lambda m, v: m.log("a", v, add_dataloader_idx=False)),
            [loader(), loader()],
        )


def test_values_logged_at_the_end_of_an_evaluation_belong_to_no_loader():
    class Ends(Net):
        def on_test_epoch_end(self):
            self.log("end", 7.0)

    trainer = make_trainer()
    results = trainer.test(
        Ends(val=lambda m, v: m.log("a", v)), [loader(), loader(3, 1)], verbose=False
    )
    assert results == [
        {"a/dataloader_idx_0": 2.0, "end": 7.0},
        {"a/dataloader_idx_1": 1.0, "end": 7.0},
    ]


# -- hooks ---------------------------------------------------------------------------------------------------------

BY_STEP = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_step_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
]
BY_EPOCH = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
]
CLOSED = [
    "on_fit_start",
    "on_fit_end",
    "on_train_end",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_validation_end",
]


def logging_in(hook, **options):
    log = lambda self, trainer, module, *_: module.log("a", 3.0, **options)  # noqa: E731
    return type("Logs", (Callback,), {hook: log})()


@pytest.mark.parametrize("hook", BY_STEP)
def test_hooks_of_a_batch_log_steps_by_default(hook):
    trainer = fit(Net(), callbacks=logging_in(hook))
    assert trainer.rows.of("a") == [(1, 3.0), (2, 3.0), (3, 3.0)]


@pytest.mark.parametrize("hook", BY_STEP)
def test_hooks_of_a_batch_can_log_epochs(hook):
    trainer = fit(Net(), callbacks=logging_in(hook, on_step=False, on_epoch=True))
    assert trainer.rows.of("a") == [(3, 3.0)]


@pytest.mark.parametrize("hook", BY_EPOCH)
def test_all_other_hooks_log_epochs_by_default(hook):
    trainer = fit(Net(), loader(), callbacks=logging_in(hook))
    assert trainer.rows.of("a") == [(3, 3.0)]


@pytest.mark.parametrize(
    "hook", ["on_train_start", "on_train_epoch_end", "on_validation_epoch_end"]
)
def test_hooks_without_steps_refuse_steps(hook):
    with pytest.raises(LogError, match=rf"(?s)no steps in {hook}.*on_epoch=True"):
        fit(Net(), loader(), callbacks=logging_in(hook, on_step=True))


@pytest.mark.parametrize("hook", CLOSED)
def test_logging_is_refused_in_hooks_without_a_step(hook):
    with pytest.raises(LogError, match=rf"(?s)'a' cannot be logged in {hook}.*fix: "):
        fit(Net(), loader(), callbacks=logging_in(hook), num_sanity_val_steps=1)


@pytest.mark.parametrize(
    "hook", ["on_predict_start", "on_predict_batch_end", "on_predict_epoch_end"]
)
def test_prediction_refuses_to_log(hook):
    trainer = make_trainer(callbacks=logging_in(hook))
    with pytest.raises(LogError, match=f"cannot be logged in {hook}"):
        trainer.predict(Predicts(), loader())


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return batch


def test_a_prediction_step_refuses_to_log():
    class Logs(Net):
        def predict_step(self, batch, batch_idx):
            self.log("a", 1.0)

    with pytest.raises(LogError, match="cannot be logged in predict_step"):
        make_trainer().predict(Logs(), loader())


@pytest.mark.parametrize(
    "method", ["setup", "configure_optimizers", "train_dataloader"]
)
def test_outside_a_hook_nothing_can_be_logged(method):
    class Early(Net):
        pass

    setattr(Early, method, lambda self, *_: self.log("a", 1.0))
    trainer = make_trainer()
    with pytest.raises(LogError, match="'a' cannot be logged outside a hook"):
        trainer.fit(Early(), None if method == "train_dataloader" else loader())


def test_after_a_fit_nothing_can_be_logged():
    trainer = fit(Net(lambda m, v: m.log("a", v)))
    with pytest.raises(LogError, match="outside a hook"):
        trainer.module.log("a", 1.0)


@pytest.mark.parametrize(
    "other",
    [
        {"on_epoch": True},
        {"prog_bar": True},
        {"logger": False},
        {"reduce_fx": "sum"},
        {"sync_dist": False},
        {"rank_zero_only": True},
    ],
)
def test_the_same_name_with_other_options_is_an_error(other):
    def log(m, v):
        m.log("a", v)
        m.log("a", v, **other)

    with pytest.raises(
        LogError,
        match=r"(?s)'a' is logged twice in training_step with different options.*fix",
    ):
        fit(Net(log))


def test_the_same_name_in_another_hook_may_have_other_options():
    trainer = fit(
        Net(lambda m, v: m.log("a", v)), callbacks=logging_in("on_train_epoch_end")
    )
    assert trainer.rows.of("a") == [(1, 0.5), (2, 2.5), (3, 4.0), (3, 3.0)]


def test_a_hook_of_the_module_and_one_of_a_callback_are_the_same_hook():
    class Both(Net):
        def on_train_epoch_end(self):
            self.log("a", 5.0)

    trainer = fit(Both(), callbacks=logging_in("on_train_epoch_end"))
    assert trainer.rows.of("a") == [(3, 4.0)]


# -- metric objects ------------------------------------------------------------------------------------------------


class WithMetric(Net):
    def __init__(self, **options):
        super().__init__()
        self.mean, self.options = MeanMetric(), options

    def training_step(self, batch, batch_idx):
        self.mean(batch.float())
        self.log(
            "mean", self.mean, **{"on_step": False, "on_epoch": True, **self.options}
        )
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.mean.update(batch.float() + 10 * self.current_epoch)
        self.log("val_mean", self.mean)


def test_a_metric_object_is_computed_and_reset_at_the_end_of_the_epoch():
    trainer = fit(WithMetric(), max_epochs=2)
    assert trainer.rows.of("mean") == [(3, 2.0), (6, 2.0)]
    assert trainer.module.mean.update_count == 0


def test_a_metric_object_is_reset_before_each_validation():
    class Only(WithMetric):
        training_step = Net.training_step

    trainer = fit(Only(), loader(), max_epochs=2, num_sanity_val_steps=1)
    assert trainer.rows.of("val_mean") == [(3, 2.0), (6, 12.0)]


def test_a_metric_object_by_step_gives_the_batch_s_own_value():
    trainer = fit(WithMetric(on_step=True))
    assert trainer.rows.of("mean_step") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert trainer.rows.of("mean_epoch") == [(3, 2.0)]


def test_a_metric_object_by_step_alone_is_reset_with_the_epoch_too():
    trainer = fit(WithMetric(on_step=True, on_epoch=False), max_epochs=2)
    assert trainer.module.mean.update_count == 0
    assert [value for _, value in trainer.rows.of("mean")] == [0.5, 2.5, 4.0] * 2


def test_a_metric_object_by_step_in_validation():
    class Steps(Net):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean(batch.float())
            self.log("mean", self.mean, on_step=True)

    trainer = fit(Steps(), loader())
    assert [value for _, value in trainer.rows.of("mean_step")] == [0.5, 2.5, 4.0]
    assert trainer.rows.of("mean_epoch") == [(3, 2.0)]


def test_a_metric_object_that_is_logged_under_two_names_is_computed_for_both():
    class Twice(WithMetric):
        def training_step(self, batch, batch_idx):
            self.log("again", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Twice(), max_epochs=2)
    assert trainer.rows.of("mean") == trainer.rows.of("again") == [(3, 2.0), (6, 2.0)]


def test_a_metric_object_that_is_logged_in_one_epoch_only_is_published_once():
    class Once(WithMetric):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 0:
                return super().training_step(batch, batch_idx)
            return Net.training_step(self, batch, batch_idx)

    assert fit(Once(), max_epochs=2).rows.of("mean") == [(3, 2.0)]


def test_a_collection_of_metric_objects():
    class Several(Net):
        def __init__(self):
            super().__init__()
            self.several = MetricCollection([SumMetric(), MaxMetric()])

        def training_step(self, batch, batch_idx):
            self.several.update(batch.float())
            self.log_dict(self.several, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = fit(Several(), max_epochs=2)
    assert trainer.rows.of("SumMetric") == [(3, 10.0), (6, 10.0)]
    assert trainer.rows.of("MaxMetric") == [(3, 4.0), (6, 4.0)]


def test_a_computed_value_is_a_value():
    class Computed(WithMetric):
        def training_step(self, batch, batch_idx):
            self.mean.update(batch.float())
            return Net.training_step(self, batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("mean", self.mean.compute())
            self.mean.reset()

    assert fit(Computed(), max_epochs=2).rows.of("mean") == [(3, 2.0), (6, 2.0)]


def test_sums_of_a_checkpoint_join_values_of_a_device():
    metrics = Metrics(Progress())
    metrics.hook = "training_step"
    options = {
        "prog_bar": False,
        "logger": True,
        "on_step": False,
        "on_epoch": True,
        "sync_dist": True,
    }
    options |= {"add_dataloader_idx": True, "batch_size": 2, "rank_zero_only": False}
    for name in ("mean", "max"):
        metrics.log(name, torch.tensor(3.0), reduce_fx=name, **options)
    again = Metrics(Progress())
    again.load_state_dict(metrics.state_dict())
    again.hook = "training_step"
    for name in ("mean", "max"):
        again.log(name, torch.tensor(3.0, device="meta"), reduce_fx=name, **options)
        again.table[("training_step", name, None)].fold()
        assert again.table[("training_step", name, None)].sums.device.type == "meta"


def test_a_metric_that_no_checkpoint_can_find_is_named_once(tmp_path):
    class Hidden(Net):
        def __init__(self):
            super().__init__()
            self.aside = [MeanMetric()]  # a list: no submodule

        def training_step(self, batch, batch_idx):
            self.aside[0].update(batch.float())
            self.log("aside", self.aside[0], on_step=False, on_epoch=True)
            if batch_idx:
                self.trainer.save_checkpoint(tmp_path / "inside")
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="the counts of 'aside'") as said:
        Trainer(max_epochs=1, barebones=True, accelerator="cpu").fit(Hidden(), loader())
    assert len(said) == 1


@pytest.mark.parametrize("when", ["in the step", "after backward"])
def test_a_value_is_the_one_at_the_call_though_its_memory_is_written_later(when):
    class Writing(Net):
        def training_step(self, batch, batch_idx):
            loss = (self.weight + batch.float().mean()).sum()
            self.log("mean", loss, on_step=True, on_epoch=True)
            if when == "in the step":
                loss /= 4  # as for gradient accumulation by hand
            self.kept = loss
            return loss

        def on_after_backward(self):
            if when == "after backward":
                self.kept.detach().zero_()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    rows = Rows()
    Trainer(
        max_epochs=1,
        logger=rows,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
    ).fit(Writing(), loader())
    assert rows.of("mean_step") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert rows.of("mean_epoch") == [(3, 2.0)]
