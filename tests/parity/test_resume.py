"""A run that was interrupted and taken up again ends, bit for bit, as the one that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import trainer_kit as tk
from tests.parity.plain import (
    Batch,
    Classifier,
    adamw,
    assert_same,
    make_batches,
    make_net,
    same_state,
    sgd,
)
from trainer_kit.core.errors import CheckpointError

EPOCHS, STEPS = 3, 4  # 15 batches in windows of 4


class Noised(Dataset[Batch]):
    """Augments: what a sample looks like is drawn each time it is read."""

    def __init__(self, count: int = 44) -> None:
        self.x, self.y = make_batches(1, size=count)[0]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index] + 0.1 * torch.randn(
            8
        ) * random.random() * np.random.rand(), self.y[index]


def warmed_up(net: nn.Module) -> Any:
    optimizer = adamw(net)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


def plateau(net: nn.Module) -> Any:
    optimizer = sgd(net)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.02
    )
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class Everything(Classifier):
    """Dropout, batch norm, metrics of every kind."""

    def __init__(self, configure: Any = warmed_up) -> None:
        super().__init__(make_net(dropout=0.3, norm=True), configure)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict(
            {"worst": loss, "twice": 2 * loss},
            on_step=False,
            on_epoch=True,
            reduce_fx="max",
        )
        self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class Recorder(tk.Callback):
    """Every value that a logger would be given, and when validation ran."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []
        self.ends: dict[int, dict[str, float]] = {}

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


