"""``trainer-kit launch`` and ``explain``: run a script on processes and machines, and show the plan of such a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import click

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.configuration_sources import Chosen, describe_origins
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.lazy import other_names
from trainer_kit.launch.options import Option, all_options

if TYPE_CHECKING:
    from trainer_kit.launch.configuration import Resolved
    from trainer_kit.launch.plan import Plan

__all__ = ["explain", "launch"]

__path__: list[
    str
] = []  # makes this a package, so that importing a missing submodule of Accelerate shows our error
__getattr__ = other_names(__name__)

_CONTEXT: Final = {
    "allow_interspersed_args": False,
    # --num-processes is --num_processes.
    "token_normalize_func": lambda token: token.replace("-", "_"),
}


if TYPE_CHECKING:
    _AnyType = click.ParamType[Any]
else:
    _AnyType = click.ParamType  # generic from click 8.4 on


@final
class _Value(_AnyType):
    """A click type that reads an option's value as in a configuration file."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = "integer" if option.whole else "text"

    def convert(
        self,
        value: Any,
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        try:
            return self.option.value(str(value))
        except ValueError as error:
            self.fail(f"{error}, not {value!r}", parameter, context)


def _launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every option in `trainer_kit.launch.options` to a command."""
    options = [option for option in all_options().values() if option.flags != ()]
    options.sort(key=lambda option: not option.switch)
    for option in reversed(options):  # click lists the last decorator first
        flags = option.flags or (f"--{option.name}",)
        command = click.option(
            *flags,
            flags[0].removeprefix("--"),
            is_flag=option.switch,
            multiple=option.many,
            default=None,
            type=None if option.switch else _Value(option),
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


def _flags(values: Mapping[str, Any]) -> dict[str, Chosen]:
    """The flags by option, each with its name as the origin."""
    return {
        name: Chosen(
            list(value) if isinstance(value, tuple) else value, f"flag --{name}"
        )
        for name, value in values.items()
        if value not in (None, ())
    }


def _masked(name: str, chosen: Chosen) -> Chosen:
    value = mask_secrets(chosen.value, name)
    if name == "tpu_env" and isinstance(value, list):
        pairs = [pair.partition("=") for pair in value]
        value = [f"{key}={mask_secrets(text, key)}" for key, _, text in pairs]
    return Chosen(value, chosen.origin)


def _script_words(
    script: str, arguments: tuple[str, ...], module: bool, no_python: bool
) -> list[str]:
    if no_python:
        program = shutil.which(script)
        if module or program is None:
            raise ConfigurationError(
                "--no_python runs a program",
                found=f"--module {script}" if module else f"no program {script}",
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
    **given: Any,
) -> NoReturn:
    """Run SCRIPT with its ARGUMENTS on processes and machines.

    Flags have priority over the configuration file, the file over the environment. SLURM and MPI need no options.
    Further flags (--tee, --log_dir, --role, --env, ...) are in the guide; so is every key of a configuration file.
    """
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.configuration import resolve
    from trainer_kit.launch.machines import RUN_TOKEN, run_token
    from trainer_kit.launch.plan import plan

    options = resolve(_flags(given), config_file)
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
        if (
            run_plan.machines.count > 1
            and run_plan.machines.rank == 0
            and not run_token()
        ):
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
    if not run_plan.supervised:  # this process becomes the script
        sys.stdout.flush()
        command = [sys.executable, *interpreter, *program]
        if program[0] == "--exec":
            command = program[1:]
        os.execve(command[0], command, {**os.environ, **run_plan.environ})
    from trainer_kit.launch.agent import Output, run_ranks

    log_dir = options["log_dir"]
    output = Output(
        tee=options["tee"],
        log_dir=None if log_dir is None else Path(log_dir),
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
    **given: Any,
) -> None:
    """Show what `launch` would do with the same arguments.

    Lists each value and its origin: a flag, a configuration file, the environment, or the default.
    """
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.configuration import resolve
    from trainer_kit.launch.machines import RUN_TOKEN, run_token
    from trainer_kit.launch.plan import plan

    options = resolve(_flags(given), config_file)
    click.echo(
        f"configuration file: {'none' if options.file is None else options.file.path}"
    )
    for line in describe_origins(
        (name, _masked(name, setting)) for name, setting in options.chosen.items()
    ):
        click.echo(line)
    _print_sagemaker(options, script, arguments)
    environment = Environment.detect()
    run_plan = plan(options, environment)
    starter = "by an agent"
    if run_plan.in_place:
        starter = f"as rank {environment.rank} of {environment.world_size} ({environment.source})"
    single_process = run_plan.processes == run_plan.machines.count == 1
    click.echo(
        f"\nprocesses here: {run_plan.processes}{'' if single_process else f', {starter}'}"
    )
    click.echo(f"machines: {run_plan.machines.count}, this is {run_plan.machines.rank}")
    if run_plan.machines.count > 1:
        click.echo(f"run token: {'given' if run_token() else f'none ({RUN_TOKEN})'}")
    for name, value in run_plan.environ.items():
        if name != "TRAINER_KIT_ORIGINS":
            click.echo(f"the script receives {name}={mask_secrets(value, name)}")
    for line in _warn_ignored(run_plan, options):
        click.echo(line)
    if script is not None:
        command = _script_words(script, arguments, module, no_python)
        click.echo(
            f"runs: {' '.join([*run_plan.through, *(command[1:] if no_python else command)])}"
        )
