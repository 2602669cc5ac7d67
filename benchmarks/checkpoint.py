"""What saving and resuming cost: ``python benchmarks/checkpoint.py --help``.

A stack of linear layers with AdamW, 96 M parameters, 1.15 GB of state (``--layers`` for less), is trained with a save
now and then. Each case is a fresh process. The stall is what a step with a save takes longer than one without; a step
beside a save that is written behind it may take longer too, which `beside` shows.

cases:
  ours          `Trainer` with `ModelCheckpoint`
  ours_waiting  the same with `async_save=False`
  torch_save    a plain loop with `torch.save`, a temporary file and a rename
  torch_async   a plain loop with `torch.distributed.checkpoint.async_save`
  memory        what saves add to the peak of `Trainer`

The copy is one of the whole state into host memory that was touched before: what no saving behind a loop can do
without. Verification is on one core. `resume 100 MB` reads, verifies and restores a state of that size.

Memory is the peak of a training with saves, less that of one without any, in processes whose malloc gives large blocks
back (MALLOC_MMAP_THRESHOLD_). Otherwise the gradients, which come and go with each step, leave holes on
the heap, and the peaks, those of the cases too, vary by several gradients from run to run, with and without saves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ["ours", "ours_waiting", "torch_save", "torch_async", "memory"]
WIDTH = 2828  # 8 M parameters a layer, 96 MB with both moments of AdamW
SMALL = 1  # layers of the state of about 100 MB


def model(layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def batch() -> Any:
    import torch

    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))


def peak() -> int:
    """The most memory that this process has had, in bytes.

    Linux's ``ru_maxrss`` is not it: a new process starts with that of the process that started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return 1024 * next(
        int(line.split()[1])
        for line in status.splitlines()
        if line.startswith("VmHWM:")
    )


