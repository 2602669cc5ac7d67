"""Ctrl-C, SIGTERM and SIGUSR1: at the next step, with a checkpoint and every teardown; the second one at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.training.tiny import Recorder, Tiny
from trainer_kit import Callback, Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.read import read_checkpoint

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 1,
}
ROOT = Path(__file__).parents[2]
NUMBERS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
)
TERM, INT, USR1 = (
    (signal.SIGTERM, 143),
    (signal.SIGINT, -signal.SIGINT),
    (signal.SIGUSR1, 138),
)
LONG = (
    pytest.mark.long
)  # each script imports torch; in this process every signal is tried

SCRIPT = """
import sys, time
import torch
from torch import nn
from trainer_kit import Callback, Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            print("at step 3", flush=True)
            while not self.trainer.requests.signal:  # the signal comes while this step works
                time.sleep(0.002)
            if sys.argv[1] == "twice":
                print("once", flush=True)
                while True:
                    time.sleep(0.002)
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Says(Callback):
    def on_exception(self, trainer, module, exception):
        print("on_exception", type(exception).__name__, trainer.global_step, flush=True)

    def teardown(self, trainer, module, stage):
        print("teardown", flush=True)

trainer = Trainer(max_epochs=1, callbacks=Says(), logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Net(), [torch.ones(2, 2)] * 10)
print("after fit", flush=True)
"""


class Ends(Callback):
    def __init__(self):
        self.heard = []

    def on_exception(self, trainer, module, exception):
        self.heard.append(type(exception))

    def teardown(self, trainer, module, stage):
        self.heard.append("teardown")


def sending(number, hook, at=None):
    """A callback that sends this process a signal in one hook, once."""

    def send(self, trainer, *given):
        if not self.sent and at in (None, trainer.global_step):
            self.sent = True
            signal.raise_signal(number)

    takes = {
        "on_train_batch_end": "outputs, batch, batch_idx",
        "on_train_batch_start": "batch, batch_idx",
    }
    takes["setup"] = "stage"
    names = ", ".join(filter(None, ["self", "trainer", "module", takes.get(hook)]))
    scope = {"send": send}
    exec(f"def {hook}({names}): send(self, trainer)", scope)
    return type("Sending", (Callback,), {hook: scope[hook], "sent": False})()


def outcome(number):
    return KeyboardInterrupt if number == signal.SIGINT else SystemExit


def fit(number, hook, at=None, *more, **options):
    """Fit until the signal ends it; returns the trainer and the exception."""
    ends, logger = Ends(), Recorder()
    callbacks = [sending(number, hook, at), ends, *more]
    trainer = Trainer(
        callbacks=callbacks, **{**QUIET, "max_epochs": 2, "logger": logger, **options}
    )
    with pytest.raises(outcome(number)) as caught:
        trainer.fit(Tiny(), [torch.ones(2, 2)] * 4, [torch.ones(2, 2)])
    if number != signal.SIGINT:
        assert caught.value.code == 128 + number
    assert ends.heard == [outcome(number), "teardown"]
    assert logger.finalized == ["interrupted"]
    assert trainer.state_verb == ""
    return trainer


@NUMBERS
@pytest.mark.parametrize(
    ("hook", "at", "step"),
    [
        ("on_train_batch_start", 0, 1),
        ("on_train_batch_start", 2, 3),
        ("on_train_batch_end", 2, 2),
        ("on_train_batch_end", 4, 4),
        ("on_train_step_end", 5, 5),
        ("on_train_step_end", 8, 8),
        ("on_train_epoch_start", 0, 1),
        ("on_train_epoch_start", 4, 5),
        ("on_validation_start", 4, 4),
        ("on_train_epoch_end", 4, 4),
        ("on_train_epoch_end", 8, 8),
    ],
)
def test_the_run_ends_at_the_next_step_with_a_checkpoint_of_it(
    tmp_path, capsys, number, hook, at, step
):
    keeper = ModelCheckpoint(every_n_train_steps=1000)
    trainer = fit(number, hook, at, keeper, log_every_n_steps=50)
    assert trainer.global_step == step
    written = list(tmp_path.glob("**/step-*"))
    assert [path.name for path in written] == [f"step-{step:08d}"]
    state = read_checkpoint(written[0])
    assert state["progress"]["step"] == step
    assert torch.equal(state["model"]["layer.weight"], trainer.module.layer.weight)
    said = capsys.readouterr().out
    leaving = (
        "KeyboardInterrupt" if number == signal.SIGINT else f"exiting {128 + number}"
    )
    assert re.search(
        rf"^{number.name}: saved step {step} in \d+\.\d s, {leaving}$",
        said,
        re.MULTILINE,
    )
    # Who presses Ctrl-C reads where the checkpoint is, and how to continue.
    line = f'newest checkpoint: {written[0]}; continue with fit(..., ckpt_path="last")'
    assert (line in said) == (number == signal.SIGINT)


@NUMBERS
def test_a_signal_during_validation_inside_an_epoch_ends_after_it(tmp_path, number):
    trainer = fit(number, "on_validation_start", 2, val_check_interval=2)
    assert trainer.global_step == 2
    assert "step-00000002" in [path.name for path in tmp_path.glob("**/step-*")]


@NUMBERS
def test_a_run_resumed_after_a_signal_ends_with_the_same_weights(tmp_path, number):
    torch.manual_seed(0)
    start = Tiny().state_dict()
    whole, broken, resumed = Tiny(), Tiny(), Tiny()
    data = torch.arange(16.0).reshape(8, 2) / 16
    batches = list(data.split(2))
    for module in (whole, broken):
        module.load_state_dict(start)
    options = {**QUIET, "max_epochs": 2, "log_every_n_steps": 50}
    Trainer(**options).fit(whole, batches)
    with pytest.raises(outcome(number)):
        Trainer(callbacks=sending(number, "on_train_batch_start", 5), **options).fit(
            broken, batches
        )
    trainer = Trainer(**options)
    trainer.fit(resumed, batches, ckpt_path="last")
    assert trainer.global_step == 8
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


@NUMBERS
def test_without_checkpoints_nothing_is_written(tmp_path, capsys, number):
    trainer = fit(number, "on_train_batch_start", 2, enable_checkpointing=False)
    assert trainer.global_step == 3
    assert list(tmp_path.glob("**/step-*")) == []
    assert "nothing to save" in capsys.readouterr().out


@NUMBERS
@pytest.mark.parametrize(
    "hook",
    ["setup", "on_fit_start", "on_sanity_check_start", "on_train_end", "on_fit_end"],
)
def test_a_signal_outside_a_step_runs_the_teardown(number, hook):
    trainer = fit(number, hook, enable_checkpointing=False)
    assert trainer.global_step == (8 if hook.endswith("_end") else 0)


@NUMBERS
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_ends_at_once_but_not_without_its_teardown(number, verb):
    kind = {"validate": "validation"}.get(verb, verb)
    ends = Ends()
    trainer = Trainer(
        callbacks=[sending(number, f"on_{kind}_epoch_start"), ends], **QUIET
    )
    with pytest.raises(outcome(number)):
        getattr(trainer, verb)(Tiny(), [torch.ones(2, 2)])
    assert ends.heard == [outcome(number), "teardown"]


def test_the_users_handler_of_sigusr1_is_called_everywhere():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        sends = [
            sending(signal.SIGUSR1, "on_train_batch_start", 2),
            sending(signal.SIGUSR1, "on_fit_start"),
        ]
        trainer = Trainer(max_epochs=1, callbacks=sends, **QUIET)
        trainer.fit(Tiny(), [torch.ones(2, 2)] * 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] * 2
    assert trainer.global_step == 4


def test_the_users_handler_is_called_outside_the_loop():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        trainer = Trainer(
            callbacks=sending(signal.SIGTERM, "on_validation_epoch_start"), **QUIET
        )
        trainer.validate(Tiny(), [torch.ones(2, 2)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


@NUMBERS
def test_the_second_signal_ends_the_step_at_once(number):
    class Twice(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                signal.raise_signal(number)
                assert self.trainer.requests.signal == number
                signal.raise_signal(number)
                raise AssertionError("the second one did not end it")
            return super().training_step(batch, batch_idx)

    ends = Ends()
    trainer = Trainer(max_epochs=1, callbacks=ends, **QUIET)
    with pytest.raises(outcome(number)):
        trainer.fit(Twice(), [torch.ones(2, 2)] * 4)
    assert trainer.global_step == 2
    assert ends.heard == [outcome(number), "teardown"]


def test_a_trainer_that_was_interrupted_can_fit_again():
    trainer = Trainer(
        max_epochs=1,
        callbacks=sending(signal.SIGTERM, "on_train_batch_end", 2),
        **QUIET,
    )
    with pytest.raises(SystemExit):
        trainer.fit(Tiny(), [torch.ones(2, 2)] * 4)
    trainer.fit(Tiny(), [torch.ones(2, 2)] * 4)
    assert trainer.global_step == 4


@contextmanager
def script(directory, word):
    (directory / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "script.py", word]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code"),
    [TERM, pytest.param(*INT, marks=LONG), pytest.param(*USR1, marks=LONG)],
)
def test_a_script_that_gets_a_signal_leaves_with_its_code_and_the_step_on_disk(
    tmp_path, number, code
):
    with script(tmp_path, "once") as process:
        assert process.stdout.readline() == "at step 3\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    *_, told, torn = out.splitlines()
    assert told == f"on_exception {outcome(number).__name__} 4"
    assert torn == "teardown"
    written = list(tmp_path.glob("**/step-*"))
    assert [path.name for path in written] == ["step-00000004"]
    assert read_checkpoint(written[0])["progress"]["batch"] == 4


@pytest.mark.parametrize(
    ("number", "code"),
    [INT, pytest.param(*TERM, marks=LONG), pytest.param(*USR1, marks=LONG)],
)
def test_a_script_that_gets_it_twice_leaves_at_once(tmp_path, number, code):
    with script(tmp_path, "twice") as process:
        assert process.stdout.readline() == "at step 3\n"
        process.send_signal(number)
        assert process.stdout.readline() == "once\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out.splitlines() == [
        f"on_exception {outcome(number).__name__} 3",
        "teardown",
    ]
    assert list(tmp_path.glob("**/step-*")) == []
