"""fp8 training by torchao: the same bits as its own calls in a plain loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision import Float8Precision, MixedPrecision, QATPrecision
from trainer_kit.testing import distributed

pytestmark = pytest.mark.slow  # importing the library takes seconds


class Net(tk.TrainModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.head = (
            nn.Linear(16, width),
            nn.Linear(width, 16),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    sizes = (16, 16, 16, 16, 16, 8)  # the last window's batches differ in weight
    return [
        (torch.randn(n, 16, generator=draw), torch.randint(3, (n,), generator=draw))
        for n in sizes
    ]


def trainer(precision: Any, **options: Any) -> tk.Trainer:
    return tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        precision=precision,
        **{"barebones": True, **options},
    )


def kinds(module: nn.Module) -> list[str]:
    return [type(part).__name__ for part in module.children()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("recipe", "base", "emulate"),
    [
        ("tensorwise", "bf16-mixed", False),
        ("tensorwise", "bf16-true", True),
        ("rowwise", "32-true", True),
    ],
)
def test_the_same_bits_as_a_plain_loop(
    recipe: Any, base: str, emulate: bool, tmp_path: Path
) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = Net()
    if base == "bf16-true":
        plain.to(torch.bfloat16)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)
    convert_to_float8_training(
        plain, config=config, module_filter_fn=lambda module, name: name != "head"
    )
    optimizer = plain.configure_optimizers()
    for _ in range(2):
        for at in range(0, 6, 2):
            optimizer.zero_grad()
            window = batches()[at : at + 2]
            for x, y in window:
                x = x.to(torch.bfloat16) if base == "bf16-true" else x
                with torch.autocast(
                    "cpu", torch.bfloat16, enabled=base == "bf16-mixed"
                ):
                    loss = plain.training_step((x, y), 0)
                (loss * (len(y) / sum(len(y) for _, y in window))).backward()
            optimizer.step()

    def precision() -> Float8Precision:
        return Float8Precision(recipe, base, emulate=emulate, exceptions=["head"])

    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4)
    module = Net()
    trainer(precision(), accumulate_grad_batches=2, callbacks=[saving], **quiet).fit(
        module, batches()
    )
    assert kinds(module) == ["Float8Linear", "Float8Linear", "Linear"]
    assert equal(module, plain)
    resumed = Net()
    trainer(precision(), accumulate_grad_batches=2).fit(
        resumed, batches(), ckpt_path=tmp_path / "step-00000004"
    )
    assert equal(resumed, plain)


def test_the_precision_word_converts_only_suitable_layers() -> None:
    module, fitted = Net(), trainer("fp8")
    with pytest.raises(
        PrecisionError, match=r"head \(3×16\)\n  fix:   pass exceptions=\['head'\]"
    ):
        fitted.fit(module, batches())
    assert (fitted.precision, kinds(module)) == ("fp8", ["Linear"] * 3)
    trainer(Float8Precision(ends=False)).fit(module, batches())
    assert kinds(module) == ["Linear", "Float8Linear", "Linear"]
    trainer(Float8Precision(ends=False)).fit(
        module, batches()
    )  # what is exchanged already stays
    assert kinds(module) == ["Linear", "Float8Linear", "Linear"]
    only = Float8Precision(module_filter=lambda part, name: name == "first")
    trainer(only).fit(second := Net(), batches())
    assert kinds(second) == ["Float8Linear", "Linear", "Linear"]


def test_evaluation_computes_in_fp8_too() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    net, x = nn.Sequential(layer), torch.randn(16, 1, 16)
    Float8Precision(base="32-true").convert_module(net)
    trained = net(x).detach()
    net.eval()
    with (
        torch.no_grad()
    ):  # torch has a path for it that takes the weights and leaves the layers out
        assert torch.equal(net(x), trained)


def test_a_device_without_fp8_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError(
            "_scaled_mm is only supported on devices of compute capability 8.9\nmore"
        )

    monkeypatch.setattr("trainer_kit.precision.torchao.scaled_matmul", refuse)
    with pytest.raises(
        PrecisionError,
        match=r"float8 matmuls\n  found: _scaled_mm is only .* 8.9\n  fix: .*em",
    ):
        trainer("fp8")
    trainer(Float8Precision(emulate=True, exceptions=["head"])).fit(Net(), batches())


def test_nothing_is_asked_of_an_accelerator_before_ranks_may_have_been_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch initializes CUDA for each of these, after which a forked process cannot use it."""

    def initializes(*given: Any) -> Any:
        raise RuntimeError("CUDA was initialized")

    monkeypatch.setattr(torch.cuda, "_lazy_init", initializes)
    monkeypatch.setattr(torch.cuda, "is_available", initializes)
    for precision in (
        Float8Precision(),
        Float8Precision(base="16-mixed"),
        MixedPrecision(torch.float16),
    ):
        precision.check(torch.device("cuda", 1), "ddp")
        if isinstance(precision, Float8Precision):
            for _ in range(2):  # the rank's own device is asked, once a run
                precision.check(torch.device("cuda", 1), "ddp")
                with pytest.raises(RuntimeError, match="CUDA was initialized"):
                    precision.convert_module(Net())
    scaler = MixedPrecision(torch.float16, device_type="cuda").scaler
    assert scaler is not None
    assert scaler.is_enabled()


