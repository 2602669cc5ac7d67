"""Checkpoints of every kind go straight to their places; what is damaged or differs is named before anything moves."""

from __future__ import annotations

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from tests.inference.nets import Hard, tokens
from trainer_kit.checkpoint import export, write_checkpoint, write_sharded
from trainer_kit.core.errors import CheckpointError, ConfigurationError, StrategyError

SPLIT = {
    "embed": "cpu",
    "blocks": "disk",
    "recurrent": "cpu",
    "lookup": "disk",
    "norm": "disk",
    "head": "cpu",
}


def trained() -> Hard:
    torch.manual_seed(0)
    net = Hard()
    with torch.no_grad():
        net(tokens())  # running statistics
    return net.eval()


def weights() -> dict[str, Tensor]:
    found = dict(trained().state_dict())
    del found["head.weight"]  # shared, as transformers writes it
    return found


def empty() -> Hard:
    with tk.init_empty_weights():
        return Hard().eval()


def indexed(directory: Path) -> Path:
    """Two ``torch.save`` files and an index without ``weight_map``, as Accelerate's guide shows."""
    directory.mkdir()
    found = weights()
    names = sorted(found)
    parts = {"first.bin": names[:5], "second.bin": names[5:]}
    for file, part in parts.items():
        torch.save({name: found[name] for name in part}, directory / file)
    (directory / "index.json").write_text(
        json.dumps({name: file for file, part in parts.items() for name in part})
    )
    return directory


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    found, state = weights(), {"model": weights(), "progress": {"step": 3}}
    one = export(found, directory / "one.safetensors")
    hub = export(found, directory / "hub", max_shard_size=700)
    torch.save({"state_dict": found}, directory / "old.ckpt")
    alone = directory / "alone"
    alone.mkdir()
    torch.save(found, alone / "pytorch_model.bin")
    return {
        "file": one,
        "hub": hub,
        "index": hub / "model.safetensors.index.json",
        "ours": write_checkpoint(directory / "step-1", state),
        "ranks": write_sharded(directory / "step-2", state),
        "torch": directory / "old.ckpt",
        "bin": alone,
        "bins": indexed(directory / "bins"),
        "bins index": directory / "bins" / "index.json",
    }


@pytest.mark.slow  # 9 checkpoints each
@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, {"": "disk"}, SPLIT, "auto"], ids=str
)
def test_every_kind_of_checkpoint(
    device_map: Any, places: dict[str, Path], tmp_path: Path
) -> None:
    expected = trained()
    with torch.no_grad():
        logits = expected(tokens())["logits"]
    for kind, checkpoint in places.items():
        in_place = kind not in ("torch", "bin", "bins", "bins index") or not isinstance(
            device_map, dict
        )
        folder = (
            None
            if in_place or "disk" not in device_map.values()
            else tmp_path / "offload"
        )
        model = tk.load_checkpoint_and_dispatch(
            empty(),
            checkpoint,
            device_map,
            offload_folder=folder,
            preload_module_classes=["Lookup"],
            strict=True,
        )
        with torch.no_grad():
            assert torch.equal(model(tokens())["logits"], logits), kind
        assert all(
            torch.equal(v, expected.state_dict()[k])
            for k, v in model.state_dict().items()
        )
        assert model.head.weight is model.embed.weight
        assert folder is None or len(list(folder.iterdir())) >= 1
    del model
    gc.collect()
    assert not (tmp_path / "offload").exists() or not list(
        (tmp_path / "offload").iterdir()
    )


def test_dtypes_and_two_steps(tmp_path: Path) -> None:
    checkpoint = export(weights(), tmp_path / "hub", max_shard_size=700)
    model = empty()
    tk.load_checkpoint_in_model(
        model, checkpoint, SPLIT, dtype="bfloat16", keep_in_fp32_modules=["norm"]
    )
    assert model.blocks[0].scale.device.type == "meta"
    tk.dispatch_model(model, SPLIT, preload_module_classes=["Lookup"])
    state = model.state_dict()
    expected = trained().state_dict()
    for name, tensor in expected.items():
        wide = "norm." in name or not tensor.is_floating_point()
        assert torch.equal(
            state[name], tensor if wide else tensor.to(torch.bfloat16)
        ), name
    real = Hard()  # a model with values of its own is overwritten, its parameters stay the same objects
    own = real.embed.weight
    tk.load_checkpoint_in_model(real, checkpoint)
    assert real.embed.weight is own is real.head.weight
    assert torch.equal(own, expected["embed.weight"])
    wide = tk.load_checkpoint_and_dispatch(Hard().double(), checkpoint, {"": "disk"})
    assert wide.state_dict()["embed.weight"].dtype == torch.float64


