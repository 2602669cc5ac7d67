"""`record_hooks` names the hooks of a run in the order of their calls."""

from __future__ import annotations

from typing import Any

import torch

import trainer_kit.testing
from trainer_kit import Callback, Trainer
from trainer_kit.testing import TinyModule, record_hooks

BATCHES = [torch.ones(2, 32)] * 2


def fit(callbacks: list[Any], **settings: Any) -> None:
    Trainer(
        accelerator="cpu", callbacks=callbacks, max_epochs=1, barebones=True, **settings
    ).fit(TinyModule(), BATCHES)


def test_names_come_in_the_order_of_the_calls() -> None:
    names = record_hooks(callbacks := [])
    fit(callbacks)
    step = [
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
    ]
    step += ["on_before_optimizer_step", "on_train_batch_end", "on_train_step_end"]
    around = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"]
    assert names == [
        *around,
        *step,
        *step,
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_every_hook_of_the_specification_is_listened_to() -> None:
    record_hooks(callbacks := [])
    (recorder,) = callbacks
    hooks = {name for name in vars(Callback) if name.startswith("on_")} | {
        "setup",
        "teardown",
    }
    assert hooks <= vars(type(recorder)).keys()


def test_a_recorded_callback_keeps_its_position() -> None:
    seen: list[list[str]] = []

    class Before(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            seen.append(list(names))

    callbacks: list[Any] = [Before()]
    names = record_hooks(callbacks)
    fit(callbacks)
    assert seen == [["setup"]]


def test_two_records_are_independent() -> None:
    callbacks: list[Any] = []
    first, second = record_hooks(callbacks), record_hooks(callbacks)
    fit(callbacks)
    assert first == second != []
    first.clear()
    assert second


def test_the_package_lists_its_names() -> None:
    assert all(
        getattr(trainer_kit.testing, name) for name in trainer_kit.testing.__all__
    )
    assert {"TinyModule", "record_hooks"} <= set(dir(trainer_kit.testing))
