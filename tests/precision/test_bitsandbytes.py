"""Quantized bases with adapters that are trained: the same bits as bitsandbytes' own layers in a plain loop."""

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
from trainer_kit.precision import BitsandbytesPrecision

pytestmark = pytest.mark.slow  # importing the library takes seconds
MODES = ["nf4", "nf4-dq", "fp4", "fp4-dq", "int8"]
FOUR = ("nf4", "fp4")


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(inputs, 2, bias=False),
            nn.Linear(2, outputs, bias=False),
        )
        nn.init.normal_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(tk.TrainModule):
    """A frozen first layer with an adapter, and a head that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Adapted(nn.Linear(64, 48).requires_grad_(False), 64, 48)
        self.head = nn.Linear(48, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(
            self.head(torch.tanh(self.first(batch[0]))).float(), batch[1]
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(torch.tanh(self.first(batch[0])))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 64, generator=draw), torch.randint(3, (n,), generator=draw))
        for n in (6, 6, 6, 6, 6, 2)
    ]


def trainer(precision: Any, **options: Any) -> tk.Trainer:
    return tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        **{"barebones": True, **options},
    )


def vendors(layer: nn.Linear, mode: str) -> nn.Module:
    """bitsandbytes' own layer with the weights of ``layer``."""
    import bitsandbytes as bnb

    if mode == "int8":
        made = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, has_fp16_weights=False, threshold=6.0
        )
        made.weight = bnb.nn.Int8Params(
            layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False
        )
    else:
        kind, nested = mode[:3], mode.endswith("dq")
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            quant_type=kind,
            compress_statistics=nested,
        )
        made.weight.data = layer.weight.data.clone()
    made.bias = layer.bias
    return made.to("cpu")


def equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("mode", "base"), [(mode, "32-true") for mode in MODES] + [("nf4", "bf16-mixed")]
)
def test_the_same_bits_as_a_plain_loop_and_after_a_resume(
    mode: Any, base: str, tmp_path: Path
) -> None:
    plain = Net()
    plain.first.base = vendors(plain.first.base, mode)
    optimizer = plain.configure_optimizers()
    for at in range(0, 6, 2):
        optimizer.zero_grad()
        window = batches()[at : at + 2]
        for x, y in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=base == "bf16-mixed"):
                loss = plain.training_step((x, y), 0)
            (loss * (len(y) / sum(len(y) for _, y in window))).backward()
        optimizer.step()

    def options() -> Any:
        return {
            "precision": BitsandbytesPrecision(mode, base=base),
            "accumulate_grad_batches": 2,
        }

    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    module = Net()
    trainer(**options(), callbacks=[saving], **quiet).fit(module, batches())
    trained = [p for p in module.parameters() if p.requires_grad]
    assert equal(trained, [p for p in plain.parameters() if p.requires_grad])
    # Another start, whose own weights would be quantized to other bits: everything comes from the checkpoint.
    resumed = Net(seed=5)
    trainer(**options()).fit(resumed, batches(), ckpt_path=tmp_path / "step-00000002")
    assert equal(resumed.state_dict().values(), module.state_dict().values())
    (one,) = trainer(**options()).predict(resumed, batches()[:1])
    (other,) = trainer(**options()).predict(module, batches()[:1])
    assert torch.equal(one, other)


def test_a_checkpoint_of_floats_is_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    floats = Net(seed=3)
    torch.save(floats.state_dict(), tmp_path / "pretrained.pt")
    module = Net()
    BitsandbytesPrecision("nf4-dq", base="32-true").convert_module(module)
    module.load_state_dict(torch.load(tmp_path / "pretrained.pt"))
    expected = Net(seed=3)
    BitsandbytesPrecision("nf4-dq", base="32-true").convert_module(expected)
    assert equal(module.state_dict().values(), expected.state_dict().values())
    x, _ = batches()[0]
    assert torch.equal(module.first(x), expected.first(x))
    assert torch.equal(copy.deepcopy(module).first(x), expected.first(x))


def test_weights_that_were_quantized_in_another_way_are_refused(tmp_path: Path) -> None:
    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer("nf4", callbacks=[saving], **quiet).fit(Net(), batches())
    for mode in ("fp4", "nf4-dq", "int8"):
        told = rf"found: first.base.weight: 'nf4', and this module has '{mode}'\n  fix: +use precision='nf4'"
        with pytest.raises(PrecisionError, match=told):
            trainer(mode).fit(Net(), batches(), ckpt_path=tmp_path / "step-00000003")
        with pytest.raises(PrecisionError, match=told):
            trainer(mode).predict(
                Net(), batches(), ckpt_path=tmp_path / "step-00000003"
            )
    module = Net()
    trainer("nf4").fit(module, batches())
    with pytest.raises(PrecisionError, match="found: 'nf4', and now 'int8'"):
        trainer("int8").fit(module, batches())
    nested, other = Net(), Net()
    BitsandbytesPrecision("nf4-dq").convert_module(nested)
    BitsandbytesPrecision("fp4-dq").convert_module(other)
    with pytest.raises(PrecisionError, match="'nf4-dq', and this module has 'fp4-dq'"):
        other.load_state_dict(nested.state_dict(), strict=False)


