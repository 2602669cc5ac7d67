"""`trainer.history` and `trainer.report` of real fits, and what a notebook shows of objects."""

import copy
import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib as mpl
import pytest
import torch

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.report.history import History
from trainer_kit.testing import TinyModule
from trainer_kit.tuner.learning_rate import LearningRates
from trainer_kit.verify.result import Check, Verification

DATA = [torch.randn(4, 32)] * 3


class Logs(TinyModule):
    def training_step(self, batch, batch_idx):
        self.log("step_number", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", 0.1)


def fit(root, epochs=2, **options):
    trainer = tk.Trainer(
        max_epochs=epochs,
        log_every_n_steps=1,
        accelerator="cpu",
        devices=1,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(Logs(), DATA, DATA[:1])
    return trainer


def test_rows_are_the_logged_values(tmp_path):
    history = fit(tmp_path).history
    assert [row["step"] for row in history] == [1, 2, 3, 4, 5, 6]
    assert [row["step_number"] for row in history] == [0, 1, 2, 3, 4, 5]
    validated = {row["step"]: row["val"] for row in history if "val" in row}
    assert list(validated) == [3, 6]
    assert list(validated.values()) == pytest.approx([0.1, 0.1], rel=1e-6)
    assert history[-1] == list(history)[-1]
    assert len(history) == 6


def test_a_resumed_run_has_the_rows_before_its_restart_once(tmp_path):
    fit(tmp_path, resume="auto")
    history = fit(tmp_path, epochs=3, resume="auto").history
    assert [row["step_number"] for row in history] == [*range(9)]


def test_a_new_fit_begins_a_new_table(tmp_path):
    trainer = fit(tmp_path)
    trainer.fit(Logs(), DATA[:1])
    assert next(row["step"] for row in trainer.history) == 1
    assert len(trainer.history) <= 6


def test_before_a_fit_it_is_empty(tmp_path):
    history = tk.Trainer(default_root_dir=tmp_path, accelerator="cpu").history
    assert list(history) == []
    assert repr(history) == "step"
    assert "0 rows" in history._repr_html_()


def test_without_a_logger_there_is_none():
    trainer = tk.Trainer(logger=False, accelerator="cpu")
    for name in ("history", "report"):
        with pytest.raises(ConfigurationError, match=rf"(?s){name} needs.*logger=True"):
            getattr(trainer, name)


class HasHistory(tk.Trainer):
    def __init__(self, **options):
        self.history = []
        super().__init__(**options)


def test_an_attribute_of_a_user_replaces_the_table_and_the_page():
    trainer = HasHistory(logger=False, accelerator="cpu")
    assert trainer.history == []
    trainer.report = None
    assert trainer.report is None


def test_a_long_series_keeps_its_extremes(tmp_path):
    journal = tmp_path / "journal.jsonl"
    lines = []
    for step in range(210_000):
        value = 9.0 if step == 777 else 0.5
        lines.append(json.dumps({"step": step, "time": 1.0, "loss": value}))
    journal.write_text("\n".join([*lines, ""]))
    history = History.read(tmp_path)
    assert len(history) < 210_000
    assert max(row["loss"] for row in history) == 9.0


def test_plot_draws_the_logged_steps(tmp_path):
    mpl.use("agg")
    history = History({"loss": ([1, 3], [0.5, 0.25]), "epoch": ([1], [0])})
    (line,) = history.plot().lines
    assert list(line.get_xdata()) == [1, 3]
    assert list(line.get_ydata()) == [0.5, 0.25]
    assert line.get_label() == "loss"
    assert len(history.plot("loss", "epoch").lines) == 2
    mpl.pyplot.close("all")
    with pytest.raises(
        ConfigurationError, match=r"(?s)nothing was logged as 'los'.*loss"
    ):
        history.plot("los")


def test_plot_marks_a_single_value_and_warns_of_nothing(tmp_path, recwarn):
    mpl.use("agg")
    once = History({"loss": ([1], [0.5]), "val": ([1, 2], [1, 2])})
    single, several = once.plot().lines
    assert single.get_marker() == "o"
    assert several.get_marker() == ""
    assert History({}).plot().get_legend() is None
    mpl.pyplot.close("all")
    assert not recwarn.list


@pytest.mark.parametrize("index", ["loss", slice(-10, None)])
def test_what_is_no_position_is_answered_with_to_pandas(index):
    history = History({"loss": ([1], [0.5])})
    with pytest.raises(ConfigurationError, match="to_pandas"):
        history[index]


def test_pandas_has_a_column_for_each_name():
    history = History({"loss": ([1, 3], [0.5, 0.25]), "val": ([3], [2])})
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigurationError, match="to_pandas needs pandas"):
            history.to_pandas()
        return
    frame = history.to_pandas()
    assert list(frame.index) == [1, 3]
    assert math.isnan(frame["val"][1])
    assert frame["val"][3] == 2


def test_the_report_is_shown_inside_a_frame(tmp_path):
    trainer = fit(tmp_path)
    shown = trainer.report._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts"')
    assert "&lt;!doctype html&gt;" in shown.lower()
    assert "<script" not in shown
    assert str(trainer.report) == str(trainer.run_dir / "report.html")


class Net(tk.TrainModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 2)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(7))
        self.head = torch.nn.LazyLinear(3)


