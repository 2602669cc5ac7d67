"""The language model's losses, on every engine that a CPU can run (torch_xla's: tests/xla), next to one process's."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from trainer_kit.testing import run_distributed

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lm.py"


def losses(strategy: str, root: str, *more: str) -> dict[str, float]:
    """As the example prints them; on ranks that are there already."""
    flags = [
        "--steps",
        "9",
        "--every",
        "3",
        "--strategy",
        strategy,
        "--root",
        root,
        *more,
    ]
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(EXAMPLE), *flags]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return {
        step: float(loss)
        for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed.getvalue())
    }


def check(strategies: list[str], alone: dict[str, float], root: str) -> None:
    for strategy in strategies:
        found = losses(strategy, f"{root}/{strategy}")
        if torch.distributed.get_rank() == 0:
            assert found == pytest.approx(alone, abs=1e-5), strategy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ["ddp", "fsdp", "fsdp_cpu_offload", "hsdp"]),
        (2, ["tp", "cp", "pp"]),
        (
            2,
            [
                f"deepspeed_stage_{stage}"
                for stage in ("0", "1", "2", "3", "2_offload", "3_offload")
            ],
        ),
        (4, ["fsdp_tp"]),
        (8, ["3d"]),
    ],
)
def test_every_engine_has_the_same_losses(
    ranks: int, strategies: list[str], tmp_path: Path
) -> None:
    alone = losses("auto", str(tmp_path / "alone"))
    assert list(alone) == ["3", "6", "9"]
    run_distributed(check, ranks, strategies, alone, str(tmp_path), timeout=110)