def run_ours(
    layers: int, steps: int, every: int | None, directory: Path, behind: bool
) -> list[float]:
    import trainer_kit as tk

    class Net(tk.TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model(layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(tk.Callback):
        """From the start of one step to the start of the next: whatever is between them belongs to the first."""

        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            starts.append(time.perf_counter())

    starts: list[float] = []
    keepers = (
        [tk.callbacks.ModelCheckpoint(directory, every_n_train_steps=every)]
        if every
        else []
    )
    trainer = tk.Trainer(
        max_steps=steps + 1,
        accelerator="cpu",
        callbacks=[Clock(), *keepers],
        enable_checkpointing=bool(keepers),
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        async_save=behind,
    )
    trainer.fit(Net(), [batch()] * (steps + 1))
    return [after - before for before, after in itertools.pairwise(starts)]


def run_plain(
    layers: int, steps: int, every: int, save: Callable[[Any, Any, int], None]
) -> list[float]:
    import torch

    net = model(layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    data, times = batch(), []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
        if step % every == 0:
            save(net, optimizer, step)
        times.append(time.perf_counter() - start)
    return times


def torch_save(directory: Path) -> Callable[[Any, Any, int], None]:
    def save(net: Any, optimizer: Any, step: int) -> None:
        import torch

        work = directory / "work"
        torch.save(
            {"model": net.state_dict(), "optimizer": optimizer.state_dict()}, work
        )
        with open(work, "rb") as file:
            os.fsync(file.fileno())
        work.rename(directory / f"step-{step}.pt")
        for old in directory.glob("step-*.pt"):
            if old.name != f"step-{step}.pt":
                old.unlink()

    return save


def torch_async(directory: Path) -> Callable[[Any, Any, int], None]:
    import logging
    import warnings

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    under_way: list[Any] = []

    def save(net: Any, optimizer: Any, step: int) -> None:
        if under_way:
            under_way.pop().result()
        weights, moments = get_state_dict(net, optimizer)
        under_way.append(
            dcp.async_save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=directory / str(step),
            )
        )
        for old in directory.iterdir():
            if old.name not in (str(step), str(step - 1)) and int(old.name) < step - 2:
                shutil.rmtree(old)

    return save


def measure(
    case: str, layers: int, steps: int, every: int, directory: Path
) -> dict[str, float]:
    """Seconds of steps without a save, with one, and beside one; and memory."""
    import torch

    torch.set_num_threads(1)
    if case.startswith("ours"):
        times = run_ours(layers, steps, every, directory, case == "ours")
    else:
        times = run_plain(
            layers,
            steps,
            every,
            {"torch_save": torch_save, "torch_async": torch_async}[case](directory),
        )
    # The first save is counted by itself: its memory is new.
    first = times[every - 1]
    with_save = [
        seconds
        for step, seconds in enumerate(times, 1)
        if step % every == 0 and step > every
    ]
    beside = [
        seconds
        for step, seconds in enumerate(times, 1)
        if step % every == 1 and step > every
    ]
    without = [
        seconds for step, seconds in enumerate(times, 1) if step > 2 and step < every
    ]
    step = statistics.median(without)
    return {
        "step": step,
        "stall": statistics.median(with_save) - step,
        "first_stall": first - step,
        "beside": statistics.median(beside) - step,
        "peak_gb": peak() / 1e9,
    }


def measure_peak(case: str, layers: int, directory: Path) -> int:
    """The most memory, in bytes, of a training with three saves (``ours``), or without any (``none``)."""
    import torch

    torch.set_num_threads(1)
    run_ours(layers, 9, None if case == "none" else 3, directory, behind=True)
    return peak()


def measure_memory(layers: int, directory: Path) -> dict[str, float]:
    """What saves add to the peak of memory, in copies of the state."""
    peaks = []
    for case in ("none", "ours"):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            peaks.append(
                in_process(
                    "peak",
                    str(layers),
                    case,
                    place,
                    MALLOC_MMAP_THRESHOLD_=str(1 << 20),
                )
            )
    without, with_saves = peaks
    return {
        "without_gb": without / 1e9,
        "copies": (with_saves - without) / state_size(layers),
    }


def measure_copy(layers: int) -> float:
    """Seconds of one copy of the whole state into host memory that was touched before."""
    import torch

    torch.set_num_threads(1)
    state = [torch.ones(WIDTH, WIDTH) for _ in range(3 * layers)]
    buffers = [torch.zeros_like(tensor) for tensor in state]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for buffer, tensor in zip(buffers, state, strict=True):
            buffer.copy_(tensor)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_reading(layers: int, directory: Path) -> dict[str, float]:
    """Saving, verifying and loading by themselves; and `torch`'s."""
    import torch

    from trainer_kit.checkpoint import (
        read_checkpoint,
        verify_checkpoint,
        write_checkpoint,
    )

    torch.set_num_threads(1)
    net = model(layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net(batch()).square().mean().backward()
    optimizer.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    size = state_size(layers)

    def seconds(act: Callable[[], Any]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    ours, theirs = directory / "ours", directory / "theirs.pt"
    saving = seconds(lambda: write_checkpoint(ours, state, overwrite=True))
    verifying = seconds(lambda: verify_checkpoint(ours))
    loading = seconds(lambda: read_checkpoint(ours))

    def restore() -> None:
        found = read_checkpoint(ours)
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    restoring = seconds(restore)
    saving_torch = seconds(lambda: torch.save(state, theirs))
    return {
        "bytes": size,
        "save": saving,
        "verify": verifying,
        "verify_gb_s": size / 1e9 / verifying,
        "load": loading,
        "resume": restoring,
        "torch_save": saving_torch,
        "torch_load": seconds(lambda: torch.load(theirs, weights_only=True)),
    }


def state_size(layers: int) -> int:
    """Weights and both moments, in bytes."""
    return 3 * 4 * WIDTH * WIDTH * layers


def in_process(*arguments: str, **environment: str) -> Any:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--only", *arguments]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if ran.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{ran.stdout}{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def report(options: argparse.Namespace) -> dict[str, Any]:
    layers, steps, every = str(options.layers), str(options.steps), str(options.every)
    directory = options.directory or (
        "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    )
    size = state_size(options.layers) / 1e9
    print(
        f"{size:.2f} GB of state, a save every {every} of {steps} steps, one thread, in {directory}\n",
        flush=True,
    )
    found: dict[str, Any] = {"copy": in_process("copy", layers)}
    print(
        f"one copy of the state       {found['copy']:7.3f} s (the stall may be 1.1 of it)",
        flush=True,
    )
    print(
        f"\n{'':14}{'step':>9}{'stall':>9}{'first':>9}{'beside':>9}{'of 100 steps':>14}{'peak':>10}"
    )
    cases = options.case or CASES
    for case in (case for case in cases if case != "memory"):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            one = found[case] = in_process(case, layers, steps, every, place)
        share = 100 * one["stall"] / (100 * one["step"])
        print(
            f"{case:14}{one['step']:7.3f} s{one['stall']:7.3f} s{one['first_stall']:7.3f} s{one['beside']:7.3f} s"
            f"{share:12.2f} %{one['peak_gb']:7.2f} GB",
            flush=True,
        )
    if "memory" in cases:
        one = found["memory"] = measure_memory(options.layers, Path(directory))
        print(
            f"\nmemory of saves {one['copies']:.3f} copies of the state, beside {one['without_gb']:.2f} GB",
            flush=True,
        )
    print(
        f"\n{'':14}{'save':>9}{'verify':>9}{'':>12}{'load':>9}{'resume':>9}{'torch.save':>12}{'torch.load':>12}"
    )
    for name, count in (("whole", layers), ("100 MB", str(SMALL))):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            one = found[name] = in_process("reading", count, place)
        print(
            f"{name:14}{one['save']:7.3f} s{one['verify']:7.3f} s{one['verify_gb_s']:7.1f} GB/s{one['load']:7.3f} s"
            f"{one['resume']:7.3f} s{one['torch_save']:10.3f} s{one['torch_load']:10.3f} s",
            flush=True,
        )
    return found


def only(arguments: list[str]) -> Any:
    what, layers, *rest = arguments
    if what == "copy":
        return measure_copy(int(layers))
    if what == "peak":
        return measure_peak(rest[0], int(layers), Path(rest[1]))
    if what == "reading":
        return measure_reading(int(layers), Path(rest[0]))
    return measure(what, int(layers), int(rest[0]), int(rest[1]), Path(rest[2]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", choices=CASES, help="one of them; may be repeated"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=12,
        help="of 8 M parameters, 96 MB of state each (12)",
    )
    parser.add_argument("--steps", type=int, default=62, help="of training (62)")
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        help="steps from save to save (20); a save that is not through by then is waited for",
    )
    parser.add_argument(
        "--directory", help="to save in (/dev/shm, else the temporary directory)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.every < 4 or options.steps <= 2 * options.every:
        parser.error(
            "steps without a save are needed too: --every of 4 or more, --steps of more than twice that"
        )
    if options.only:
        print(json.dumps(only(options.only)))
        return
    found = report(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
