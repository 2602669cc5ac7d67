import contextlib
import io
import itertools
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from tests.callbacks.fits import BATCH, Timed, Unsized, trainer
from trainer_kit.callbacks import LambdaCallback, TQDMProgressBar
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.testing import TinyModule


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
                for each in piece.split("\r")[
                    (0 if not piece.startswith("\r") else 1) :
                ]:
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
    monkeypatch.setattr("trainer_kit.callbacks.progress_bar.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    return pass_time


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    file = Terminal()
    # Not sys.stderr itself: that one is the test runner's, who exchanges it between setup and call.
    monkeypatch.setattr(
        "trainer_kit.callbacks.progress_bar.message_stream", lambda: file
    )
    return file


@pytest.fixture
def plain(monkeypatch):
    file = io.StringIO()
    # Not sys.stderr itself: that one is the test runner's, who exchanges it between setup and call.
    monkeypatch.setattr(
        "trainer_kit.callbacks.progress_bar.message_stream", lambda: file
    )
    return file


def drawn(file):
    """Every state of the line, without the fill."""
    return [
        part.strip()
        for part in file.getvalue().replace("\n", "\r").split("\r")
        if part.strip()
    ]


def fitted(
    bar,
    clock,
    *others,
    batches=4,
    val=None,
    values=None,
    seconds=0,
    val_seconds=0,
    ckpt_path=None,
    **options,
):
    """A fit with ``bar`` whose batches take so many seconds of the clock, and log ``values``."""
    made = trainer(
        bar,
        *others,
        **{
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "enable_progress_bar": True,
            **options,
        },
    )
    module = Timed(clock, values, train=seconds, val=val_seconds)
    made.fit(
        module,
        [BATCH] * batches if isinstance(batches, int) else batches,
        val,
        ckpt_path=ckpt_path,
    )
    return made


def test_a_line_on_a_terminal(terminal, clock):
    values = {"loss": 0.123456, "n": 3.0, "big": 1.5e9}
    fitted(
        TQDMProgressBar(), clock, seconds=0.5, values=values, max_epochs=3, max_steps=4
    )
    states = drawn(terminal)
    assert states[0].startswith("Epoch 0/2:   0%|")
    assert any(
        "2/4 [00:01<00:01,  2.00batch/s, loss=0.123, n=3, big=1.500e+09]" in state
        for state in states
    )
    assert "4/4 [00:02<00:00,  2.00batch/s" in states[-1]
    assert terminal.getvalue().endswith("\n"), (
        "what is printed next begins a line of its own"
    )


def test_the_bars_are_tqdms_as_in_lightning(terminal, clock):
    class Totals(LambdaCallback):
        order = "late"

        def on_train_batch_end(self, trainer, pl_module, *arguments):
            bar = trainer.progress_bar_callback.train_progress_bar
            seen.append((type(bar).__name__, bar.total, bar.desc))
            bar.color = "green"

    seen, progress = [], TQDMProgressBar()
    with pytest.raises(ConfigurationError, match=r"has drawn no test_progress_bar"):
        _ = progress.test_progress_bar
    made = fitted(progress, clock, Totals(), batches=3, seconds=0.5)
    assert [row[1:] for row in seen] == [(3, "Epoch 0/0")] * 3
    assert progress.train_progress_bar.color == "green"
    assert progress.__getstate__()["_bars"] == {}  # tqdm objects cannot be pickled
    with pytest.raises(
        ConfigurationError, match=r"(?s)val_progress_bar.*init_validation"
    ):
        _ = progress.val_progress_bar
    made.validate(Timed(clock, {}, train=1, val=1), [BATCH] * 2, verbose=False)
    assert progress.val_progress_bar.total == 2


def test_a_terminal_without_a_size(terminal, clock, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda stream: (0, 0))
    fitted(TQDMProgressBar(), clock, seconds=0.5, max_steps=1)
    assert "1/4 [00:00<00:01,  2.00batch/s]" in drawn(terminal)[-1]
    assert max(map(len, drawn(terminal))) <= 80


def test_it_is_drawn_at_most_ten_times_a_second(terminal, clock):
    fitted(TQDMProgressBar(), clock, batches=500, seconds=0.002)
    assert (
        9 <= len(drawn(terminal)) <= 12
    )  # ten, one at the start and one at the end of the epoch


def test_a_step_does_next_to_nothing(terminal, clock):
    calls = []

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.endswith(
            "trainer_kit/callbacks/progress_bar.py"
        ):
            calls.append(frame.f_code.co_name)

    profiler = LambdaCallback(
        on_train_batch_start=lambda *_: sys.setprofile(count),
        on_train_epoch_end=lambda *_: sys.setprofile(None),
    )
    try:
        fitted(TQDMProgressBar(), clock, profiler, batches=10)
    finally:
        sys.setprofile(None)
    assert calls == ["on_train_batch_end"] * 10


def test_refresh_rate(terminal, clock):
    fitted(TQDMProgressBar(refresh_rate=5), clock, batches=20, seconds=1, max_steps=12)
    counts = [state.split("/20")[0].split()[-1] for state in drawn(terminal)]
    assert list(dict.fromkeys(counts)) == [
        "0",
        "5",
        "10",
        "12",
    ]  # the last state is drawn when the epoch ends


def test_validation_borrows_the_line(terminal, clock):
    val = [DataLoader(torch.ones(samples, 32), batch_size=2) for samples in (4, 2)]
    options = {"val_check_interval": 2, "max_epochs": 10, "max_steps": 4}
    fitted(TQDMProgressBar(), clock, val=val, seconds=1, val_seconds=10, **options)
    states = drawn(terminal)
    titles = [
        title for title, _ in itertools.groupby(state.split(":")[0] for state in states)
    ]
    assert titles == ["Epoch 0/9", "Validation", "Epoch 0/9", "Validation", "Epoch 0/9"]
    assert any("3/3 [00:30" in state for state in states)
    assert "4/4 [00:04<00:00,  1.00batch/s" in states[-1], (
        "the time of validation is not the epoch's"
    )
    assert "\n" not in terminal.getvalue()[:-1], "one line"


@pytest.mark.parametrize(
    ("leave", "lines"),
    [(False, ["Epoch 2/2"]), (True, ["Epoch 0/2", "Epoch 1/2", "Epoch 2/2"])],
)
def test_leave_keeps_the_bars_of_finished_epochs(terminal, clock, leave, lines):
    fitted(TQDMProgressBar(leave=leave), clock, batches=2, max_epochs=3)
    assert [line.split(":")[0] for line in Screen(terminal.getvalue()).shown] == lines


def test_the_sanity_check_leaves_nothing(terminal, clock):
    found = []

    def look(trainer, module):
        found.append((drawn(terminal), Screen(terminal.getvalue()).shown))

    look_after = LambdaCallback(on_train_start=look)
    fitted(
        TQDMProgressBar(),
        clock,
        look_after,
        val=[BATCH] * 9,
        val_seconds=1,
        num_sanity_val_steps=2,
    )
    ((states, shown),) = found
    assert any(state.startswith("Sanity check:  50%") for state in states)
    assert shown == []


@pytest.mark.parametrize(
    ("stage", "moment"),
    [("validate", "Validation"), ("test", "Test"), ("predict", "Predict")],
)
def test_other_entry_points(terminal, clock, stage, moment):
    made = trainer(TQDMProgressBar(), enable_progress_bar=True)
    quiet = {} if stage == "predict" else {"verbose": False}
    getattr(made, stage)(Timed(clock, val=1, test=1, predict=1), [BATCH] * 2, **quiet)
    assert drawn(terminal)[-1].startswith(f"{moment}: 100%|")
    assert "2/2" in drawn(terminal)[-1]


def test_an_unknown_length(terminal, clock):
    fitted(
        TQDMProgressBar(),
        clock,
        batches=Unsized([BATCH] * 4),
        seconds=2,
        max_epochs=-1,
        max_steps=1,
    )
    assert drawn(terminal)[-1].startswith("Epoch 0: 1batch [00:02")


def test_a_resumed_epoch(terminal, clock, tmp_path):
    fitted(TQDMProgressBar(), clock, batches=10, max_steps=6).save_checkpoint(
        tmp_path / "six"
    )
    fitted(
        TQDMProgressBar(),
        clock,
        batches=10,
        max_steps=7,
        seconds=1,
        ckpt_path=tmp_path / "six",
    )
    assert "7/10 [00:01<00:03,  1.00batch/s" in drawn(terminal)[-1]


def test_an_exception_leaves_the_terminal_clean(terminal, clock):
    def fail(*_):
        raise ValueError("stop here")

    with pytest.raises(ValueError, match="stop here"):
        fitted(TQDMProgressBar(), clock, LambdaCallback(on_before_optimizer_step=fail))
    assert terminal.getvalue().endswith("\n")
    assert not terminal.getvalue().endswith("\n\n"), "teardown writes nothing more"


def test_print_goes_above_the_line(terminal, clock, capsys):
    bar, found = TQDMProgressBar(), []

    def write(*_):
        bar.print("hello", 3, sep="-", file=terminal)
        found.append(Screen(terminal.getvalue()).shown)
        bar.print("to stdout")

    fitted(bar, clock, LambdaCallback(on_train_batch_start=write), batches=1)
    ((first, *_, last),) = found
    assert first == "hello-3"
    assert last.startswith("Epoch 0/0")
    bar.print("after", "it")
    assert capsys.readouterr().out == "to stdout\nafter it\n"


def test_plain_lines(plain, clock):
    seconds = [1] * 25 + [0] * 25
    fitted(
        TQDMProgressBar(),
        clock,
        batches=25,
        val=[BATCH],
        seconds=seconds,
        values={"loss": 0.5},
        max_epochs=2,
    )
    assert plain.getvalue().splitlines() == [
        "Epoch 0/1: 10/25 batches, 1/s, loss=0.5",
        "Epoch 0/1: 20/25 batches, 1/s, loss=0.5",
        "Epoch 0/1: 25/25 batches, 1/s, loss=0.5",
        "Epoch 1/1: 25/25 batches, 2.5e+10/s, loss=0.5",
    ]


def test_print_without_a_terminal(plain, clock, capsys):
    bar = TQDMProgressBar()
    fitted(
        bar,
        clock,
        LambdaCallback(on_train_batch_start=lambda *_: bar.print("hello")),
        batches=1,
    )
    assert capsys.readouterr().out == "hello\n"


def test_disabled_bars_are_silent(terminal, clock, capsys):
    off = TQDMProgressBar()
    off.disable()
    for bar in (TQDMProgressBar(refresh_rate=0), off):
        fitted(bar, clock, val=[BATCH], seconds=100)
        bar.print("hello")
    assert terminal.getvalue() == capsys.readouterr().out == ""
    assert not off.is_enabled
    off.enable()
    assert off.is_enabled


@pytest.mark.world_size(2)
def test_other_ranks_are_silent():
    bar, out, err = TQDMProgressBar(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = {
            "devices": 2,
            "strategy": "ddp",
            "max_epochs": 1,
            "enable_progress_bar": True,
        }
        made = trainer(bar, **options)
        made.fit(TinyModule(), [BATCH] * 2, [BATCH])
        bar.print("hello")
    assert out.getvalue() == ("hello\n" if made.global_rank == 0 else "")
    assert ("Epoch 0" in err.getvalue()) == (made.global_rank == 0), err.getvalue()
    assert made.global_rank == 0 or err.getvalue() == ""


def test_no_thread_is_left(terminal, clock):
    threads = []

    def count(*_):
        threads.append(set(threading.enumerate()))

    fitted(
        TQDMProgressBar(),
        clock,
        LambdaCallback(on_train_start=count, on_train_end=count),
    )
    before, with_a_line = threads
    assert before == with_a_line


def test_bad_arguments():
    with pytest.raises(ConfigurationError, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
