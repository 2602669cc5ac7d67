"""The example of streams, mixtures and packing continues after a kill as if nothing had happened."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.programs import Programs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_mixture.py"


def run(
    programs: Programs, root: Path, *arguments: str, devices: int = 1
) -> subprocess.CompletedProcess[str]:
    flags = ["--precision", "64-true", "--root", root.name, "--weights", f"{root}.pt"]
    flags += ["--devices", str(devices)]
    return programs.run(EXAMPLE, *flags, *arguments, anew=devices > 1)


def weights(root: Path) -> dict[str, Tensor]:
    return torch.load(f"{root}.pt")


@pytest.mark.slow
def test_a_killed_run_continues_on_one_and_on_another_number_of_devices(
    tmp_path: Path, programs: Programs
) -> None:
    whole = tmp_path / "whole"
    assert "23 steps" in run(programs, whole).stdout
    expected = weights(whole)
    for killed_on, resumed_on in ((1, 1), (2, 1), (1, 2)):
        root = tmp_path / f"from_{killed_on}_to_{resumed_on}"
        killed = run(programs, root, "--kill-at", "12", devices=killed_on)
        assert killed.returncode != 0
        assert not root.with_suffix(".pt").exists()
        resumed = run(programs, root, devices=resumed_on)
        assert "resuming from step" in resumed.stdout, resumed.stdout + resumed.stderr
        assert "23 steps" in resumed.stdout
        for name, value in weights(root).items():
            if killed_on == resumed_on:
                assert torch.equal(value, expected[name]), name
            # Another number of ranks adds in another order.
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
