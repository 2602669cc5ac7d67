"""States to save, and what it means that two of them are the same."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.checkpoint.commit import write_checkpoint
from trainer_kit.checkpoint.encoding import decode, encode
from trainer_kit.checkpoint.files import read_tensors, safetensors_bytes, write_file


def _make_state(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "progress": {"step": 12},
        "rng": {
            "torch": torch.get_rng_state(),
            "numpy": np.random.RandomState(1).get_state(),
        },
        "callbacks": {"Best": {"score": float("nan"), "paths": ("a", "b")}},
    }


def _same(a, b):
    """Equal in value, type, order, dtype and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            _same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return _same(a.real, b.real) and _same(a.imag, b.imag)
    return bool(a == b)


def bytes_of(tensor):
    return (
        tensor.clone(memory_format=torch.contiguous_format)
        .resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def _through(value, folder=None):
    """Through JSON text, and through a file where a folder is given."""
    tensors = {}
    text = json.dumps(
        encode(value, tensors, at="part", copy=folder is None), allow_nan=False
    )
    if folder is not None:
        path = folder / f"{len(list(folder.iterdir()))}.safetensors"
        write_file(path, safetensors_bytes(tensors)[1])
        tensors = read_tensors(path)
    return decode(json.loads(text), tensors)


@pytest.fixture
def same():
    return _same


@pytest.fixture
def through():
    return _through


@pytest.fixture
def make_state():
    return _make_state


@pytest.fixture
def saved(tmp_path):
    return write_checkpoint(tmp_path / "step-12", _make_state(), info={"step": 12})
