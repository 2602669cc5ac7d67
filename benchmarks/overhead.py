"""What a training loop costs over the hand-written one: ``make bench``, or ``python benchmarks/overhead.py --help``.

A tiny step (MLP 32→64→10, batch 32, cross entropy, SGD with momentum: about 100 µs) makes the loop's own cost visible.
Each measurement is a fresh process that runs the hand-written loop, the library's, and the hand-written one again, on
one thread, and takes CPU time of that thread; what is reported is the median over rounds of the ratio to the
hand-written loop that does the same work. Python calls in a step are counted in runs of their own; they are exact and
do not depend on the machine. Where final weights (or means) differ from the hand-written loop's, nothing is reported
for that loop, and the exit code is 1.

cases:
  bare          train, nothing else
  usual         a value logged every 10 steps to TensorBoard, a progress bar, one checkpoint at the end
  idle50        bare, with 50 callbacks that override nothing
  log5          bare, and five scalars logged every step with averages over the epoch
  eval          one evaluation batch
  eval_metric   the same, with the mean of the loss
  eval_loader   one evaluation batch of a DataLoader
  mean_loader   the same, with the mean of the loss
  predict       one prediction batch of a DataLoader
  accumulate    four micro-batches an optimizer step, gradients clipped by norm; for one micro-batch
  ddp2          bare, on two gloo processes with a DataLoader, over a hand-written DistributedDataParallel loop
  ddp2_own      the same over batches that the user divided: the size of the other rank's batch is unknown beforehand
  capture       bare, with compile="step": forward and backward run as one captured graph
  import        CPU seconds over `import torch` until the library's main classes are there
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from ranks import environment, free_port  # noqa: E402

IMPORTS = {
    "trainer_kit": ("trainer_kit", ["Trainer", "TrainModule"]),
    "raw": ("trainer_kit", ["Accelerator"]),
    "lightning": ("lightning.pytorch", ["Trainer", "LightningModule"]),
    "fabric": ("lightning.fabric", ["Fabric"]),
    "accelerate": ("accelerate", ["Accelerator"]),
    "ignite": ("ignite.engine", ["Engine", "Events"]),
}
EVERY_LIBRARY = list(IMPORTS)
WITH_HOOKS = ["trainer_kit", "lightning"]
CASES = {
    "bare": EVERY_LIBRARY,
    "usual": EVERY_LIBRARY,
    "idle50": WITH_HOOKS,
    "log5": WITH_HOOKS,
    "eval": EVERY_LIBRARY,
    "eval_metric": EVERY_LIBRARY,
    "eval_loader": EVERY_LIBRARY,
    "mean_loader": EVERY_LIBRARY,
    "predict": WITH_HOOKS,
    "accumulate": EVERY_LIBRARY,
    "ddp2": EVERY_LIBRARY,
    "ddp2_own": EVERY_LIBRARY,
    "capture": ["trainer_kit"],
    "import": EVERY_LIBRARY,
}
# The case without what is measured: `over bare` and `extra` compare with it.
BASE = {"usual": "bare", "eval_metric": "eval", "mean_loader": "eval_loader"}
# For a loop of the user's own with trainer_kit's Accelerator, called "raw".
RAW_BUDGETS = {"bare": ("ratio", 1.10), "accumulate": ("ratio", 1.10)}
# For trainer_kit: the column, and its budget (docs/design.md, chapter 9).
BUDGETS = {
    "bare": ("ratio", 1.05),
    "usual": ("ratio", 1.15),
    "idle50": ("extra_calls", 0.0),
    "log5": ("extra_us", 35.0),
    "eval": ("ratio", 1.10),
    "eval_metric": ("ratio", 1.05),
    "eval_loader": ("ratio", 1.02),
    "mean_loader": ("ratio", 1.05),
    "predict": ("ratio", 1.02),
    "accumulate": ("ratio", 1.05),
    "ddp2": ("ratio", 1.03),
    "capture": ("ratio", 0.7),
    "import": ("seconds", 0.1),
}
WARM, COUNTED = 200, 200


@dataclass
class Result:
    """What the rounds of one library in one case gave."""

    case: str
    library: str
    rounds: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None

    def median(self, key: str) -> float | None:
        values = [one[key] for one in self.rounds if one.get(key) is not None]
        return statistics.median(values) if values else None

    def spread(self) -> str:
        ratios = [one["ratio"] for one in self.rounds if "ratio" in one]
        return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else ""

    def budget(self) -> tuple[str, float] | None:
        return {"trainer_kit": BUDGETS, "raw": RAW_BUDGETS}.get(self.library, {}).get(
            self.case
        )

    def over_budget(self) -> bool:
        found = self.budget()
        if found is None:
            return False
        key, limit = found
        value = self.median(key)
        return value is not None and value > limit


def measure(case: str, library: str, steps: int, count: bool) -> dict[str, Any]:
    """One measurement, in this process."""
    if case == "import":
        return _measure_import(*IMPORTS[library])
    import hand_written
    import peers
    import torch
    from workload import FROM_LOADER, Batches, Clock, Samples, Work

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    world = 2 if case.startswith("ddp2") else 1
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    distinct = [(torch.randn(32, 32), torch.randint(0, 10, (32,))) for _ in range(64)]
    finals: list[Any] = []

    def one(loop: Any, counting: bool = False, case: str = case, **extra: int) -> float:
        length = COUNTED if counting else steps
        to_the_end = case == "usual" and not counting
        clock = Clock(WARM, None if to_the_end else WARM + length, counting)
        total = WARM + length + (0 if to_the_end else 4)
        everything = (distinct * (world * total // len(distinct) + 1))[: world * total]
        batches: Any = Batches(everything[rank::world])
        if case == "ddp2":
            samples = Samples(everything)
            batches = (
                samples.loader()
                if loop is peers.PEERS["trainer_kit"]
                else samples.shard(rank, world)
            )
        elif case in FROM_LOADER:
            batches = Samples(everything).loader()
        with tempfile.TemporaryDirectory() as directory:
            work = Work(case, batches, clock, directory, **extra)
            finals.append(
                ([p.detach().clone() for p in loop(work).parameters()], work.losses)
            )
        return (clock.calls if counting else clock.seconds * 1e6) / length

    plain, loop = hand_written.run, peers.PEERS[library]
    extra = {"idle50": {"idle": 50}, "log5": {"logs": 5}}.get(case, {})
    before = one(plain)
    ours = one(loop, **extra)
    after = one(plain)
    _check(finals)
    result: dict[str, Any] = {
        "us": ours,
        "plain_us": (before + after) / 2,
        "ratio": 2 * ours / (before + after),
    }
    if case in BASE:
        result["over_bare"] = ours / one(plain, case=BASE[case])
    if extra:
        result["extra_us"] = ours - one(loop)
    if count:
        result["calls"], result["plain_calls"] = (
            one(loop, True, **extra),
            one(plain, True),
        )
        if extra:
            result["extra_calls"] = result["calls"] - one(loop, True)
    if world > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def _check(finals: list[Any]) -> None:
    """Refuse to compare loops that did not do the same work."""
    import torch

    (plain, plain_losses), *others = finals
    for weights, losses in others:
        for ours, theirs in zip(weights, plain, strict=True):
            if not torch.equal(ours, theirs):
                raise SystemExit(
                    f"final weights differ by {(ours - theirs).abs().max().item():.3g}"
                )
        for name, value in plain_losses.items():
            if abs(losses[name] - value) > 1e-5:
                raise SystemExit(
                    f"the mean of {name} is {losses[name]}, by hand {value}"
                )


def _measure_import(package: str, names: list[str]) -> dict[str, Any]:
    import torch  # noqa: F401

    began, modules = time.thread_time(), len(sys.modules)
    found = importlib.import_module(package)
    for (
        name
    ) in names:  # some packages import nothing until they are asked for something
        getattr(found, name)
    return {
        "seconds": time.thread_time() - began,
        "modules": len(sys.modules) - modules,
    }


def spawn(case: str, library: str, steps: int, count: bool) -> dict[str, Any]:
    """One measurement in fresh processes with a terminal; raises RuntimeError with what they said if one fails."""
    import fcntl
    import pty
    import struct
    import termios

    world = 2 if case.startswith("ddp2") else 1
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        said: list[bytes] = []
        reader = threading.Thread(target=_drain, args=(ours, said))
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--measure",
            case,
            library,
            "--steps",
            str(steps),
        ]
        command += ["--json", str(out), *(["--count"] if count else [])]
        processes = [
            subprocess.Popen(
                command,
                env=environment(rank, world, port),
                stdout=theirs,
                stderr=theirs,
                cwd=directory,
            )
            for port in [free_port()]
            for rank in range(world)
        ]
        os.close(theirs)
        reader.start()
        codes = [process.wait() for process in processes]
        reader.join()
        os.close(ours)
        if any(codes):
            text = b"".join(said).decode(errors="replace").replace("\r\n", "\n").strip()
            raise RuntimeError(text[-3000:] or f"exit codes {codes}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _drain(terminal: int, said: list[bytes]) -> None:
    # The last process to close its end makes the read fail: that is how a terminal says end of file.
    try:
        while data := os.read(terminal, 65536):
            said.append(data)
    except OSError:
        return


def run_case(case: str, libraries: list[str], rounds: int, steps: int) -> list[Result]:
    """All rounds of a case, the libraries in turn."""
    results = [Result(case, library) for library in CASES[case] if library in libraries]
    for index in range(rounds):
        for result in results:
            if result.refused is not None:
                continue
            try:
                result.rounds.append(
                    spawn(case, result.library, steps, count=index == 0)
                )
            except RuntimeError as error:
                result.refused = str(error)
            shown = "failed" if result.refused else _numbers(result.rounds[-1])
            print(
                f"{case} {index + 1}/{rounds} {result.library}: {shown}",
                file=sys.stderr,
                flush=True,
            )
    return results


def _numbers(measured: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.3g}" for key, value in measured.items() if value is not None
    )


def show(case: str, results: list[Result]) -> None:
    """The table of one case."""
    columns = ["over bare", "µs", "by hand", "extra µs", "calls", "by hand", "extra"]
    keys = [
        "over_bare",
        "us",
        "plain_us",
        "extra_us",
        "calls",
        "plain_calls",
        "extra_calls",
    ]
    if case == "import":
        columns, keys = ["seconds", "modules"], ["seconds", "modules"]
    present = [
        index
        for index, key in enumerate(keys)
        if any(r.median(key) is not None for r in results)
    ]
    header = "" if case == "import" else f"{'ratio':>7} {'range':>11}"
    print(
        f"\n{case:<13}{header}" + "".join(f"{columns[index]:>10}" for index in present)
    )
    for result in results:
        if result.refused is not None:
            print(
                f"{result.library:<13}not reported: {result.refused.splitlines()[-1]}"
            )
            continue
        ratio = result.median("ratio")
        cells = [] if ratio is None else [f"{ratio:>7.2f} {result.spread():>11}"]
        for index in present:
            value = result.median(keys[index])
            digits = (
                3
                if keys[index] == "seconds"
                else 2
                if keys[index] == "over_bare"
                else 1
            )
            cells.append(" " * 10 if value is None else f"{value:>10.{digits}f}")
        note = ""
        if (budget := result.budget()) is not None:
            key, limit = budget
            note = f"  budget: {key.replace('_', ' ')} {limit:g}" + (
                " EXCEEDED" if result.over_budget() else ""
            )
        print(f"{result.library:<13}" + "".join(cells) + note)


def _installed(library: str) -> bool:
    return importlib.util.find_spec(IMPORTS[library][0].partition(".")[0]) is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        nargs="+",
        choices=list(CASES),
        default=list(CASES),
        help="default: all",
    )
    parser.add_argument(
        "--frameworks",
        nargs="+",
        choices=EVERY_LIBRARY,
        help="default: those that are installed",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="fresh processes for each number (default: 5)",
    )
    parser.add_argument(
        "--steps", type=int, default=2000, help="steps that are timed (default: 2000)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write every measurement here"
    )
    parser.add_argument(
        "--measure", nargs=2, metavar=("CASE", "LIBRARY"), help=argparse.SUPPRESS
    )
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 100 or options.steps % 20:
        parser.error(
            "--steps: at least 100, and a multiple of 20, so that every run ends between two windows and flushes"
        )
    if options.measure:
        measured = measure(*options.measure, options.steps, options.count)
        if os.environ.get("RANK", "0") == "0":
            options.json.write_text(json.dumps(measured))
        return 0
    libraries = options.frameworks or [
        name for name in EVERY_LIBRARY if _installed(name)
    ]
    absent = [name for name in EVERY_LIBRARY if name not in libraries]
    print(
        f"measuring: {', '.join(libraries)}"
        + (f"; left out: {', '.join(absent)}" if absent else ""),
        flush=True,
    )
    everything: list[Result] = []
    for case in options.case:
        results = run_case(case, libraries, options.rounds, options.steps)
        show(case, results)
        everything += results
    if options.json:
        options.json.write_text(
            json.dumps([vars(result) for result in everything], indent=1)
        )
    for result in everything:
        if result.refused is not None:
            print(
                f"\n{result.case} {result.library}:\n{result.refused}", file=sys.stderr
            )
    return 1 if any(result.refused is not None for result in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
