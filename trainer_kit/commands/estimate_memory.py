"""``trainer-kit estimate-memory``: the memory that a model will need."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from trainer_kit.commands.terminal import table
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.yaml_guard import YamlProblem, guarded_events

__all__ = ["estimate_memory"]


@click.command("estimate-memory")
@click.argument("model")
@click.option("--args", default="{}", help="The constructor's arguments, as JSON or YAML: '{width: 512}'.")
def estimate_memory(model: str, args: str) -> None:
    """Print the memory that MODEL needs, by dtype.

    MODEL is a class (package.module:Class), a directory with a Hugging Face config.json, a safetensors file, or a
    checkpoint. Nothing is downloaded, and no weight is read or allocated.
    """
    from trainer_kit.core.display import in_units
    from trainer_kit.planning import memory

    shapes = memory.describe_module(_shapes(model, args))
    rows = [("DTYPE", "WEIGHTS", "GRADIENTS", "ADAM", "TRAINING", "LARGEST LAYER")]
    for each in memory.estimate_memory(shapes):
        sizes = (each.weights, each.gradients, each.optimizer, each.training, each.largest_layer)
        rows.append((each.dtype, *("-" if size is None else in_units(size) for size in sizes)))  # type: ignore[arg-type]
    largest = max(shapes.layers, key=lambda name: shapes.layers[name], default="")
    click.echo(
        f"{model}: {shapes.parameters:,} numbers, {shapes.trainable:,} trained; the largest layer is {largest!r}"
    )
    table(rows)
    click.echo("On each device, without activations. 16-mixed and bf16-mixed keep all three in float32.")


def _shapes(model: str, args: str) -> Any:
    from trainer_kit.checkpoint.weights import weight_shapes

    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return _from_config(path)
    if path.exists():
        return weight_shapes(path)
    if ":" not in model:
        raise ConfigurationError(
            "this is no model", found=model, fix="give package.module:Class, or the path of weights or of a config.json"
        )
    return _from_class(model, _mapping(args))


def _mapping(text: str) -> dict[str, Any]:
    import yaml

    try:
        guarded_events(text)
        found = yaml.safe_load(text)
    except (YamlProblem, yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"--args cannot be read: {error}", found=text, fix='write "{width: 512}"') from error
    if not isinstance(found, dict):
        raise ConfigurationError("--args are names and values", found=text, fix='write "{width: 512}"')
    return found


def _from_class(model: str, arguments: dict[str, Any]) -> Any:
    import torch
    from torch import nn

    module, _, name = model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{module} cannot be imported", found=str(error), fix="run where it can be") from error
    if not hasattr(home, name):
        raise ConfigurationError(f"{module} has no {name!r}", fix=did_you_mean(name, vars(home)))
    try:
        with torch.device("meta"):
            made = getattr(home, name)(**arguments)
            if hasattr(made, "configure_model"):
                made.configure_model()
    except Exception as error:  # a constructor of the user may raise anything
        raise ConfigurationError(
            f"{name} could not be made without its weights",
            found=f"{type(error).__name__}: {error}",
            fix="pass its arguments as --args '{name: value}'; a constructor that reads its weights cannot be used",
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigurationError(f"{name} is no module", found=type(made).__name__)
    return made


def _from_config(path: Path) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(
            "a config.json is read with transformers, which is not installed",
            found=str(path),
            fix="pip install transformers, or give a class or a safetensors file",
        ) from error
    import torch

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)
