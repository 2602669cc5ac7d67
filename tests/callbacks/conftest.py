"""A small trainer that records what callbacks ask for, and calls their hooks in the loop's order.

`ModelCheckpoint` and `EarlyStopping` are tested in real fits: `tests.callbacks.fits`.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer_kit.checkpoint.codec import decode, encode
from trainer_kit.core.progress import Progress


class OneOf:
    """A group of processes of which only this one is looked at: what it hears is what it is told to hear."""

    def __init__(self, size=1):
        self.size, self.rank, self.heard, self.rows = size, 0, [], None

    def broadcast(self, value, source=0):
        self.heard.append(value)
        return value

    def agree(self, values):
        return self.rows or [values] * self.size


class FakeTrainer:
    def __init__(self, run_dir, callbacks=(), *, batches=4, val_batches=(), world_size=1, rank=0, **attributes):
        self.progress = Progress()
        self.run_dir, self.callbacks = Path(run_dir), list(callbacks)
        self.world_size, self.global_rank, self.is_global_zero = world_size, rank, rank == 0
        self.num_training_batches, self.num_val_batches = batches, list(val_batches)
        self.strategy = SimpleNamespace(
            world=OneOf(world_size), device=torch.device("cpu"), costs=lambda *_: None, names_on_all_ranks=lambda: None
        )
        self.precision_plugin = None
        self.sanity_checking, self.fast_dev_run = False, False
        self.num_sanity_val_batches = self.num_test_batches = self.num_predict_batches = [math.inf]
        self.max_epochs, self.max_steps, self.log_every_n_steps = 10, -1, 50
        self.estimated_stepping_batches = 100
        self.callback_metrics, self.progress_bar_metrics = {}, {}
        self.optimizers, self.lr_scheduler_configs = [], []
        self.module = SimpleNamespace(automatic_optimization=True, parameters=list)
        self.stops, self.logged, self.accumulation = [], [], []
        self.train_batch_samples = None
        self.printed = []
        vars(self).update(attributes)

    current_epoch = property(lambda self: self.progress.epoch)
    global_step = property(lambda self: self.progress.step)

    def print(self, *values, **options):
        if self.is_global_zero:
            self.printed.append(" ".join(map(str, values)))

    def stop(self, reason):
        self.stops.append(reason)

    def set_accumulation(self, batches, measure=None):
        self.accumulation.append(batches)

    def log_metrics(self, metrics, step=None):
        if self.global_rank != 0:
            return
        self.logged.append((step, dict(metrics)))

    def call(self, hook, *arguments):
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.module, *arguments)

    def begin(self, states=None, stage="fit"):
        self.call("setup", stage)
        for callback, state in zip(self.callbacks, states or [], strict=False):
            callback.load_state_dict(stored(state))
        if stage == "fit":
            self.call("on_fit_start")
            self.call("on_train_start")
        return self

    def step(self, samples=0, tokens=0, batches=1):
        progress = self.progress
        progress.batch += batches
        progress.epoch_batch += batches
        progress.samples += samples
        progress.tokens += tokens
        progress.step += 1
        self.call("on_train_batch_end", None, None, progress.epoch_batch - 1)
        self.call("on_train_step_end")

    def validate(self, **metrics):
        self.call("on_validation_start")
        self.log(**metrics)
        self.call("on_validation_end")

    def log(self, **metrics):
        self.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def end_epoch(self, **metrics):
        self.log(**metrics)
        self.call("on_train_epoch_end")
        self.progress.epoch += 1
        self.progress.epoch_batch = 0

    def epoch(self, steps=None, val=None, **metrics):
        """One epoch with a validation at its end where ``val`` has values."""
        self.call("on_train_epoch_start")
        for _ in range(int(steps or (4 if math.isinf(self.num_training_batches) else self.num_training_batches))):
            self.step()
        if val is not None:
            self.validate(**val)
        self.end_epoch(**metrics)


def stored(state):
    """The state as a checkpoint gives it back."""
    tensors = {}
    return decode(encode(dict(state), tensors, at="callback"), tensors, at="callback")


@pytest.fixture
def make_trainer(tmp_path):
    def make(*callbacks, **options):
        return FakeTrainer(options.pop("run_dir", tmp_path), callbacks, **options)

    return make


@pytest.fixture
def through_checkpoint():
    return stored
