"""Command lines that name a checkpoint: the module's arguments that they leave out come from it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, final

import yaml

from trainer_kit.checkpoint.codecs import import_path
from trainer_kit.checkpoint.manifest import read_manifest
from trainer_kit.checkpoint.read import is_complete, read_checkpoint
from trainer_kit.checkpoint.weights import read_module
from trainer_kit.commands.argument_checks import options_with_values
from trainer_kit.core.display import mask_secrets
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import locate
from trainer_kit.core.types import HyperParameters, JsonObject, Nested

__all__ = ["CheckpointWords", "read_hyper_parameters", "words_from_checkpoint"]

_MODEL: Final = "model"
_UNWRITABLE: Final = object()


@final
@dataclass(frozen=True)
class CheckpointWords:
    """Hyperparameters of a checkpoint as options of a command line.

    Attributes:
        options: to be appended to the words of the user.
        line: which values come from the checkpoint; "" if none do.
    """

    options: tuple[str, ...] = ()
    line: str = ""


def words_from_checkpoint(
    words: Sequence[str],
    files: Iterable[JsonObject],
    known: Collection[str],
    kinds: Sequence[type[object]] | None,
) -> CheckpointWords:
    """The options that a command line takes from the hyperparameters in its ``--ckpt_path``.

    Args:
        words: of the command line.
        files: the contents of its configuration files, in their order.
        known: all options of the command, such as ``--model.width``.
        kinds: the classes among which ``--model`` chooses; None: the class is fixed.
    """
    # In the order of their priority, as the parser reads them: a word overrides a file.
    settings = list(files)
    for option, value in options_with_values(words):
        settings.append({option.removeprefix("--"): _parsed(option, value)})
    # An empty path is none: `ckpt_path: null` in a file overrides nothing.
    paths = [entry["ckpt_path"] for entry in settings if entry.get("ckpt_path")]
    path = None
    if paths:
        path = paths[-1]
    hparams: HyperParameters = {}
    # Only a Trainer knows which checkpoint is the last or the best; the entry point prints what differs.
    if isinstance(path, str) and path not in ("last", "best"):
        hparams = read_hyper_parameters(path)
    explicit = {name for entry in settings for name in _model_arguments(entry)}
    accepted = _accepted(settings, known, kinds)
    texts: dict[str, str] = {}
    refused: list[str] = []
    for name, value in hparams.items():
        # save_hyperparameters may hold more than the constructor takes, and the user's word has priority.
        if name in explicit or name not in accepted:
            continue
        text = _as_text(value)
        if text is None:
            refused.append(name)
        else:
            texts[name] = text
    if not texts and not refused:
        return CheckpointWords()
    # The line is printed, and may end in a log that others read.
    shown = mask_secrets({name: hparams[name] for name in texts})
    listed = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    line = f"hyperparameters of {path}: {listed or 'none'}"
    overridden = [name for name in hparams if name in explicit and name in accepted]
    if overridden:
        line += (
            f"; from the command line or a configuration file: {', '.join(overridden)}"
        )
    if refused:
        line += f"; to be passed, since no option can hold them: {', '.join(refused)}"
    # Options and not defaults of the parser: so their types are checked, and the saved configuration holds them.
    return CheckpointWords(
        tuple(f"--{_MODEL}.{name}={text}" for name, text in texts.items()), line
    )


def read_hyper_parameters(path: str) -> dict[str, Any]:
    """The hyperparameters in a checkpoint; empty if there are none, or if ``path`` is no checkpoint."""
    location = locate(path)
    try:
        if is_complete(location):
            # A module without save_hyperparameters has no such part, and asking for it would be an error.
            if "hyper_parameters" not in read_manifest(location)["parts"]:
                return {}
            contents = read_checkpoint(location, parts=["hyper_parameters"])
            hparams = contents["hyper_parameters"]
        else:
            hparams = read_module(location)["hyper_parameters"]
    # The entry point reads the same path, and raises this with all that it knows.
    except CheckpointError:
        return {}
    return {str(name): value for name, value in hparams.items()}


def _parsed(option: str, text: str) -> Nested:
    # --model may be a whole mapping of class_path and init_args; other values are compared as texts or not at all.
    if option != f"--{_MODEL}":
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _model_arguments(entry: JsonObject) -> set[str]:
    """The arguments of the module that one setting gives."""
    names: set[str] = set()
    for key, value in entry.items():
        if key == _MODEL and isinstance(value, Mapping):
            inner = value.get("init_args")
            # Both forms: `model: {width: 3}`, and `model: {class_path: ..., init_args: {width: 3}}`.
            names.update(value)
            if isinstance(inner, Mapping):
                names.update(inner)
        elif key.startswith(f"{_MODEL}."):
            name = key.removeprefix(f"{_MODEL}.").removeprefix("init_args.")
            names.add(name.partition(".")[0])
    return names


def _accepted(
    settings: Sequence[JsonObject],
    known: Collection[str],
    kinds: Sequence[type[object]] | None,
) -> set[str]:
    """The arguments that the chosen class takes."""
    if kinds is None:
        prefix = f"--{_MODEL}."
        return {
            option.removeprefix(prefix).partition(".")[0]
            for option in known
            if option.startswith(prefix)
        }
    class_name: str | None = ""
    for entry in settings:
        value = entry.get(f"{_MODEL}.class_path", entry.get(_MODEL, class_name))
        # `model: MyModule` is short for a mapping with only a class_path.
        if isinstance(value, Mapping):
            value = value.get("class_path", class_name)
        class_name = value
    for kind in kinds:
        if class_name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
            return set(inspect.signature(kind).parameters)
    return set()


def _as_text(value: object) -> str | None:
    """A hyperparameter as the text of an option; None if no option can hold it."""
    plain = _plain(value)
    if plain is _UNWRITABLE:
        return None
    # JSON is YAML, so that lists and mappings are read back; a plain text must have no quotes around it.
    if isinstance(plain, str):
        return plain
    return json.dumps(plain)


def _plain(value: object) -> Nested:
    # jsonargparse reads an enum by its name. Before the types below: an IntEnum is an int too.
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        # A checkpoint holds {"repr": text} for an object that it cannot hold.
        if set(items) == {"repr"} or _UNWRITABLE in items.values():
            return _UNWRITABLE
        return items
    if isinstance(value, (list, tuple)):
        elements = [_plain(element) for element in value]
        if _UNWRITABLE in elements:
            return _UNWRITABLE
        return elements
    if callable(value):
        # A function or class, which jsonargparse reads by its import path; a lambda has none.
        return import_path(value) or _UNWRITABLE
    return _UNWRITABLE
