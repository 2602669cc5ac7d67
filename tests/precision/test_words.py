"""Every word for a precision: what the weights, the batch, the forward and new layers are in."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer_kit as tk
from trainer_kit.core.errors import ConfigurationError, PrecisionError
from trainer_kit.core.registry import PRECISIONS
from trainer_kit.precision import MixedPrecision, TruePrecision, make_precision
from trainer_kit.precision.native import NAMES

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# What it is called; weights; a matrix product in the step; a tensor that the step makes; whether losses are scaled.
MEANING = {
    "64-true": ("64-true", F64, F64, F64, False),
    "64": ("64-true", F64, F64, F64, False),
    "32-true": ("32-true", F32, F32, F32, False),
    "32": ("32-true", F32, F32, F32, False),
    "no": ("32-true", F32, F32, F32, False),
    "bf16-true": ("bf16-true", BF16, BF16, BF16, False),
    "16-true": ("16-true", F16, F16, F16, False),
    "bf16-mixed": ("bf16-mixed", F32, BF16, F32, False),
    "bf16": ("bf16-mixed", F32, BF16, F32, False),
    "16-mixed": ("16-mixed", F32, F16, F32, True),
    "16": ("16-mixed", F32, F16, F32, True),
    "fp16": ("16-mixed", F32, F16, F32, True),
}


class Watched(tk.TrainModule):
    """Writes down the dtypes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        self.inside = nn.Linear(4, 2)
        self.seen["made"] = self.inside.weight.dtype

    def look(self, where: str, batch: dict[str, Any]) -> Tensor:
        out = self.inside(self.outside(batch["x"][0]) * self.scale)
        self.seen[where] = (
            batch["x"][0].dtype,
            batch["y"].dtype,
            out.dtype,
            torch.zeros(1).dtype,
        )
        return out

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.look("training", batch).float().pow(2).mean()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.look("validation", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.look("test", batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.look("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[dict[str, Any]]:
    return [{"x": [torch.ones(3, 4)], "y": torch.arange(3), "name": "a"}]


def quiet(**options: Any) -> tk.Trainer:
    return tk.Trainer(
        max_epochs=1, barebones=True, accelerator="cpu", devices=1, **options
    )


def test_the_table_is_complete() -> None:
    assert MEANING.keys() == NAMES.keys()


@pytest.mark.parametrize("word", [*MEANING, 16, 32, 64, "BF16-Mixed"])
def test_words(word: Any) -> None:
    name, weights, product, made, scales = MEANING[str(word).lower()]
    module, trainer = Watched(), quiet(precision=word)
    assert trainer.precision_plugin.name == name
    assert trainer.precision_plugin.scales is scales
    trainer.fit(module, batches(), batches())
    trainer.test(module, batches(), verbose=False)
    (predicted,) = trainer.predict(module, batches())
    assert module.outside.weight.dtype == module.scale.dtype == weights
    assert module.count.dtype == torch.long
    assert module.seen.pop("made") == weights
    expected = (weights, torch.long, product, made)
    assert module.seen == dict.fromkeys(
        ("training", "validation", "test", "predict"), expected
    )
    assert predicted.dtype == product
    assert torch.get_default_dtype() == F32
    assert not torch.is_autocast_enabled("cpu")


def test_by_default_nothing_is_cast() -> None:
    class Mixed(Watched):
        """Mixes dtypes on purpose."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 4).double()

        def look(self, where: str, batch: dict[str, Any]) -> Tensor:
            return self.inside(self.wide(batch["x"][0]).float())

    given = [{"x": [torch.ones(3, 4, dtype=F64)], "y": torch.arange(3)}]
    module, trainer = Mixed(), quiet()
    trainer.fit(module, given)
    assert trainer.precision_plugin.name == "32-true"
    assert module.wide.weight.dtype == F64


def test_the_default_dtype_is_put_back_after_an_error() -> None:
    class Failing(Watched):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            raise KeyError("bad batch")

    for word in ("64-true", "bf16-mixed"):
        with pytest.raises(KeyError):
            quiet(precision=word).fit(Failing(), batches())
        assert torch.get_default_dtype() == F32
        assert not torch.is_autocast_enabled("cpu")


def test_an_object_instead_of_a_word() -> None:
    for options in (
        {"precision": TruePrecision(F64)},
        {"plugins": TruePrecision(F64)},
        {"plugins": [TruePrecision(F64)]},
    ):
        module = Watched()
        quiet(**options).fit(module, batches())
        assert module.outside.weight.dtype == F64


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("bf16-mixd", "did you mean 'bf16-mixed'"),
        (8, "unknown precision '8'"),
        ("f64", "64"),
    ],
)
def test_an_unknown_word_is_refused_with_the_nearest(word: Any, told: str) -> None:
    with pytest.raises(PrecisionError, match=told):
        quiet(precision=word)


@pytest.mark.parametrize(
    ("word", "library", "told"),
    [
        (
            "transformer-engine",
            "transformer_engine.pytorch",
            "pip install 'transformer-engine\\[pytorch\\]'",
        ),
        ("fp8", "torchao", "pip install 'trainer-kit\\[torchao\\]'"),
        ("nf4-dq", "bitsandbytes", "pip install 'trainer-kit\\[bitsandbytes\\]'"),
        ("int8", "bitsandbytes", "pip install 'trainer-kit\\[bitsandbytes\\]'"),
    ],
)
def test_a_vendor_precision_names_its_requirements(
    word: str, library: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        library,
        *(name for name in sys.modules if name.startswith(f"{library}.")),
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrecisionError, match=told):
        quiet(precision=word)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="precision is set twice"):
        quiet(precision="bf16", plugins=TruePrecision(F64))
    with pytest.raises(ConfigurationError, match="plugin is not a precision"):
        quiet(plugins=object())
    with pytest.raises(PrecisionError, match="bfloat16 needs no gradient scaler"):
        MixedPrecision(BF16, "cpu", torch.amp.GradScaler("cpu"))


def test_unknown_dtypes_and_precisions_are_refused() -> None:
    with pytest.raises(
        PrecisionError,
        match=r"found: precision=torch.bfloat16\n  fix: .*TruePrecision\(torch.bfloat16",
    ):
        quiet(precision=BF16)
    with pytest.raises(
        PrecisionError,
        match=r"MixedPrecision has no dtype torch.float32\n  fix: .*torch.bfloat16",
    ):
        MixedPrecision(F32)
    with pytest.raises(
        PrecisionError,
        match=r"no dtype '16-mixed'\n  fix: +precision='16-mixed', or MixedPrecision",
    ):
        MixedPrecision("16-mixed")  # type: ignore[arg-type]
    with pytest.raises(PrecisionError, match=r"TruePrecision has no dtype torch\.int8"):
        TruePrecision(torch.int8)


def test_a_registered_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PRECISIONS, "_targets", {})
    PRECISIONS.register("mine", lambda: TruePrecision(F64))
    module = Watched()
    quiet(precision="mine").fit(module, batches())
    assert module.outside.weight.dtype == F64


def test_batches_are_cast_at_any_depth() -> None:
    precision = make_precision("bf16-true", "cpu")
    batch = precision.convert_batch(
        {
            "a": (torch.ones(2), [torch.ones(2, dtype=torch.int32)]),
            "b": None,
            "c": "text",
        }
    )
    assert batch["a"][0].dtype == BF16
    assert batch["a"][1][0].dtype == torch.int32
    assert (batch["b"], batch["c"]) == (None, "text")
    complex_numbers = torch.ones(2, dtype=torch.complex64)
    assert precision.convert_batch(complex_numbers) is complex_numbers