def test_the_server_that_ranks_are_forked_from_initializes_nothing() -> None:
    names = [*distributed._PRELOAD, *distributed._PRELOAD_WHERE_USED]
    program = f"""
import importlib, torch
def initializes(*given): raise SystemExit("CUDA was initialized")
torch.cuda._lazy_init = torch.cuda.is_available = initializes
for name in {names}:
    importlib.import_module(name)
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_exchanged_layers_do_not_stay_under_another_precision() -> None:
    net = Net()
    Float8Precision(base="32-true", exceptions=["head"]).convert_module(net)
    Float8Precision(base="32-true", exceptions=["head"]).convert_module(net)
    with pytest.raises(
        PrecisionError,
        match=r"found: 'fp8', and now 'bf16-mixed'\n  fix: +build the module again",
    ):
        MixedPrecision(torch.bfloat16).convert_module(net)
    with pytest.raises(
        PrecisionError, match="found: 'fp8', and now 'fp8' with other options"
    ):
        Float8Precision(base="32-true", exceptions=["first", "head"]).convert_module(
            net
        )
    with pytest.raises(PrecisionError, match="found: 'fp8', and now 'qat'"):
        QATPrecision().convert_module(nn.Sequential(net))


def test_an_unknown_recipe() -> None:
    with pytest.raises(
        PrecisionError, match="no fp8 recipe 'rowise'\n  fix:   did you mean 'rowwise'"
    ):
        Float8Precision("rowise")  # type: ignore[arg-type]


def test_an_accelerator_with_its_recipes() -> None:
    accelerator = tk.Accelerator(cpu=True, mixed_precision="fp8")
    model = Net()
    optimizer = model.configure_optimizers()
    model, optimizer = accelerator.prepare(model, optimizer)
    assert (accelerator.fp8_backend, accelerator.mixed_precision) == ("AO", "fp8")
    assert kinds(model) == ["Linear", "Float8Linear", "Linear"]
    before = model.middle.weight.detach().clone()
    x, y = batches()[0]
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    assert not torch.equal(
        before, model.middle.weight
    )  # the optimizer has the exchanged layer's parameters
    recipe = tk.AORecipeKwargs(
        pad_inner_dim=True, module_filter_func=lambda module, name: name == "first"
    )
    accelerator = tk.Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]
    )
    model = accelerator.prepare(Net())
    assert kinds(model) == ["Float8Linear", "Linear", "Linear"]
    assert model.first.config.pad_inner_dim
    gathered = tk.AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    with pytest.raises(
        PrecisionError,
        match=r"found: enable_fsdp_float8_all_gather: .*\n  fix: +leave it out",
    ):
        tk.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[gathered])
    scaled = tk.GradScalerKwargs(init_scale=8.0)
    accelerator = tk.Accelerator(
        cpu=True,
        mixed_precision=Float8Precision(base="16-mixed"),
        kwargs_handlers=[scaled],
    )
    assert float(accelerator.precision.scale_loss(torch.ones(()))) == 8.0
    with pytest.raises(PrecisionError, match="MS-AMP is no longer maintained"):
        tk.Accelerator(
            cpu=True, mixed_precision="fp8", kwargs_handlers=[tk.MSAMPRecipeKwargs()]
        )
    with pytest.raises(PrecisionError, match="needs Transformer Engine"):
        tk.Accelerator(
            cpu=True, mixed_precision="fp8", kwargs_handlers=[tk.TERecipeKwargs()]
        )
