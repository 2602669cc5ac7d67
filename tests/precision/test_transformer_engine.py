"""Transformer Engine against a recording stand-in of its interface: nothing here computes in fp8."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainer_kit as tk
from trainer_kit.core.errors import PrecisionError
from trainer_kit.precision import transformer_engine as home


class Engine:
    """What is called, and layers with the state that delayed scaling keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, renamed: bool) -> None:
        self.entered: list[Any] = []
        self.active = 0
        self.available: Any = (True, "")
        engine = self

        class Layer:
            fp8_meta: dict[str, Any]

            def begin(self) -> None:
                self.fp8_meta = {}

            def init_fp8_meta_tensors(self, recipe: Any) -> None:
                for key in ("scaling_fwd", "scaling_bwd"):
                    self.fp8_meta.setdefault(
                        key,
                        SimpleNamespace(
                            scale=torch.ones(3),
                            amax_history=torch.zeros(recipe.amax_history_len, 3),
                        ),
                    )

            def get_extra_state(self) -> Tensor:
                return torch.tensor(
                    [128, 4, 149], dtype=torch.uint8
                )  # a pickle, as the real one

            def set_extra_state(self, state: Any) -> None:
                assert state is None

            def note(self, x: Tensor) -> None:
                if engine.active and isinstance(self, nn.Linear):
                    self.init_fp8_meta_tensors(engine.entered[-1][1])
                    history = self.fp8_meta["scaling_fwd"].amax_history
                    history.copy_(history.roll(1, 0))
                    history[0] = x.detach().abs().max()

        class Linear(Layer, nn.Linear):
            def __init__(
                self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype
            ) -> None:
                nn.Linear.__init__(self, inputs, outputs, bias, dtype=params_dtype)
                self.begin()

            def forward(self, x: Tensor) -> Tensor:
                self.note(x)
                return nn.Linear.forward(self, x)

        class LayerNorm(Layer, nn.LayerNorm):
            def __init__(
                self, shape: Any, eps: float, params_dtype: torch.dtype
            ) -> None:
                nn.LayerNorm.__init__(self, shape, eps, dtype=params_dtype)
                self.begin()

        @contextmanager
        def entering(enabled: bool, recipe: Any) -> Any:
            self.entered.append((enabled, recipe))
            self.active += enabled
            yield
            self.active -= enabled

        parts: dict[str, Any] = {"Linear": Linear, "LayerNorm": LayerNorm}
        parts["is_fp8_available"] = lambda return_reason: self.available
        if renamed:
            parts["autocast"] = entering
        else:
            parts["fp8_autocast"] = lambda enabled, fp8_recipe: entering(
                enabled, fp8_recipe
            )
        recipes = {
            "DelayedScaling": self.recipe,
            "Format": SimpleNamespace(HYBRID="hybrid", E4M3="e4m3"),
        }
        for name, given in (
            ("pytorch", parts),
            ("common", {}),
            ("common.recipe", recipes),
        ):
            module = ModuleType(f"transformer_engine.{name}")
            vars(module).update(given)
            monkeypatch.setitem(sys.modules, f"transformer_engine.{name}", module)
        monkeypatch.setitem(
            sys.modules, "transformer_engine", ModuleType("transformer_engine")
        )
        monkeypatch.setattr(home, "_NOT_NVIDIA", ())  # the stand-in runs on a CPU

    @staticmethod
    def recipe(amax_history_len: int = 4, **options: Any) -> Any:
        return SimpleNamespace(amax_history_len=amax_history_len, **options)


class Net(tk.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = (
            nn.Linear(16, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(
            self.head(self.norm(self.first(batch[0]))).float(), batch[1]
        )

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 16, generator=draw), torch.randint(3, (6,), generator=draw))
        for _ in range(4)
    ]


def trainer(precision: Any, **options: Any) -> tk.Trainer:
    return tk.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        **{"barebones": True, **options},
    )


