"""``trainer-kit checkpoint``: list, verify, compare, convert and repair checkpoints; ``merge-weights``: join files."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import click

from trainer_kit.commands.terminal import FilePath, table
from trainer_kit.core.display import plural
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import Location, RemotePath, is_url, locate

__all__ = ["checkpoint", "merge_command", "merge_command_parser", "merge_weights"]


class _Place(FilePath):
    """A local path, or a URL; the command checks whether the URL exists."""

    def convert(
        self,
        value: str | os.PathLike[str],
        parameter: click.Parameter | None,
        context: click.Context | None,
    ) -> Any:
        if not is_url(value):
            return super().convert(value, parameter, context)
        location = locate(value)
        # file:// is a local path, of which click checks that it exists; a remote one would cost a request here.
        if isinstance(location, RemotePath):
            return location
        return super().convert(location, parameter, context)


_CHECKPOINT = _Place(exists=True, path_type=Path)
_DIRECTORY = _Place(exists=True, file_okay=False, path_type=Path)

# Each command imports the checkpoint code itself: it needs torch, which --help does not need.


@click.group()
def checkpoint() -> None:
    """List, verify, compare, export, import and repair checkpoints."""


@checkpoint.command("ls")
@click.argument("directory", type=_DIRECTORY, default=".")
def _ls(directory: Location) -> None:
    """List the complete checkpoints in DIRECTORY, oldest first: step, epoch, size, age, names (last, best).

    Where DIRECTORY is that of a run or of several runs, those one level or more below it are listed.
    """
    from trainer_kit.checkpoint.read import directories_with_checkpoints

    below = directories_with_checkpoints(directory)
    if not below:
        click.echo(f"no checkpoints in {directory}")
    for child, _ in below:
        if child != directory:
            click.echo(f"{child}:")
        _list(child)


def _list(directory: Location) -> None:
    from trainer_kit.checkpoint.read import size_of
    from trainer_kit.checkpoint.store import checkpoints, read_index
    from trainer_kit.core.display import in_units

    named = read_index(directory) or {}
    rows = [("CHECKPOINT", "STEP", "EPOCH", "SIZE", "SAVED (UTC)", "NAMES")]
    for record in checkpoints(directory):
        names = sorted(name for name, path in named.items() if path == record.path.name)
        size = in_units(size_of(record.path))
        step, epoch = (str(record.info.get(key, "-")) for key in ("step", "epoch"))
        rows.append(
            (
                record.path.name,
                step,
                epoch,
                size,
                f"{record.created:%Y-%m-%d %H:%M:%S}",
                ", ".join(names),
            )
        )
    table(rows)


@checkpoint.command("verify")
@click.argument("paths", type=_CHECKPOINT, nargs=-1, required=True)
def _verify(paths: tuple[Location, ...]) -> None:
    """Read every byte of the checkpoints at PATHS, or in the directories at PATHS. Exit code 1: one is damaged.

    Files beside checkpoints, as a pattern such as DIR/* names them too, are skipped with a line.
    """
    from trainer_kit.checkpoint.read import verify_checkpoint

    verified = 0
    damaged = 0
    for path in paths:
        inside = _to_verify(path)
        if not inside:
            click.echo(f"{path}: not a checkpoint, skipped")
        for checkpoint_path in inside:
            verified += 1
            try:
                verify_checkpoint(checkpoint_path)
            except CheckpointError as error:
                damaged += 1
                file = os.path.relpath(error.file, checkpoint_path)
                problem = error.reason
                if file != ".":
                    problem = f"{file}: {problem}"
                click.echo(f"{checkpoint_path}: damaged: {problem}")
            else:
                click.echo(f"{checkpoint_path}: ok")
    if not verified:
        click.echo("no checkpoint was verified")
    # A pattern that matched nothing must not pass for sound checkpoints in a script.
    sys.exit(int(bool(damaged) or not verified))


def _to_verify(path: Location) -> list[Location]:
    """Return the checkpoint at ``path``, or the checkpoints in it, whole or damaged; else those on the next level."""
    from trainer_kit.checkpoint.manifest import is_library_file, was_checkpoint
    from trainer_kit.checkpoint.read import directories_with_checkpoints
    from trainer_kit.checkpoint.store import candidates

    if was_checkpoint(path):
        return [path]
    if not path.is_dir():
        return []
    inside = candidates(path)
    if not inside:
        for child, _ in directories_with_checkpoints(path):
            inside += candidates(child)
    # Files of the library without a manifest are the remains of a checkpoint, to be reported as damaged.
    if not inside and any(map(is_library_file, path.iterdir())):
        return [path]
    return sorted(inside)


@checkpoint.command("diff")
@click.argument("a", type=_CHECKPOINT)
@click.argument("b", type=_CHECKPOINT)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if they differ.")
def _diff(a: Location, b: Location, exit_code: bool) -> None:
    """Print in which values checkpoints A and B differ, bit by bit; nothing for equal ones."""
    from trainer_kit.checkpoint.compare import diff

    differences = diff(a, b)
    for difference in differences:
        click.echo(str(difference))
    # As `git diff`: 0 by default, so that a script with `set -e` may print differences.
    sys.exit(int(bool(differences) and exit_code))


@checkpoint.command("export")
@click.argument("source", type=_CHECKPOINT)
@click.argument("target", type=FilePath(path_type=Path))
@click.option(
    "--format",
    type=click.Choice(["huggingface", "lightning", "safetensors", "torch"]),
    help="By default chosen by the suffix of TARGET; without one: huggingface.",
)
@click.option(
    "--lightning",
    "format",
    flag_value="lightning",
    help="A .ckpt file from which Lightning resumes.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Maximum size of a file in Hugging Face's layout.",
)
def _export(
    source: Location, target: Path, format: str | None, max_shard_size: str
) -> None:
    """Write the weights of SOURCE to TARGET: one file, or Hugging Face's layout."""
    from trainer_kit.checkpoint.weights import export

    # click.Choice has checked the word, which `export` types as a Literal.
    click.echo(export(source, target, format, max_shard_size=max_shard_size))  # type: ignore[arg-type]


@checkpoint.command("import")
@click.argument("file", type=FilePath(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", required=False)
def _import(file: Path, target: str | None) -> None:
    """Convert Lightning's FILE (.ckpt) to the checkpoint TARGET; by default FILE without its suffix."""
    from trainer_kit.checkpoint.lightning import import_lightning
    from trainer_kit.checkpoint.manifest import read_manifest
    from trainer_kit.checkpoint.read import read_info

    path = import_lightning(file, target)
    info = read_info(path)
    # A Lightning file that was saved with save_weights_only=True has no loops, from which a fit could resume.
    usage = f'only the weights: fit(ckpt_path="{path}", load_weights_only=True)'
    if "progress" in read_manifest(path)["parts"]:
        usage = f'fit(ckpt_path="{path}")'
    click.echo(f"{path}: step {info['step']}, epoch {info['epoch']}; {usage}")
    if info["left_out"]:
        click.echo(f"not imported: the state of {', '.join(info['left_out'])}")


@checkpoint.command("repair")
@click.argument("directory", type=_DIRECTORY)
def _repair(directory: Location) -> None:
    """Rename damaged checkpoints in DIRECTORY to NAME.damaged, clean up after dead runs, rewrite the index."""
    from trainer_kit.checkpoint.store import repair

    result = repair(directory)
    for path, problem in result.damaged:
        click.echo(
            f"set aside as {path.name}: {Path(problem.file).name}: {problem.reason}"
        )
    for path, problem in result.left:
        click.echo(f"left unchanged: {path.name}: {problem.reason}")
    if result.discarded:
        click.echo(f"discarded {plural(result.discarded, 'incomplete save')}")
    newest = ""
    if result.sound:
        newest = f", the newest is {result.sound[0].name}"
    click.echo(f"{len(result.sound)} sound{newest}")


@click.command("merge-weights")
@click.argument("directory", type=FilePath(exists=True, path_type=Path))
@click.argument("output", type=FilePath(path_type=Path))
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    help="Maximum size of a file, if OUTPUT is a directory.",
)
def merge_weights(directory: Path, output: Path, max_shard_size: str) -> None:
    """Write the weights of many files as one.

    OUTPUT ends in .safetensors for one file; without a suffix it is a directory in Hugging Face's layout.

    DIRECTORY is a checkpoint of this library, sharded or not, Hugging Face's safetensors with their index, or a torch
    distributed checkpoint, as Accelerate writes it under FSDP.
    """
    from trainer_kit.checkpoint.weights import export

    click.echo(export(directory, output, max_shard_size=max_shard_size))


def merge_command_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser] | None = None,
) -> argparse.ArgumentParser:
    """The parser of Accelerate's ``merge-weights``, for programs that call `merge_command`.

    Example:
        >>> merge_command_parser().parse_args(["state/pytorch_model_fsdp_0", "out"]).unsafe_serialization
        False
    """
    if subparsers is None:
        parser = argparse.ArgumentParser(description=merge_command.__doc__)
    else:
        parser = subparsers.add_parser(
            "merge-weights", description=merge_command.__doc__
        )
        # Programs of Accelerate call `args.func(args)` for the command that was chosen.
        parser.set_defaults(func=merge_command)
    parser.add_argument("checkpoint_directory")
    parser.add_argument("output_path")
    parser.add_argument("--unsafe_serialization", action="store_true")
    parser.add_argument("--remove_checkpoint_dir", action="store_true")
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights of a directory into one file, as `merge_fsdp_weights` does."""
    from trainer_kit.accelerator.script_names import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory,
        args.output_path,
        not args.unsafe_serialization,
        args.remove_checkpoint_dir,
    )
