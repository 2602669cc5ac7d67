"""``trainer-kit doctor``: check machines and ranks; ``trainer-kit env``: versions, devices and settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import TrainerKitError
from trainer_kit.core.types import JsonObject
from trainer_kit.health.machine import Finding, check_machine
from trainer_kit.report.environment import describe_environment

if TYPE_CHECKING:
    from trainer_kit.health.survey import Survey

__all__ = ["doctor", "env"]

_TIMEOUT: Final = timedelta(seconds=120)
"""How long ranks wait for each other."""


@click.command("doctor")
@click.option(
    "--directory",
    type=FilePath(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Directory of the runs.",
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    help="Ranks to start; by default one for each accelerator.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(directory: Path, devices: int | None, as_json: bool) -> None:
    """Check machines and ranks for problems of training.

    Checks versions, devices, drivers, ranks, network, ports, disk, shared memory, limits and the clock; measures
    matmuls, memory and collectives on every rank, and names ranks that differ from the others. Under a launcher
    (trainer-kit launch -m trainer_kit doctor, torchrun, srun) it checks the ranks of that launcher. Each line is OK, a
    warning, or something to fix. Exits with 1 if anything is to be fixed, else with 0.
    """
    from trainer_kit.core.environment import Environment

    try:
        environment = Environment.detect()
    # An inconsistent environment is one of the things to check: check_machine reports it as a finding.
    except TrainerKitError:
        findings = check_machine(directory)
        survey: Survey | None = None
    else:
        if environment.launched:
            findings, survey = _on_ranks(directory)
        else:
            findings, survey = _check_this_machine(directory, devices)
        # Every rank exits with the code, since a launcher reports the worst one; only rank 0 prints.
        if environment.rank > 0:
            sys.exit(_exit_code(findings))
    if as_json:
        click.echo(json.dumps(_as_json(findings, survey), indent=2))
    else:
        _print(findings, survey)
    sys.exit(_exit_code(findings))


def _check_this_machine(
    directory: Path, devices: int | None
) -> tuple[list[Finding], Survey | None]:
    """Start ranks, if there are to be several, then check this machine; a fork must come before CUDA is used."""
    from trainer_kit.core.environment import available_devices
    from trainer_kit.launch.processes import run_forked

    count = devices or available_devices()
    findings: list[Finding] = []
    result: Survey | None = None
    try:
        if count > 1:
            result = run_forked(partial(_measure, directory), count)
        else:
            result = _measure_alone(directory)
        findings = list(result.findings)
    # Whatever fails in the measurement is itself a finding; the checks of the machine may say why.
    except Exception as error:
        findings = [
            Finding(
                "speeds",
                _first_line(error),
                "fix",
                "start with fewer ranks, or look at the traceback above",
            )
        ]
    return [*check_machine(directory), *findings], result


def _on_ranks(directory: Path) -> tuple[list[Finding], Survey | None]:
    """Survey the ranks that a launcher has started; the first rank of each machine checks it."""
    try:
        result = _measure(directory, 0, machine=True)
    except Exception as error:
        finding = Finding(
            "ranks",
            f"do not connect: {_first_line(error)}",
            "fix",
            "see the lines about network and ports",
        )
        return [*check_machine(directory), finding], None
    return list(result.findings), result


def _measure(directory: Path, rank: int, machine: bool = False) -> Survey:
    """Join the ranks of the environment, and measure; ``rank`` is what starts them passes, and is not needed."""
    from trainer_kit.core.environment import Environment, pick_device
    from trainer_kit.health.survey import survey
    from trainer_kit.strategies.process_group import join_world

    environment = Environment.detect()
    # Ranks that shared an accelerator would measure each other, and NCCL refuses them: then all measure the CPU.
    if _has_devices(environment.local_world_size):
        device = pick_device(local_rank=environment.local_rank)
    else:
        device = pick_device("cpu")
    group = join_world(device, timeout=_TIMEOUT)
    machine_findings: list[Finding] = []
    if machine and environment.local_rank == 0:
        machine_findings = check_machine(directory)
    # What is OK on every machine is printed once, by the first.
    if environment.rank > 0:
        machine_findings = [
            finding for finding in machine_findings if finding.level != "OK"
        ]
    return survey(group, device, directory, machine_findings)


def _has_devices(ranks: int) -> bool:
    """Whether each rank of this machine has an accelerator."""
    from trainer_kit.core.environment import Environment, available_devices, pick_device

    if pick_device("auto").type == "cpu":
        return False
    # SLURM may show each rank only its own device.
    return available_devices() >= ranks or Environment.detect().source == "slurm"


def _measure_alone(directory: Path) -> Survey:
    from trainer_kit.core.environment import pick_device
    from trainer_kit.health.survey import survey
    from trainer_kit.strategies.single import Alone

    # Without a process group: a blocked port must not hide what one process can measure.
    return survey(Alone(), pick_device(), directory)


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}"


def _exit_code(findings: list[Finding]) -> int:
    return int(any(finding.level == "fix" for finding in findings))


def _print(findings: list[Finding], survey: Survey | None) -> None:
    hosts: set[str] = set()
    if survey is not None:
        hosts = {rank.host for rank in survey.ranks}
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        host = ""
        # On one machine, and beside a text that names the host, the name would only be noise.
        if len(hosts) > 1 and finding.host and finding.host not in finding.text:
            host = f" [{finding.host}]"
        click.echo(f"{finding.level:8}{finding.about:{width}}  {finding.text}{host}")
        if finding.fix and finding.level != "OK":
            click.echo(f"{'':8}{'':{width}}  → {finding.fix}")
    levels = [finding.level for finding in findings]
    errors = levels.count("fix")
    warnings = levels.count("warning")
    click.echo(
        f"{len(findings)} checks: {errors} to fix, {warnings} warning{'s' * (warnings != 1)}"
    )


def _as_json(findings: list[Finding], survey: Survey | None) -> JsonObject:
    # All keys exist also without a survey, so that a reader needs no check for them.
    contents: JsonObject = {
        "findings": [asdict(finding) for finding in findings],
        "ranks": [],
        "seconds": None,
    }
    if survey is not None:
        contents["ranks"] = [asdict(rank) for rank in survey.ranks]
        contents["seconds"] = round(survey.seconds, 3)
    return contents


@click.command("env")
def env() -> None:
    """Show versions, devices and settings; secrets are masked."""
    for name, value in [*describe_environment(), *_configuration()]:
        click.echo(f"{name}: {value}")


def _configuration() -> Iterator[tuple[str, object]]:
    from trainer_kit.launch.configuration import default_file, read_configuration

    path = default_file()
    yield "configuration", path or "none"
    if path is None:
        return
    try:
        values = read_configuration(path).values
    except TrainerKitError as error:
        yield "  unreadable", error
        return
    for name, value in mask_secrets(dict(values)).items():
        yield f"  {name}", value