@pytest.mark.parametrize("renamed", [False, True])
def test_layers_context_recipe_and_state(
    renamed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(monkeypatch, renamed)

    def precision() -> Any:
        kind = tk.precision.TransformerEnginePrecision
        return kind(
            "bf16-true",
            {"fp8_format": "E4M3", "amax_history_len": 3},
            evaluate=False,
            exceptions=["head"],
        )

    quiet = {
        "barebones": False,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saving = tk.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    module, plain = Net(), Net().to(torch.bfloat16)
    whole = trainer(precision(), callbacks=[saving], num_sanity_val_steps=0, **quiet)
    whole.fit(module, batches(), batches()[:1])
    assert [type(part).__module__ == __name__ for part in module.children()] == [
        True,
        True,
        False,
    ]
    assert [enabled for enabled, _ in engine.entered] == [True] * 4 + [False]
    assert engine.entered[0][1] == SimpleNamespace(
        amax_history_len=3, fp8_format="e4m3"
    )
    assert engine.active == 0
    optimizer = plain.configure_optimizers()
    for x, y in batches():
        optimizer.zero_grad()
        plain.training_step((x.to(torch.bfloat16), y), 0).backward()
        optimizer.step()
    assert [
        torch.equal(a, b)
        for a, b in zip(module.parameters(), plain.parameters(), strict=True)
    ] == [True] * 6
    assert not any("_extra_state" in name for name in module.state_dict())
    resumed = Net()
    again = trainer(precision())
    again.fit(resumed, batches(), ckpt_path=tmp_path / "step-00000002")
    one, other = (
        again.precision_plugin.state_dict()["layers"],
        whole.precision_plugin.state_dict()["layers"],
    )
    assert list(one) == ["first"]
    assert torch.equal(
        one["first"]["scaling_fwd"]["amax_history"],
        other["first"]["scaling_fwd"]["amax_history"],
    )
    assert one["first"]["scaling_fwd"]["amax_history"].shape == (3, 3)
    assert one["first"]["scaling_fwd"]["amax_history"].min() > 0


def test_norms_that_it_does_not_have_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(monkeypatch, renamed=True)
    net = nn.Sequential(
        nn.LayerNorm(8),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.LayerNorm(8, bias=False),
    )
    tk.precision.TransformerEnginePrecision("bf16-mixed").convert_module(net)
    assert [type(part) is nn.LayerNorm for part in net] == [False, True, True]


def test_precision_words_are_accepted_and_invalid_options_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch, renamed=True)
    assert trainer("transformer-engine").precision_plugin.base.name == "bf16-true"
    assert trainer("transformer-engine-float16").precision_plugin.base.name == "16-true"
    with pytest.raises(
        PrecisionError,
        match=r"multiples of 16.*\n  found: head \(8 to 3\)\n  fix: .*\['head'\]",
    ):
        trainer("transformer-engine").fit(Net(), batches())
    engine.available = (False, "Device compute capability 8.9 or higher required")
    with pytest.raises(
        PrecisionError,
        match="does not support fp8 on this GPU\n  found: Device compute",
    ):
        trainer("transformer-engine")
    monkeypatch.undo()
    refused = home._NOT_NVIDIA
    Engine(monkeypatch, renamed=True)
    monkeypatch.setattr(home, "_NOT_NVIDIA", refused)
    with pytest.raises(PrecisionError, match="does not run on a device of type 'cpu'"):
        trainer("transformer-engine")


def test_an_accelerator_with_accelerates_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch, renamed=True)
    recipe = tk.TERecipeKwargs(amax_history_len=5, amax_compute_algo="max")
    accelerator = tk.Accelerator(
        cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe]
    )
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 8)))
    assert (accelerator.fp8_backend, accelerator.has_fp8_handler) == ("TE", True)
    assert model(batches()[0][0]).dtype == torch.float32
    expected = SimpleNamespace(
        amax_history_len=5, amax_compute_algo="max", fp8_format="hybrid", margin=0
    )
    assert engine.entered == [(True, expected)]
    model.eval()(batches()[0][0])
    assert engine.entered[-1][0] is False
    with pytest.raises(PrecisionError, match="no longer supports matmuls"):
        tk.Accelerator(
            cpu=True,
            mixed_precision="fp8",
            kwargs_handlers=[
                tk.TERecipeKwargs(override_linear_precision=(False, False, True))
            ],
        )
