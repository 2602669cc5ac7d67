"""The loss of one language model under sixteen strategies, for ``make pictures``.

    python docs/draw/curves.py          # draws docs/pictures/curves.svg from docs/pictures/curves.json
    python docs/draw/curves.py --run    # trains first: examples/lm.py once for each strategy, some minutes on two cores

Each curve is what ``examples/lm.py`` prints: same seed, same data, only ``--strategy`` and ``--devices`` differ.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer_kit.testing import run_distributed

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "pictures" / "curves.json"
PICTURE = DATA.with_suffix(".svg")
RANKS = {
    "auto": 1,
    **dict.fromkeys(["ddp", "fsdp", "fsdp_cpu_offload", "hsdp", "tp", "cp", "pp"], 2),
    **{
        f"deepspeed_stage_{stage}": 2
        for stage in ("0", "1", "2", "3", "2_offload", "3_offload")
    },
    "fsdp_tp": 4,
    "3d": 8,
}
STEPS, TIMEOUT = 20, 1800.0


def train(strategy: str) -> dict[int, float]:
    """What the example prints on this rank: the loss of each step."""
    printed = io.StringIO()
    with TemporaryDirectory() as root, redirect_stdout(printed):
        sys.argv = [
            "lm.py",
            "--strategy",
            strategy,
            "--root",
            root,
            "--steps",
            str(STEPS),
            "--every",
            "1",
        ]
        runpy.run_path(str(ROOT / "examples" / "lm.py"), run_name="__main__")
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed.getvalue())
    }


def collect(strategies: list[str]) -> None:
    """Train with these strategies, and write the losses of each after its run."""
    for strategy in strategies:
        losses = run_distributed(train, RANKS[strategy], strategy, timeout=TIMEOUT)
        found = (
            json.loads(DATA.read_text(encoding="utf-8"))["losses"]
            if DATA.exists()
            else {}
        )
        found[strategy] = next(each for each in losses if each)  # one rank prints
        lines = ",\n".join(
            f'  "{name}": {json.dumps(found[name])}' for name in RANKS if name in found
        )
        DATA.write_text(
            f'{{"ranks": {json.dumps(RANKS)},\n "losses": {{\n{lines}\n}}}}\n',
            encoding="utf-8",
        )
        print(f"trained with {strategy} on {RANKS[strategy]} ranks", flush=True)


LEFT, TOP, WIDTH, HEIGHT, ROW = 48, 44, 690, 280, 20
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}.b{font-weight:600;font-size:14px;fill:#1b1f24}.n{fill:#1b1f24}"
    ".back{fill:#fff}.grid{stroke:#8c959f;stroke-opacity:.3}polyline{fill:none;stroke-linejoin:round}"
    + "".join(f".c{i}{{stroke:hsl({i * 360 // 16},70%,45%)}}" for i in range(16))
    + "@media (prefers-color-scheme:dark){text{fill:#a5adbb}.b,.n{fill:#e6e8ee}.back{fill:#14161f}"
    + "".join(f".c{i}{{stroke:hsl({i * 360 // 16},65%,62%)}}" for i in range(16))
    + "}"
)


def difference(losses: dict[str, float], alone: dict[str, float]) -> float:
    """The largest difference of two curves, at any step."""
    assert losses.keys() == alone.keys(), "curves of different steps"
    return max(abs(losses[step] - alone[step]) for step in alone)


def render() -> str:
    """All curves on one axis, each thinner than the one below it, and a legend with the differences."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    curves: dict[str, dict[str, float]] = data["losses"]
    alone = curves["auto"]
    values = [value for losses in curves.values() for value in losses.values()]
    last = max(map(int, alone))
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2

    def at(step: float, loss: float) -> tuple[float, float]:
        return LEFT + WIDTH * step / last, TOP + HEIGHT * (high - loss) / (high - low)

    drawn = []
    for half in range(round(low * 2), round(high * 2) + 1):
        y = at(0, half / 2)[1]
        drawn.append(
            f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:g}" y2="{y:g}"/>'
        )
        drawn.append(
            f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{half / 2:g}</text>'
        )
    drawn += [
        f'<text x="{at(step, low)[0]:g}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, last // 4)
    ]
    for i, (name, losses) in enumerate(curves.items()):
        points = " ".join(
            "{:.1f},{:.1f}".format(*at(int(step), loss))
            for step, loss in losses.items()
        )
        width = 1.5 + 1.1 * (len(curves) - 1 - i)
        drawn.append(
            f'<polyline class="c{i}" stroke-width="{width:g}" points="{points}"><title>{name}</title></polyline>'
        )
    below = TOP + HEIGHT + 46
    rows = -(-len(curves) // 2)
    for i, (name, losses) in enumerate(curves.items()):
        x, y = LEFT + i // rows * WIDTH / 2, below + i % rows * ROW
        ranks = data["ranks"][name]
        most = difference(losses, alone)
        apart = (
            "one process"
            if name == "auto"
            else f"{ranks} ranks, " + (f"{most:.0e} apart" if most else "equal")
        )
        drawn.append(
            f'<line class="c{i}" stroke-width="6" x1="{x:g}" x2="{x + 20:g}" y1="{y - 4}" y2="{y - 4}"/>'
        )
        drawn.append(
            f'<text class="n" x="{x + 28:g}" y="{y}">{name}</text><text x="{x + 205:g}" y="{y}">{apart}</text>'
        )
    width, height = LEFT + WIDTH + 24, below + rows * ROW + 6
    most = max(difference(losses, alone) for losses in curves.values())
    label = f"The loss of one model over {last} steps with {len(curves)} strategies: the curves coincide"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
            f' aria-label="{label}">',
            f"<style>{STYLE}</style>",
            '<rect class="back" width="100%" height="100%" rx="8"/>',
            f'<text class="b" x="{LEFT}" y="24">One language model, {len(curves)} strategies: losses differ by'
            f" {most:.0e} at most</text>",
            f'<text x="{LEFT + WIDTH}" y="24" text-anchor="end">loss over optimizer steps</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run",
        nargs="*",
        metavar="STRATEGY",
        help="train first, with these strategies or with all",
    )
    args = parser.parse_args()
    if args.run is not None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        collect(args.run or list(RANKS))
    PICTURE.write_text(render(), encoding="utf-8")
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
