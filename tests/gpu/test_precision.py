"""Every precision on the device: the bits of the same calls in a loop by hand, or a refusal ahead of the first step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from tests.gpu.devices import (
    Net,
    assert_same,
    batches,
    by_hand,
    deterministic,
    device_of,
    fit,
    on_each_device,
)
from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision import BitsandbytesPrecision, Float8Precision, MixedPrecision


def needs(library: str) -> Any:
    return pytest.mark.skipif(
        importlib.util.find_spec(library) is None, reason=f"needs {library}"
    )


def has_float8(kind: str) -> bool:
    return kind == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@on_each_device
@pytest.mark.parametrize("word", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_native(kind: str, word: str) -> None:
    device, plain, mine = device_of(kind), Net(), Net()
    dtype = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}[
        word.split("-")[0]
    ]
    scaler = torch.amp.GradScaler(device.type) if word == "16-mixed" else None
    if word.endswith("true"):
        plain.to(dtype)
    with deterministic():
        how = {"cast": dtype} if word.endswith("true") else {"autocast": dtype}
        by_hand(plain, batches(), device, scaler=scaler, **how)
    trainer = fit(mine, batches(), kind, precision=word, deterministic=True)
    assert_same(mine, plain)
    if scaler is not None:
        assert trainer.precision_plugin.state_dict() == scaler.state_dict()


class Overflows(Net):
    """The second step's gradients overflow float16."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before = [p.detach().clone() for p in self.parameters()]
        return self.loss(batch) * (1e30 if batch_idx == 1 else 1.0)


class Skips(tk.Callback):
    def __init__(self) -> None:
        self.stepped: list[bool] = []

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        pairs = zip(module.before, module.parameters(), strict=True)
        self.stepped.append(not all(a.equal(b) for a, b in pairs))


@on_each_device
def test_an_overflow_skips_a_step_and_the_scale_is_in_checkpoints(
    kind: str, tmp_path: Path
) -> None:
    skips, kept = Skips(), tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    options: dict[str, Any] = {
        "max_epochs": 1,
        "accumulate_grad_batches": 1,
        "barebones": False,
    }

    def scaling() -> MixedPrecision:
        type_ = device_of(kind).type
        return MixedPrecision(
            torch.float16, type_, torch.amp.GradScaler(type_, init_scale=1024.0)
        )

    data = batches(4)
    trainer = fit(
        Overflows(), data, kind, plugins=scaling(), callbacks=[skips, kept], **options
    )
    assert skips.stepped == [True, False, True, True]
    state = trainer.precision_plugin.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (512.0, 2)
    # What goes on from there has the scale ahead of the last step.
    again = scaling()
    options["enable_checkpointing"] = False
    fit(
        Overflows(),
        data,
        kind,
        plugins=again,
        ckpt_path=tmp_path / "step-00000003",
        **options,
    )
    assert again.state_dict() == state


class Wide(Net):
    """Layers whose sizes are multiples of 16, and enough values for 8-bit states."""

    def __init__(self, frozen: bool = False, configure: Any = None) -> None:
        super().__init__(configure=configure)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))]
        )
        self.blocks.requires_grad_(not frozen)
        self.head = nn.Linear(64, 4)


def wide() -> list[Any]:
    return batches(6, size=16, last=16, width=64)


@pytest.mark.slow
@needs("torchao")
@on_each_device
@pytest.mark.parametrize(
    ("recipe", "base"), [("tensorwise", "bf16-mixed"), ("rowwise", "bf16-true")]
)
def test_fp8(kind: str, recipe: Any, base: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    device, emulate = device_of(kind), kind == "cpu" and recipe == "rowwise"
    precision = Float8Precision(recipe, base, emulate=emulate, exceptions=["head"])
    if not has_float8(kind):
        with pytest.raises(PrecisionError, match="not support float8 matmuls"):
            fit(Wide(), wide(), kind, precision=precision)
        return
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)
    plain, mine = Wide(), Wide()
    if base == "bf16-true":
        plain.to(torch.bfloat16)
    convert_to_float8_training(
        plain, config=config, module_filter_fn=lambda part, name: name != "head"
    )
    how = (
        {"cast": torch.bfloat16}
        if base == "bf16-true"
        else {"autocast": torch.bfloat16}
    )
    by_hand(plain, wide(), device, **how)
    fit(mine, wide(), kind, precision=precision)
    assert sum(type(part).__name__ == "Float8Linear" for part in mine.modules()) == 2
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def vendors(layer: nn.Linear, mode: str) -> nn.Module:
    """bitsandbytes' own layer, which quantizes here, as ours do, and then moves."""
    import bitsandbytes as bnb

    if mode == "int8":
        made = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, has_fp16_weights=False, threshold=6.0
        )
        made.weight = bnb.nn.Int8Params(
            layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False
        )
    else:
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            quant_type=mode,
            compress_statistics=False,
        )
        made.weight.data = layer.weight.data.clone()
    made.bias = layer.bias
    return made.to("cpu")


@pytest.mark.slow
@needs("bitsandbytes")
@on_each_device
@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_quantized_weights(kind: str, mode: Any) -> None:
    plain, mine = (
        Wide(frozen=True, configure=_head_only),
        Wide(frozen=True, configure=_head_only),
    )
    for place in ("0", "2"):
        plain.blocks[0].set_submodule(
            place, vendors(plain.blocks[0].get_submodule(place), mode)
        )
    by_hand(plain, wide(), device_of(kind), autocast=torch.bfloat16)
    fit(mine, wide(), kind, precision=BitsandbytesPrecision(mode))
    kinds = {type(part).__name__ for part in mine.blocks[0].modules()}
    assert kinds & {"_Linear4bit", "_Linear8bit"}
    assert {p.device for p in mine.parameters()} == {device_of(kind)}
    torch.testing.assert_close(
        mine.head.weight, plain.head.weight, rtol=1e-3, atol=1e-4
    )


def _head_only(module: Any) -> Any:
    return torch.optim.AdamW(module.head.parameters(), lr=0.01)


@pytest.mark.slow
@on_each_device
@pytest.mark.parametrize(
    ("name", "library", "path"),
    [
        pytest.param(
            "AdamW8bit",
            "bitsandbytes",
            "bitsandbytes.optim",
            marks=needs("bitsandbytes"),
        ),
        pytest.param(
            "adamw_torch_8bit", "torchao", "torchao.optim", marks=needs("torchao")
        ),
    ],
)
def test_eight_bit_optimizers(
    kind: str, name: str, library: str, path: str, tmp_path: Path
) -> None:
    made = importlib.import_module(path).AdamW8bit
    # torchao compiles its steps, which takes a minute: what they compute is the same without.
    with torch.compiler.set_stance("force_eager"):
        plain = Wide(configure=lambda module: made(module.parameters(), lr=0.01))
        by_hand(plain, wide(), device_of(kind))
        mine = [
            Wide(
                configure=lambda module: tk.optimizer(
                    name, module.parameters(), lr=0.01
                )
            )
            for _ in range(2)
        ]
        kept = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
        fit(mine[0], wide(), kind, barebones=False, callbacks=[kept])
        start = {
            "ckpt_path": tmp_path / "step-00000003",
            "enable_checkpointing": False,
            "barebones": False,
        }
        fit(mine[1], wide(), kind, **start)
    for module in mine:
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