def test_scales_are_not_cast() -> None:
    module = Net()
    trainer(BitsandbytesPrecision("nf4", base="bf16-true")).fit(module, batches())
    dtypes = {
        name: str(value.dtype).removeprefix("torch.")
        for name, value in module.first.state_dict().items()
    }
    adapters = dict.fromkeys(("down.weight", "up.weight", "base.bias"), "bfloat16")
    assert dtypes == {**adapters, "base.weight": "uint8", "base.nf4_absmax": "float32"}


def test_layers_trained_in_8_bits() -> None:
    import bitsandbytes as bnb

    class Whole(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True)

    def loop(module: Any, given: Any) -> None:
        optimizer = module.configure_optimizers()
        for batch in given:
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()

    plain = Whole()
    for name in ("first.base", "first.down", "first.up"):
        layer = plain.get_submodule(name)
        made = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=False, threshold=6.0
        )
        made.weight, made.bias = (
            bnb.nn.Int8Params(layer.weight.data, has_fp16_weights=True),
            layer.bias,
        )
        plain.set_submodule(name, made)
    loop(plain, batches())
    module = Whole()
    trainer(
        BitsandbytesPrecision("int8-training", base="32-true", ignore_modules={"head"})
    ).fit(module, batches())
    assert module.state_dict().keys() == Whole().state_dict().keys()
    assert equal(list(module.parameters()), [p.data for p in plain.parameters()])
    # Inputs of three dimensions, as of a transformer, where the vendor's layer finds no gradient on a CPU.
    module.first(torch.randn(2, 3, 64)).sum().backward()


class Normed(tk.TrainModule):
    """Under autocast a norm hands float32 to the layer that multiplies in 8 bits."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.head = (
            nn.LayerNorm(64),
            nn.Linear(64, 48),
            nn.Linear(48, 3),
        )
        self.first.requires_grad_(not frozen)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(
            self.head(torch.tanh(self.first(self.norm(batch[0])))).float(), batch[1]
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.1
        )


@pytest.mark.parametrize("mode", ["int8", "int8-training"])
@pytest.mark.parametrize("base", ["bf16-mixed", "bf16-true", "32-true"])
def test_8_bit_layers_are_fed_float32(mode: Any, base: str) -> None:
    module = Normed(frozen=mode == "int8")
    before = {
        name: p.detach().clone()
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    given = [
        (x.to(torch.bfloat16) if base == "bf16-true" else x, y) for x, y in batches()
    ]
    trainer(BitsandbytesPrecision(mode, base=base)).fit(module, given)
    plain = Normed(frozen=mode == "int8")
    for x, y in batches():
        loss = plain.training_step((x, y), 0)
        loss.backward()
        with torch.no_grad():
            for p in plain.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
    for name, p in plain.named_parameters():
        if p.requires_grad:
            ours = module.get_parameter(name).float()
            assert not torch.equal(ours, before[name]), f"{name} is trained"
            torch.testing.assert_close(ours, p, atol=0.02, rtol=0.05)


def test_modules_that_cannot_be_quantized_are_refused_before_the_first_step() -> None:
    class Trainable(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True)

    with pytest.raises(
        PrecisionError,
        match=r"no linear layer is frozen\n  found: 4 .*'first.base'\n  fix: .*freeze",
    ):
        trainer("nf4").fit(Trainable(), batches())

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(48, 64)
            self.table.weight = self.first.base.weight

    with pytest.raises(
        PrecisionError,
        match=r"found: first.base.weight and table.weight\n  fix: .*\['first.base'\]",
    ):
        trainer("int8").fit(Tied(), batches())
    with pytest.raises(PrecisionError, match="no mode 'nf5'"):
        BitsandbytesPrecision("nf5")  # type: ignore[arg-type]
    with pytest.raises(PrecisionError, match="the model has no module named 'haed'"):
        trainer(BitsandbytesPrecision("nf4", exceptions=["haed"])).fit(Net(), batches())


def test_an_accelerator_and_lightnings_plugin() -> None:
    both = BitsandbytesPrecision(
        "nf4", ignore_modules={"head"}, exceptions={"*up": "32"}
    )
    assert list(both.exceptions) == ["head", "*up"]
    precision = BitsandbytesPrecision("nf4", ignore_modules={"head"})
    module = Net()
    tk.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, barebones=True, plugins=[precision]
    ).fit(module, batches())
    accelerator = tk.Accelerator(cpu=True, mixed_precision="nf4")
    model = Net()
    model, optimizer = accelerator.prepare(model, model.configure_optimizers())
    accelerator.backward(model.training_step(batches()[0], 0))
    optimizer.step()
    assert (
        model.first.base.weight.dtype == module.first.base.weight.dtype == torch.uint8
    )
