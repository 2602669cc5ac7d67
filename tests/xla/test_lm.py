"""The language model's losses on torch_xla's CPU, one device and four, beside torch's: `make test-xla`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip(
    "torch_xla", reason="torch_xla has an environment of its own: make test-xla"
)

from tests.examples.test_lm import losses

pytestmark = pytest.mark.slow
WORDS = (
    ["xla"] if os.environ.get("CPU_NUM_DEVICES", "1") == "1" else ["xla", "xla_fsdp"]
)


@pytest.mark.parametrize("word", WORDS)
def test_the_same_losses(word: str, tmp_path: Path) -> None:
    found = losses(
        word, str(tmp_path / word)
    )  # ahead of the other: autograd counts devices when it is first used
    alone = losses("single_device", str(tmp_path / "alone"), "--devices", "1")
    assert list(found) == ["3", "6", "9"]
    assert found == pytest.approx(alone, abs=1e-5)
