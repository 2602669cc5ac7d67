"""Subclasses of shipped classes: what they override is called, or refused where an object is used."""

from __future__ import annotations

import io
import os

import pytest

import trainer_kit
from tests.callbacks.fits import each, fit
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import (
    EarlyStopping,
    GradientAccumulation,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from trainer_kit.checkpoint.store import lookup, read_index
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.signatures import check_overrides
from trainer_kit.loggers import CSVLogger, TensorBoardLogger
from trainer_kit.loggers.layout import DirectoryLogger
from trainer_kit.strategies import DDPStrategy, FSDPStrategy, Strategy


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def shown(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal() if request.param else io.StringIO()
    monkeypatch.setattr(
        "trainer_kit.callbacks.progress_bar.message_stream", lambda: file
    )
    return file


def test_the_bars_of_a_subclass_are_drawn(shown):
    """Lightning's documented subclass, a value that is text, and one bar of its own for each kind of line."""

    class Bar(TQDMProgressBar):
        made = ()

        def get_metrics(self, trainer, module):
            items = dict(super().get_metrics(trainer, module))
            items.pop("v_num", None)
            return {**items, "note": "hello"}

        def init_sanity_tqdm(self):
            self.made += ("sanity",)
            return super().init_sanity_tqdm()

        def init_train_tqdm(self):
            self.made += ("train",)
            return super().init_train_tqdm()

        def init_validation_tqdm(self):
            self.made += ("validation",)
            bar = super().init_validation_tqdm()
            bar.set_description("running validation...")
            return bar

    bar = Bar()
    fit(
        bar,
        epochs=2,
        val=each("m", 1.0, 1.0),
        enable_progress_bar=True,
        num_sanity_val_steps=1,
    )
    assert bar.made == ("sanity", "train", "validation", "validation")
    text = shown.getvalue()
    assert "note=hello" in text
    assert "Epoch 1/1" in text
    if shown.isatty():
        assert "running validation..." in text


def test_descriptions_and_the_format_of_the_bar(shown):
    class Bar(TQDMProgressBar):
        BAR_FORMAT = "<{desc}|{n_fmt}>"
        sanity_check_description = "trial"

        @property
        def validation_description(self):
            return "judging"

    fit(Bar(), val=each("m", 1.0), enable_progress_bar=True, num_sanity_val_steps=1)
    if shown.isatty():
        for piece in ("<trial", "<judging", "<Epoch 0/0", "|4>"):
            assert piece in shown.getvalue()


def test_names_of_checkpoints():
    class Keeper(ModelCheckpoint):
        CHECKPOINT_JOIN_CHAR = "_"
        CHECKPOINT_EQUALS_CHAR = ":"
        CHECKPOINT_NAME_LAST = "newest"
        STARTING_VERSION = 5

    done = fit(
        keeper := Keeper(filename="{m:.0f}"), epochs=3, val=each("m", 1.0, 1.0, 1.0)
    )
    assert sorted(done.on_disk) == ["m:1_v5", "m:1_v6"]
    assert (
        str(lookup(keeper.dirpath, "newest"))
        == str(lookup(keeper.dirpath, "last"))
        == keeper.last_model_path
    )


def test_a_constant_that_is_set_on_the_instance():
    keeper = ModelCheckpoint(filename="{epoch}")
    keeper.CHECKPOINT_EQUALS_CHAR = "-"
    assert fit(keeper).on_disk == ["epoch-0"]


def test_a_name_of_the_users_own():
    class Keeper(ModelCheckpoint):
        def format_checkpoint_name(self, metrics, filename=None, ver=None, prefix=None):
            return super().format_checkpoint_name(metrics, filename, ver, prefix="mine")

    assert fit(Keeper(save_top_k=-1), epochs=2).on_disk == [
        "mine-step-00000004",
        "mine-step-00000008",
    ]

    class Outside(ModelCheckpoint):
        def format_checkpoint_name(self, metrics, filename=None, ver=None, prefix=None):
            return "../outside"

    with pytest.raises(
        ConfigurationError, match="must return a directory directly in dirpath"
    ):
        fit(Outside())
    assert not os.path.exists("run/outside")


def test_a_template_names_the_last_one():
    keeper = ModelCheckpoint(save_top_k=-1)
    keeper.CHECKPOINT_NAME_LAST = "{epoch}-last"
    fit(keeper, epochs=2)
    assert sorted(read_index(keeper.dirpath)) == ["epoch=1-last", "last"]
    assert str(lookup(keeper.dirpath, "epoch=1-last")) == keeper.last_model_path


@pytest.mark.parametrize("name", ["", "a/b", "{epoch"])
def test_a_name_for_the_last_one_that_is_none(name):
    class Keeper(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = name

    with pytest.raises(ConfigurationError, match="checkpoint filename"):
        fit(Keeper())


@pytest.mark.parametrize(
    "make",
    [
        lambda kind: kind(),
        lambda kind: kind(every_n_epochs=1),
    ],
)
def test_an_overridden_hook_is_called_although_the_base_class_is_disabled(make):
    class Keeper(ModelCheckpoint):
        steps = 0

        def on_train_step_end(self, trainer, module):
            super().on_train_step_end(trainer, module)
            self.steps += 1

    fit(keeper := make(Keeper))
    assert keeper.steps == 4


@pytest.mark.parametrize(
    ("base", "make"),
    [
        (Timer, lambda kind: kind()),
        (GradientAccumulation, lambda kind: kind(1)),
        (LearningRateMonitor, lambda kind: kind("epoch")),
    ],
)
def test_overridden_hooks_of_idle_callbacks_are_called(base, make):
    def on_train_step_end(self, trainer, module):
        self.steps = getattr(self, "steps", 0) + 1

    kind = type("Mine", (base,), {"on_train_step_end": on_train_step_end})
    fit(
        callback := make(kind),
        **({"logger": CSVLogger("logs")} if base is LearningRateMonitor else {}),
    )
    assert callback.steps == 4


@pytest.mark.parametrize(
    ("base", "name", "fix"),
    [
        (ModelCheckpoint, "_save_checkpoint", "after_save_checkpoint"),
        (ModelCheckpoint, "_save_topk_checkpoint", "set monitor="),
        (ModelCheckpoint, "check_monitor_top_k", "set monitor="),
        (ModelCheckpoint, "FILE_EXTENSION", "filename="),
        (ModelCheckpoint, "_request_if_rated", "override a hook"),
        (
            TQDMProgressBar,
            "total_val_batches_current_dataloader",
            "override total_val_batches",
        ),
        (TQDMProgressBar, "_should_update", "override get_metrics"),
        (TQDMProgressBar, "_draw", "override a hook"),
        (EarlyStopping, "_run_early_stopping_check", "trainer.stop"),
        (EarlyStopping, "_evaluate_stopping_criteria", "trainer.stop"),
        (LearningRateMonitor, "_extract_stats", "trainer.log_metrics"),
        (ModelSummary, "summarize", "override show"),
        (Timer, "_check_time_remaining", "trainer.stop"),
        (StochasticWeightAveraging, "avg_fn", "pass avg_fn= to the constructor"),
        (StochasticWeightAveraging, "reset_batch_norm_and_save_state", "update_bn"),
        (DDPStrategy, "optimizer_step", "bind_step"),
        (DDPStrategy, "setup_environment", "start"),
        (FSDPStrategy, "model_to_device", "prepare_module"),
        (CSVLogger, "_get_next_version", "version="),
        (TensorBoardLogger, "_get_next_version", "version="),
    ],
)
def test_overrides_that_would_never_be_called_are_refused(base, name, fix):
    """A package may define such a class that its program does not use: it can still be imported."""
    refused = (
        rf"Mine\.{name} (would never be called|replaces a private name)(.|\n)*{fix}"
    )
    arguments = {EarlyStopping: ("loss",), StochasticWeightAveraging: (0.1,)}
    mine = type("Mine", (base,), {name: lambda self, *args: None})
    mine = mine(
        *(("logs",) if issubclass(base, DirectoryLogger) else arguments.get(base, ()))
    )
    where = (
        "strategy"
        if issubclass(base, Strategy)
        else "callbacks"
        if issubclass(base, Callback)
        else "logger"
    )
    with pytest.raises(ConfigurationError, match=refused):
        Trainer(**{"accelerator": "cpu", where: mine})


def test_names_of_the_users_own_are_free():
    class Mine(ModelCheckpoint):
        _mine = 3

        def helper(self):
            return self._mine

    class More(Mine):
        _mine = 4

    assert More("kept").helper() == 4


@pytest.mark.parametrize(
    "room", [trainer_kit.callbacks, trainer_kit.strategies, trainer_kit.loggers]
)
def test_a_subclass_that_overrides_nothing_private_is_taken(room):
    """Also of abstract classes, which Python gives private attributes of its own."""
    roots = (Callback, Strategy, DirectoryLogger)
    bases = [getattr(room, name) for name in room.__all__]
    bases = [
        base for base in bases if isinstance(base, type) and issubclass(base, roots)
    ]
    assert len(bases) > 2
    for base in bases:
        mine = type("Mine", (base,), {"extra": 3, "__doc__": "mine"})
        for root in roots:
            check_overrides(mine, root)


def test_a_strategy_of_the_users_own_trains():
    class Mine(DDPStrategy):
        def describe(self):
            return "mine"

    Trainer(strategy=Mine(), accelerator="cpu")
