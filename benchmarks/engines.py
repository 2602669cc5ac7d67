"""What engines cost under a trainer: ``make bench``, or ``python benchmarks/engines.py --help``.

A small transformer with AdamW on two gloo processes of one thread each. Each measurement is two fresh processes that
run one loop; the loops of an engine take turns, round by round. A step's time is the median from one call of the model
to the next, on the slower rank, and the ratio is to the hand-written loop of the same round. Memory is what the peak of
a rank adds to what it had when everything was imported and used once. Final weights are compared: a loop whose weights
differ from the hand-written one's by more than the tolerance is not reported, and the exit code is 1.

engines:
  ddp        DistributedDataParallel
  fsdp       FSDP2, a unit a block
  deepspeed  ZeRO stage 2

loops: by hand; trainer_kit, its `Trainer`; raw, its `Accelerator` in a loop of the user's own; lightning and
accelerate, where they are installed. What one of these cannot run here is said, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from checkpoint import peak as memory_peak  # noqa: E402
from ranks import environment, free_port  # noqa: E402

ENGINES = {
    "ddp": ["by hand", "trainer_kit", "raw", "lightning", "accelerate"],
    "fsdp": ["by hand", "trainer_kit", "raw", "lightning", "accelerate"],
    "deepspeed": ["by hand", "trainer_kit", "lightning", "accelerate"],
}
PACKAGES = {"lightning": "lightning", "accelerate": "accelerate"}
BUDGET = 1.05  # of trainer_kit, over the hand-written loop
WORLD, WARM, TOLERANCE = 2, 5, 1e-4


@dataclass
class Result:
    """What the rounds of one loop on one engine gave."""

    engine: str
    loop: str
    rounds: list[dict[str, float]] = field(default_factory=list)
    refused: str | None = None

    def median(self, key: str) -> float | None:
        values = [one[key] for one in self.rounds if key in one]
        return statistics.median(values) if values else None


def measure(engine: str, loop: str, sizes: dict[str, int], out: Path) -> None:
    """One loop on one rank; rank 0 leaves weights, every rank its numbers."""
    import torch
    from transformer import LOOPS, Work

    torch.set_num_threads(1)
    if loop in ("trainer_kit", "raw"):
        import trainer_kit.trainer  # noqa: F401
    elif loop in PACKAGES:
        importlib.import_module(PACKAGES[loop])
    if engine == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        importlib.import_module("deepspeed")
    LOOPS["plain"](
        Work(engine="none", width=32, layers=1, length=2, batch=1, steps=2)
    )  # imports more, once used
    work = Work(engine=engine, **sizes)
    before = memory_peak()
    model = LOOPS[loop](work)
    peak = memory_peak() - before
    # Whole, on every rank; only then may rank 0 go on alone.
    weights = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    rank = int(os.environ["RANK"])
    if rank == 0:
        torch.save([weight.detach().clone() for weight in weights], out / "weights.pt")
    steps = [
        after - start
        for start, after in zip(work.starts, work.starts[1:], strict=False)
    ][WARM:]
    (out / f"rank-{rank}.json").write_text(
        json.dumps({"ms": 1e3 * statistics.median(steps), "mb": peak / 1e6})
    )
    # torch's gloo may abort a process that shuts down Python while a thread of its own lets go of the last collective.
    os._exit(0)


def spawn(
    engine: str, loop: str, sizes: dict[str, int]
) -> tuple[dict[str, float], Any]:
    """One measurement: its numbers and final weights; raises RuntimeError with what the ranks said if one fails."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--measure",
            engine,
            loop,
            directory,
        ]
        command += [
            word for name, value in sizes.items() for word in (f"--{name}", str(value))
        ]
        port = free_port()
        logs = [open(Path(directory) / f"{rank}.log", "w+b") for rank in range(WORLD)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                command,
                env=environment(rank, WORLD, port),
                stdout=logs[rank],
                stderr=logs[rank],
                cwd=directory,
            )
            for rank in range(WORLD)
        ]
        codes = [process.wait() for process in processes]
        said = [
            log.seek(0) or log.read().decode(errors="replace").strip() for log in logs
        ]
        for log in logs:
            log.close()
        if any(codes):
            raise RuntimeError(
                next(text for text, code in zip(said, codes, strict=True) if code)[
                    -3000:
                ]
                or str(codes)
            )
        ranks = [
            json.loads((Path(directory) / f"rank-{rank}.json").read_text())
            for rank in range(WORLD)
        ]
        weights = torch.load(Path(directory) / "weights.pt", weights_only=True)
        return {key: max(rank[key] for rank in ranks) for key in ranks[0]}, weights


