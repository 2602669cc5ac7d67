"""Validation, logging, callbacks, the bar and checkpoints leave weights and generators as they are, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_same,
    make_batches,
    make_net,
    merged,
    train,
)


class Noisy(Classifier):
    """Training and validation both draw; validation does whatever validation must not do to training."""

    def __init__(self) -> None:
        super().__init__(make_net(dropout=0.3, norm=True), adamw)
        self.validated: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (
            1 + random.random() + np.random.rand()
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert not torch.is_grad_enabled()
        assert not self.net.training
        random.random(), np.random.rand(), torch.rand(3)
        torch.manual_seed(99)
        self.net[3].train()
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def on_validation_start(self) -> None:
        torch.rand(7)
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)

    def on_validation_end(self) -> None:
        random.random()


def shuffled(count: int = 20, num_workers: int = 0) -> DataLoader[Any]:
    x, y = merged(make_batches(1, size=count))
    return DataLoader(
        TensorDataset(x, y), batch_size=3, shuffle=True, num_workers=num_workers
    )


def everything_drawn() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def run(
    val: Any = None, module: Noisy | None = None, **options: Any
) -> tuple[Noisy, tuple[Any, ...]]:
    module = Noisy() if module is None else module
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    options = {"seed": 4, "max_epochs": 3, **options}
    train(module, shuffled(), val, **options)
    return module, everything_drawn()


@pytest.fixture(scope="module")
def alone() -> tuple[Noisy, tuple[Any, ...]]:
    return run()


OPTIONS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "every 2 batches": {"val_check_interval": 2},
    "every third of an epoch": {"val_check_interval": 0.34},
    "every 5 steps over epochs": {
        "val_check_interval": "5st",
        "check_val_every_n_epoch": None,
    },
    "every 2nd epoch": {"check_val_every_n_epoch": 2},
    "sanity check of all": {
        "num_sanity_val_steps": -1,
        "barebones": False,
        "logger": False,
        "enable_checkpointing": False,
    },
    "limited": {"limit_val_batches": 1},
    "inference mode off": {"inference_mode": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_validation(
    alone: tuple[Noisy, tuple[Any, ...]], options: dict[str, Any]
) -> None:
    module, drawn = run(shuffled(8), **options)
    assert module.validated
    assert_same(module, alone[0])
    assert drawn == alone[1]
    assert all(part.training for part in module.modules())


def test_validation_with_workers(alone: tuple[Noisy, tuple[Any, ...]]) -> None:
    module, drawn = run(shuffled(8, num_workers=1))
    assert module.validated == [7, 14, 21]
    assert_same(module, alone[0])
    assert drawn == alone[1]


def test_the_sanity_check_leaves_no_metric_and_no_trace(
    alone: tuple[Noisy, tuple[Any, ...]],
) -> None:
    seen: list[Any] = []

    class Look(tk.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(
                (
                    dict(trainer.callback_metrics),
                    everything_drawn(),
                    trainer.should_stop,
                )
            )

        def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = True
            torch.rand(5)

    quiet = {
        "barebones": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    module, drawn = run(
        shuffled(8), callbacks=[Look()], num_sanity_val_steps=2, **quiet
    )
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert seen == [({}, everything_drawn(), False)]
    assert_same(module, alone[0])
    assert drawn == alone[1]


def test_validate_within_training_and_again_after_it(
    alone: tuple[Noisy, tuple[Any, ...]],
) -> None:
    module = Noisy()
    trainer = tk.Trainer(
        max_epochs=3, seed=4, barebones=True, accelerator="cpu", devices=1
    )
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    trainer.fit(module, shuffled(), shuffled(8))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, shuffled(8), verbose=False)
    assert_same(module, weights)
    assert_same(module, alone[0])


class Logged(Noisy):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(
            {"a": loss * 2, "b": 3.0, "worst": loss}, on_epoch=True, reduce_fx="max"
        )
        return loss


class Reader(tk.Callback):
    """Reads whatever it can at every step."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        float(outputs["loss"])
        (
            dict(trainer.callback_metrics),
            dict(trainer.progress_bar_metrics),
            trainer.optimizers,
        )

    def on_before_optimizer_step(
        self, trainer: Any, module: Any, optimizer: Any
    ) -> None:
        sum(p.grad.norm() for p in module.parameters())


def test_logging_callbacks_bar_and_checkpoints(
    tmp_path: Path, alone: tuple[Noisy, tuple[Any, ...]]
) -> None:
    callbacks = [
        Reader(),
        tk.callbacks.LearningRateMonitor(),
        tk.callbacks.EarlyStopping("val_loss", patience=99),
        tk.callbacks.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
        tk.callbacks.Timer("1h"),
    ]
    module, drawn = run(
        shuffled(8),
        Logged(),
        barebones=False,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        enable_progress_bar=True,
        log_every_n_steps=1,
        logger=["csv", "tensorboard"],
    )
    assert len(list(tmp_path.rglob("checkpoints/step-*"))) == 10
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1
    assert_same(module, alone[0])
    assert drawn == alone[1]


def test_checkpoints_equal_the_run_without_them_at_every_step(tmp_path: Path) -> None:
    states: list[dict[str, torch.Tensor]] = []

    class Keep(tk.Callback):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            states.append(
                {name: value.clone() for name, value in module.state_dict().items()}
            )

    run(callbacks=[Keep()])
    each = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    run(
        callbacks=[each],
        barebones=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = sorted(tmp_path.glob("step-*"))
    assert len(saved) == len(states) == 21
    for path, state in zip(saved, states, strict=True):
        module = Classifier(make_net(dropout=0.3, norm=True))
        trainer = tk.Trainer(barebones=True, accelerator="cpu", devices=1)
        module.validation_step = lambda batch, batch_idx: None
        trainer.validate(module, [make_batches(1)[0]], ckpt_path=path, verbose=False)
        assert_same(module, state)


def test_a_frozen_part_in_evaluation_mode_stays_so() -> None:
    class Frozen(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.net[1].eval()
            self.net[1].requires_grad_(False)

    module, _ = run(shuffled(8), Frozen(), val_check_interval=2)
    assert torch.equal(module.net[1].running_mean, torch.zeros(16))
    assert isinstance(module.net[1], nn.BatchNorm1d)
    assert not module.net[1].training
    assert module.net[3].training
