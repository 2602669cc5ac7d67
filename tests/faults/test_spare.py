"""What stays when the newest checkpoint turns out to be damaged, or to hold nothing but NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Callback, Trainer, TrainModule
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import checkpoints, read_checkpoint, verify_checkpoint
from trainer_kit.testing import run_distributed

BATCHES = [torch.ones(2, 3)] * 8


class Two(TrainModule):
    """The loss says nothing about one of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.aside = (
            torch.nn.Linear(3, 1),
            torch.nn.Parameter(torch.ones(2)),
        )
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean() + 0 * self.aside.nan_to_num(0, 0, 0).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Spoils(Callback):
    """From one step to another a weight is NaN."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        spoilt = self.first <= trainer.global_step <= self.last
        module.aside.data.fill_(float("nan") if spoilt else 1.0)


def fit(
    directory: Path,
    steps: int,
    *callbacks: Any,
    devices: int = 1,
    ckpt: Any = None,
    **keeps: Any,
) -> Trainer:
    keeper = ModelCheckpoint(directory / "kept", every_n_train_steps=1, **keeps)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(
        max_steps=steps, callbacks=[*callbacks, keeper], devices=devices, **options
    )
    trainer.fit(Two(), BATCHES * 4, ckpt_path=ckpt)
    return trainer


def kept(directory: Path) -> list[int | None]:
    return [record.step for record in checkpoints(directory / "kept")]


def test_a_newest_checkpoint_that_is_damaged_is_not_the_only_one(
    tmp_path: Path, capsys: Any
) -> None:
    fit(tmp_path, 5)
    assert kept(tmp_path) == [4, 5]
    for step in (4, 5):
        verify_checkpoint(tmp_path / "kept" / f"step-{step:08d}")
    (tmp_path / "kept" / "step-00000005" / "model.safetensors").write_bytes(b"rot")
    again = fit(tmp_path, 6, ckpt="last")
    assert "falling back to step-00000004" in capsys.readouterr().out
    assert again.global_step == 6
    assert kept(tmp_path) == [5, 6]


def test_the_newest_state_is_last_also_where_another_one_is_better(
    tmp_path: Path,
) -> None:
    class Worse(Callback):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            module.log("m", float(trainer.global_step), on_step=True)

    trainer = fit(tmp_path, 6, Worse(), monitor="m", save_last=True)
    assert kept(tmp_path) == [1, 6]
    assert list(trainer.checkpoint_callback.best_k_models) == [
        str(tmp_path / "kept" / "step-00000001")
    ]
    assert trainer.checkpoint_callback.last_model_path.endswith("step-00000006")


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_last_checkpoint_with_finite_weights_stays(
    tmp_path: Path, capsys: Any, weights_only: bool
) -> None:
    fit(tmp_path, 7, Spoils(3, 99), save_weights_only=weights_only)
    assert kept(tmp_path) == [2, 6, 7]
    assert (
        read_checkpoint(tmp_path / "kept" / "step-00000002")["model"]["aside"]
        .isfinite()
        .all()
    )
    assert (
        capsys.readouterr().out.count(
            "step-00000003 are not finite: the last checkpoint with finite weights stays"
        )
        == 1
    )


def test_the_fallback_is_deleted_once_there_is_another_one(tmp_path: Path) -> None:
    fit(tmp_path, 7, Spoils(3, 5))
    assert kept(tmp_path) == [6, 7]


def test_the_fallback_is_kept_through_a_resume_and_deleted_after_it(
    tmp_path: Path,
) -> None:
    fit(tmp_path, 5, Spoils(3, 99))
    assert kept(tmp_path) == [2, 4, 5]
    fit(tmp_path, 7, Spoils(3, 99), ckpt="last")
    assert kept(tmp_path) == [2, 6, 7]
    fit(tmp_path, 9, Spoils(99, 99), ckpt="last")
    assert kept(tmp_path) == [8, 9]


def fit_on_ranks(directory: str) -> None:
    fit(Path(directory), 6, Spoils(3, 99), devices=2)


def test_two_ranks_keep_one_fallback(tmp_path: Path) -> None:
    run_distributed(fit_on_ranks, 2, str(tmp_path))
    assert kept(tmp_path) == [2, 5, 6]


def test_files_of_other_programs_are_kept(tmp_path: Path) -> None:
    (tmp_path / "kept" / "step-00000000").mkdir(parents=True)
    (tmp_path / "kept" / "step-00000000" / "notes.txt").write_text("mine")
    (tmp_path / "kept" / "best.ckpt").write_text("mine")
    fit(tmp_path, 4)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        *("step-00000000", "best.ckpt", "index.json", "step-00000003", "step-00000004")
    }
