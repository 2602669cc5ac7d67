"""Weights are quantized while they are loaded: the bits of layers that were quantized in memory, on every tier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from trainer_kit.checkpoint import export
from trainer_kit.core.errors import CheckpointError, ConfigurationError, PrecisionError
from trainer_kit.precision import BitsandbytesPrecision

pytestmark = pytest.mark.slow  # importing bitsandbytes takes seconds

CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "fp32",
    },
    "nf4-dq": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True, "torch_dtype": "fp32"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.body = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64)
        )
        self.head = nn.Linear(64, 20)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(ids)))
        return out


def trained() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def empty() -> Net:
    with tk.init_empty_weights():
        return Net().eval()


@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.filterwarnings("ignore:.*MatMul8bitLt")
def test_it_is_the_precision_of_that_name(mode: str, tmp_path: Path) -> None:
    config, ids = tk.BnbQuantizationConfig(**CONFIGS[mode]), torch.tensor([[1, 2, 3]])
    assert config.mode == mode
    expected = trained().requires_grad_(False)
    BitsandbytesPrecision(mode, torch.float32, ["head"], base="32-true").convert_module(
        expected
    )  # type: ignore[arg-type]
    weights = trained().state_dict()
    torch.save(weights, tmp_path / "old.bin")
    hub = export(weights, tmp_path / "hub", max_shard_size="20kB")
    offload = {"offload_folder": tmp_path / "offload"}
    split = {
        "embed": "cpu",
        "body.0": "disk",
        "body.1": "cpu",
        "body.2": "cpu",
        "body.3": "disk",
        "head": "disk",
    }
    made = [
        tk.load_and_quantize_model(trained(), config),
        tk.load_and_quantize_model(empty(), config, hub, device_map="auto"),
        tk.load_and_quantize_model(empty(), config, hub, device_map=split, **offload),
        tk.load_and_quantize_model(
            empty(), config, tmp_path / "old.bin", device_map={"": "disk"}, **offload
        ),
    ]
    again = export(made[0].state_dict(), tmp_path / "quantized")
    made.append(
        tk.load_and_quantize_model(
            empty(), config, again, device_map={"": "disk"}, **offload
        )
    )
    for model in made:
        with torch.no_grad():
            assert torch.equal(model(ids), expected(ids))
        state = model.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(
            torch.equal(state[name], value)
            for name, value in expected.state_dict().items()
        )
        assert not model.body[0].weight.requires_grad
    assert made[0].is_loaded_in_4bit is (mode != "int8")


def test_skipped_modules_keep_their_dtype(tmp_path: Path) -> None:
    hub = export(trained().state_dict(), tmp_path / "hub")
    config = tk.BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bf16",
        skip_modules=["body.0"],
        keep_in_fp32_modules=["3"],
    )
    model = tk.load_and_quantize_model(empty(), config, hub)
    dtypes = [
        model.embed.weight.dtype,
        *(model.body[i].weight.dtype for i in (0, 2, 3)),
        model.head.weight.dtype,
    ]
    assert dtypes == [
        torch.bfloat16,
        torch.bfloat16,
        torch.uint8,
        torch.float32,
        torch.uint8,
    ]
    assert model.body[2].fp4_absmax.dtype == torch.float32
    tied = copy.deepcopy(trained())
    tied.embed.weight = tied.head.weight
    sharing = tk.load_and_quantize_model(
        tied, tk.BnbQuantizationConfig(**CONFIGS["nf4"])
    )
    assert sharing.embed.weight is sharing.head.weight


def test_wrong_calls(tmp_path: Path) -> None:
    config = tk.BnbQuantizationConfig(**CONFIGS["nf4"])
    for options, reason in (
        ({}, "either 4-bit or 8-bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "either 4-bit or 8-bit"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "np4"},
            "'np4' is not a 4-bit type",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "half"},
            "'half' is not a dtype",
        ),
        ({"load_in_4bit": True, "llm_int8_threshold": 5.0}, "applies to 8-bit"),
    ):
        with pytest.raises(PrecisionError, match=reason):
            tk.BnbQuantizationConfig(**options)
    with pytest.raises(
        PrecisionError,
        match=r"the model has no weights to quantize\n(?s:.*)as weights_location",
    ):
        tk.load_and_quantize_model(empty(), config)
    with pytest.raises(PrecisionError, match="no layer of this model can be quantized"):
        tk.load_and_quantize_model(
            nn.Sequential(nn.Embedding(2, 64), nn.Linear(64, 2)), config
        )
    hub = export(trained().state_dict(), tmp_path / "hub")
    with pytest.raises(ConfigurationError, match="as offload_folder"):
        tk.load_and_quantize_model(empty(), config, hub, device_map={"": "disk"})
    other = empty()
    other.body[0] = nn.Linear(64, 64)
    with pytest.raises(CheckpointError, match=r"\[128, 64\] in the checkpoint"):
        tk.load_and_quantize_model(other, config, hub)
