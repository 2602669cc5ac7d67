"""What a terminal of a given width shows of a real fit."""

import fcntl
import os
import pty
import re
import struct
import termios
import tty
from contextlib import suppress

import pytest
import torch

import trainer_kit as tk
from trainer_kit.testing import TinyModule

VALUES = ("accuracy_top1", "learning_rate", "perplexity", "my_loss", "gradient_norm")


class Logs(TinyModule):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for name in self.names:
            self.log(name, 0.5, prog_bar=True)
        return loss


def drawn(monkeypatch, columns, names, batches):
    """The states of the line that show values, on a terminal of this width."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    text = b""
    with os.fdopen(slave, "w") as stderr:
        monkeypatch.setattr(
            "trainer_kit.callbacks.progress_bar.message_stream", lambda: stderr
        )
        tk.Trainer(
            max_epochs=1,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        ).fit(Logs(names), batches)
    with suppress(OSError):  # the end of a terminal's output
        while part := os.read(master, 2**16):
            text += part
    os.close(master)
    return [
        line.rstrip() for line in re.split(r"[\r\n]+", text.decode()) if "=" in line
    ]


@pytest.mark.parametrize("columns", [200, 100, 80, 60, 50, 40, 30, 20])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_no_word_is_cut_and_the_loss_is_always_there(monkeypatch, columns, known):
    batches = [torch.randn(4, 32)] * 2
    lines = drawn(monkeypatch, columns, VALUES, batches if known else iter(batches))
    assert lines
    for line in lines:
        assert len(line) <= columns
        assert re.search(r"\bmy_loss=[\d.e-]+(?![\w.])", line)
        names = re.findall(r"(\w+)=[\d.e-]+", line)
        assert set(names) <= set(VALUES)
        assert line.count("=") == len(names)
        assert line.endswith(("]", "...")) or names in ([*VALUES], ["my_loss"]), line


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(110, ["|", "batch", "["]), (90, ["batch", "["]), (75, ["["]), (60, [])],
)
def test_values_come_before_decoration(monkeypatch, columns, parts):
    line = drawn(
        monkeypatch, columns, ("train_acc", "my_loss", "lr"), [torch.randn(4, 32)] * 2
    )[-1]
    assert "train_acc=0.5, my_loss=0.5, lr=0.5" in line
    assert [part for part in ("|", "batch", "[") if part in line] == parts, line


def test_braces_in_a_name_are_text(monkeypatch):
    assert (
        "{x}_loss="
        in drawn(
            monkeypatch, 20, ("{x}_loss", "something_else"), [torch.randn(4, 32)] * 2
        )[-1]
    )
