"""What a fit draws in a notebook, with stand-ins for the notebook, its widgets and IPython's display."""

import io
import multiprocessing
import sys
import warnings
from types import SimpleNamespace

import pytest
import tqdm.auto
import tqdm.notebook

from tests.callbacks.fits import BATCH, Timed, trainer
from trainer_kit.callbacks import ModelSummary, RichProgressBar, TQDMProgressBar
from trainer_kit.core import notebook


class Traits(SimpleNamespace):
    def set_trait(self, name, value):
        setattr(self, name, value)


class Widget(Traits):
    def __init__(self, children=(), min=0, max=None):  # names of ipywidgets
        self.children = list(children)
        self.min = min
        self.max = max
        self.value = ""
        self.bar_style = ""
        self.layout = Traits(width=None, display=None)
        self.style = Traits(bar_color=None)

    @property
    def text(self):
        left, bar, right = self.children
        return f"{left.value} {bar.value}/{bar.max} {right.value}".replace(
            "\u2007", " "
        )


@pytest.fixture
def kernel(monkeypatch):
    """A notebook without ipywidgets."""
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    notebook._import_widget_bar.cache_clear()
    yield
    notebook._import_widget_bar.cache_clear()


@pytest.fixture
def displayed(kernel, monkeypatch):
    """A notebook with ipywidgets: what it displays."""
    widgets = []
    monkeypatch.setattr(tqdm.auto, "tqdm", tqdm.notebook.tqdm_notebook)
    for name in ("TqdmHBox", "IProgress", "HTML"):
        monkeypatch.setattr(tqdm.notebook, name, Widget, raising=False)
    monkeypatch.setattr(tqdm.notebook, "display", widgets.append, raising=False)
    return widgets


def fitted(bar, **options):
    made = trainer(
        bar,
        ModelSummary(),
        **{
            "log_every_n_steps": 1,
            "enable_progress_bar": True,
            "max_epochs": 3,
            **options,
        },
    )
    module = Timed(lambda seconds: None, {"loss": 0.5}, train=0)
    made.fit(module, [BATCH] * 4, [BATCH] * 2)
    return made


def test_one_widget_shows_all_epochs(displayed, capsys):
    made = fitted(TQDMProgressBar(), max_steps=10)
    (bar,) = displayed
    assert bar.text.startswith("Epoch 2/2:  50% 2/4  2/4 [")
    assert bar.text.endswith("batch/s, loss=0.5]")
    assert bar.children[1].bar_style == "", (
        "a fit that ends inside an epoch is no error"
    )
    assert bar.layout.display is None
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "total params" in output
    assert made.progress_bar_callback.train_progress_bar.container is bar


def test_the_sanity_check_is_hidden_at_its_end(displayed):
    fitted(TQDMProgressBar(), num_sanity_val_steps=1)
    sanity_check, bar = displayed
    assert sanity_check.layout.display == "none"
    assert bar.text.startswith("Epoch 2/2: 100% 4/4  ")


def test_leave_has_a_widget_for_each_epoch(displayed):
    fitted(TQDMProgressBar(leave=True))
    assert [bar.text[:9] for bar in displayed] == [
        "Epoch 0/2",
        "Epoch 1/2",
        "Epoch 2/2",
    ]


def test_an_unknown_length(displayed):
    made = trainer(TQDMProgressBar(), enable_progress_bar=True, max_epochs=1)
    made.fit(Timed(lambda seconds: None, train=0), iter([BATCH] * 3))
    (bar,) = displayed
    assert " 3/? [" in bar.text


@pytest.mark.parametrize("make_bar", [TQDMProgressBar, RichProgressBar])
def test_without_ipywidgets_one_line_of_text_shows_all_epochs(
    kernel, monkeypatch, capsys, make_bar
):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(make_bar())
    output, errors = capsys.readouterr()
    assert errors == ""
    shown = [line.split("\r")[-1] for line in output.split("\n")]
    bars = [line for line in shown if line.startswith("Epoch")]
    assert len(bars) == 1
    assert bars[0].startswith("Epoch 2/2: 100%|")
    assert len(bars[0]) <= 100


def test_a_file_of_the_user_gets_the_bar_of_rich(kernel, monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    log = io.StringIO()
    fitted(RichProgressBar(console_kwargs={"file": log}))
    assert "Epoch 2/2" in log.getvalue()
    assert "Epoch" not in capsys.readouterr().out


def test_a_widget_of_the_user_without_a_total_gets_it(displayed, monkeypatch):
    # No thread that outlives the test.
    monkeypatch.setattr(tqdm.notebook.tqdm_notebook, "monitor_interval", 0)

    class Bar(TQDMProgressBar):
        def init_train_tqdm(self):
            return tqdm.auto.tqdm()

    fitted(Bar())
    (bar,) = displayed
    assert bar.children[1].max == 4
    assert bar.children[1].layout.width is None


def test_a_forked_process_draws_text(displayed, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert notebook.widget_bar_class() is None


def test_a_terminal_of_ipython_is_no_notebook(monkeypatch):
    ipython = SimpleNamespace(get_ipython=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert not notebook.in_notebook()
    assert notebook.widget_bar_class() is None
