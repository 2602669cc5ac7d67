"""``trainer-kit tpu-config``: the command that prepares the machines of a TPU pod."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from packaging.version import InvalidVersion, Version

from trainer_kit.commands.terminal import FilePath
from trainer_kit.core.errors import ConfigurationError, LaunchError

__all__ = ["tpu_config"]


@click.command("tpu-config")
@click.option(
    "--config_file",
    type=FilePath(path_type=Path),
    help="YAML or JSON; by default the file of `config`.",
)
@click.option("--tpu_name", help="The TPU's name; by default the configuration's.")
@click.option("--tpu_zone", help="The TPU's zone; by default the configuration's.")
@click.option("--use_alpha", is_flag=True, help="`gcloud alpha` in place of `gcloud`.")
@click.option(
    "--command_file",
    type=FilePath(path_type=Path),
    help="A file with commands, one on each line.",
)
@click.option("--command", multiple=True, help="A command; may be given several times.")
@click.option(
    "--install_accelerate",
    is_flag=True,
    help="Install Hugging Face Accelerate on the machines first.",
)
@click.option(
    "--accelerate_version",
    default="latest",
    help="latest, dev, or a version such as 1.15.0.",
)
@click.option("--debug", is_flag=True, help="Print the command, and succeed.")
def tpu_config(
    config_file: Path | None,
    tpu_name: str | None,
    tpu_zone: str | None,
    use_alpha: bool,
    command_file: Path | None,
    command: tuple[str, ...],
    install_accelerate: bool,
    accelerate_version: str,
    debug: bool,
) -> None:
    """Print the gcloud command that runs commands on every machine of a TPU pod.

    It is never run from here: without --debug the command is printed too, and this program exits with 1.
    """
    from trainer_kit.launch.configuration import default_file, read_configuration

    path = config_file or default_file()
    values: Mapping[str, Any] = {}
    if path is not None:
        values = read_configuration(path).values
    commands = list(command or values.get("commands") or ())
    file = command_file
    # Commands of the command line replace those of the configuration, in both of its forms.
    if file is None and not command:
        file = values.get("command_file")
    if file:
        commands = _lines(Path(file))
    name = tpu_name or values.get("tpu_name")
    zone = tpu_zone or values.get("tpu_zone")
    for value, flags in (
        (commands, "--command or --command_file"),
        (name, "--tpu_name"),
        (zone, "--tpu_zone"),
    ):
        if not value:
            raise ConfigurationError(
                "options of the command for the machines are missing",
                found=f"no {flags}",
                fix=f"add {flags}",
            )
    if install_accelerate:
        commands.insert(0, f"pip install {_requirement(accelerate_version)}")
    elif accelerate_version != "latest":
        raise ConfigurationError(
            "--accelerate_version has no effect without --install_accelerate",
            found=accelerate_version,
            fix="add --install_accelerate",
        )
    ssh_command = ["gcloud"]
    if use_alpha:
        ssh_command.append("alpha")
    ssh_command += ["compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)]
    # The directory is the one of Accelerate's command, whose command files may rely on it.
    ssh_command += ["--command", "; ".join(["cd /usr/share", *commands])]
    ssh_command += ["--worker", "all"]
    click.echo(shlex.join(ssh_command))
    if not debug:
        raise LaunchError(
            "this command does not run gcloud, which would act on machines of your cloud account",
            fix="run the printed command in your shell, or add --debug",
        )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "the file of commands cannot be read", found=f"{path}: {error}"
        ) from error
    # They are joined by semicolons: an empty line would be a syntax error, and a comment would hide what follows.
    return [
        line for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]


def _requirement(version: str) -> str:
    if version == "latest":
        return "accelerate -U"
    if version == "dev":
        return "git+https://github.com/huggingface/accelerate.git"
    try:
        return f"accelerate=={Version(version)}"
    except InvalidVersion as error:
        raise ConfigurationError(
            "this is not a version",
            found=f"--accelerate_version {version}",
            fix="pass a version such as 1.15.0",
        ) from error
