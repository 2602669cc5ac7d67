"""What a release wrote is read by every later one, bit by bit; what a later one writes is refused with both versions.

Each directory of ``golden`` was written once, by the ``write`` of its format below, in the release that brought it.
They are never written again.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainer_kit.checkpoint import (
    checkpoints,
    diff,
    export,
    read_checkpoint,
    read_sharded,
    read_weights,
    verify_checkpoint,
    write_checkpoint,
    write_sharded,
)
from trainer_kit.checkpoint.encoding import EnumRecord
from trainer_kit.checkpoint.manifest import dump_manifest
from trainer_kit.checkpoint.read import is_complete, read_info
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import run_distributed

GOLDEN = Path(__file__).parent / "golden"
INFO = {"step": 12, "epoch": 1, "world_size": 2, "best": float("inf")}


def make_golden_state():
    """Every kind of value that the format holds; nothing random, nothing of the machine."""
    weight = torch.arange(12.0).reshape(3, 4) / 8
    model = OrderedDict(
        {"layer.weight": weight, "layer.bias": torch.tensor([0.5, -0.0, float("nan")])}
    )
    model._metadata = OrderedDict({"": {"version": 1}})
    dtypes = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    return {
        "model": model,
        "optimizer_states": [
            {
                "state": {
                    "layer.weight": {
                        "step": torch.tensor(12.0),
                        "exp_avg": weight.square(),
                    }
                },
                "param_groups": [
                    {"lr": 0.1, "betas": (0.9, 0.999), "params": ["layer.weight"]}
                ],
            }
        ],
        "tensors": {
            **{str(dtype): torch.tensor([0, 1, 1], dtype=dtype) for dtype in dtypes},
            "complex": torch.tensor([1 + 2j]),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7),
            "array": np.arange(4, dtype=np.int32).reshape(2, 2),
            "words": np.array(["a", "bc"]),
        },
        "rng": [
            {
                "torch": torch.arange(16, dtype=torch.uint8),
                "python": (3, (1, 2, 2**63), None),
            }
        ],
        "callbacks": {
            "Best": {
                "score": float("-inf"),
                "kept": {"a": 0.25},
                3: {"by": "number"},
                "$": "a key",
            },
            "plain": [
                None,
                True,
                -1,
                2**70,
                1e-300,
                "é",
                b"\x00\xff",
                bytearray(b"x"),
                1 - 2j,
            ],
            "kinds": [
                {1, 2},
                frozenset({"a"}),
                torch.Size([2, 3]),
                torch.float16,
                torch.device("cuda", 1),
            ],
            "more": [
                Path("a/b"),
                timedelta(days=1, microseconds=2),
                EnumRecord("m.Mode", "SLOW", 2),
                np.float32(0.1),
            ],
        },
    }


def write_together(path):
    """On two ranks: matrices in rows, the rest alike on both."""
    state, mesh = make_golden_state(), init_device_mesh("cpu", (2,))

    def rows(tensor):
        half = -(-len(tensor) // 2)
        own = tensor[:half] if mesh.get_rank() == 0 else tensor[half:]
        return DTensor.from_local(
            own, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )

    moments = state["optimizer_states"][0]["state"]["layer.weight"]
    state["model"]["layer.weight"] = rows(state["model"]["layer.weight"])
    moments["exp_avg"] = rows(moments["exp_avg"])
    state["tensors"]["complex"] = rows(state["tensors"]["complex"])
    write_sharded(path, state, info=INFO)


def write(path, version):
    """As the release that brought this format did."""
    if version == "format-1":
        write_checkpoint(path, make_golden_state(), info=INFO)
    else:
        run_distributed(write_together, 2, str(path))
    return path


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("format-*")))
def golden(request):
    return GOLDEN / request.param


def test_there_is_one_for_each_format():
    assert sorted(path.name for path in GOLDEN.glob("format-*")) == [
        "format-1",
        "format-2",
    ]


def test_it_is_read(golden, same):
    manifest = verify_checkpoint(golden)
    assert manifest["version"] == int(golden.name.rpartition("-")[2])
    assert same(read_checkpoint(golden), make_golden_state())
    assert read_info(golden) == INFO
    assert [record.step for record in checkpoints(GOLDEN)] == [12, 12]
    assert sum(file.stat().st_size for file in golden.iterdir()) < 10_000


def test_its_weights_are_read_and_exported(golden, tmp_path):
    weights = read_weights(golden)
    assert torch.equal(weights["layer.weight"], torch.arange(12.0).reshape(3, 4) / 8)
    assert set(read_weights(export(golden, tmp_path / "model.safetensors"))) == {
        "layer.weight",
        "layer.bias",
    }


def test_todays_files_equal_the_golden_ones(golden, tmp_path):
    """When this fails, the format has changed: give it a new version, a migration, and a golden directory."""
    today = write(tmp_path / "today", golden.name)
    assert diff(golden, today) == []
    for file in golden.iterdir():
        if file.name != "manifest.json":  # it names the versions of today
            assert (today / file.name).read_bytes() == file.read_bytes()


def test_it_loads_into_a_state(golden, same):
    state = {
        "model": {
            name: torch.zeros_like(value)
            for name, value in make_golden_state()["model"].items()
        }
    }
    read_sharded(golden, state)
    assert same(state["model"], dict(make_golden_state()["model"]))


def test_a_newer_format_is_refused_with_both_versions(golden, tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(golden, newer)
    manifest = json.loads((newer / "manifest.json").read_text())
    del manifest["sha256"]
    (newer / "manifest.json").write_bytes(dump_manifest({**manifest, "version": 7}))
    for read in (verify_checkpoint, read_checkpoint, read_weights, read_info):
        with pytest.raises(
            CheckpointError,
            match=r"format 7, this library reads 1 and 2\n(.|\n)*fix: +upgrade",
        ) as caught:
            read(newer)
        assert (caught.value.file, caught.value.key) == (
            str(newer / "manifest.json"),
            "version",
        )
    assert not is_complete(newer)