def test_differences_are_named(tmp_path: Path) -> None:
    found = weights()
    renamed = {
        name.replace("lookup", "lookout"): value
        for name, value in found.items()
        if name != "norm.weight"
    }
    part = export(renamed, tmp_path / "part.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)lacks lookup.*has lookout.*did you mean 'lookout.dense.weight'",
    ):
        tk.load_checkpoint_in_model(empty(), part)
    with pytest.raises(CheckpointError, match="lacks lookup"):
        tk.load_checkpoint_in_model(Hard(), part, strict=True)
    with pytest.warns(
        UserWarning,
        match=r"lacks lookup.*, and has lookout.*strict=True makes this an error",
    ):
        tk.load_checkpoint_in_model(Hard(), part)
    extra = export({**found, "extra": torch.ones(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has extra, which the model does not have\n"
    ):
        tk.load_checkpoint_in_model(empty(), extra, strict=True)
    with pytest.raises(CheckpointError, match="the checkpoint lacks"):
        tk.load_checkpoint_in_model(
            Hard(), export({"x": torch.ones(1)}, tmp_path / "x.safetensors")
        )
    model = empty()
    other = export(
        {**found, "norm.weight": torch.ones(9)}, tmp_path / "other.safetensors"
    )
    with pytest.raises(
        CheckpointError,
        match=r"\[9\] in the checkpoint, and the model has \[8\]\n.*norm.weight",
    ):
        tk.load_checkpoint_in_model(model, other)
    assert model.embed.weight.device.type == "meta"  # nothing was loaded
    torch.save(
        {**found, "head.weight": found["embed.weight"] + 1}, tmp_path / "two.bin"
    )
    two = {**found, "head.weight": found["embed.weight"] + 1}
    for checkpoint in (tmp_path / "two.bin", export(two, tmp_path / "two.safetensors")):
        with pytest.raises(
            CheckpointError,
            match=r"(?s)it differs from 'embed.weight'.*head.weight.*without this tie",
        ):
            tk.load_checkpoint_in_model(model, checkpoint)
    assert model.embed.weight.device.type == "meta"
    two["head.weight"] = found["embed.weight"].clone()
    tk.load_checkpoint_in_model(empty(), export(two, tmp_path / "twice.safetensors"))
    untied = empty()
    untied.head.weight = nn.Parameter(torch.empty(11, 8, device="meta"))
    with pytest.raises(
        CheckpointError, match=r"lacks head.weight\n(?s:.*)model.tie_weights\(\)"
    ):
        tk.load_checkpoint_in_model(
            untied, export(found, tmp_path / "tied.safetensors")
        )


def test_damaged_hostile_and_foreign_files(tmp_path: Path) -> None:
    hub = export(weights(), tmp_path / "hub", max_shard_size=700)
    shard = next(iter(sorted(hub.glob("*.safetensors"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        tk.load_checkpoint_and_dispatch(empty(), hub, {"": "disk"})
    shard.unlink()
    with pytest.raises(CheckpointError, match="lists it, but it does not exist"):
        tk.load_checkpoint_and_dispatch(empty(), hub, {"": "disk"})

    ours = write_checkpoint(tmp_path / "step-1", {"model": weights()})
    file = next(ours.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: checksum"):
        tk.load_checkpoint_and_dispatch(empty(), ours, {"": "disk"})

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"embed.weight": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(
        CheckpointError, match=r"torch.load\(weights_only=True\) refused it"
    ):
        tk.load_checkpoint_in_model(empty(), tmp_path / "evil.bin")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "nothing").mkdir()
    for name, reason in {"nothing": "none of them", "absent": "does not exist"}.items():
        with pytest.raises(CheckpointError, match=reason):
            tk.load_checkpoint_in_model(empty(), tmp_path / name)
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"embed.weight": "../evil.bin"}))
    with pytest.raises(
        CheckpointError, match="a file that is not one of this directory"
    ):
        tk.load_checkpoint_in_model(empty(), index)


def test_wrong_calls(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "old.bin")
    model = empty()
    with pytest.raises(
        ConfigurationError, match=r"go to disk, and cannot be read(?s:.*)offload_folder"
    ):
        tk.load_checkpoint_and_dispatch(model, tmp_path / "old.bin", {"": "disk"})
    with pytest.raises(StrategyError, match="has no device for"):
        tk.load_checkpoint_and_dispatch(model, tmp_path / "old.bin", {"embed": "cpu"})
    for name in ("broadcast_from_rank0", "offload_8bit_bnb"):
        with pytest.raises(ConfigurationError, match=f"has no {name}=True"):
            tk.load_checkpoint_in_model(model, tmp_path / "old.bin", **{name: True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tk.load_checkpoint_in_model(
            model, tmp_path / "old.bin", offload_state_dict=True
        )