def run_engine(
    engine: str, loops: list[str], rounds: int, sizes: dict[str, int]
) -> list[Result]:
    """All rounds of an engine, the loops in turn."""
    results = [Result(engine, loop) for loop in ENGINES[engine] if loop in loops]
    for index in range(rounds):
        plain: tuple[dict[str, float], Any] | None = None
        for result in results:
            if result.refused is not None:
                continue
            try:
                numbers, weights = spawn(engine, result.loop, sizes)
                if result.loop == "by hand":
                    plain = numbers, weights
                if plain is not None:
                    check(weights, plain[1])
                    numbers["ratio"] = numbers["ms"] / plain[0]["ms"]
                result.rounds.append(numbers)
            except RuntimeError as error:
                result.refused = str(error)
            shown = (
                "failed"
                if result.refused
                else ", ".join(f"{key} {value:.3g}" for key, value in numbers.items())
            )
            print(
                f"{engine} {index + 1}/{rounds} {result.loop}: {shown}",
                file=sys.stderr,
                flush=True,
            )
    return results


def check(ours: list[Any], theirs: list[Any]) -> None:
    """Refuse to compare loops that did not do the same work."""
    import torch

    # Not Python's max, which passes a NaN by.
    furthest = (
        torch.stack(
            [
                (mine - other).abs().max()
                for mine, other in zip(ours, theirs, strict=True)
            ]
        )
        .max()
        .item()
    )
    if not furthest <= TOLERANCE:
        raise RuntimeError(f"final weights differ by {furthest:.3g}")


def show(engine: str, results: list[Result]) -> None:
    """The table of one engine."""
    print(f"\n{engine:<13}{'ratio':>7}{'ms a step':>12}{'peak MB':>10}")
    for result in results:
        if result.refused is not None:
            print(f"{result.loop:<13}not reported: {result.refused.splitlines()[-1]}")
            continue
        ratio = result.median("ratio")
        over = " EXCEEDED" if ratio is not None and ratio > BUDGET else ""
        note = (
            f"  budget: {BUDGET:g}{over}"
            if result.loop == "trainer_kit" and ratio is not None
            else ""
        )
        shown = "" if ratio is None else f"{ratio:.2f}"
        print(
            f"{result.loop:<13}{shown:>7}{result.median('ms'):>12.1f}{result.median('mb'):>10.0f}{note}"
        )


def _installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES.get(name, "torch")) is not None


def main() -> int:
    everyone = list(dict.fromkeys(loop for loops in ENGINES.values() for loop in loops))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        choices=list(ENGINES),
        default=list(ENGINES),
        help="default: all",
    )
    parser.add_argument(
        "--loops", nargs="+", choices=everyone, help="default: those that are installed"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="fresh processes for each number (default: 5)",
    )
    for name, value in {
        "width": 256,
        "layers": 4,
        "length": 64,
        "batch": 8,
        "steps": 40,
    }.items():
        parser.add_argument(
            f"--{name}", type=int, default=value, help=f"default: {value}"
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write every measurement here"
    )
    parser.add_argument(
        "--measure",
        nargs=3,
        metavar=("ENGINE", "LOOP", "DIRECTORY"),
        help=argparse.SUPPRESS,
    )
    options = parser.parse_args()
    if options.steps < WARM + 2 or options.width % 32:
        parser.error(f"--steps: at least {WARM + 2}; --width: a multiple of 32")
    sizes = {
        name: getattr(options, name)
        for name in ("width", "layers", "length", "batch", "steps")
    }
    if options.measure:
        measure(*options.measure[:2], sizes, Path(options.measure[2]))
        return 0
    loops = options.loops or [loop for loop in everyone if _installed(loop)]
    engines = [
        e
        for e in options.engine
        if e != "deepspeed" or importlib.util.find_spec("deepspeed") is not None
    ]
    absent = [
        name for name in (*everyone, *options.engine) if name not in (*loops, *engines)
    ]
    print(
        f"measuring: {', '.join(loops)}"
        + (f"; left out: {', '.join(absent)}" if absent else ""),
        flush=True,
    )
    results = [
        result for e in engines for result in _measured(e, loops, options.rounds, sizes)
    ]
    if options.json:
        options.json.write_text(
            json.dumps([vars(result) for result in results], indent=1)
        )
    for result in results:
        if result.refused is not None:
            print(
                f"\n{result.engine} {result.loop}:\n{result.refused}", file=sys.stderr
            )
    ours = ("by hand", "trainer_kit", "raw")
    return (
        1
        if any(result.refused is not None and result.loop in ours for result in results)
        else 0
    )


def _measured(
    engine: str, loops: list[str], rounds: int, sizes: dict[str, int]
) -> list[Result]:
    results = run_engine(engine, loops, rounds, sizes)
    show(engine, results)
    return results


if __name__ == "__main__":
    sys.exit(main())
