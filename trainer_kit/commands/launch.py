"""``trainer-kit launch`` and ``explain``: a script on processes and machines, and what that will be."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import click

from trainer_kit.commands.paths import FilePath
from trainer_kit.core.configuration_sources import Chosen, describe_origins
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.options import Option, all_options

if TYPE_CHECKING:
    from trainer_kit.launch.plan import Plan
    from trainer_kit.launch.resolve import Resolved

__all__ = ["explain", "launch"]

_SHOWN: Final = {
    "num_processes": "Processes, on all machines together.",
    "mixed_precision": "no, fp16, bf16 or fp8.",
    "gradient_accumulation_steps": "Micro-batches of an optimizer step.",
    "gpu_ids": 'Devices of this machine: "0,1", or "all".',
    "num_machines": "Machines; start this command on each.",
    "machine_rank": "This machine among them, from 0.",
    "main_process_ip": "Address of machine 0.",
    "main_process_port": "Port there, where the machines meet.",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS.",
    "dynamo_backend": "Of torch.compile.",
    "max_restarts": "Start all processes again after a failure, so often.",
}
_WORDS: Final = {
    "cpu": "On the CPU; an engine below, or of the file, stays.",
    "multi_gpu": "On several devices of this machine.",
    "use_ddp": "Data parallel, whatever the file says.",
    "use_fsdp": "With FSDP.",
    "use_deepspeed": "With DeepSpeed.",
    "use_megatron_lm": "With Megatron-LM.",
    "tpu": "On the TPUs of this machine, through torch_xla.",
    "debug": "Each process says what it has; collectives are checked first.",
}
_FILE_ONLY: Final = ("compute_environment", "distributed_type", "use_cpu", "fp16", "environment", "tpu_config_file")
_SWITCHES: Final = (
    "same_network", "enable_cpu_affinity", "downcast_bf16", "tpu_use_cluster", "tpu_use_sudo", "use_parallelism_config",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "fp8_use_autocast_during_eval",
)  # fmt: skip
_OTHER_NAMES: Final = {
    "tee": ("-t",),
    "tpu_use_cluster": ("--tpu_cluster/--no_tpu_cluster",),
    "tpu_vm": ("--vm",),
    "tpu_env": ("--env",),
}
_CONTEXT: Final = {
    "allow_interspersed_args": False,
    # --num-processes is --num_processes.
    "token_normalize_func": lambda token: token.replace("-", "_"),
}


@final
class _Value(click.ParamType[Any]):
    """What an option may be, on the command line as in a file."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = "integer" if option.read.__name__ in ("_integer", "_natural", "positive", "_port") else "text"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return self.option.value(str(value))
        except ValueError as error:
            self.fail(f"{error}, not {value!r}", parameter, context)


def _launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option of a configuration; the ones that few need are not in ``--help``."""
    known = all_options()
    for name in sorted(known.keys() - _SHOWN.keys() - _WORDS.keys() - set(_FILE_ONLY)):
        switch = name in _SWITCHES
        command = click.option(
            f"--{name}",
            name,
            *_OTHER_NAMES.get(name, ()),
            is_flag=switch,
            multiple=known[name].many,
            default=None,
            type=None if switch else _Value(known[name]),
            hidden=True,
        )(command)
    for name, text in reversed(_SHOWN.items()):
        command = click.option(f"--{name}", type=_Value(known[name]), help=text)(command)
    for word, text in reversed(_WORDS.items()):
        command = click.option(f"--{word}", is_flag=True, default=None, help=text)(command)
    file = FilePath(path_type=Path)
    return click.option("--config_file", type=file, help="YAML or JSON; by default what `config` wrote.")(command)


def _flags(given: Mapping[str, Any]) -> dict[str, Chosen]:
    """The flags by option, each with its name as the origin."""
    return {
        name: Chosen(list(value) if isinstance(value, tuple) else value, f"flag --{name}")
        for name, value in given.items()
        if value not in (None, ())
    }


def _masked(name: str, chosen: Chosen) -> Chosen:
    value = mask_secrets(chosen.value, name)
    if name == "tpu_env" and isinstance(value, list):
        value = [f"{key}={mask_secrets(text, key)}" for key, _, text in (pair.partition("=") for pair in value)]
    return Chosen(value, chosen.origin)


def _words(script: str, arguments: tuple[str, ...], module: bool, no_python: bool) -> list[str]:
    if no_python:
        found = shutil.which(script)
        if module or found is None:
            raise ConfigurationError(
                "--no_python runs a program", found=f"--module {script}" if module else f"no program {script}"
            )
        return ["--exec", found, *arguments]
    if module:
        return ["-m", script, *arguments]
    if not Path(script).is_file():
        raise ConfigurationError(
            "there is no such script", found=script, fix="--module for a module's name, --no_python for a program"
        )
    return [script, *arguments]


@click.command("launch", context_settings=_CONTEXT)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_launch_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program of any language.")
@click.option("-q", "--quiet", is_flag=True, help="Do not say which configuration is used.")
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

    Flags count before the configuration file, that before the environment. Under SLURM or MPI no options are needed.
    Further flags (--tee, --log_dir, --role, --env, ...) are in the guide; so is every key of a configuration file.
    """
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.plan import plan
    from trainer_kit.launch.resolve import resolve
    from trainer_kit.launch.signed import RUN_TOKEN, run_token

    options = resolve(_flags(given), config_file)
    found = plan(options, Environment.detect())
    words = _words(script, arguments, module, no_python)
    if found.through and no_python:
        raise ConfigurationError(
            "torch_xla starts Python scripts only, one on each device",
            found=f"--no_python {script}",
            fix="--num_processes 1: one process for all devices",
        )
    if not quiet:
        if options.file is not None:
            click.echo(f"trainer-kit: configuration from {options.file.path}", err=True)
        for name in options.before_file():
            click.echo(f"trainer-kit: {options.describe(name)}", err=True)
        for name in found.left_out:
            click.echo(f"trainer-kit: has no effect yet: {options.describe(name)}", err=True)
        if found.machines.count > 1 and found.machines.rank == 0 and not run_token():
            where = f"any host that reaches {found.machines.address} can send commands to this run"
            click.echo(f"trainer-kit: {where}; set {RUN_TOKEN} to one value on all machines", err=True)
    _run([*found.through, *words], found, options)


