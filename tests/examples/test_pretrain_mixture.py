"""The example of streams, mixtures and packing continues after a kill as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_mixture.py"


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    flags = ["--precision", "64-true", "--root", root.name, "--weights", f"{root}.pt"]
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *flags, *arguments],
        cwd=root.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )


def weights(root: Path) -> dict[str, Tensor]:
    return torch.load(f"{root}.pt")


@pytest.mark.slow
def test_a_killed_run_continues_on_one_and_on_another_number_of_devices(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    assert "23 steps" in run(whole).stdout
    expected = weights(whole)
    for killed_on, resumed_on in (("1", "1"), ("2", "1"), ("1", "2")):
        root = tmp_path / f"from_{killed_on}_to_{resumed_on}"
        killed = run(root, "--devices", killed_on, "--kill-at", "12")
        assert killed.returncode != 0
        assert not root.with_suffix(".pt").exists()
        resumed = run(root, "--devices", resumed_on)
        assert "resuming from step" in resumed.stdout, resumed.stdout + resumed.stderr
        assert "23 steps" in resumed.stdout
        for name, value in weights(root).items():
            if killed_on == resumed_on:
                assert torch.equal(value, expected[name]), name
            # Another number of ranks adds in another order.
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
