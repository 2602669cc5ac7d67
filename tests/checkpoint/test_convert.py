"""What is exported is read by the programs it is meant for."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
from torch import nn

from trainer_kit.checkpoint import export, read_weights, write_checkpoint
from trainer_kit.checkpoint.files import in_bytes
from trainer_kit.checkpoint.weights import weight_shapes
from trainer_kit.core.errors import CheckpointError, ConfigurationError

WEIGHTS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "b.weight": torch.full((5,), 2.0, dtype=torch.float64),
}


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(
        tmp_path / "in" / "step-3", {"model": WEIGHTS, "progress": {"step": 3}}
    )


def check(found):
    assert set(found) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_file(checkpoint, tmp_path):
    path = export(checkpoint, tmp_path / "new" / "model.safetensors")
    assert path == tmp_path / "new" / "model.safetensors"
    check(safetensors.torch.load_file(path))
    check(read_weights(path))
    assert os.listdir(tmp_path / "new") == ["model.safetensors"]


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
def test_torch(checkpoint, tmp_path, suffix):
    path = export(checkpoint, tmp_path / f"model.{suffix}")
    check(torch.load(path, weights_only=True))


def test_a_small_model_is_one_shard(checkpoint, tmp_path):
    path = export(checkpoint, tmp_path / "hub")
    assert os.listdir(path) == ["model.safetensors"]
    check(safetensors.torch.load_file(path / "model.safetensors"))


@pytest.mark.parametrize(("size", "shards"), [(1, 4), (30, 3), ("0.04KB", 2), (78, 1)])
def test_shards(checkpoint, tmp_path, size, shards):
    path = export(checkpoint, tmp_path / "hub.v1", "huggingface", max_shard_size=size)
    if shards == 1:
        assert os.listdir(path) == ["model.safetensors"]
        return
    files = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    assert sorted(os.listdir(path)) == [*files, "model.safetensors.index.json"]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 24 + 6 + 8 + 40}
    found = {}
    for file in files:
        held = safetensors.torch.load_file(path / file)
        assert {index["weight_map"][name] for name in held} == {file}
        with safetensors.safe_open(path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found.update(held)
    check(found)


def test_a_lightning_file_becomes_safetensors(tmp_path):
    torch.save({"state_dict": WEIGHTS, "epoch": 3}, tmp_path / "old.ckpt")
    check(read_weights(export(tmp_path / "old.ckpt", tmp_path / "new.safetensors")))


@pytest.mark.parametrize(
    ("size", "count"),
    [("5GB", 5 * 10**9), ("1GiB", 2**30), ("1.5 kb", 1500), ("12", 12), (7, 7)],
)
def test_sizes(size, count):
    assert in_bytes(size, "size") == count


@pytest.mark.parametrize("size", ["5 gigabytes", "", "GB", "-1GB", 0, -3, "1GB2", None])
def test_sizes_that_are_none(checkpoint, tmp_path, size):
    with pytest.raises(ConfigurationError, match="max_shard_size"):
        export(checkpoint, tmp_path / "hub", max_shard_size=size)


def test_unsupported_exports_are_refused(checkpoint, tmp_path):
    (tmp_path / "taken.pt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        export(checkpoint, tmp_path / "taken.pt")
    assert (tmp_path / "taken.pt").read_text() == "mine"
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)model\.onnx.*huggingface, lightning, safetensors, torch",
    ):
        export(checkpoint, tmp_path / "model.onnx")
    with pytest.raises(ConfigurationError, match="'onnx'"):
        export(checkpoint, tmp_path / "model.pt", "onnx")
    odd = write_checkpoint(
        tmp_path / "odd", {"model": {"c": torch.ones(2, dtype=torch.complex64)}}
    )
    with pytest.raises(
        CheckpointError, match=r"do not hold torch\.complex64"
    ) as caught:
        export(odd, tmp_path / "odd.safetensors")
    assert caught.value.key == "c"
    assert torch.equal(
        torch.load(export(odd, tmp_path / "odd.pt"), weights_only=True)["c"],
        torch.ones(2) + 0j,
    )
    (checkpoint / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        export(checkpoint, tmp_path / "hub")
    assert sorted(os.listdir(tmp_path)) == ["in", "odd", "odd.pt", "taken.pt"]


@pytest.mark.parametrize("name", ["hub", "model.safetensors", "model.pt"])
def test_a_failed_export_leaves_nothing(checkpoint, tmp_path, monkeypatch, name):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export(checkpoint, tmp_path / name)
    assert os.listdir(tmp_path) == ["in"]


def test_a_tied_weight_is_written_once_and_read_back_under_all_its_names(tmp_path):
    weights = {"emb.weight": torch.randn(16, 8), "body.weight": torch.randn(8, 8)}
    weights["head.weight"], weights["row"] = (
        weights["emb.weight"],
        weights["emb.weight"][0],
    )
    one, several = tmp_path / "one.safetensors", tmp_path / "hub"
    export(weights, one)
    export(weights, several, max_shard_size=300)
    export(weights, tmp_path / "one.pt")
    assert list(safetensors.torch.load_file(one)) == [
        "body.weight",
        "emb.weight",
        "row",
    ]
    with safetensors.safe_open(one, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["body.weight", "emb.weight", "row"]
    assert index["metadata"] == {"total_size": 16 * 8 * 4 + 8 * 8 * 4 + 8 * 4}
    for path in (one, several, tmp_path / "one.pt"):
        back = read_weights(path)
        assert back.keys() == weights.keys()
        assert all(torch.equal(back[name], weights[name]) for name in weights)
        assert back["head.weight"] is back["emb.weight"] or path.suffix == ".pt"
    for path in (one, several):
        assert {name: tuple(t.shape) for name, t in weight_shapes(path).items()} == {
            name: tuple(t.shape) for name, t in weights.items()
        }


def test_tied_weights_written_by_safetensors_are_read(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"))
    model.load_state_dict(read_weights(tmp_path / "theirs.safetensors"))


def test_a_checkpoint_holds_a_tied_weight_once_and_so_does_its_export(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    path = write_checkpoint(tmp_path / "step-1", {"model": dict(model.state_dict())})
    assert sorted(safetensors.torch.load_file(path / "model.safetensors")) == [
        "0.bias",
        "0.weight",
        "1.bias",
    ]
    model.load_state_dict(read_weights(path))
    assert sorted(weight_shapes(path)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    exported = safetensors.torch.load_file(export(path, tmp_path / "one.safetensors"))
    assert sorted(exported) == ["0.bias", "0.weight", "1.bias"]
