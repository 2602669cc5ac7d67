"""Directories of safetensors: read whole, and refused where index and files disagree or a pickle stands there."""

from __future__ import annotations

import json
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainer_kit.checkpoint import export, read_weights, write_checkpoint, write_sharded
from trainer_kit.checkpoint.files import CARRIERS
from trainer_kit.checkpoint.weights import weight_shapes
from trainer_kit.core.errors import CheckpointError

WEIGHTS = {
    "a.w": torch.arange(6.0).view(2, 3),
    "a.b": torch.ones(3, dtype=torch.bfloat16),
    "n": torch.tensor([3, 4]),
}


def same(one, two):
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )


@pytest.fixture
def sharded(tmp_path):
    return export(WEIGHTS, tmp_path / "hub", max_shard_size=20)


def test_with_and_without_an_index(sharded, tmp_path):
    assert len(list(sharded.iterdir())) > 2
    assert same(read_weights(sharded), WEIGHTS)
    (sharded / "model.safetensors.index.json").unlink()
    assert same(read_weights(sharded), WEIGHTS)
    assert same(read_weights(export(WEIGHTS, tmp_path / "one")), WEIGHTS)


def test_shapes_are_those_of_the_weights(sharded, tmp_path):
    state = {"model": WEIGHTS, "progress": {"step": 1}}
    places = [
        sharded,
        write_checkpoint(tmp_path / "whole", state),
        write_sharded(tmp_path / "ranks", state),
        export(WEIGHTS, tmp_path / "w.safetensors"),
    ]
    for place in places:
        check_shapes(place, WEIGHTS)


def test_shapes_of_dtypes_that_safetensors_does_not_hold(tmp_path):
    carried = {
        dtype: carrier
        for dtype, carrier in CARRIERS.items()
        if dtype is not torch.complex32
    }  # torch warns
    odd = {
        f"{dtype}": torch.zeros(2, 6, dtype=carrier).view(dtype)
        for dtype, carrier in carried.items()
    }
    state = {
        "model": OrderedDict(
            {**odd, "layer._extra_state": np.ones(3), "w#2": torch.ones(2)}
        )
    }
    for write in (write_checkpoint, write_sharded):
        check_shapes(
            write(tmp_path / write.__name__, state), {**odd, "w#2": torch.ones(2)}
        )


def check_shapes(place, weights):
    told = weight_shapes(place)
    assert {name: (t.shape, t.dtype, t.device.type) for name, t in told.items()} == {
        name: (t.shape, t.dtype, "meta") for name, t in weights.items()
    }


def index_of(directory, change):
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def elsewhere(content):
    content["weight_map"]["n"] = "../outside.safetensors"


def missing(content):
    content["weight_map"]["n"] = "model-00009-of-00009.safetensors"


def wrong_file(content):
    places = content["weight_map"]
    places["n"], places["a.w"] = places["a.w"], places["n"]


def no_map(content):
    del content["weight_map"]


def one_more(content):
    content["weight_map"]["ghost"] = content["weight_map"]["n"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (elsewhere, "not one of this directory"),
        (missing, "does not exist"),
        (
            wrong_file,
            r"lists this weight here, but the file does not hold it\n  found: key '(n|a\.w)'",
        ),
        (no_map, "not an index of weights"),
        (
            one_more,
            r"lists this weight here, but the file does not hold it\n  found: key 'ghost'",
        ),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(
    sharded, tmp_path, change, reason
):
    save_file({"n": torch.zeros(2)}, tmp_path / "outside.safetensors")
    index_of(sharded, change)
    with pytest.raises(CheckpointError, match=reason):
        read_weights(sharded)


def test_two_files_with_the_same_name_are_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        CheckpointError, match="another file in this directory contains it too"
    ):
        read_weights(tmp_path)


@pytest.mark.parametrize("inside", ["", "pytorch_model_fsdp_0"])
def test_a_distributed_checkpoint_is_refused_and_nothing_of_it_runs(tmp_path, inside):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    directory = tmp_path / "dcp" / inside
    directory.mkdir(parents=True)
    import pickle

    (directory / ".metadata").write_bytes(pickle.dumps(Evil()))
    (directory / "__0_0.distcp").write_bytes(b"PK")
    with pytest.raises(
        CheckpointError,
        match=r"mkdir does not belong in .* is a pickle, which can run any code",
    ):
        read_weights(tmp_path / "dcp")
    assert not (tmp_path / "made").exists()
    (directory / ".metadata").write_bytes(pickle.dumps({"no": "records"}))
    with pytest.raises(CheckpointError, match="it does not describe tensors"):
        read_weights(tmp_path / "dcp")


def test_lists_in_the_metadata_of_a_distributed_checkpoint_are_not_made_texts(tmp_path):
    # Each list holds the one before it twice: 12 of them have a text of 40 kB, 40 of them one of 10 TB.
    doubled = b"".join(b"q%c0](h%ch%ce" % (index, index, index) for index in range(12))
    (tmp_path / ".metadata").write_bytes(
        b"\x80\x02ctorch.serialization\n_get_layout\n]" + doubled + b"\x85R."
    )
    with pytest.raises(CheckpointError, match="a list is neither text nor a number"):
        read_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_of_two_processes_is_whole(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.bfloat16)
    )
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"))
    found = read_weights(tmp_path / "dcp")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_an_incomplete_checkpoint_is_not_read_as_loose_files(tmp_path):
    path = write_checkpoint(tmp_path / "step-1", {"model": {"w": torch.ones(2)}})
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        read_weights(path)
