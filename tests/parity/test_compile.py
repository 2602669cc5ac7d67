"""Compiled steps train as uncompiled ones do, whole and block by block, under the strategies that wrap or divide."""

from __future__ import annotations

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


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's compiler looks at it, and hides that by default
@pytest.mark.world_size(2)
def test_on_two_ranks() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1}
    whole: dict[str, Any] = {"backend": BACKEND}
    blocks = {**whole, "regional": True}
    # 25: short batches, and a rank without one.
    expected = {one: fit("ddp", Classifier, 25, 3, 2, precision=one, **options)[1] for one in ("64-true", "32-true")}
    for strategy, size, ways, precision in (
        (lambda: "ddp", 3, (whole, blocks), "64-true"),
        (lambda: "fsdp", 3, (whole, blocks), "64-true"),
        (partial(mesh, tp=2), 6, (whole, blocks), "64-true"),
        (partial(mesh, pp=2), 6, (blocks,), "64-true"),
        (partial(DeepSpeedStrategy, stage=2), 3, (whole, blocks), "32-true"),
    ):
        for how in ways:
            with case(strategy=strategy(), **how):
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                _, found = fit(strategy(), Classifier, 25, size, 2, compile=how, precision=precision, **options)
                assert_same(found, expected[precision], 2e-6 if precision == "32-true" else 1e-10)
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    with pytest.raises(StrategyError, match=r"whole step to compile(.|\n)*regional"):
        fit(mesh(pp=2), Classifier, 25, 6, 2, compile=whole, **options)
