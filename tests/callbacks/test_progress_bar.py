import io
import itertools
import sys
import threading
from types import SimpleNamespace

import pytest

from trainer_kit.callbacks import TQDMProgressBar
from trainer_kit.core.errors import ConfigurationError


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Screen:
    """What a terminal shows of a text: carriage returns overwrite, and tqdm's move-up codes go up."""

    def __init__(self, text):
        self.lines, row = [""], 0
        for part in text.replace("\x1b[A", "\x00").split("\n"):
            for piece in part.split("\x00"):
                cells = self.lines[row]
                for each in piece.split("\r")[(0 if not piece.startswith("\r") else 1) :]:
                    cells = each + cells[len(each) :]
                self.lines[row] = cells
                row -= 1
            row += 2
            while row >= len(self.lines):
                self.lines.append("")

    @property
    def shown(self):
        return [line.rstrip() for line in self.lines if line.strip()]


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    for module in ("progress_bar",):
        monkeypatch.setattr(f"trainer_kit.callbacks.{module}.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    return pass_time


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal()
    # Not sys.stderr itself: that one is the test runner's, who exchanges it between setup and call.
    monkeypatch.setattr("trainer_kit.callbacks.progress_bar.sys", SimpleNamespace(stderr=file))
    return file


@pytest.fixture
def plain(monkeypatch):
    file = io.StringIO()
    # Not sys.stderr itself: that one is the test runner's, who exchanges it between setup and call.
    monkeypatch.setattr("trainer_kit.callbacks.progress_bar.sys", SimpleNamespace(stderr=file))
    return file


def drawn(file):
    """Every state of the line, without the fill."""
    return [part.strip() for part in file.getvalue().replace("\n", "\r").split("\r") if part.strip()]


def test_a_line_on_a_terminal(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=4, max_epochs=3).begin()
    trainer.call("on_train_epoch_start")
    trainer.progress_bar_metrics = {"loss": 0.123456, "n": 3, "big": 1.5e9}
    for _ in range(4):
        clock(0.5)
        trainer.step()
    trainer.end_epoch()
    trainer.call("on_train_end")
    trainer.call("teardown", "fit")
    states = drawn(terminal)
    assert states[0].startswith("Epoch 0/2:   0%|")
    assert "1/4 [00:00<00:01,  2.00batch/s, loss=0.123, n=3, big=1.500e+09]" in states[1]
    assert "4/4 [00:02<00:00,  2.00batch/s" in states[-1]
    assert terminal.getvalue().endswith("\n"), "what is printed next begins a line of its own"


def test_a_terminal_without_a_size(make_trainer, terminal, clock, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda stream: (0, 0))
    trainer = make_trainer(TQDMProgressBar(), batches=4).begin()
    trainer.call("on_train_epoch_start")
    clock(0.5)
    trainer.step()
    assert "1/4 [00:00<00:01,  2.00batch/s]" in drawn(terminal)[-1]
    assert max(map(len, drawn(terminal))) <= 80
    trainer.call("teardown", "fit")


def test_it_is_drawn_at_most_ten_times_a_second(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=1000).begin()
    trainer.call("on_train_epoch_start")
    for _ in range(1000):
        clock(0.001)
        trainer.step()
    assert 9 <= len(drawn(terminal)) <= 11


def test_a_step_does_next_to_nothing(make_trainer, terminal, clock):
    bar = TQDMProgressBar()
    trainer = make_trainer(bar, batches=1000).begin()
    trainer.call("on_train_epoch_start")
    calls = []

    def count(frame, event, argument):
        if event == "call" and "callbacks" in frame.f_code.co_filename and "trainer_kit" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        for index in range(10):
            bar.on_train_batch_end(trainer, None, None, None, index)
    finally:
        sys.setprofile(None)
    assert calls == ["on_train_batch_end"] * 10


def test_refresh_rate(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(refresh_rate=5), batches=20).begin()
    trainer.call("on_train_epoch_start")
    for _ in range(12):
        clock(1)
        trainer.step()
    assert [state.split("/20")[0].split()[-1] for state in drawn(terminal)] == ["0", "5", "10"]


def test_validation_borrows_the_line(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=4, val_batches=[2, 1]).begin()
    trainer.call("on_train_epoch_start")
    clock(1)
    trainer.step()
    trainer.call("on_validation_start")
    for index in range(3):
        clock(10)
        trainer.call("on_validation_batch_end", None, None, index)
    trainer.call("on_validation_end")
    clock(1)
    trainer.step()
    trainer.end_epoch()
    trainer.call("on_train_end")
    states = drawn(terminal)
    titles = [title for title, _ in itertools.groupby(state.split(":")[0] for state in states)]
    assert titles == ["Epoch 0/9", "Validation", "Epoch 0/9"]
    assert any("3/3 [00:30" in state for state in states)
    assert "2/4 [00:02<00:02,  1.00batch/s" in states[-1], "the time of validation is not the epoch's"
    assert "\n" not in terminal.getvalue()[:-1], "one line"


@pytest.mark.parametrize(("leave", "lines"), [(False, ["Epoch 2/9"]), (True, ["Epoch 0/9", "Epoch 1/9", "Epoch 2/9"])])
def test_which_epochs_stay(make_trainer, terminal, clock, leave, lines):
    trainer = make_trainer(TQDMProgressBar(leave=leave), batches=2).begin()
    for _ in range(3):
        trainer.epoch()
    trainer.call("on_train_end")
    assert [line.split(":")[0] for line in Screen(terminal.getvalue()).shown] == lines


def test_the_sanity_check_leaves_nothing(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), val_batches=[9], num_sanity_val_batches=[2]).begin()
    trainer.sanity_checking = True
    trainer.call("on_sanity_check_start")
    trainer.call("on_validation_start")
    clock(1)
    trainer.call("on_validation_batch_end", None, None, 0)
    trainer.call("on_validation_end")
    trainer.call("on_sanity_check_end")
    assert any(state.startswith("Sanity check:  50%") for state in drawn(terminal))
    assert Screen(terminal.getvalue()).shown == []


