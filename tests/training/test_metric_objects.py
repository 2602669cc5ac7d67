"""Metric objects hold their epoch until its last hook has read them, and a run that continues inside an epoch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from tests.training.tiny import Tiny
from trainer_kit import Callback, Trainer, checkpoints
from trainer_kit.callbacks import ModelCheckpoint

OPTIONS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def batches(count: int = 6, size: int = 2) -> DataLoader:
    return DataLoader(
        torch.arange(float(count)).reshape(-1, 1).repeat(1, 2), batch_size=size
    )


class Counting(Tiny):
    """Each hook of an epoch's end reads the metric objects that the steps of the epoch have logged."""

    def __init__(self, on_step: bool = False) -> None:
        super().__init__()
        self.on_step, self.read = on_step, {}
        self.train_mean, self.val_mean, self.test_mean = (
            MeanMetric(),
            MeanMetric(),
            MeanMetric(),
        )
        self.best, self.last = MaxMetric(), MaxMetric()
        self.both = MetricCollection(
            {"mean": MeanMetric(), "again": MeanMetric(), "sum": SumMetric()},
            prefix="c_",
        )

    def count(self, name, metric, batch):
        metric.update(batch)
        self.log(name, metric, on_step=self.on_step, on_epoch=True)

    def note(self, name, metric):
        self.read.setdefault(name, []).append(round(float(metric.compute()), 3))

    def training_step(self, batch, batch_idx):
        self.count("train", self.train_mean, batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.count("val", self.val_mean, batch)
        self.both.update(batch)
        self.log_dict(self.both)

    def test_step(self, batch, batch_idx):
        self.count("test", self.test_mean, batch)

    def on_train_epoch_end(self):
        self.note("train", self.train_mean)

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        self.note("val", self.val_mean)
        self.read.setdefault("both", []).append(
            {k: float(v) for k, v in self.both.compute().items()}
        )
        self.best.update(self.val_mean.compute() - self.trainer.current_epoch)
        self.log("best", self.best.compute())
        self.last.update(self.val_mean.compute() - self.trainer.current_epoch)
        self.log(
            "last", self.last
        )  # an object that a hook logs belongs to its epoch, too

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.note("val_end", self.val_mean)

    def on_test_epoch_end(self):
        self.note("test", self.test_mean)


class Reader(Callback):
    def __init__(self, order: str) -> None:
        self.order = order

    @property
    def state_key(self):
        return f"Reader({self.order})"

    def on_train_epoch_end(self, trainer, module):
        module.note(f"train {self.order}", module.train_mean)

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            module.note(f"val {self.order}", module.val_mean)

    def on_test_epoch_end(self, trainer, module):
        module.note(f"test {self.order}", module.test_mean)


@pytest.mark.parametrize("on_step", [False, True])
def test_every_hook_at_the_end_of_an_epoch_reads_the_whole_epoch(on_step):
    module = Counting(on_step)
    readers = [Reader(order) for order in ("early", "normal", "late")]
    trainer = Trainer(
        max_epochs=2, callbacks=readers, enable_checkpointing=False, **OPTIONS
    )
    trainer.fit(module, batches(), batches())
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (shown["best"], shown["last"]) == (2.5, 1.5)
    trainer.test(module, batches(), verbose=False)
    both = module.read.pop("both")
    assert both == [{"c_mean": 2.5, "c_again": 2.5, "c_sum": 30.0}] * 2
    tested = {
        name: values for name, values in module.read.items() if name.startswith("test")
    }
    assert tested == {
        key: [2.5] for key in ["test", "test early", "test normal", "test late"]
    }
    others = {
        name: values for name, values in module.read.items() if name not in tested
    }
    kinds = [
        "train",
        "train early",
        "train normal",
        "train late",
        "val",
        "val early",
        "val normal",
        "val late",
    ]
    assert others == {key: [2.5, 2.5] for key in [*kinds, "val_end"]}
    metrics = [
        module.train_mean,
        module.val_mean,
        module.test_mean,
        module.last,
        *module.both.values(),
    ]
    assert [metric.update_count for metric in metrics] == [0] * 7


def test_a_checkpoint_is_chosen_by_a_best_value_that_a_hook_computes(tmp_path):
    keeper = ModelCheckpoint(tmp_path, monitor="best", mode="max", save_top_k=-1)
    Trainer(max_epochs=2, callbacks=keeper, **OPTIONS).fit(
        Counting(), batches(), batches()
    )
    assert sorted(map(float, keeper.best_k_models.values())) == [2.5, 2.5]


def test_values_of_a_validation_inside_an_epoch_do_not_reset_the_training_objects():
    module = Counting()
    Trainer(
        max_epochs=1, val_check_interval=1, enable_checkpointing=False, **OPTIONS
    ).fit(module, batches(), batches())
    assert module.read["train"] == [2.5]
    assert module.read["val"] == [2.5] * 3


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings(
    "ignore:The ``compute`` method of metric"
)  # torchmetrics, on a rank without a batch
@pytest.mark.parametrize("count", [6, 1])  # with one sample, a rank has no batch
def test_hooks_of_all_ranks_read_the_value_over_all_ranks(count):
    module = Counting()
    trainer = Trainer(
        **{**OPTIONS, "devices": 2},
        max_epochs=1,
        enable_checkpointing=False,
        callbacks=Reader("late"),
    )
    trainer.fit(module, batches(count, 1), batches(count, 1))
    mean = batches(count).dataset.mean().item()
    names = ["train", "train late", "val", "val late", "val_end"]
    assert {name: module.read[name] for name in names} == {key: [mean] for key in names}
    assert module.val_mean.update_count == module.train_mean.update_count == 0


class Sums(Tiny):
    """Values and objects whose epoch has a known mean and sum; one of them is computed and reset by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.logged, self.aside = MeanMetric(), MeanMetric()

    def training_step(self, batch, batch_idx):
        self.logged(batch)
        self.aside(batch)
        self.log("object", self.logged, on_step=False, on_epoch=True)
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        self.log("sum", batch.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("aside", self.aside.compute())
        self.aside.reset()


WHOLE = {"object": 2.5, "mean": 2.5, "sum": 30.0, "aside": 2.5}
PART = {"object": 1.5, "mean": 1.5, "sum": 12.0, "aside": 1.5}


def shown(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def resumed(path: object) -> dict[str, float]:
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS)
    trainer.fit(Sums(), batches(), ckpt_path=str(path))
    return shown(trainer)


class Ends(Callback):
    """Ends the run after two of three steps."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2 and self.how == "stop":
            trainer.stop("enough")
        if trainer.global_step == 2 and self.how == "exception":
            raise RuntimeError("planted")


@pytest.mark.parametrize("how", ["max_steps", "max_duration", "stop", "exception"])
def test_the_last_checkpoint_of_a_run_that_ends_inside_its_epoch_holds_its_sums(
    how, tmp_path
):
    limits = {
        "max_steps": {"max_steps": 2},
        "max_duration": {"max_duration": "4sp", "max_epochs": 1},
    }
    keeper = ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = Trainer(
        **limits.get(how, {"max_epochs": 1}), callbacks=[keeper, Ends(how)], **OPTIONS
    )
    if how == "exception":
        with pytest.raises(RuntimeError, match="planted"):
            trainer.fit(Sums(), batches())
    else:
        trainer.fit(Sums(), batches())
        assert shown(trainer) == PART
    assert resumed(checkpoints(tmp_path)[-1].path) == WHOLE


@pytest.mark.parametrize("tests", [False, True])
def test_a_checkpoint_saved_after_the_run_holds_the_sums_of_its_epoch(tests, tmp_path):
    module, trainer = (
        Sums(),
        Trainer(max_steps=2, enable_checkpointing=False, **OPTIONS),
    )
    trainer.fit(module, batches())
    if tests:
        trainer.test(module, batches(), verbose=False)
    trainer.save_checkpoint(tmp_path / "after")
    assert resumed(tmp_path / "after") == WHOLE


def test_a_fit_that_the_same_trainer_continues_has_the_sums_of_its_epoch():
    module, trainer = (
        Sums(),
        Trainer(max_steps=2, enable_checkpointing=False, **OPTIONS),
    )
    trainer.fit(module, batches())
    trainer.fit_loop.max_steps = 3
    trainer.fit(module, batches())
    assert shown(trainer) == WHOLE


def test_a_run_that_a_hook_extends_continues_with_its_sums():
    class Extends(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.fit_loop.max_steps = 3

    trainer = Trainer(
        max_steps=2, enable_checkpointing=False, callbacks=Extends(), **OPTIONS
    )
    trainer.fit(Sums(), batches())
    assert shown(trainer) == WHOLE


def test_a_checkpoint_of_the_last_hook_of_an_epoch_repeats_that_hook_with_its_values(
    tmp_path,
):
    class Saves(Callback):
        order = "early"

        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "hook")

    Trainer(max_epochs=1, enable_checkpointing=False, callbacks=Saves(), **OPTIONS).fit(
        Sums(), batches()
    )
    assert resumed(tmp_path / "hook") == WHOLE


@pytest.mark.world_size(2)
def test_sums_of_two_ranks_continue_inside_their_epoch():
    module, options = Sums(), {**OPTIONS, "devices": 2, "enable_checkpointing": False}
    trainer = Trainer(max_steps=2, **options)
    trainer.fit(module, batches(6, 1))
    trainer.fit_loop.max_steps = 3
    trainer.fit(module, batches(6, 1))
    assert shown(trainer) == WHOLE


class Validating(Sums):
    def __init__(self) -> None:
        super().__init__()
        self.fails, self.val_mean = False, MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.val_mean.update(batch)
        if self.fails and batch_idx == 1:
            raise RuntimeError("planted")

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("val", self.val_mean.compute())
        self.val_mean.reset()


def test_a_validation_that_fails_is_owed_and_leaves_no_trace_in_its_objects(tmp_path):
    class Fails(Callback):
        def on_train_step_end(self, trainer, module):
            module.fails = trainer.global_step == 2

    keeper = ModelCheckpoint(tmp_path, save_on_exception=True)
    trainer = Trainer(
        max_epochs=1, val_check_interval=2, callbacks=[keeper, Fails()], **OPTIONS
    )
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(Validating(), batches(), batches())
    values = []

    class Reads(Callback):
        def on_validation_end(self, trainer, module):
            values.append((trainer.global_step, float(trainer.callback_metrics["val"])))

    trainer = Trainer(
        max_epochs=1,
        val_check_interval=2,
        enable_checkpointing=False,
        callbacks=Reads(),
        **OPTIONS,
    )
    trainer.fit(
        Validating(),
        batches(),
        batches(),
        ckpt_path=str(checkpoints(tmp_path)[-1].path),
    )
    assert values == [(2, 2.5)]


def test_a_run_that_was_interrupted_leaves_no_trace_in_the_next_one():
    module = Sums()
    trainer = Trainer(
        max_epochs=1, enable_checkpointing=False, callbacks=Ends("exception"), **OPTIONS
    )
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(module, batches())
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS)
    module.aside.reset()  # which is not logged, so it is the module's own
    trainer.fit(module, batches())
    assert shown(trainer)["sum"] == 30.0
