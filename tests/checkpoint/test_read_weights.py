"""Weights are read from every honest format, and hostile files run nothing."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from torch import nn

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.weights import read_weights
from trainer_kit.core.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"scale": 2}

    def set_extra_state(self, state):
        pass


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Tied()


def check(weights, module):
    assert list(weights) == list(module.state_dict())
    assert all(
        torch.equal(weights[name], value) for name, value in module.state_dict().items()
    )
    assert not any(value.requires_grad for value in weights.values())
    module.load_state_dict(weights)


def test_our_checkpoint(module, tmp_path):
    path = write_checkpoint(
        tmp_path / "c", {"model": module.state_dict(), "progress": {"step": 1}}
    )
    check(read_weights(path), module)
    assert list(
        read_weights(
            write_checkpoint(tmp_path / "e", {"model": Extra(1, 1).state_dict()})
        )
    ) == [
        "weight",
        "bias",
    ]
    with pytest.raises(CheckpointError, match="no such part"):
        read_weights(write_checkpoint(tmp_path / "none", {"progress": {}}))
    with pytest.raises(CheckpointError, match="where a state_dict has a tensor"):
        read_weights(write_checkpoint(tmp_path / "odd", {"model": {"w": 3}}))


def test_safetensors_files_are_recognized_by_content(tmp_path):
    weights = {"w": torch.randn(3), "b": torch.ones((), dtype=torch.bfloat16)}
    for name in ("a.safetensors", "a.bin"):
        safetensors.torch.save_file(weights, tmp_path / name)
        back = read_weights(tmp_path / name)
        assert all(torch.equal(back[key], value) for key, value in weights.items())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("lightning", [True, False])
def test_torch_save(module, tmp_path, zipped, lightning):
    state = module.state_dict()
    content = (
        {"state_dict": state, "epoch": 3, "hyper_parameters": OrderedDict(a=1)}
        if lightning
        else state
    )
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    check(read_weights(tmp_path / "w.pt"), module)


def test_parameters_come_back_detached(tmp_path):
    torch.save(dict(nn.Linear(2, 2).named_parameters()), tmp_path / "w.pt")
    assert not any(
        value.requires_grad for value in read_weights(tmp_path / "w.pt").values()
    )


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize(
    "how", ["zip", "legacy", "pickle", "beside", "hyper_parameters"]
)
def test_pickles_that_would_run_code_do_not(tmp_path, monkeypatch, how):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    weights = {"w": torch.ones(1)}
    content = {
        "beside": {"w": torch.ones(1), "x": Bomb()},
        "hyper_parameters": {"state_dict": weights, "hyper_parameters": Bomb()},
    }.get(how, Bomb())
    file = tmp_path / "w.ckpt"
    if how == "pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how != "legacy")
    with pytest.raises(CheckpointError, match="weights_only=True") as caught:
        read_weights(file)
    assert caught.value.file == str(file)
    assert "only tensors and plain values" in caught.value.fix
    assert os.listdir(tmp_path) == ["w.ckpt"]


def test_whole_modules_are_refused(tmp_path):
    torch.save(nn.Linear(1, 1), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="refused"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(1)],
        torch.ones(1),
        {"w": 3},
        {1: torch.ones(1)},
        {"state_dict": {"a": "b"}},
    ],
)
def test_content_that_is_not_a_state_dict_is_named(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="state_dict"):
        read_weights(tmp_path / "w.pt")


def header(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK",
        b"PK\x03\x04" + b"\0" * 100,
        b"\x80",
        b"\x80\x04.",
        b"hello, world",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        header(b"{"),
        header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        header(
            b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"\0" * 4
        ),
        header(
            b'{"w": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 4]}}',
            b"\0" * 4,
        ),
        header(
            b'{"w": {"dtype": "Q99", "shape": [1], "data_offsets": [0, 4]}}', b"\0" * 4
        ),
        header(
            b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
            b' "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}',
            b"\0" * 6,
        ),
    ],
    ids=range(14),
)
def test_broken_files_are_refused(tmp_path, raw):
    (tmp_path / "w").write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_weights(tmp_path / "w")
    assert caught.value.file == str(tmp_path / "w")


@pytest.mark.parametrize("cut", [10, 100, 500])
def test_truncated_torch_files_are_refused(module, tmp_path, cut):
    torch.save(module.state_dict(), tmp_path / "w")
    data = (tmp_path / "w").read_bytes()
    (tmp_path / "w").write_bytes(data[:-cut])
    with pytest.raises(CheckpointError):
        read_weights(tmp_path / "w")


def test_absent_files_and_foreign_directories(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            read_weights(path)
