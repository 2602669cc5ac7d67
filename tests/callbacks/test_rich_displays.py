"""What rich draws of a real fit, on terminals of several widths and where there is none."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch

from tests.callbacks.fits import BATCH, Scripted, Timed, each, trainer
from trainer_kit.callbacks import LambdaCallback, RichModelSummary, RichProgressBar
from trainer_kit.callbacks.rich_displays import RichProgressBarTheme
from trainer_kit.core.errors import ConfigurationError

VALUES = {"accuracy_top1": 0.5, "learning_rate": 0.25, "train_loss": 0.125}


def drawn(bar, *others, width=80, batches=4, val=None, values=None, **options):
    """The lines on the terminal, each once, of a fit whose batches take half a second each."""
    file, now = io.StringIO(), [0.0]
    bar._console_kwargs.update(
        file=file, force_terminal=True, width=width, color_system=None
    )
    made = trainer(
        bar,
        *others,
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=True,
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_kit.callbacks.progress_bar.monotonic", lambda: now[0])
        patch.setattr("trainer_kit.callbacks.rich_displays.monotonic", lambda: now[0])
        pass_time = lambda seconds: now.__setitem__(0, now[0] + seconds)  # noqa: E731
        made.fit(Timed(pass_time, values or VALUES, train=0.5), [BATCH] * batches, val)
    text = re.sub(r"\x1b\[[0-9?;]*[a-zA-Z]", "", file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize("width", [120, 80, 50])
def test_bar_and_values_fit_the_terminal(width):
    lines = drawn(RichProgressBar(), width=width)
    assert max(map(len, lines)) <= width
    assert (
        any("4/4" in line and "00:02 < 00:00" in line for line in lines) or width < 80
    )
    text = " ".join(lines)
    for value in ("accuracy_top1=0.5", "learning_rate=0.25", "train_loss=0.125"):
        assert re.search(rf"(?:^| ){re.escape(value)}(?: |$)", text), "no value is cut"


def test_columns_theme_and_overrides():
    from rich.progress import TextColumn

    class Bar(RichProgressBar):
        def configure_columns(self, trainer):
            return [
                *super().configure_columns(trainer),
                TextColumn("<{task.completed:.0f} of " + "{task.total:.0f}>"),
            ]

        def get_metrics(self, trainer, module):
            return {**super().get_metrics(trainer, module), "note": "warm"}

    theme = RichProgressBarTheme(metrics_text_delimiter=" ; ", metrics_format=".1f")
    lines = drawn(Bar(theme=theme), width=120)
    assert any("<4 of 4>" in line for line in lines)
    assert any("train_loss=0.1 ; note=warm" in line for line in lines)


def test_validation_and_sanity_check_share_the_line():
    titles = [
        line.split()[0]
        for line in drawn(RichProgressBar(), val=[BATCH], num_sanity_val_steps=1)
    ]
    assert {"Sanity", "Epoch", "Validation"} <= set(titles)


def test_print_goes_above_the_line(capsys):
    bar = RichProgressBar()
    lines = drawn(
        bar,
        LambdaCallback(
            on_train_batch_end=lambda *_: bar.print(
                "[hello]", file=bar._console_kwargs["file"]
            )
        ),
    )
    assert "[hello]" in lines
    drawn(
        bar,
        LambdaCallback(on_train_batch_end=lambda *_: bar.print("to stdout")),
        batches=1,
    )
    assert capsys.readouterr().out == "to stdout\n"


def test_a_file_gets_plain_lines(capsys):
    trainer(RichProgressBar(), max_epochs=2, enable_progress_bar=True).fit(
        Scripted(), [BATCH] * 4
    )
    assert re.search(r"Epoch 1/1: 4/4 batches, [\d.e+]+/s", capsys.readouterr().err)


def test_no_thread_and_no_redirection_are_left():
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="stop here"):
        drawn(
            RichProgressBar(),
            LambdaCallback(
                on_before_optimizer_step=lambda *_: (_ for _ in ()).throw(
                    ValueError("stop here")
                )
            ),
        )
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("kind", [RichProgressBar, RichModelSummary])
def test_without_rich_the_extra_is_named(kind, monkeypatch):
    monkeypatch.setattr(
        "lightning_utilities.core.imports.RequirementCache.__bool__", lambda self: False
    )
    with pytest.raises(
        ConfigurationError, match=r"needs rich(.|\n)*trainer-kit\[rich\]"
    ):
        kind()


def test_the_table_of_a_module(capsys):
    made = trainer(
        summary := RichModelSummary(max_depth=1),
        max_epochs=1,
        enable_model_summary=True,
    )
    assert made.callbacks == [summary]
    module = Scripted(val=each("m"))
    module.example_input_array = torch.ones(2, 32)
    made.fit(module, [BATCH])
    text = capsys.readouterr().err
    assert re.search(r"layer\s+│ Linear │", text)
    assert "66        trainable params" in text
