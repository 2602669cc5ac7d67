"""What the loop costs, exactly: frames between `fit` and the user's step, and Python calls for each step."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer_kit
from tests.calls import python_calls, stop_the_clock_of_steps
from trainer_kit import Callback, Trainer, TrainModule

OURS = str(Path(trainer_kit.__file__).parent)
MOST_FRAMES = 4
MOST_CALLS = 55


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch):
    stop_the_clock_of_steps(monkeypatch)


class Net(TrainModule):
    """The tiny step of the benchmarks: MLP 32 -> 64 -> 10."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count):
    return [(torch.randn(32, 32), torch.randint(10, (32,)))] * count


def calls_per_step(module=Net, **options):
    """The difference between a long and a short fit, so that whatever comes once cancels out."""

    def fit(count):
        trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, **options)
        return python_calls(lambda: trainer.fit(module(), batches(count)))

    fit(3)  # imports and caches
    return (fit(140) - fit(40)) / 100


def frames_to_step(**options):
    """Frames of this library from `Trainer.fit` to the module's step, `fit` included."""
    seen = []

    class Looks(Net):
        def training_step(self, batch, batch_idx):
            frame, files = sys._getframe(1), []
            while frame is not None:
                files.append((frame.f_code.co_filename, frame.f_code.co_name))
                if frame.f_code is inspect.unwrap(Trainer.fit).__code__:
                    break
                frame = frame.f_back
            assert files[-1][1] == "fit"
            seen.append([name for file, name in files if file.startswith(OURS)])
            return super().training_step(batch, batch_idx)

    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, **options)
    trainer.fit(Looks(), batches(4))
    return max(seen, key=len)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}]
)
def test_fit_adds_few_frames_above_the_users_step(options):
    names = frames_to_step(**options)
    assert len(names) <= MOST_FRAMES, names


@pytest.mark.world_size(2)
def test_ddp_adds_few_frames_above_the_users_step():
    names = frames_to_step(strategy="ddp", devices=2)
    assert len(names) <= MOST_FRAMES + 1, (
        names
    )  # one more: DDP is entered through its own forward


def test_a_tiny_step_takes_few_python_calls():
    assert calls_per_step() <= MOST_CALLS


@pytest.mark.slow
def test_callbacks_that_override_nothing_add_no_call():
    class Idle(Callback):
        pass

    assert calls_per_step(callbacks=[Idle() for _ in range(50)]) == calls_per_step()


@pytest.mark.slow
def test_callbacks_that_listen_elsewhere_add_no_call():
    class Elsewhere(Callback):
        def on_train_start(self, trainer, module): ...
        def on_train_epoch_end(self, trainer, module): ...
        def on_validation_end(self, trainer, module): ...

    assert (
        calls_per_step(callbacks=[Elsewhere() for _ in range(50)]) == calls_per_step()
    )


@pytest.mark.slow
def test_a_logged_value_takes_few_calls():
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for name in "abcde":
                self.log(name, loss, on_step=True, on_epoch=True)
            return loss

    class Silent(Logs):
        def log(self, name, value, **options): ...

    extra = calls_per_step(Logs) - calls_per_step(Silent)
    assert extra / 5 <= 2.5
