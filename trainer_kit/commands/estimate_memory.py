"""``trainer-kit estimate-memory``: the memory that a model will need."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

import click

from trainer_kit.commands.terminal import table
from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.types import Keywords, Nested
from trainer_kit.core.wings import need_wing
from trainer_kit.core.yaml_guard import YamlProblem, guarded_events

if TYPE_CHECKING:
    from torch import nn

__all__ = ["estimate_memory"]


@final
class _SeveralDtypes(click.Command):
    """Takes several words after ``--dtypes``, as Accelerate's command does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before the options are read, which need the room's table of dtypes.
        need_wing("planning", "trainer-kit estimate-memory")
        from trainer_kit.planning.memory import DTYPES

        # click options take one word each, so `--dtypes int8 int4` becomes `--dtypes int8 --dtypes int4`.
        arguments: list[str] = []
        for argument in args:
            follows_dtype = arguments[-2:-1] == ["--dtypes"] and arguments[-1] in DTYPES
            if follows_dtype and argument in DTYPES:
                arguments.append("--dtypes")
            arguments.append(argument)
        return super().parse_args(ctx, arguments)


@click.command("estimate-memory", cls=_SeveralDtypes)
@click.argument("model")
@click.option(
    "--args",
    default="{}",
    help="The constructor's arguments, as JSON or YAML: '{width: 512}'.",
)
@click.option(
    "--dtypes",
    multiple=True,
    help="float32, bfloat16, float16, float8, int8, int4; by default all.",
)
@click.option(
    "--library_name",
    type=click.Choice(["transformers", "timm"]),
    help="MODEL is a class of this library.",
)
@click.option(
    "--trust_remote_code",
    is_flag=True,
    help="Run Python files in the directory of a config.json.",
)
def estimate_memory(
    model: str,
    args: str,
    dtypes: tuple[str, ...],
    library_name: str | None,
    trust_remote_code: bool,
) -> None:
    """Print the memory that MODEL needs, by dtype.

    MODEL is a class (package.module:Class), a directory with a Hugging Face config.json, a safetensors file, or a
    checkpoint; with --library_name also a class of transformers, or a model of timm. Nothing is downloaded, and no
    weight is read or allocated.
    """
    from trainer_kit.core.display import in_units
    from trainer_kit.planning import memory

    # A dtype that is not used for training has no size of gradients and optimizer.
    def show(size: float | None) -> str:
        if size is None:
            return "-"
        return in_units(size)

    shapes = memory.describe_module(
        _shapes(model, args, library_name, trust_remote_code)
    )
    rows = [("DTYPE", "WEIGHTS", "GRADIENTS", "ADAM", "TRAINING", "LARGEST LAYER")]
    for estimate in memory.estimate_memory(shapes, dtypes or None):
        rows.append(
            (
                estimate.dtype,
                show(estimate.weights),
                show(estimate.gradients),
                show(estimate.optimizer),
                show(estimate.training),
                show(estimate.largest_layer),
            )
        )
    largest = max(shapes.layers, key=lambda name: shapes.layers[name], default="")
    layer = "the model itself"
    if largest:
        layer = repr(largest)
    click.echo(
        f"{model}: {shapes.parameters:,} parameters, {shapes.trainable:,} trainable; largest layer: {layer}"
    )
    table(rows)
    click.echo(
        "On each device, without activations. 16-mixed and bf16-mixed keep all three in float32."
    )


def _shapes(model: str, args: str, library: str | None, trust_remote_code: bool) -> Any:
    from trainer_kit.checkpoint.weights import weight_shapes

    path = Path(model)
    configured = path.is_dir() and (path / "config.json").is_file()
    # Weights in the directory are exact, and need neither transformers nor Python files of the model.
    if configured and (
        library == "transformers" or not any(path.glob("*.safetensors"))
    ):
        return _from_config(path, trust_remote_code)
    if path.exists():
        return weight_shapes(path)
    if ":" not in model:
        if library is not None and "/" not in model:
            return _from_library(library, model, _mapping(args))
        # With a slash it is a path, or a name on the Hugging Face Hub.
        problem = "this is not a model"
        if "/" in model:
            problem = "this path does not exist, and models are not downloaded"
        raise ConfigurationError(
            problem,
            found=model,
            fix="pass package.module:Class, or the path of weights or of a config.json (hf download NAME config.json)",
        )
    return _from_class(model, _mapping(args))