class Data(tk.DataModule):
    def __init__(self, path="<b>", api_token="secret"):
        super().__init__()
        self.path = path
        self.api_token = api_token


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (Net(), ["Net", "encoder", "Linear", "8"]),
        (Scaled(), ["8", "LazyLinear", "not initialized", "scale", "Parameter", ">7<"]),
        (Data(), ["Data", "&lt;b&gt;", "***"]),
        (tk.callbacks.EarlyStopping("val", patience=7), ["patience", "7", "val"]),
        (tk.strategies.DDPStrategy(), ["DDPStrategy"]),
        (
            LearningRates([1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1], [4.0, 4, 3, 1, 0.8, 9]),
            ["steepest", "0.001"],
        ),
        (
            Verification("ddp", 2, [Check("equal", "weights", "a < b")]),
            ["ddp: all equal", "weights", "a &lt; b"],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_notebook_shows_a_small_table(shown, texts):
    page = shown._repr_html_()
    for text in texts:
        assert text in page
    assert "<b></" not in page
    assert "secret" not in page
    assert len(page) < 5000


class Login(NamedTuple):
    user: str
    password: str


@dataclass
class Store:
    url: str
    api_key: bytes


class Client:
    def __str__(self):
        return "client of https://me:hunter2@host"

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Login("me", "hunter2"), "&#x27;password&#x27;: ***"),
        (Store("s3://me:hunter2@host", b"hunter2"), "&#x27;api_key&#x27;: ***"),
        ({"https://me:hunter2@host"}, "me:***@host"),
        ({"db": {"password": ["hunter2"]}}, "***"),
        (Client(), "client of https://me:***@host"),
        ([Client()], "me:***@host"),
        (b"https://me:hunter2@host/", "me:***@host"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_secret_is_shown_whatever_holds_it(value, text):
    page = Data(value)._repr_html_()
    assert "hunter2" not in page
    assert text in page


@pytest.mark.parametrize(
    "value", [b"hunter2", ["hunter2"], Login("me", "hunter2"), Client()]
)
def test_the_value_of_a_secret_name_is_not_shown(value):
    page = Data("path", value)._repr_html_()
    assert "hunter2" not in page
    assert "***" in page


def test_a_secret_that_is_not_set_is_shown_as_such():
    assert ">None<" in Data("path", None)._repr_html_()
    assert "***" not in Data("path", "")._repr_html_()


class Endless(list):
    """Fails the test where all of it is read."""

    def __iter__(self):
        yield from range(100)
        raise AssertionError("a table shows a few items")

    def __repr__(self):
        raise AssertionError("a table shows a few items")


def test_a_table_builds_no_text_that_it_does_not_show():
    assert "[0, 1, 2," in Data(Endless([0]))._repr_html_()
    assert "[0, 1, 2," in Data(list(range(10_000_000)))._repr_html_()
    page = Data({"weight": torch.zeros(2, 3), "of": {}})._repr_html_()
    assert "Tensor of shape (2, 3)" in page
    assert "&#x27;of&#x27;: {}" in page
    lazy = torch.nn.LazyLinear(3).weight
    assert "UninitializedParameter, not initialized" in Data(lazy)._repr_html_()


def test_a_trainer_shows_its_parts_before_and_after_a_fit(tmp_path):
    assert "strategy" in tk.Trainer(accelerator="cpu")._repr_html_()
    page = fit(tmp_path)._repr_html_()
    for text in ("SingleDevice", "ModelCheckpoint", "steps", ">6<", "val"):
        assert text in page


def test_every_callback_and_strategy_can_be_shown():
    for name in tk.callbacks.__all__:
        cls = getattr(tk.callbacks, name)
        if isinstance(cls, type) and issubclass(cls, tk.Callback):
            assert "_repr_html_" in dir(cls)
    assert copy.copy(tk.callbacks.Timer("00:01:00:00"))._repr_html_()
