"""A cast of participants that override every hook and note each call; any call can be made to raise."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainer_kit import Callback, DataModule, TrainModule
from trainer_kit.core.hooks import DataHooks, ModuleHooks

CALLBACK_HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]
MODULE_HOOKS = [name for name in vars(ModuleHooks) if name.startswith("on_")]
DATA_HOOKS = [name for name in vars(DataHooks) if not name.startswith("__")]
STEPS = ["training_step", "validation_step", "test_step", "predict_step"]
MODULE_METHODS = [
    *STEPS,
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_optimizers",
    "loss_weight",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
]


class Log(list):
    """(hook, who) of every call; as text, with one line for a hook that several hear one after the other."""

    def __init__(self):
        super().__init__()
        self.traps = {}

    def note(self, who, hook):
        self.append((hook, who))
        trap = self.traps.get((who, hook))
        if trap is not None:
            raise trap

    def lines(self):
        return [
            " ".join([hook, *(who for _, who in calls)])
            for hook, calls in groupby(self, key=lambda call: call[0])
        ]

    def who(self, hook):
        return [who for name, who in self if name == hook]


def spy_callback(name, log, order="normal"):
    def hook(method):
        return lambda self, *given: log.note(name, method)

    members = {method: hook(method) for method in CALLBACK_HOOKS}
    members |= {
        "order": order,
        "state_key": property(lambda self: name),
        "state_dict": lambda self: {"name": name},
        "load_state_dict": lambda self, state: log.note(
            name, f"load_state_dict {state['name']}"
        ),
    }
    return type(name, (Callback,), members)()


class PlainModule(TrainModule):
    """One layer, every step, a scheduler that counts steps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.asleep = nn.Dropout(0.5).eval()

    def forward(self, x):
        return self.asleep(self.layer(x))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return self(batch).mean()

    def test_step(self, batch, batch_idx):
        return self(batch).mean()

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def loss_weight(self, batch):
        return len(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class PlainData(DataModule):
    def __init__(self):
        super().__init__()
        self.samples = torch.arange(12.0).reshape(6, 2)

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=2)

    def val_dataloader(self):
        return DataLoader(self.samples[:2], batch_size=2)

    def test_dataloader(self):
        return DataLoader(self.samples[:2], batch_size=2)

    def predict_dataloader(self):
        return DataLoader(self.samples[:2], batch_size=2)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch.to(device)


def _noting(who, log, name, base):
    inherited = getattr(base, name)

    def method(self, *given, **options):
        log.note(who, name)
        return inherited(self, *given, **options)

    return method


def spy_module(log):
    transfer = (
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
    )
    names = [*MODULE_HOOKS, *MODULE_METHODS, "prepare_data", "setup", "teardown"]
    members = {
        name: _noting("M", log, name, PlainModule)
        for name in names
        if name not in transfer
    }
    return type("SpyModule", (PlainModule,), members)()


def spy_data(log):
    return type(
        "SpyData",
        (PlainData,),
        {name: _noting("D", log, name, PlainData) for name in DATA_HOOKS},
    )()


@pytest.fixture
def make_cast():
    """A module, a datamodule and callbacks; ``late`` stands first in the list and is called last."""

    def make():
        log = Log()
        callbacks = [
            spy_callback("late", log, "late"),
            spy_callback("C1", log),
            spy_callback("C2", log),
        ]
        return SimpleNamespace(
            log=log, module=spy_module(log), data=spy_data(log), callbacks=callbacks
        )

    return make
