"""Sizes are compared with the manifest and with the tensors' own header before content is read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint import read_checkpoint, read_sharded, write_sharded
from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.manifest import MANIFEST, dump_manifest
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import RemotePath
from trainer_kit.testing import TinyModule

TERABYTE = 1 << 40
STATE = {"model": {"w": torch.ones(4)}, "progress": {"step": 1}}


def grow(path, name, size=TERABYTE):
    """Make a file sparse and as large as that, and say so in a manifest that is sound by itself."""
    os.truncate(path / name, size)
    seal(path, **{name: size})


def seal(path, **sizes):
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["sha256"]
    for name, size in sizes.items():
        manifest["files"][name]["size"] = size
    (path / MANIFEST).write_bytes(dump_manifest(manifest))


def tensors(path):
    (name,) = (entry.name for entry in Path(path).glob("model*.safetensors"))
    return name


@pytest.fixture
def quick():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 20, "a terabyte takes minutes"


@pytest.mark.parametrize(
    "read", [tk.verify_checkpoint, read_checkpoint], ids=["verify", "read"]
)
@pytest.mark.parametrize("kind", ["tensors", "state.json"])
def test_a_terabyte_of_nothing_is_not_hashed(tmp_path, quick, read, kind):
    path = write_checkpoint(tmp_path / "step-1", STATE, info={"step": 1})
    grow(path, tensors(path) if kind == "tensors" else kind)
    words = (
        "the tensors in its header end at"
        if kind == "tensors"
        else "where at most 268 MB are written"
    )
    with pytest.raises(CheckpointError, match=words):
        read(path)


def test_nor_of_a_state_that_ranks_wrote(tmp_path, quick):
    path = write_sharded(tmp_path / "step-1", STATE, info={"step": 1})
    grow(path, tensors(path))
    with pytest.raises(CheckpointError, match="the tensors in its header end at"):
        read_sharded(path, {"model": {"w": torch.zeros(4)}, "progress": {"step": 0}})


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b'{"w": 3}', b'{"w": {"data_offsets": [0, "x"]}}', b'{"w": {}}'],
)
def test_a_header_that_is_none(tmp_path, quick, header):
    path = write_checkpoint(tmp_path / "step-1", STATE, info={"step": 1})
    name = tensors(path)
    (path / name).write_bytes(len(header).to_bytes(8, "little") + header)
    grow(path, name)
    with pytest.raises(
        CheckpointError, match="does not begin with a header of tensors"
    ):
        tk.verify_checkpoint(path)


@pytest.mark.parametrize("length", [2**63, 100_000_001])
def test_a_header_without_end(tmp_path, quick, length):
    path = write_checkpoint(tmp_path / "step-1", STATE, info={"step": 1})
    name = tensors(path)
    (path / name).write_bytes(length.to_bytes(8, "little"))
    grow(path, name)
    with pytest.raises(CheckpointError, match="a header of "):
        tk.verify_checkpoint(path)


def test_a_run_passes_it_by_at_once(tmp_path, quick, capsys):
    def fit(epochs, ckpt_path=None):
        keeper = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
            "accelerator": "cpu",
        }
        trainer = tk.Trainer(max_epochs=epochs, callbacks=keeper, **quiet)
        trainer.fit(TinyModule(), [torch.ones(2, 32)] * 4, ckpt_path=ckpt_path)
        return trainer

    fit(1)
    newest = tmp_path / "step-00000004"
    grow(newest, tensors(newest))
    assert fit(2, "last").global_step == 8
    said = capsys.readouterr().out
    assert "checkpoint step-00000004 rejected" in said
    assert "the tensors in its header end at" in said


def test_nothing_is_fetched_from_a_storage_before_sizes_are_known(monkeypatch):
    path = write_checkpoint("memory://sizes/step-1", STATE, info={"step": 1})
    name = next(
        name
        for name in tk.verify_checkpoint(path)["files"]
        if name.endswith(".safetensors")
    )
    file = path / name
    content = file.read_bytes()
    file.write_bytes(content + bytes(1 << 20))
    manifest = json.loads((path / MANIFEST).read_bytes())
    del manifest["sha256"]
    manifest["files"][name]["size"] = len(content) + (1 << 20)
    (path / MANIFEST).write_bytes(dump_manifest(manifest))
    monkeypatch.setattr(
        RemotePath, "fetch_to", lambda self, file: pytest.fail(f"{self} is fetched")
    )
    with pytest.raises(CheckpointError, match="the tensors in its header end at"):
        read_checkpoint(path)