@pytest.mark.parametrize(("stage", "moment"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_other_verbs(make_trainer, terminal, clock, stage, moment):
    totals = {"num_test_batches": [2], "num_predict_batches": [2]}
    trainer = make_trainer(TQDMProgressBar(), val_batches=[2], **totals).begin(stage=stage)
    trainer.call(f"on_{moment}_start")
    for index in range(2):
        clock(1)
        trainer.call(f"on_{moment}_batch_end", None, None, index)
    trainer.call(f"on_{moment}_end")
    trainer.call("teardown", stage)
    assert drawn(terminal)[-1].startswith(f"{moment.capitalize()}: 100%|")
    assert "2/2" in drawn(terminal)[-1]


def test_an_unknown_length(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=float("inf"), max_epochs=None).begin()
    trainer.call("on_train_epoch_start")
    clock(2)
    trainer.step()
    assert drawn(terminal)[-1].startswith("Epoch 0: 1batch [00:02")


def test_a_resumed_epoch(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=10)
    trainer.progress.epoch_batch = 6
    trainer.begin()
    trainer.call("on_train_epoch_start")
    clock(1)
    trainer.step()
    assert "7/10 [00:01<00:03,  1.00batch/s" in drawn(terminal)[-1]


def test_an_exception_leaves_the_terminal_clean(make_trainer, terminal, clock):
    trainer = make_trainer(TQDMProgressBar()).begin()
    trainer.call("on_train_epoch_start")
    trainer.step()
    trainer.call("on_exception", ValueError())
    assert terminal.getvalue().endswith("\n")
    length = len(terminal.getvalue())
    trainer.call("teardown", "fit")
    assert len(terminal.getvalue()) == length


def test_print_goes_above_the_line(make_trainer, terminal, clock, capsys):
    bar = TQDMProgressBar()
    trainer = make_trainer(bar).begin()
    trainer.call("on_train_epoch_start")
    bar.print("hello", 3, sep="-", file=terminal)
    shown = Screen(terminal.getvalue()).shown
    assert shown[0] == "hello-3"
    assert shown[-1].startswith("Epoch 0/9")
    bar.print("to stdout")
    trainer.call("on_train_end")
    bar.print("after", "it")
    assert capsys.readouterr().out == "to stdout\nafter it\n"


def test_plain_lines(make_trainer, plain, clock):
    trainer = make_trainer(TQDMProgressBar(), batches=30, val_batches=[1]).begin()
    trainer.call("on_train_epoch_start")
    trainer.progress_bar_metrics = {"loss": 0.5}
    for _ in range(25):
        clock(1)
        trainer.step()
    trainer.call("on_validation_start")
    trainer.call("on_validation_end")
    trainer.end_epoch()
    trainer.progress_bar_metrics = {}
    clock(5)
    trainer.epoch(steps=2)
    trainer.call("on_train_end")
    assert plain.getvalue().splitlines() == [
        "Epoch 0/9: 10/30 batches, 1/s, loss=0.5",
        "Epoch 0/9: 20/30 batches, 1/s, loss=0.5",
        "Epoch 0/9: 25/30 batches, 1/s, loss=0.5",
        "Epoch 1/9: 2/30 batches, 2e+09/s",
    ]


def test_print_without_a_terminal(make_trainer, plain, capsys):
    bar = TQDMProgressBar()
    trainer = make_trainer(bar).begin()
    trainer.call("on_train_epoch_start")
    bar.print("hello")
    assert capsys.readouterr().out == "hello\n"


def test_other_ranks_and_disabled_bars_are_silent(make_trainer, terminal, clock, capsys):
    off = TQDMProgressBar()
    off.disable()
    for bar, rank in ((TQDMProgressBar(), 1), (TQDMProgressBar(refresh_rate=0), 0), (off, 0)):
        trainer = make_trainer(bar, rank=rank, val_batches=[1]).begin()
        clock(100)
        trainer.epoch(val={"loss": 1.0})
        bar.print("hello")
        trainer.call("on_train_end")
        trainer.call("teardown", "fit")
    assert terminal.getvalue() == capsys.readouterr().out == ""
    assert not off.is_enabled
    off.enable()
    assert off.is_enabled


def test_no_thread_is_left(make_trainer, terminal, clock):
    before = set(threading.enumerate())
    trainer = make_trainer(TQDMProgressBar()).begin()
    trainer.epoch()
    assert set(threading.enumerate()) == before
    trainer.call("on_train_end")


def test_bad_arguments():
    with pytest.raises(ConfigurationError, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
