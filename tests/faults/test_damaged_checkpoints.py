"""A damaged newest checkpoint is named and set aside; the run goes on from the one before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import trainer_kit as tk
from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
BATCHES = [torch.ones(2, 32)] * 6


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGES = {
    "bit": (
        lambda path: flip(path / "model.safetensors"),
        "model.safetensors: damaged: checksum",
    ),
    "cut": (
        lambda path: os.truncate(path / "model.safetensors", 9),
        "model.safetensors: 9 bytes, but",
    ),
    "gone": (
        lambda path: (path / "state.json").unlink(),
        "state.json: the file is missing",
    ),
    "empty": (
        lambda path: (path / "manifest.json").write_bytes(b""),
        "manifest.json: damaged JSON",
    ),
    "manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "step-00000006: not a checkpoint: it has no manifest",
    ),
}


def fit(directory, epochs=1, ckpt_path=None, **options):
    keeper = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(max_epochs=epochs, callbacks=keeper, **{**QUIET, **options})
    trainer.fit(TinyModule(), BATCHES, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def kept(tmp_path):
    fit(tmp_path)
    assert [record.step for record in tk.checkpoints(tmp_path)] == [2, 4, 6]
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_taken(kept, capsys, damage):
    do, reason = DAMAGES[damage]
    do(kept / "step-00000006")
    trainer = fit(kept, epochs=2, ckpt_path="last")
    assert trainer.global_step == 12
    rejected, resumed = capsys.readouterr().out.splitlines()
    assert rejected.startswith(f"checkpoint step-00000006 rejected: {reason}")
    assert rejected.endswith(
        "; falling back to step-00000004; it is now step-00000006.damaged"
    )
    assert resumed == f"resuming from step 4 ({kept / 'step-00000004'})"
    assert (kept / "step-00000006.damaged").is_dir()
    assert [record.step for record in tk.checkpoints(kept)] == [2, 4, 6, 8, 10, 12]


def test_two_in_a_row(kept, capsys):
    for step in (4, 6):
        flip(kept / f"step-{step:08d}" / "state.json")
    fit(kept, epochs=2, ckpt_path="last")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" rejected")[0] for line in lines[:2]] == [
        "checkpoint step-00000006",
        "checkpoint step-00000004",
    ]
    assert all("; falling back to step-00000002; " in line for line in lines[:2])
    assert lines[2].startswith("resuming from step 2 ")


def test_nothing_sound_is_an_error_not_a_new_run(kept):
    for step in (2, 4, 6):
        flip(kept / f"step-{step:08d}" / "state.json")
    before = sorted(os.listdir(kept))
    with pytest.raises(
        CheckpointError, match="contains no intact checkpoint"
    ) as caught:
        fit(kept, epochs=2, ckpt_path="last")
    assert caught.value.file == str(kept / "step-00000006" / "state.json")
    assert sorted(os.listdir(kept)) == before


def test_an_explicit_path_is_never_replaced_by_another(kept):
    flip(kept / "step-00000006" / "model.safetensors")
    with pytest.raises(CheckpointError, match="damaged: checksum"):
        fit(kept, epochs=2, ckpt_path=kept / "step-00000006")
    assert (kept / "step-00000006").is_dir()


def test_an_evaluation_passes_by_but_moves_nothing(kept, capsys):
    flip(kept / "step-00000006" / "model.safetensors")
    trainer = Trainer(default_root_dir=kept, callbacks=ModelCheckpoint(kept), **QUIET)
    trainer.test(TinyModule(), BATCHES, ckpt_path="last", verbose=False)
    assert (
        "checkpoint step-00000006 rejected: model.safetensors: "
        in capsys.readouterr().out
    )
    assert (kept / "step-00000006").is_dir()


def test_a_run_in_a_new_directory_takes_no_checkpoint_of_another_one(tmp_path, capsys):
    old = tmp_path / "one" / "checkpoints"
    fit(old)
    flip(old / "step-00000006" / "state.json")
    trainer = fit(
        tmp_path / "two", epochs=2, ckpt_path="last", default_root_dir=tmp_path
    )
    assert trainer.global_step == 12
    assert f"no checkpoint is in {tmp_path / 'two'} yet" in capsys.readouterr().out
    assert sorted(os.listdir(old)) == [
        "index.json",
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.world_size(2)
def test_all_ranks_fall_back_together(tmp_path):
    trainer = fit(tmp_path, epochs=2, strategy="ddp")
    if trainer.is_global_zero:
        newest = tk.checkpoints(tmp_path)[-1].path
        flip(newest / "model.safetensors")
    trainer.strategy.world.barrier()
    again = fit(tmp_path, epochs=4, ckpt_path="last", strategy="ddp")
    assert again.global_step == 12
    names = {path.name for path in Path(tmp_path).iterdir()}
    again.strategy.world.barrier()
    assert {name for name in names if name.endswith(".damaged")} == {
        "step-00000006.damaged"
    }


def test_a_clock_that_is_set_back_hides_no_newer_run(tmp_path, capsys, monkeypatch):
    def run(steps, ckpt_path=None):
        options = {
            **QUIET,
            "callbacks": ModelCheckpoint(save_top_k=-1),
            "default_root_dir": tmp_path,
        }
        Trainer(max_steps=steps, **options).fit(
            TinyModule(), BATCHES, ckpt_path=ckpt_path
        )

    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: 2 * 10**18)
        run(4)
    run(2)
    (tmp_path / "checkpoints" / "index.json").unlink()
    capsys.readouterr()
    run(6, "last")
    assert (
        f"resuming from step 2 ({tmp_path / 'checkpoints' / 'step-00000002'})"
        in capsys.readouterr().out
    )