class Values:
    """A logger."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.values.setdefault(step, {}).update(metrics)


class Power(Exception):
    """What ends a run in the middle."""


class Cut(tk.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.at:
            raise Power


def run(
    directory: Path,
    module: Any,
    *extra: Any,
    ckpt: Any = None,
    start: int = 1,
    workers: int = 0,
    save: bool = True,
    **options: Any,
) -> tuple[tk.Trainer, Recorder, Values]:
    """Everything is made anew, as in a new process; where the global generators stand is up to ``start``."""
    random.seed(start), np.random.seed(start), torch.manual_seed(start)
    saving = tk.callbacks.ModelCheckpoint(
        directory, every_n_train_steps=1, save_top_k=-1
    )
    recorder, values = Recorder(), Values()
    if ckpt is None:
        options.setdefault("seed", 3)
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 1.0,
        "val_check_interval": 5,
        "log_every_n_steps": 1,
        **options,
    }
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[
            recorder,
            *([saving] if save else []),
            tk.callbacks.LearningRateMonitor("step"),
            *extra,
        ],
        enable_checkpointing=save,
        logger=values,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **options,
    )
    train = DataLoader(Noised(), batch_size=3, shuffle=True, num_workers=workers)
    val = DataLoader(Noised(10), batch_size=4)
    trainer.fit(module, train, val, ckpt_path=ckpt)
    return trainer, recorder, values


def assert_equal_ends(
    whole: Any, resumed: Any, module: nn.Module, again: nn.Module, since: int
) -> None:
    (trainer, recorder, values), (trainer2, recorder2, values2) = whole, resumed
    assert_same(again, module)
    for one, other in zip(trainer.optimizers, trainer2.optimizers, strict=True):
        same_state(one.state_dict(), other.state_dict(), "optimizer")
    for one, other in zip(
        trainer.lr_scheduler_configs, trainer2.lr_scheduler_configs, strict=True
    ):
        same_state(
            one.scheduler.state_dict(), other.scheduler.state_dict(), "scheduler"
        )
    assert recorder2.rates == {
        step: rate for step, rate in recorder.rates.items() if step > since
    }
    assert recorder2.validated == [step for step in recorder.validated if step > since]
    values2.values.pop(
        since, None
    )  # what the start of an epoch logs belongs to the step before it
    assert values2.values == {
        step: value for step, value in values.values.items() if step > since
    }
    before, after = trainer.progress.state_dict(), trainer2.progress.state_dict()
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
    same_state(
        {k: v.item() for k, v in trainer.callback_metrics.items()},
        {k: v.item() for k, v in trainer2.callback_metrics.items()},
    )


@pytest.mark.slow
def test_from_every_step_of_the_same_run_in_turn(tmp_path: Path) -> None:
    """Resumed after each step, as on a machine that is always taken away."""
    module = Everything()
    whole = run(tmp_path / "whole", module)
    resumed, again, newest = None, None, None
    for cut in range(1, EPOCHS * STEPS):
        again = Everything()
        with pytest.raises(Power):
            run(tmp_path / "cut", again, Cut(cut), ckpt=newest, start=cut)
        newest = sorted((tmp_path / "cut").glob("step-*"))[-1]
    again = Everything()
    resumed = run(tmp_path / "cut", again, ckpt="last", start=50)
    assert_equal_ends(whole, resumed, module, again, since=EPOCHS * STEPS - 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "adamw, warmup": {},
    "sgd, plateau": {"configure": plateau},
    "workers": {"workers": 2, "cuts": (6,)},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "schedule": {"accumulate_grad_batches": {0: 3, 1: 4}, "cuts": (4, 5, 7)},
    "sample target": {"accumulate_grad_batches": "8sp"},
    "validation over epochs": {
        "val_check_interval": 7,
        "check_val_every_n_epoch": None,
    },
    "validation by steps": {
        "val_check_interval": "3st",
        "check_val_every_n_epoch": None,
    },
    "limited": {"limit_train_batches": 9},
    "rarely logged": {"log_every_n_steps": 5},
    "samples seeded here": {"reproducible_workers": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_from_within_an_epoch_and_from_its_end(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    options = dict(options)
    cuts, configure = (
        options.pop("cuts", (1, 4, 7)),
        options.pop("configure", warmed_up),
    )
    module = Everything(configure)
    whole = run(tmp_path, module, **options)
    drawn = torch.get_rng_state().tolist(), random.getstate()
    for cut in cuts:
        again = Everything(configure)
        nn.init.zeros_(again.net[0].weight)
        resumed = run(
            tmp_path,
            again,
            ckpt=tmp_path / f"step-{cut:08d}",
            start=77,
            save=False,
            **options,
        )
        assert_equal_ends(whole, resumed, module, again, since=cut)
        assert (torch.get_rng_state().tolist(), random.getstate()) == drawn


class SaveAndStop(tk.Callback):
    """Saves by hand, ahead of the validation of the step; stops at the end of one."""

    def __init__(self, directory: Path, stop: int = -1) -> None:
        self.directory, self.stop = directory, stop

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.directory / f"mine-{trainer.global_step}")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.stop:
            trainer.stop("good enough")


def test_a_checkpoint_before_a_due_validation_runs_it_on_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "save": False,
        "val_check_interval": 4,
    }  # at steps 1, 2, 3 of an epoch of 4
    module = Everything(plateau)
    whole = run(tmp_path, module, SaveAndStop(tmp_path), **options)
    for cut in (2, 3, 4):
        again = Everything(plateau)
        resumed = run(
            tmp_path, again, ckpt=tmp_path / f"mine-{cut}", start=77, **options
        )
        assert resumed[1].validated[:2] == {2: [2, 3], 3: [3, 5], 4: [5, 6]}[cut]
        resumed[1].validated[:] = [step for step in resumed[1].validated if step > cut]
        assert_equal_ends(whole, resumed, module, again, since=cut)
    stopped = [
        run(
            tmp_path / "b",
            Everything(),
            SaveAndStop(tmp_path / "b", 3),
            max_epochs=1,
            **options,
        )
    ]
    stopped.append(
        run(
            tmp_path,
            Everything(),
            SaveAndStop(tmp_path / "c", 3),
            ckpt=tmp_path / "b" / "mine-3",
            max_epochs=1,
            **options,
        )
    )
    assert [trainer.global_step for trainer, *_ in stopped] == [3, 3]


@pytest.mark.slow
def test_augmentation_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    """Dropout too: seeding samples in this process leaves its generators alone."""
    here, there, apart = Everything(), Everything(), Everything()
    run(tmp_path / "here", here, reproducible_workers=True)
    drawn = torch.get_rng_state()
    run(tmp_path / "there", there, reproducible_workers=True, workers=2)
    assert_same(there, here)
    assert torch.equal(torch.get_rng_state(), drawn)
    run(tmp_path / "apart", apart)  # by default this process draws as it comes
    assert not torch.equal(apart.net[0].weight, here.net[0].weight)


def test_an_epoch_cut_by_max_steps_continues_at_its_position(tmp_path: Path) -> None:
    module, again = Everything(), Everything()
    whole = run(tmp_path / "whole", module)
    run(tmp_path / "parts", Everything(), max_steps=6)
    resumed = run(tmp_path / "parts", again, ckpt="last", start=9)
    assert_equal_ends(whole, resumed, module, again, since=6)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    module, again = Everything(), Everything()
    run(tmp_path, module)
    trainer, recorder, _ = run(tmp_path, again, ckpt="last")
    assert recorder.rates == {}
    assert_same(again, module)
    assert trainer.current_epoch == EPOCHS


def test_more_epochs_than_before(tmp_path: Path) -> None:
    module, again = Everything(plateau), Everything(plateau)
    whole = run(tmp_path / "whole", module)
    run(tmp_path / "parts", Everything(plateau), max_epochs=2)
    resumed = run(tmp_path / "parts", again, ckpt="last", start=5)
    assert_equal_ends(whole, resumed, module, again, since=2 * STEPS)


class Stream(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Any:
        yield from zip(*make_batches(1, size=20)[0], strict=True)


def test_a_drawn_seed_is_in_the_checkpoint(tmp_path: Path) -> None:
    module, again = Everything(), Everything()
    run(tmp_path, module, seed=None)
    run(tmp_path, again, ckpt=tmp_path / "step-00000005", save=False)
    assert_same(again, module)


def test_a_resumed_stream_skips_the_batches_of_the_run(tmp_path: Path) -> None:
    def fit(module: Any, ckpt: Any = None) -> None:
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=1, save_top_k=-1
        )
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        trainer = tk.Trainer(max_epochs=3, callbacks=[saving], devices=1, **quiet)
        trainer.fit(module, DataLoader(Stream(), batch_size=3), ckpt_path=ckpt)

    module, again = Classifier(make_net(), adamw), Classifier(make_net(), adamw)
    fit(module)
    with pytest.warns(UserWarning, match="to start at batch 3, 3 batches"):
        fit(again, tmp_path / "step-00000010")
    assert_same(again, module)


# -- a learning rate that is configured otherwise today -------------------------------------------------------------


def constant(lr: float) -> Any:
    return lambda net: torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def decayed(lr: float, kind: str) -> Any:
    def configure(net: nn.Module) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        scheduler: Any = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if kind == "sequential":
            first = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
            scheduler = lr_scheduler.SequentialLR(
                optimizer, [first, scheduler], milestones=[2]
            )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return configure


def test_a_learning_rate_configured_otherwise_today_wins_and_is_printed(
    tmp_path: Path, capsys: Any
) -> None:
    run(tmp_path, Everything(constant(0.1)))
    capsys.readouterr()
    _, recorder, _ = run(
        tmp_path, Everything(constant(0.03)), ckpt=tmp_path / "step-00000005"
    )
    assert set(recorder.rates.values()) == {0.03}
    printed = capsys.readouterr().out
    assert "lr: 0.03" in printed
    assert "0.1" in printed


def test_everything_else_that_is_configured_otherwise_today_wins_too(
    tmp_path: Path, capsys: Any
) -> None:
    def configure(betas: tuple[float, float], decay: float) -> Any:
        return lambda net: torch.optim.AdamW(
            net.parameters(), lr=0.01, betas=betas, weight_decay=decay
        )

    run(tmp_path, Everything(configure((0.9, 0.999), 0.1)))
    capsys.readouterr()
    trainer, _, _ = run(
        tmp_path,
        Everything(configure((0.9, 0.999), 0.0)),
        ckpt=tmp_path / "step-00000005",
    )
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.0
    printed = capsys.readouterr().out
    assert "weight_decay: 0.0" in printed
    assert "betas" not in printed


def test_an_unchanged_learning_rate_is_the_live_one(
    tmp_path: Path, capsys: Any
) -> None:
    _, whole, _ = run(tmp_path, Everything(decayed(0.1, "lambda")))
    capsys.readouterr()
    _, recorder, _ = run(
        tmp_path, Everything(decayed(0.1, "lambda")), ckpt=tmp_path / "step-00000005"
    )
    assert recorder.rates == {
        step: rate for step, rate in whole.rates.items() if step > 5
    }
    assert "configured" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["lambda", "sequential"])
def test_schedulers_continue_with_the_new_rate(tmp_path: Path, kind: str) -> None:
    _, whole, _ = run(tmp_path, Everything(decayed(0.1, kind)))
    _, recorder, _ = run(
        tmp_path, Everything(decayed(0.05, kind)), ckpt=tmp_path / "step-00000005"
    )
    expected = {
        step: pytest.approx(rate / 2) for step, rate in whole.rates.items() if step > 5
    }
    assert recorder.rates == expected


class Kept(Classifier):
    """Its optimizer is made once: a second fit trains with the same."""

    made: Any = None
    rate: float | None = None

    def configure_optimizers(self) -> Any:
        if self.made is None:
            self.made = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        if self.rate is not None:
            self.made.param_groups[0]["lr"] = self.rate
        scheduler = lr_scheduler.StepLR(self.made, 1, gamma=0.5)
        return [self.made], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def test_a_fit_from_a_checkpoint_in_a_process_that_has_trained_is_that_of_a_new_process(
    tmp_path: Path, capsys: Any
) -> None:
    def fit(module: Any, ckpt: Path | None = None) -> list[float]:
        rates: list[float] = []
        saving = tk.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=1, save_top_k=-1
        )
        noting = tk.callbacks.LambdaCallback(
            on_train_batch_start=lambda trainer, *_: rates.append(
                trainer.optimizers[0].param_groups[0]["lr"]
            )
        )
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        trainer = tk.Trainer(
            max_epochs=2, callbacks=[saving, noting], devices=1, **quiet
        )
        trainer.fit(module, make_batches(3), ckpt_path=ckpt)
        return rates

    def made() -> Kept:
        module = Kept(make_net())
        module.net[0].requires_grad_(False)
        return module

    module = made()
    whole = fit(module)
    assert whole == pytest.approx([0.1 * 0.5**step for step in range(6)])
    ended = {name: value.clone() for name, value in module.state_dict().items()}
    capsys.readouterr()
    for again in (module, made()):
        assert fit(again, tmp_path / "step-00000002") == whole[2:]
        assert_same(again, ended)
    assert "configured" not in capsys.readouterr().out
    module.rate = 0.4  # which the user configures now
    assert fit(module, tmp_path / "step-00000002")[0] == 0.4
    assert "lr: 0.4 as configured now, not 0.1" in capsys.readouterr().out


def test_a_tensor_rate_keeps_its_configured_value_under_a_schedule(
    tmp_path: Path, capsys: Any
) -> None:
    def configure(net: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1))
        return [optimizer], [
            {
                "scheduler": lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
                "interval": "step",
            }
        ]

    run(tmp_path, Everything(configure))
    capsys.readouterr()
    run(tmp_path, Everything(configure), ckpt=tmp_path / "step-00000005")
    assert "configured" not in capsys.readouterr().out


class Unfreezes(tk.Callback):
    """The first layer is trained from the second epoch on, as `BackboneFinetuning` has it; another one stops to be."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net[0].requires_grad_(True)
            module.net[-1].bias.requires_grad_(False)
            (optimizer,) = trainer.optimizers
            optimizer.add_param_group(
                {"params": module.net[0].parameters(), "lr": 0.03}
            )


