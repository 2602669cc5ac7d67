"""Writes the pictures that tutorials plot, docs/pictures/diffusion.png and forecast.png, for ``make pictures``.

It runs the scripts in full, about two minutes on two cores, in a directory of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PLOTS = {"diffusion": "diffusion.png", "time_series": "forecast.png"}
"""By tutorial: the picture that its script writes, and its page shows."""


def draw(name: str, *flags: str, into: Path = PICTURES) -> Path:
    """Run one tutorial, and keep its picture."""
    with TemporaryDirectory() as root:
        subprocess.run(
            [
                sys.executable,
                str(ROOT / "examples" / "tutorials" / f"{name}.py"),
                *flags,
            ],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return shutil.copy(Path(root) / PLOTS[name], into / PLOTS[name])


if __name__ == "__main__":
    for tutorial in PLOTS:
        print(f"wrote {draw(tutorial).relative_to(ROOT)}", flush=True)
