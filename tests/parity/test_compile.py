"""Compiled steps train as uncompiled ones do, whole and block by block, under the strategies that wrap or divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.plain import case
from trainer_kit.testing.conformance import Classifier, assert_same, fit

BACKEND = "aot_eager"  # graphs of forward and backward as the compiler makes them, without minutes of code generation


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's compiler looks at it, and hides that by default
@pytest.mark.world_size(2)
def test_ddp_and_fsdp() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1}
    # 25: short batches, and a rank without one.
    _, expected = fit("ddp", Classifier, 25, 3, 2, **options)
    for strategy in ("ddp", "fsdp"):
        for how in ({"backend": BACKEND}, {"backend": BACKEND, "regional": True}):
            with case(strategy=strategy, **how):
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                _, found = fit(strategy, Classifier, 25, 3, 2, compile=how, **options)
                assert_same(found, expected)
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
