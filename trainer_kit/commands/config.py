"""``trainer-kit config``: write a configuration by questions or for this machine, and show the one in use."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import click

from trainer_kit.commands.terminal import FilePath, ask, choose
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.lazy import other_names
from trainer_kit.core.types import JsonObject
from trainer_kit.launch.options import SECTIONS, TOP, Option, positive, several_on

__all__ = ["config", "write_basic_config"]

# Makes this module a package: Accelerate has modules below it, such as `commands.config.default`.
__path__: list[str] = []
__getattr__ = other_names(__name__)

_LATER: Final = "(written; cannot be launched yet)"
_PLACES: Final = (
    ("LOCAL_MACHINE", "this machine, or several"),
    ("AMAZON_SAGEMAKER", f"Amazon SageMaker {_LATER}"),
)
_SAGEMAKER: Final = (
    ("ec2_instance_type", "ml.p3.2xlarge"),
    ("iam_role_name", None),
    ("region", "us-east-1"),
)
_HOLDS: Final = (
    ("DDP", "every process holds all of it"),
    ("FSDP", "in shards, by FSDP"),
    ("DEEPSPEED", "in shards, by DeepSpeed"),
    ("MEGATRON_LM", "in pieces, by Megatron-LM"),
)
# Values as texts, as the wizard shows and reads them.
_ENGINES: Final[Mapping[str, Mapping[str, str]]] = {
    "FSDP": {
        "fsdp_version": "2",
        "fsdp_reshard_after_forward": "true",
        "fsdp_offload_params": "false",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": "true",
        "fsdp_activation_checkpointing": "false",
    },
    "DEEPSPEED": {
        "zero_stage": "2",
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "gradient_accumulation_steps": "1",
        "gradient_clipping": "1.0",
    },
    "MEGATRON_LM": {
        "megatron_lm_tp_degree": "1",
        "megatron_lm_pp_degree": "1",
        "megatron_lm_num_micro_batches": "1",
        "megatron_lm_sequence_parallelism": "false",
        "megatron_lm_use_distributed_optimizer": "false",
    },
}
"""The options that the wizard asks for, with their defaults."""
_PRECISIONS: Final = ["no", "fp16", "bf16", "fp8"]
_FILE: Final = FilePath(path_type=Path, dir_okay=False)


def _accelerator() -> tuple[str | None, int]:
    """The type and the number of the accelerators of this machine."""
    from trainer_kit.core.devices import count_accelerators, present_accelerator

    device = present_accelerator()
    if device is None:
        return None, 0
    return device.type, count_accelerators()


def _ask(option: Option, default: str) -> object:
    if option.words:
        return choose(
            f"{option.name}?", [(name, name) for name in option.words], default
        )
    return ask(f"{option.name}?", default, option.value)


def _ask_processes(answers: JsonObject, kind: str) -> None:
    """Ask for machines, processes, and how the model is distributed."""
    device, count = _accelerator()
    machines = ask("How many machines?", "1", positive)
    answers["num_machines"] = machines
    if machines > 1:
        answers["machine_rank"] = ask(
            "Which of them is this, from 0?", "0", TOP["machine_rank"].value
        )
        answers["main_process_ip"] = ask("Address of machine 0?", None, str)
        answers["main_process_port"] = ask(
            "Port there?", "29500", TOP["main_process_port"].value
        )
    # At least 1: the file may be written on a login node that has no accelerator.
    per_machine = max(count, 1)
    if kind == "MULTI_CPU":
        per_machine = max(2, os.cpu_count() or 1)
    hint = ""
    if device is not None and kind.startswith("MULTI_"):
        hint = f" ({count} of type {device} here)"
    answers["num_processes"] = ask(
        f"How many processes, on all machines together?{hint}",
        str(per_machine * machines),
        positive,
    )
    if kind.startswith("MULTI_") and kind != "MULTI_CPU":
        engine = choose("How is the model distributed?", _HOLDS, "DDP")
        if engine in _ENGINES:
            section = f"{engine.lower()}_config"
            answers["distributed_type"] = engine
            answers[section] = {
                name: _ask(SECTIONS[section][name], default)
                for name, default in _ENGINES[engine].items()
            }
        # As Accelerate's wizard writes it; `launch` takes it as no restriction.
        answers["gpu_ids"] = "all"


def _ask_yes(question: str, default: str) -> bool:
    return choose(question, [("no", "no"), ("yes", "yes")], default) == "yes"


def _ask_everything() -> JsonObject:
    """The wizard: its questions depend on the answers, its defaults on this machine."""
    device, count = _accelerator()
    answers: JsonObject = {
        "compute_environment": choose("Where will it run?", _PLACES, "LOCAL_MACHINE")
    }
    if answers["compute_environment"] == "AMAZON_SAGEMAKER":
        # The instance type decides about devices there, so nothing of this machine is asked for.
        answers.update(
            {name: ask(f"{name}?", default, str) for name, default in _SAGEMAKER}
        )
        answers["distributed_type"] = "NO"
    else:
        kind = _ask_kind(device, count)
        answers["distributed_type"] = kind
        # One process on a machine without an accelerator means its CPU; `launch` would look for a device otherwise.
        answers["use_cpu"] = kind == "MULTI_CPU" or (kind == "NO" and device is None)
        if kind == "NO":
            answers.update(num_machines=1, num_processes=1)
        else:
            _ask_processes(answers, kind)
    precisions = [(name, name) for name in ("no", "bf16", "fp16", "fp8")]
    default_precision = "bf16"
    if device is None:
        default_precision = "no"
    answers["mixed_precision"] = choose(
        "Mixed precision?", precisions, default_precision
    )
    compiled = choose(
        "Compile models with torch.compile?",
        [("NO", "no"), ("INDUCTOR", "yes, with inductor")],
        "NO",
    )
    if compiled != "NO":
        answers["dynamo_config"] = {"dynamo_backend": compiled}
    answers["debug"] = _ask_yes(
        "Check the data of collectives first (debug mode)?", "no"
    )
    return answers


def _ask_kind(device: str | None, count: int) -> str:
    """Ask for the ``distributed_type``, apart from engines."""
    # Without an accelerator here the file may be meant for a machine with CUDA.
    several = several_on(device or "cuda")
    hint = " (none here)"
    if count:
        hint = f", {count} here"
    kinds = (
        ("NO", "one process"),
        ("MULTI_CPU", "several processes on the CPU"),
        (several, f"several accelerators{hint}"),
        ("XLA", "TPUs of this machine, through torch_xla"),
    )
    default = "NO"
    if count > 1:
        default = several
    return choose("On what?", kinds, default)


def _write(path: Path, answers: Mapping[str, object]) -> None:
    """Write the file atomically."""
    import yaml

    # An unanswered question is left out, so that the default of `launch` holds.
    filled = {name: value for name, value in answers.items() if value not in (None, {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        text = json.dumps(filled, indent=2)
    else:
        text = yaml.safe_dump(filled, sort_keys=True)
    replace_file(path, text.encode())


@click.group("config", invoke_without_command=True)
@click.option(
    "--config_file",
    "--config-file",
    type=_FILE,
    help="Where to write; by default where `launch` looks.",
)
@click.pass_context
def config(context: click.Context, config_file: Path | None) -> None:
    """Ask, and write a configuration for `launch`."""
    context.obj = config_file
    if context.invoked_subcommand is not None:
        return
    from trainer_kit.launch.configuration import our_default

    path = config_file or our_default()
    answers = _ask_everything()
    replace = [("yes", "yes"), ("no", "no")]
    if path.exists() and choose(f"Replace {path}?", replace, "yes") == "no":
        click.echo("nothing was written")
        return
    _write(path, answers)
    click.echo(f"written: {path}")
    # `launch` finds the file at the default path by itself.
    option = ""
    if config_file is not None:
        option = f"--config_file {path} "
    click.echo(f"use it:  trainer-kit launch {option}train.py")


@config.command("default")
@click.option(
    "--mixed_precision",
    "--mixed-precision",
    type=click.Choice(_PRECISIONS),
    default="no",
)
@click.option("--config_file", "--config-file", type=_FILE, help="Where to write.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.pass_context
def _default(
    context: click.Context, mixed_precision: str, config_file: Path | None, force: bool
) -> None:
    """Write a configuration for this machine's devices, without questions."""
    from trainer_kit.launch.configuration import our_default

    path = config_file or context.obj or our_default()
    if path.exists() and not force:
        raise click.ClickException(
            f"{path} exists and was not overwritten; --force overwrites it"
        )
    _write(path, _basic_configuration(mixed_precision))
    click.echo(f"written: {path}")


