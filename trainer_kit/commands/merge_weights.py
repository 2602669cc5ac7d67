"""``trainer-kit merge-weights``: the weights of many files as one, or as few."""

from __future__ import annotations

from pathlib import Path

import click

from trainer_kit.commands.paths import FilePath

__all__ = ["merge_weights"]


@click.command("merge-weights")
@click.argument("directory", type=FilePath(exists=True, path_type=Path))
@click.argument("output", type=FilePath(path_type=Path))
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a file, where OUTPUT is a directory.")
def merge_weights(directory: Path, output: Path, max_shard_size: str) -> None:
    """Write the weights of many files as one.

    OUTPUT ends in .safetensors for one file; without a suffix it is a directory in Hugging Face's layout.

    DIRECTORY is a checkpoint of this library, sharded or not, or Hugging Face's safetensors with their index. torch's
    distributed checkpoints are refused, as they are pickles.
    """
    from trainer_kit.checkpoint.weights import export

    click.echo(export(directory, output, max_shard_size=max_shard_size))
