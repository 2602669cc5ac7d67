"""Compiled steps train as uncompiled ones do, whole and block by block, under the strategies that wrap or divide."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.parity.plain import case
from tests.parity.test_conformance import mesh
from trainer_kit.core.errors import StrategyError
from trainer_kit.strategies import DeepSpeedStrategy
from trainer_kit.testing.conformance import Classifier, assert_same, fit

BACKEND = "aot_eager"  # graphs of forward and backward as the compiler makes them, without minutes of code generation


WHOLE: dict[str, Any] = {"backend": BACKEND}
BLOCKS = {**WHOLE, "regional": True}
OPTIONS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "max_epochs": 1,
}
CASES: dict[str, tuple[Callable[[], Any], int, tuple[dict[str, Any], ...], str]] = {
    "ddp": (lambda: "ddp", 3, (WHOLE, BLOCKS), "64-true"),
    "fsdp": (lambda: "fsdp", 3, (WHOLE, BLOCKS), "64-true"),
    "tp": (partial(mesh, tp=2), 6, (WHOLE, BLOCKS), "64-true"),
    "pp": (partial(mesh, pp=2), 6, (BLOCKS,), "64-true"),
    "deepspeed": (partial(DeepSpeedStrategy, stage=2), 3, (WHOLE, BLOCKS), "32-true"),
}


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's compiler looks at it, and hides that by default
@pytest.mark.parametrize(
    "name", CASES
)  # a test each: the ranks of a test share one limit of time
@pytest.mark.world_size(2)
def test_on_two_ranks(name: str) -> None:
    strategy, size, ways, precision = CASES[name]
    # 25: short batches, and a rank without one.
    _, expected = fit("ddp", Classifier, 25, 3, 2, precision=precision, **OPTIONS)
    for how in ways:
        with case(strategy=strategy(), **how):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            _, found = fit(
                strategy(),
                Classifier,
                25,
                size,
                2,
                compile=how,
                precision=precision,
                **OPTIONS,
            )
            assert_same(found, expected, 2e-6 if precision == "32-true" else 1e-10)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, (
                "nothing was compiled"
            )


@pytest.mark.long
@pytest.mark.world_size(2)
def test_a_whole_step_of_a_pipeline_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"whole step to compile(.|\n)*regional"):
        fit(mesh(pp=2), Classifier, 25, 6, 2, compile=WHOLE, **OPTIONS)
