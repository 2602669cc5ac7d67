"""The loss of one language model under sixteen strategies, for ``make pictures``.

    python docs/draw/curves.py          # draws docs/pictures/curves.svg from docs/pictures/curves.json
    python docs/draw/curves.py --run    # trains first: examples/lm.py once for each strategy, some minutes on two cores

Each curve is what ``examples/lm.py`` prints: same seed, same data, only ``--strategy`` and ``--devices`` differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "pictures" / "curves.json"
RANKS = {
    "auto": 1,
    **dict.fromkeys(["ddp", "fsdp", "fsdp_cpu_offload", "hsdp", "tp", "cp", "pp"], 2),
    **{f"deepspeed_stage_{stage}": 2 for stage in ("0", "1", "2", "3", "2_offload", "3_offload")},
    "fsdp_tp": 4,
    "3d": 8,
}
STEPS, EVERY = 40, 1


def train(strategy: str) -> dict[int, float]:
    """The printed losses of one run, by step."""
    with TemporaryDirectory() as root:
        flags = ["--strategy", strategy, "--devices", str(RANKS[strategy]), "--root", root]
        flags += ["--steps", str(STEPS), "--every", str(EVERY)]
        ran = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "lm.py"), *flags],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise RuntimeError(f"{strategy}: exit code {ran.returncode}\n{ran.stderr[-3000:]}")
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", ran.stdout)}


def collect(strategies: list[str]) -> None:
    """Train with these strategies, and write the losses of each after its run."""
    for strategy in strategies:
        losses = train(strategy)
        print(strategy, losses[STEPS], flush=True)
        found = json.loads(DATA.read_text())["losses"] if DATA.exists() else {}
        found[strategy] = losses
        lines = ",\n".join(f'  "{name}": {json.dumps(found[name])}' for name in RANKS if name in found)
        DATA.write_text(f'{{"ranks": {json.dumps(RANKS)},\n "losses": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", choices=[*RANKS, []], help="train first, with these strategies or with all")
    args = parser.parse_args()
    if args.run is not None:
        collect(args.run or list(RANKS))


if __name__ == "__main__":
    main()
