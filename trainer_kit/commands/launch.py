"""``trainer-kit launch`` and ``explain``: run a script on processes and machines, and show the plan of such a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, final

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.commands.troubleshooting import find_section
from trainer_kit.core.configuration_sources import Chosen, describe_origins
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.lazy import other_names
from trainer_kit.core.types import Function
from trainer_kit.launch.options import Option, all_options

if TYPE_CHECKING:
    from trainer_kit.launch.configuration import Resolved
    from trainer_kit.launch.plan import Plan

__all__ = ["explain", "launch"]

# Makes this module a package, so that the import of a module that Accelerate has below it raises our error.
__path__: list[str] = []
__getattr__ = other_names(__name__)

_CONTEXT: Final = {
    # Options after SCRIPT are the script's own.
    "allow_interspersed_args": False,
    # --num-processes is --num_processes.
    "token_normalize_func": lambda token: token.replace("-", "_"),
}


# The class is generic from click 8.4 on only, and older versions are supported.
if TYPE_CHECKING:
    _ValueType = click.ParamType[object]
else:
    _ValueType = click.ParamType


@final
class _Value(_ValueType):
    """A click type that reads an option's value as in a configuration file."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = "text"
        if option.whole:
            self.name = "integer"

    def convert(
        self,
        value: object,
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> object:
        try:
            return self.option.value(str(value))
        except ValueError as error:
            self.fail(f"{error}, not {value!r}", parameter, context)


def _launch_options(command: Function) -> Function:
    """Add a flag for every option in `trainer_kit.launch.options` to a command."""
    # Flags of None are the option's own name; an empty tuple marks a key that only files have.
    options = [option for option in all_options().values() if option.flags != ()]
    options.sort(key=lambda option: not option.switch)
    # click lists the last decorator first.
    for option in reversed(options):
        flags = option.flags or (f"--{option.name}",)
        value_type = None
        if not option.switch:
            value_type = _Value(option)
        command = click.option(
            *flags,
            flags[0].removeprefix("--"),
            is_flag=option.switch,
            multiple=option.many,
            # None tells a flag that was not written from one with a value, which overrides the file.
            default=None,
            type=value_type,
            help=option.help,
            hidden=not option.help,
        )(command)
    command = click.option(
        "--no_python", is_flag=True, help="SCRIPT is a program of any language."
    )(command)
    command = click.option(
        "-m",
        "--module",
        is_flag=True,
        help="SCRIPT is a module's name, as for python -m.",
    )(command)
    file = FilePath(path_type=Path)
    return click.option(
        "--config_file",
        type=file,
        help="YAML or JSON; by default the file of `config`.",
    )(command)


def _warn_ignored(run_plan: Plan, options: Resolved) -> Iterator[str]:
    for name, reason in run_plan.ignored.items():
        yield f"has no effect yet: {options.describe(name)}: {reason}"


def _flags(values: Mapping[str, object]) -> dict[str, Chosen]:
    """The flags by option, each with its name as the origin."""
    flags = {}
    for name, value in values.items():
        # Flags that were not written.
        if value in (None, ()):
            continue
        # click has tuples where files have lists, which `resolve` compares and prints.
        if isinstance(value, tuple):
            value = list(value)
        flags[name] = Chosen(value, f"flag --{name}")
    return flags


def _masked(name: str, chosen: Chosen) -> Chosen:
    value = mask_secrets(chosen.value, name)
    # A list of NAME=value texts, each of which may be a secret by its own name.
    if name == "tpu_env" and isinstance(value, list):
        pairs = [pair.partition("=") for pair in value]
        value = [f"{key}={mask_secrets(text, key)}" for key, _, text in pairs]
    return Chosen(value, chosen.origin)


def _script_words(
    script: str, arguments: tuple[str, ...], module: bool, no_python: bool
) -> list[str]:
    if no_python:
        # The agent starts it without a shell, so its path is resolved here.
        program = shutil.which(script)
        if module:
            raise ConfigurationError(
                "--no_python runs a program", found=f"--module {script}"
            )
        if program is None:
            raise ConfigurationError(
                "--no_python runs a program", found=f"no program {script}"
            )
        return ["--exec", program, *arguments]
    if module:
        return ["-m", script, *arguments]
    if not Path(script).is_file():
        raise ConfigurationError(
            "the script does not exist",
            found=script,
            fix="add --module for a module's name, or --no_python for a program",
        )
    return [script, *arguments]


@click.command("launch", context_settings=_CONTEXT)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_launch_options
@click.option(
    "-q", "--quiet", is_flag=True, help="Do not print which configuration is used."
)
def launch(
    script: str,
    arguments: tuple[str, ...],
    config_file: Path | None,
    module: bool,
    no_python: bool,
    quiet: bool,
    **flags: object,
) -> NoReturn:
    """Run SCRIPT with its ARGUMENTS on processes and machines.

    Flags have priority over the configuration file, the file over the environment. SLURM and MPI need no options.
    Further flags (--tee, --log_dir, --role, --env, ...) are in the guide; so is every key of a configuration file.
    """
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.configuration import resolve
    from trainer_kit.launch.machines import RUN_TOKEN, run_token
    from trainer_kit.launch.plan import plan

    options = resolve(_flags(flags), config_file)
    # Before `plan`, which refuses such a job: SageMaker starts it from the printed estimator.
    _print_sagemaker(options, script, arguments)
    run_plan = plan(options, Environment.detect())
    command = _script_words(script, arguments, module, no_python)
    if run_plan.through and no_python:
        raise ConfigurationError(
            "torch_xla starts Python scripts only, one on each device",
            found=f"--no_python {script}",
            fix="pass --num_processes 1: one process for all devices",
        )
    if not quiet:
        if options.file is not None:
            click.echo(f"trainer-kit: configuration from {options.file.path}", err=True)
        for name in options.before_file():
            click.echo(f"trainer-kit: {options.describe(name)}", err=True)
        for line in _warn_ignored(run_plan, options):
            click.echo(f"trainer-kit: {line}", err=True)
        # Only the first machine listens.
        is_first = run_plan.machines.count > 1 and run_plan.machines.rank == 0
        if is_first and not run_token():
            warning = f"any host that reaches {run_plan.machines.address} can send commands to this run"
            click.echo(
                f"trainer-kit: {warning}; set {RUN_TOKEN} to one value on all machines",
                err=True,
            )
    _run([*run_plan.through, *command], run_plan, options)


def _print_sagemaker(
    options: Resolved, script: str | None, arguments: tuple[str, ...]
) -> None:
    """Print a job on SageMaker as its estimator's arguments; `plan` then refuses it."""
    from trainer_kit.launch.sagemaker import is_sagemaker, sagemaker_lines

    if is_sagemaker(options) and script is not None:
        for line in sagemaker_lines(options, script, arguments):
            click.echo(line)


def _run(program: list[str], run_plan: Plan, options: Resolved) -> NoReturn:
    from trainer_kit.launch.program import split_command

    interpreter, _ = split_command(sys.orig_argv)
    # A rank of another launcher becomes the script: a process between them would hide its signals and exit code.
    if not run_plan.supervised:
        # execve drops what Python has buffered.
        sys.stdout.flush()
        command = [sys.executable, *interpreter, *program]
        if program[0] == "--exec":
            command = program[1:]
        os.execve(command[0], command, {**os.environ, **run_plan.environ})
    from trainer_kit.launch.agent import Output, run_ranks

    log_dir = options["log_dir"]
    if log_dir is not None:
        log_dir = Path(log_dir)
    output = Output(
        tee=options["tee"],
        log_dir=log_dir,
        role=options["role"] or Output.role,
    )
    run_ranks(
        program,
        run_plan.processes,
        options=interpreter,
        machines=run_plan.machines,
        extra_env=run_plan.environ,
        max_restarts=run_plan.max_restarts,
        output=output,
        # torchrun's own default.
        monitor_interval=options["monitor_interval"] or 0.1,
    )


@click.command("explain", context_settings=_CONTEXT)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_launch_options
def explain(
    script: str | None,
    arguments: tuple[str, ...],
    config_file: Path | None,
    module: bool,
    no_python: bool,
    **flags: object,
) -> None:
    """Show what `launch` would do with the same arguments.

    Lists each value and its origin: a flag, a configuration file, the environment, or the default. For the name of an
    error, such as NonFiniteError, or the section that it names: what to do about it.
    """
    section = find_section(script)
    if section is not None:
        click.echo(section)
        return
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.configuration import resolve
    from trainer_kit.launch.machines import RUN_TOKEN, run_token
    from trainer_kit.launch.plan import plan

    options = resolve(_flags(flags), config_file)
    file: Path | str = "none"
    if options.file is not None:
        file = options.file.path
    click.echo(f"configuration file: {file}")
    for line in describe_origins(
        (name, _masked(name, setting)) for name, setting in options.chosen.items()
    ):
        click.echo(line)
    _print_sagemaker(options, script, arguments)
    environment = Environment.detect()
    run_plan = plan(options, environment)
    starter = ", by an agent"
    if run_plan.in_place:
        starter = f", as rank {environment.rank} of {environment.world_size} ({environment.source})"
    # For a single process there is nothing to tell about its launcher.
    if run_plan.processes == run_plan.machines.count == 1:
        starter = ""
    click.echo(f"\nprocesses here: {run_plan.processes}{starter}")
    click.echo(f"machines: {run_plan.machines.count}, this is {run_plan.machines.rank}")
    if run_plan.machines.count > 1:
        token = f"none ({RUN_TOKEN})"
        # The token itself is a secret.
        if run_token():
            token = "given"
        click.echo(f"run token: {token}")
    for name, value in run_plan.environ.items():
        # It repeats, encoded, the origins that are printed above.
        if name != "TRAINER_KIT_ORIGINS":
            click.echo(f"the script receives {name}={mask_secrets(value, name)}")
    for line in _warn_ignored(run_plan, options):
        click.echo(line)
    if script is not None:
        command = _script_words(script, arguments, module, no_python)
        # Without the marker that tells the agent to start a program as it is.
        if no_python:
            command = command[1:]
        click.echo(f"runs: {' '.join([*run_plan.through, *command])}")
