"""``trainer-kit test``: check training on this machine with a small module in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.display import plural
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import JsonObject
from trainer_kit.launch.configuration import default_file

__all__ = ["trial"]


@click.command("test")
@click.option("--devices", help="Number of devices; on a CPU, of processes.")
@click.option("--accelerator", help="cpu, gpu, or a device type of torch.")
@click.option("--strategy", help="As in Trainer(...).")
@click.option("--precision", help="As in Trainer(...).")
@click.option(
    "--config_file",
    type=FilePath(exists=True),
    help="Use the configuration in this file, as `launch` does.",
)
@click.option(
    "--timeout",
    default=180.0,
    show_default=True,
    help="Time limit in seconds for all runs.",
)
def trial(
    devices: str | None,
    accelerator: str | None,
    strategy: str | None,
    precision: str | None,
    config_file: str | None,
    timeout: float,
) -> None:
    """Train a small module here, and check the result.

    Compares its weights with those of a plain loop, verifies its checkpoints, and resumes a run in new processes.
    Without options it uses the saved configuration, or all devices. Exits with 0 for OK, with 1 for a wrong result, and
    with 124 if the time is over, without a result.
    """
    values = {
        "devices": devices,
        "accelerator": accelerator,
        "strategy": strategy,
        "precision": precision,
    }
    options = [
        f"--{name}={value}" for name, value in values.items() if value is not None
    ]
    if config_file is not None and options:
        raise ConfigurationError(
            "a configuration file and options cannot be combined",
            fix="leave out --config_file or the other options",
        )
    file: str | Path | None = config_file
    # Options describe a run by themselves, to which the saved configuration would add its own.
    if not options:
        file = file or default_file()
    # Processes of `python -m`: a training that hangs or crashes must not take this command with it.
    starter = [sys.executable, "-m"]
    if file is not None:
        click.echo(f"    using {file}")
        starter += ["trainer_kit", "launch", "--quiet", f"--config_file={file}", "-m"]
    starter.append("trainer_kit.commands.trial_run")
    # One deadline for both runs: the option promises an end after this time.
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="trainer_kit-test-") as root:
        first, second = Path(root, "first"), Path(root, "second")
        first.mkdir()
        began = time.monotonic()
        _run([*starter, str(first), *options], deadline, "started", timeout)
        seconds = time.monotonic() - began
        # The run writes what it trained on, since only its ranks know what "auto" means.
        metadata = json.loads((first / "about.json").read_text())
        setup = "{world_size} x {device}, {strategy}, {precision}".format(**metadata)
        click.echo(f"OK  trained on {setup} in {seconds:.1f} s")
        _check_weights(first, metadata)
        second.mkdir()
        resume = f"--resume={first}"
        _run([*starter, str(second), *options, resume], deadline, "resumed", timeout)
        _check_resume(first, second, metadata)


def _run(command: list[str], deadline: float, verb: str, timeout: float) -> None:
    # A session of its own, so that `_stop` reaches the ranks that the process starts.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        click.echo(
            f"TIMEOUT  the run that was {verb} did not finish within the {timeout:g} s for all runs{_load()}"
        )
        click.echo(
            f"    try --timeout={3 * timeout:g}; if that is not enough, the run hangs"
        )
        _show(_stop(process))
        sys.exit(124)
    # Ctrl-C does not reach another session.
    except BaseException:
        _stop(process)
        raise
    if process.returncode:
        _fail(f"the run that was {verb} exited with code {process.returncode}", output)


def _stop(process: subprocess.Popen[str]) -> str:
    """Stop the process and all that it started. Returns the output."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=5)[0]
    return ""


def _check_weights(directory: Path, metadata: JsonObject) -> None:
    from trainer_kit.checkpoint import checkpoints, read_weights, verify_checkpoint
    from trainer_kit.commands.trial_run import STEPS, plain_weights
    from trainer_kit.core.errors import CheckpointError

    records = checkpoints(directory / "checkpoints")
    if [record.info.get("step") for record in records] != [STEPS // 2, STEPS]:
        _fail(
            f"checkpoints of steps {STEPS // 2} and {STEPS} are missing",
            ", ".join(str(r.path.name) for r in records),
        )
    try:
        for record in records:
            verify_checkpoint(record.path)
    except CheckpointError as error:
        _fail("a checkpoint is damaged", str(error))
    click.echo(f"OK  saved and verified {plural(len(records), 'checkpoint')}")
    before, after = plain_weights(metadata["world_size"])
    weights = read_weights(records[-1].path)
    moved = max(float((after[name] - before[name]).abs().max()) for name in after)
    difference = max(
        float((after[name] - weights[name].to(after[name].dtype)).abs().max())
        for name in after
    )
    # Relative to how far the weights moved, so that a run that trains nothing is not close to the plain loop. A tenth
    # allows for six steps in 16 bits.
    allowed = 0.1
    if metadata["precision"].startswith(("32", "64")):
        allowed = 1e-4
    line = f"weights moved by {moved:.2g}, and are {difference:.1g} from those of a plain loop in 32-true"
    # `not <=`: a difference of NaN fails too.
    if not difference <= allowed * moved:
        _fail("training comes out differently from a plain loop", line)
    click.echo(f"OK  {line}")


def _check_resume(first: Path, second: Path, metadata: JsonObject) -> None:
    import torch

    from trainer_kit.checkpoint import checkpoints, read_weights

    weights = read_weights(checkpoints(first / "checkpoints")[-1].path)
    resumed_weights = read_weights(checkpoints(second / "checkpoints")[-1].path)
    exact = all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
    close = all(
        torch.allclose(weights[name].float(), resumed_weights[name].float(), atol=1e-4)
        for name in weights
    )
    # Kernels of accelerators may sum in another order each time; on a CPU a resumed run is bit-identical.
    if not (exact or (close and metadata["device"] != "cpu")):
        _fail(
            "a resumed run ends with other weights",
            f"resumed from step 3 on {metadata['device']}",
        )
    agreement = "the same weights to 1e-4"
    if exact:
        agreement = "the same bits"
    click.echo(f"OK  resumed in new processes, with {agreement}")


def _fail(problem: str, details: str) -> NoReturn:
    click.echo(f"WRONG  {problem}")
    _show(details)
    sys.exit(1)


def _show(output: str) -> None:
    for line in output.strip().splitlines()[-30:]:
        click.echo(f"    {line}")


def _load() -> str:
    """The load of the machine, if it is known."""
    # Windows has no load, and some containers hide it.
    with suppress(AttributeError, OSError):
        return f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    return ""
