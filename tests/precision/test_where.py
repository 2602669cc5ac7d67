"""What runs where: engines and precisions declare what they refuse, and the guide shows all of it in one table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import (
    Accelerator,
    Trainer,
    strategies,
)  # they register the names of strategies
from trainer_kit.core.errors import PrecisionError
from trainer_kit.core.registry import STRATEGIES
from trainer_kit.precision import BitsandbytesPrecision, MixedPrecision, TruePrecision
from trainer_kit.precision.aliases import WORDS, make_precision
from trainer_kit.precision.precision import Precision
from trainer_kit.strategies.single import Alone, SingleDeviceStrategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "precision.md"
ENGINES: dict[str, Any] = {
    cls.engine: cls
    for cls in (
        strategies.SingleDeviceStrategy,
        strategies.DDPStrategy,
        strategies.FSDPStrategy,
        strategies.MeshStrategy,
        strategies.DeepSpeedStrategy,
        strategies.XLAStrategy,
        strategies.MegatronStrategy,
    )
}
UNTESTED = {
    ("16-true", "deepspeed"),
    ("16-mixed", "deepspeed"),
    *(
        (name, "megatron")
        for name in ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
    ),
    *(("transformer-engine", engine) for engine in ("single", "ddp", "fsdp")),
}
"""Not refused, and no test runs it: for want of the device, or of the engine."""


def table() -> dict[str, list[str]]:
    page = PAGE.read_text(encoding="utf-8").split(
        "## Support matrix: precisions and strategies"
    )[1]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", page, re.M)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}


def sign(precision: str, engine: str) -> str:
    if precision in ENGINES[engine].refused_precisions:
        return "–"
    return "○" if (precision, engine) in UNTESTED else "✓"


def test_the_guide_equals_the_declarations_of_the_engines() -> None:
    shown = table()
    assert shown == {name: [sign(name, engine) for engine in ENGINES] for name in shown}
    head = re.search(r"^\| precision \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert head is not None
    assert [cell.strip() for cell in head[1].split("|")] == list(ENGINES)
    for cls in ENGINES.values():
        assert cls.refused_precisions.keys() <= shown.keys()


@pytest.mark.slow  # imports every library
def test_every_word_has_a_row() -> None:
    for word in WORDS:
        if not word.startswith("transformer-engine"):
            assert make_precision(word).name in table()


@pytest.mark.parametrize("engine", ENGINES)
def test_refusals_name_the_reason_and_the_engines_that_work(engine: str) -> None:
    class Named(Precision):
        def convert_module(self, module: torch.nn.Module) -> None:
            """Nothing to cast."""

    strategy = ENGINES[engine].__new__(ENGINES[engine])
    strategy.device = torch.device("cpu")
    for name in table():
        precision = Named()
        precision.name = name
        if name not in strategy.refused_precisions:
            strategy.check_precision(precision)
            continue
        with pytest.raises(
            PrecisionError, match=f"{name!r} does not run on {engine}"
        ) as caught:
            strategy.check_precision(precision)
        assert caught.value.found == strategy.refused_precisions[name]
        assert "single" in str(caught.value.fix)


def test_devices() -> None:
    with pytest.raises(
        PrecisionError,
        match="does not run on a device of type 'mps'\n  found: the device has no float64",
    ):
        TruePrecision(torch.float64).check(torch.device("mps"), "single")
    with pytest.raises(
        PrecisionError,
        match=r"'nf4' does not run on .* 'mps'\n  found: bitsandbytes has no kernels",
    ):
        BitsandbytesPrecision("nf4").check(torch.device("mps"), "single")


def test_a_precision_without_a_device_runs_on_the_trainers_device() -> None:
    precision = MixedPrecision(torch.float16)
    precision.check(torch.device("xpu"), "single")
    assert precision.forward_context().device == "xpu"  # type: ignore[union-attr]
    own = MixedPrecision(torch.float16, "cpu")
    with pytest.raises(
        PrecisionError,
        match=r"found: device_type='cpu', and the run is on 'xpu'\n  fix: +leave dev",
    ):
        own.check(torch.device("xpu"), "single")
    kept = MixedPrecision(
        torch.float16, scaler=torch.amp.GradScaler("cpu", init_scale=4.0)
    )
    scaler = kept.scaler
    for device in ("xpu", "cpu"):
        kept.check(torch.device(device), "single")
    assert kept.scaler is scaler


def test_a_trainer_and_an_accelerator_look_it_up_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(*arguments: Any) -> Any:
        made = SingleDeviceStrategy(*arguments)
        made.engine = "deepspeed"
        made.refused_precisions = strategies.DeepSpeedStrategy.refused_precisions  # type: ignore[misc]
        return made

    monkeypatch.setitem(STRATEGIES._targets, "single_device", named)
    with pytest.raises(PrecisionError, match="'64-true' does not run on deepspeed"):
        Trainer(accelerator="cpu", devices=1, precision="64-true", barebones=True)
    with pytest.raises(
        PrecisionError,
        match=r"'64-true' does not run on deepspeed\n  found: .* in float32 at most",
    ):
        Accelerator(cpu=True, mixed_precision="64-true")


def test_every_strategy_has_its_column() -> None:
    classes = [
        getattr(strategies, name)
        for name in strategies.__all__
        if name.endswith("Strategy")
    ]
    assert {cls.engine for cls in classes if cls is not strategies.Strategy} == set(
        ENGINES
    )


def test_a_strategy_without_a_declared_row_is_in_no_row() -> None:
    """Names that begin with "pp" or "tp" used to be taken for meshes, on which fp8 is refused."""

    class Mine(strategies.Strategy):
        name = "ppo_engine"

        def start(self) -> None:
            self.world = self.data = self.losses = self.reports = Alone()

        def describe(self) -> str:
            return "mine"

    assert (
        Trainer(
            accelerator="cpu", strategy=Mine(), precision="fp8", barebones=True
        ).strategy.name
        == "ppo_engine"
    )


def test_a_method_by_its_former_name_is_refused() -> None:
    with pytest.raises(PrecisionError, match="separately_gathered_modules"):
        type("Mine", (Precision,), {"kept_modules": lambda self, module: []})
