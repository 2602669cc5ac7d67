"""How often a resume looks at its checkpoint, and how often its calls go from a lower room into a higher one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import trainer_kit
from tests.test_architecture import LEVEL
from trainer_kit import Trainer
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import resolve_checkpoint
from trainer_kit.testing import TinyModule
from trainer_kit.training.entry_points import EntryPoint

OURS = Path(trainer_kit.__file__).parent
MOST_CLIMBS = 8


def fit(directory, epochs, ckpt_path=None):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[ModelCheckpoint(dirpath=directory / "checkpoints", save_top_k=-1)],
    )
    trainer.fit(TinyModule(), [torch.randn(4, 32)] * 4, ckpt_path=ckpt_path)
    return trainer


def level_of(frame):
    """The level of the room of a frame; None for frames of other libraries."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(OURS):
            room = path.relative_to(OURS).parts[0].removesuffix(".py")
            return LEVEL[room]
        frame = frame.f_back
    return None


def calls_to_start(monkeypatch, directory, ckpt_path):
    """The functions that a fit calls to find and read where it starts, and those that a lower room calls."""
    called, climbs = [], []

    def note(frame, event, argument):
        is_ours = Path(frame.f_code.co_filename).is_relative_to(OURS)
        if event != "call" or not is_ours:
            return
        called.append(frame.f_code)
        caller = level_of(frame.f_back)
        if caller is not None and caller < level_of(frame):
            climbs.append(f"{frame.f_back.f_code.co_name} -> {frame.f_code.co_name}")

    find_start = EntryPoint._find_start

    def find_start_watched(*arguments):
        sys.setprofile(note)
        try:
            return find_start(*arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(EntryPoint, "_find_start", find_start_watched)
    resumed = fit(directory, 3, ckpt_path)
    assert resumed.global_step == 12
    return called, climbs


def test_a_resume_resolves_its_checkpoint_once(tmp_path, monkeypatch):
    path = fit(tmp_path, 2).checkpoint_callback.best_model_path
    called, climbs = calls_to_start(monkeypatch, tmp_path, path)
    assert called.count(resolve_checkpoint.__code__) == 1
    assert called.count(read_manifest.__code__) == 1
    assert len(climbs) <= MOST_CLIMBS, climbs