def _basic_configuration(mixed_precision: str) -> JsonObject:
    device, count = _accelerator()
    distributed_type = "NO"
    if count > 1:
        distributed_type = several_on(device or "cuda")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "num_processes": max(count, 1),
        "num_machines": 1,
        # The file may be read on a machine with a device, but it describes this one.
        "use_cpu": device is None,
        "mixed_precision": mixed_precision,
        "debug": False,
    }


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration for this machine's devices, as ``trainer-kit config default`` does.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: the file, ``.json`` or YAML; by default where `launch` looks.

    Returns:
        Its path; False where a file is there, which stays as it is.

    Raises:
        ConfigurationError: another precision.
    """
    from trainer_kit.launch.configuration import our_default

    precision = mixed_precision.lower()
    if precision not in _PRECISIONS:
        raise ConfigurationError(
            "unknown precision",
            found=repr(mixed_precision),
            fix=did_you_mean(precision, _PRECISIONS),
        )
    if save_location is None:
        save_location = our_default()
    path = Path(save_location)
    # As in Accelerate, whose callers check for False; the command raises instead.
    if path.exists():
        click.echo(f"{path} exists and was not overwritten")
        return False
    _write(path, _basic_configuration(precision))
    return path


@config.command("show")
@click.option(
    "--config_file",
    "--config-file",
    type=_FILE,
    help="The file; by default the one that `launch` uses.",
)
@click.pass_context
def _show(context: click.Context, config_file: Path | None) -> None:
    """Show the configuration that `launch` uses."""
    from trainer_kit.launch.configuration import (
        accelerates_default,
        default_file,
        our_default,
        read_configuration,
    )

    path = config_file or context.obj or default_file()
    if path is None:
        raise ConfigurationError(
            "no configuration file was found",
            found=f"neither {our_default()} nor {accelerates_default()}",
            fix="write one with: trainer-kit config, or trainer-kit config default",
        )
    configuration = read_configuration(path)
    click.echo(path)
    for name, value in mask_secrets(dict(configuration.values)).items():
        click.echo(f"{configuration.lines[name]:>4}  {name}: {value}")