def _run(words: list[str], found: Plan, options: Resolved) -> NoReturn:
    from trainer_kit.launch.command import split_command

    interpreter, _ = split_command(sys.orig_argv)
    if not found.supervised:  # this process becomes the script
        sys.stdout.flush()
        command = words[1:] if words[0] == "--exec" else [sys.executable, *interpreter, *words]
        os.execve(command[0], command, {**os.environ, **found.environ})
    from trainer_kit.launch import run_ranks
    from trainer_kit.launch.output import Output

    log_dir = options["log_dir"]
    output = Output(
        tee=options["tee"], log_dir=None if log_dir is None else Path(log_dir), role=options["role"] or Output.role
    )

    run_ranks(
        words,
        found.processes,
        options=interpreter,
        machines=found.machines,
        extra_env=found.environ,
        max_restarts=found.max_restarts,
        output=output,
        monitor_interval=options["monitor_interval"] or 0.1,
    )


@click.command("explain", context_settings=_CONTEXT)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_launch_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name.")
@click.option("--no_python", is_flag=True, help="SCRIPT is a program of any language.")
def explain(
    script: str | None,
    arguments: tuple[str, ...],
    config_file: Path | None,
    module: bool,
    no_python: bool,
    **given: Any,
) -> None:
    """Show what `launch` would do with the same words.

    Each value, and where it comes from: a flag, a configuration file, the environment, or the default.
    """
    from trainer_kit.core.environment import Environment
    from trainer_kit.launch.plan import plan
    from trainer_kit.launch.resolve import resolve
    from trainer_kit.launch.signed import RUN_TOKEN, run_token

    options = resolve(_flags(given), config_file)
    click.echo(f"configuration file: {'none' if options.file is None else options.file.path}")
    for line in describe_origins((name, _masked(name, chosen)) for name, chosen in options.chosen.items()):
        click.echo(line)
    here = Environment.detect()
    found = plan(options, here)
    by = f"as rank {here.rank} of {here.world_size} ({here.source})" if found.in_place else "by an agent"
    alone = found.processes == found.machines.count == 1
    click.echo(f"\nprocesses here: {found.processes}{'' if alone else f', {by}'}")
    click.echo(f"machines: {found.machines.count}, this is {found.machines.rank}")
    if found.machines.count > 1:
        click.echo(f"run token: {'given' if run_token() else f'none ({RUN_TOKEN})'}")
    for name, value in found.environ.items():
        if name != "TRAINER_KIT_ORIGINS":
            click.echo(f"the script is given {name}={mask_secrets(value, name)}")
    for name in found.left_out:
        click.echo(f"has no effect yet: {options.describe(name)}")
    if script is not None:
        words = _words(script, arguments, module, no_python)
        click.echo(f"runs: {' '.join([*found.through, *(words[1:] if no_python else words)])}")
