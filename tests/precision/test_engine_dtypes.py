"""What a precision tells an engine that gathers weights and adds up gradients of its own."""

from __future__ import annotations

import pytest
import torch

from trainer_kit.precision import make_precision


@pytest.mark.parametrize(
    ("word", "param", "reduce"),
    [
        ("32-true", None, None),
        ("64-true", None, None),
        ("bf16-true", None, None),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.float16, torch.float32),
    ],
)
def test_gathered_weights_and_added_gradients(
    word: str, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    precision = make_precision(word, "cpu")
    assert (precision.param_dtype, precision.reduce_dtype) == (param, reduce)