def head_only(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net[1:].parameters(), lr=0.01, weight_decay=0.1)
    return [optimizer], [
        {"scheduler": lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ModelCheckpoint now writes to")
def test_groups_that_were_added_meanwhile(tmp_path: Path) -> None:
    def train(
        path: Path,
        ckpt: Path | None = None,
        unfreezes: bool = True,
        configure: Any = head_only,
    ) -> Any:
        torch.manual_seed(2)
        module = Classifier(make_net(dropout=0.3), configure)
        keeper = tk.callbacks.ModelCheckpoint(
            path, every_n_train_steps=1, save_top_k=-1
        )
        quiet = {
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        callbacks = [keeper, Unfreezes()] if unfreezes else [keeper]
        trainer = tk.Trainer(
            accelerator="cpu", devices=1, callbacks=callbacks, max_epochs=3, **quiet
        )
        trainer.fit(module, make_batches(4), ckpt_path=ckpt)
        return trainer, module

    whole, module = train(tmp_path / "whole")
    assert len(whole.optimizers[0].param_groups) == 2
    for step in range(
        3, 12
    ):  # 4 steps an epoch: ahead of it, at its start, inside, and behind
        resumed, again = train(
            tmp_path / f"from-{step}", tmp_path / "whole" / f"step-{step:08d}"
        )
        assert_same(again, module)
        same_state(resumed.optimizers[0].state_dict(), whole.optimizers[0].state_dict())
        assert [p.requires_grad for p in again.parameters()] == [
            p.requires_grad for p in module.parameters()
        ]
    # A parameter that begins in another way today stays as it is today.
    late = tmp_path / "whole" / "step-00000011"
    _, other = train(tmp_path / "other", late, unfreezes=False)
    assert all(p.requires_grad for p in other.net[0].parameters())
    assert not other.net[-1].bias.requires_grad

    def all_at_once(net: nn.Module) -> Any:
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    with pytest.raises(
        CheckpointError, match="2 groups were saved, the optimizer has 1"
    ):
        train(tmp_path / "never", late, configure=all_at_once)