def _mapping(text: str) -> Keywords:
    import yaml

    try:
        guarded_events(text)
        # After `guarded_events`, which ends at a size and depth that a hostile text could exceed.
        mapping = yaml.safe_load(text)
    except (YamlProblem, yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(
            f"--args cannot be read: {error}", found=text, fix='write "{width: 512}"'
        ) from error
    if not isinstance(mapping, dict):
        raise ConfigurationError(
            "--args must map names to values", found=text, fix='write "{width: 512}"'
        )
    return mapping


def _from_class(model: str, arguments: Keywords) -> nn.Module:
    module, _, name = model.partition(":")
    # An installed script has no current directory in its path, unlike `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        module_object = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{module} cannot be imported",
            found=str(error),
            fix="run the command in a directory from which it can be imported",
        ) from error
    if not hasattr(module_object, name):
        raise ConfigurationError(
            f"{module} has no {name!r}", fix=did_you_mean(name, vars(module_object))
        )
    make = getattr(module_object, name)

    def build() -> object:
        model_object = make(**arguments)
        # A TrainModule may create its layers only here, which a Trainer would call.
        if hasattr(model_object, "configure_model"):
            model_object.configure_model()
        return model_object

    return _build_module(name, build)


def _build_module(name: str, build: Callable[[], object]) -> nn.Module:
    import torch
    from torch import nn

    try:
        # Parameters on the meta device have shapes and no storage, so a model of any size fits here.
        with torch.device("meta"):
            module = build()
    # A constructor of the user may raise anything.
    except Exception as error:
        raise ConfigurationError(
            f"{name} cannot be constructed without its weights",
            found=f"{type(error).__name__}: {error}",
            fix="pass its arguments as --args '{name: value}'; a constructor that reads weights is not supported",
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"{name} is not a module", found=type(module).__name__)
    return module


def _library(name: str, model: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"this model needs {name}, which is not installed",
            found=model,
            fix=f"pip install {name}, or give a class or a safetensors file",
        ) from error


def _from_library(library: str, name: str, arguments: Keywords) -> nn.Module:
    package = _library(library, name)
    if library == "timm":
        return _build_module(
            name, lambda: package.create_model(name, pretrained=False, **arguments)
        )
    model_class = getattr(package, name, None)
    # Pipelines and tokenizers of transformers are classes too, but have no configuration of a model.
    configuration = getattr(model_class, "config_class", None)
    if model_class is None or configuration is None:
        raise ConfigurationError(
            f"transformers has no model class {name!r}",
            fix=did_you_mean(name, dir(package)),
        )
    return _build_module(name, lambda: model_class(configuration(**arguments)))


def _find_remote_code(config: Nested) -> str | None:
    """The first class in an ``auto_map`` of the configuration, or of one inside it, that is in another repository."""
    # "owner/repository--file.Class"; without the dashes the file is in the directory of the configuration.
    if isinstance(config, list):
        return next(filter(None, map(_find_remote_code, config)), None)
    if not isinstance(config, dict):
        return None
    classes = config.get("auto_map")
    if isinstance(classes, dict):
        for names in classes.values():
            # Of tokenizers it is a list: the slow one and the fast one.
            if not isinstance(names, list):
                names = [names]
            for name in names:
                if isinstance(name, str) and "--" in name:
                    return name
    return _find_remote_code(list(config.values()))


def _from_config(path: Path, trust_remote_code: bool) -> nn.Module:
    elsewhere = None
    # A damaged file is reported below, by transformers.
    with suppress(ValueError, OSError):
        elsewhere = _find_remote_code(
            json.loads((path / "config.json").read_text("utf-8"))
        )
    if elsewhere is not None:
        raise ConfigurationError(
            "this config.json takes its Python files from another repository, and nothing is downloaded",
            found=f"auto_map: {elsewhere}",
            fix=f"hf download {elsewhere.partition('--')[0]}, read its Python files, and give that directory",
        )
    transformers = _library("transformers", str(path))
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            "this config.json cannot be used",
            found=str(error).splitlines()[0],
            fix="add --trust_remote_code if the directory has Python files and you have read them",
        ) from error
    # A model of its own Python files may be mapped only for one task, without a bare AutoModel.
    heads = [
        name
        for name in getattr(config, "auto_map", None) or {}
        if name.startswith("AutoModelFor")
    ]
    maker = getattr(transformers, [*heads, "AutoModel"][0])
    return _build_module(
        path.name,
        lambda: maker.from_config(config, trust_remote_code=trust_remote_code),
    )
