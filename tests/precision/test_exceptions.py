"""Modules that compute in another dtype than the rest, under every native precision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision import MixedPrecision, ModulePrecision, TruePrecision
from trainer_kit.precision.exceptions import _ForwardInDtype

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


class Net(tk.TrainModule):
    """A first layer, a norm, a head; notes what goes into each and comes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = (
            nn.Linear(8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 4),
        )
        self.seen: dict[str, Any] = {}
        for name in ("first", "norm", "head"):
            self.get_submodule(name).register_forward_hook(self.note(name))

    def note(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: Tensor) -> None:
            self.seen[name] = (next(module.parameters()).dtype, out.dtype)

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 8, generator=draw), torch.randint(4, (5,), generator=draw))
        for _ in range(count)
    ]


def fit(
    precision: Any, module: Net | None = None, **options: Any
) -> tuple[Net, tk.Trainer]:
    module = module or Net()
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        **{"barebones": True, **options},
    )
    trainer.fit(module, batches())
    return module, trainer


def test_under_autocast() -> None:
    module, _ = fit(
        MixedPrecision(
            BF16, exceptions={"norm": "32", "head": ModulePrecision(F64, F32)}
        )
    )
    assert module.seen == {"first": (F32, BF16), "norm": (F32, F32), "head": (F64, F32)}
    module, _ = fit(MixedPrecision(F16, exceptions={"head": "bf16"}))
    assert module.seen["head"] == (F32, BF16)
    assert not torch.is_autocast_enabled("cpu")


def test_exceptions_choose_the_dtype_of_modules_under_true_precision() -> None:
    given = {"LayerNorm": "32", "he*d": ModulePrecision(F32, output_dtype=F32)}
    module, _ = fit(TruePrecision(BF16, exceptions=given))
    assert module.seen == {
        "first": (BF16, BF16),
        "norm": (F32, BF16),
        "head": (F32, F32),
    }
    assert torch.get_default_dtype() == F32
    module, _ = fit(TruePrecision(BF16, exceptions=["norm", "head"]))
    assert module.seen["head"] == (F32, BF16)


@pytest.mark.parametrize("true", [False, True])
def test_the_same_bits_as_by_hand(true: bool) -> None:
    plain = Net()
    if true:
        plain.first.to(BF16)
    optimizer = plain.configure_optimizers()
    for x, y in batches():
        optimizer.zero_grad()
        if true:
            hidden = plain.norm(torch.tanh(plain.first(x.to(BF16))).float()).to(BF16)
            out = plain.head(hidden.float()).to(BF16)
        else:
            with torch.autocast("cpu", BF16):
                hidden = torch.tanh(plain.first(x))
                with torch.autocast("cpu", enabled=False):
                    out = plain.head(plain.norm(hidden.float()))
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()
    kind = TruePrecision if true else MixedPrecision
    module, _ = fit(kind(BF16, exceptions=["norm", "head"]))
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    def precision() -> Any:
        return TruePrecision(BF16, exceptions=["norm"])

    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    whole, _ = fit(precision(), callbacks=[saving], **quiet)
    again = Net()
    trainer = tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision(),
        barebones=True,
    )
    trainer.fit(again, batches(), ckpt_path=tmp_path / "step-00000003")
    assert again.norm.weight.dtype == F32
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_precision_without_exceptions_ends_those_of_another() -> None:
    module, _ = fit(MixedPrecision(BF16, exceptions=["head"]))
    assert module.seen["head"] == (F32, F32)
    fit("bf16-mixed", module)
    assert module.seen["head"] == (F32, BF16)
    copied = copy.deepcopy(fit(MixedPrecision(BF16, exceptions=["head"]), module)[0])
    with torch.no_grad():
        copied.head.weight.zero_()
    assert not torch.equal(
        copied(batches(1)[0][0]), module(batches(1)[0][0])
    )  # the copy's exception calls the copy


def test_weights_that_an_earlier_precision_cast_do_not_stay_so_in_silence() -> None:
    module, _ = fit("bf16-true")
    for after in ("32-true", "bf16-mixed"):
        with pytest.raises(
            PrecisionError,
            match=rf"found: torch.bfloat16, and now '{after}'\n  fix: .* module.float",
        ):
            fit(after, module)
    fit("64-true", module)
    fit("32-true", module.float())
    own = Net().bfloat16()  # the user's own choice
    TruePrecision().convert_module(own)
    assert own.head.weight.dtype == BF16


@pytest.mark.parametrize("kind", [TruePrecision, MixedPrecision])
def test_evaluation_of_transformer_layers_has_the_exceptions_of_training(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    net, x, dtypes = nn.Sequential(layer), torch.randn(3, 5, 16), []
    call = _ForwardInDtype.__call__

    def heard(self: Any, *arguments: Any, **options: Any) -> Any:
        dtypes.append(self.dtype)
        return call(self, *arguments, **options)

    monkeypatch.setattr(_ForwardInDtype, "__call__", heard)
    for pattern, times in (("*norm*", 2), ("*self_attn", 1)):
        precision = kind(BF16, exceptions={pattern: "32"})
        precision.convert_module(net)
        for train in (
            True,
            False,
        ):  # torch has a path for evaluation that takes the weights and leaves modules out
            dtypes.clear()
            with torch.no_grad(), precision.forward_context():
                net.train(train)(precision.convert_batch(x))
            assert dtypes == [F32] * times
    kind(BF16).convert_module(net)
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize(
    ("exceptions", "told"),
    [
        (["heads"], "the model has no module named 'heads'"),
        ({"head": "b16"}, "unknown dtype 'b16'"),
        (
            ["tied"],
            "a weight shared by two modules cannot have two dtypes\n  found: head.weight and tied.weight",
        ),
    ],
)
def test_invalid_exceptions_are_refused_before_the_first_step(
    exceptions: Any, told: str
) -> None:
    module = Net()
    module.tied = nn.Linear(8, 4)
    module.tied.weight = module.head.weight
    with pytest.raises(PrecisionError, match=told):
        fit(TruePrecision(BF16, exceptions=exceptions), module)
    assert module.seen == {}


def test_an_accelerator_takes_the_object() -> None:
    accelerator = tk.Accelerator(
        cpu=True, mixed_precision=TruePrecision(BF16, exceptions=["norm"])
    )
    model = accelerator.prepare(Net())
    assert model(batches(1)[0][0]).dtype == F32
    assert model.seen == {
        "first": (BF16, BF16),
        "norm": (F32, BF16),
        "head": (BF16, BF16),
    }
