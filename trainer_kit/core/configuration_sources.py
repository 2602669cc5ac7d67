"""A value and its origin: an argument, a flag, a configuration file, the environment, or the default.

The launcher resolves flags and files, and passes their values to the ranks in environment variables; the variable
`ORIGINS` has the origin of each, for ``explain()``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from trainer_kit.core.errors import ConfigurationError

__all__ = [
    "ORIGINS",
    "Chosen",
    "choose",
    "describe_origins",
    "is_true",
    "steps_of",
    "variable",
]

ORIGINS: Final = "TRAINER_KIT_ORIGINS"
"""The variable that holds the origins of the other variables, as JSON by option."""

_PREFIXES: Final = ("TRAINER_KIT_", "ACCELERATE_")
_OTHER_NAMES: Final = {
    "debug": ("ACCELERATE_DEBUG_MODE",),
    "main_process_ip": ("MASTER_ADDR",),
    "main_process_port": ("MASTER_PORT",),
    "num_cpu_threads_per_process": ("OMP_NUM_THREADS",),
    **{
        f"parallelism_config_{name}": (f"PARALLELISM_CONFIG_{name.upper()}",)
        for name in (
            "dp_replicate_size",
            "dp_shard_size",
            "tp_size",
            "cp_size",
            "cp_comm_strategy",
        )
    },
}


@final
@dataclass(frozen=True)
class Chosen:
    """A value and its origin.

    Attributes:
        value: the value; a string if it comes from a variable.
        origin: where it comes from, such as ``"argument"`` or ``"config.yaml:3"``.
    """

    value: Any
    origin: str


def variable(name: str, environ: Mapping[str, str] = os.environ) -> Chosen | None:
    """The value of an option in the environment: ``TRAINER_KIT_NAME``, or ``ACCELERATE_NAME``.

    Args:
        name: the option.
        environ: the variables.

    Example:
        >>> variable("mixed_precision", {"ACCELERATE_MIXED_PRECISION": "bf16"})
        Chosen(value='bf16', origin='environment ACCELERATE_MIXED_PRECISION')
    """
    keys = [f"{prefix}{name.upper()}" for prefix in _PREFIXES]
    keys += _OTHER_NAMES.get(name, ())
    for key in keys:
        # An empty variable counts as one that is not set.
        if not environ.get(key):
            continue
        origin = None
        # Only this library's launcher records origins: a flag or a file that it passes on in its own variables.
        if key.startswith(_PREFIXES[0]):
            origin = _launcher_origins(environ).get(name)
        if not isinstance(origin, str):
            origin = f"environment {key}"
        return Chosen(environ[key], origin)
    return None


def _launcher_origins(environ: Mapping[str, str]) -> Mapping[str, object]:
    try:
        origins = json.loads(environ.get(ORIGINS) or "{}")
    except ValueError:
        # Origins are shown to users, and nothing else: a damaged variable ends no run.
        return {}
    if not isinstance(origins, dict):
        return {}
    return origins


def choose(
    name: str,
    argument: object,
    default: object,
    environ: Mapping[str, str] = os.environ,
) -> Chosen:
    """The argument, else the value in the environment, else the default.

    Args:
        name: the option.
        argument: the user's argument; None if it was not given.
        default: the value if neither is set.
        environ: the variables.

    Example:
        >>> choose("mixed_precision", "fp16", "no", {"TRAINER_KIT_MIXED_PRECISION": "bf16"})
        Chosen(value='fp16', origin='argument')
        >>> choose("mixed_precision", None, "no", {})
        Chosen(value='no', origin='default')
    """
    if argument is not None:
        return Chosen(argument, "argument")
    return variable(name, environ) or Chosen(default, "default")


def is_true(value: object) -> bool:
    """Whether ``value`` is true, or a word for it in an environment variable.

    Example:
        >>> is_true("yes"), is_true("0"), is_true(True)
        (True, False, True)
    """
    return str(value).strip().lower() in ("1", "true", "yes", "on", "y")


def steps_of(chosen: Chosen) -> int:
    """Convert a number of micro-batches, which may be the text of a variable, to int.

    Raises:
        ConfigurationError: it is not an integer.

    Example:
        >>> steps_of(Chosen("4", "environment ACCELERATE_GRADIENT_ACCUMULATION_STEPS"))
        4
    """
    try:
        # int() would cut 2.5 to 2.
        if isinstance(chosen.value, float) and not chosen.value.is_integer():
            raise ValueError
        return int(chosen.value)
    except (TypeError, ValueError):
        raise ConfigurationError(
            "gradient_accumulation_steps must be an integer",
            found=f"{chosen.value!r} ({chosen.origin})",
        ) from None


def describe_origins(chosen: Iterable[tuple[str, Chosen]]) -> list[str]:
    """Format each option as a line with columns for name, value and origin.

    Example:
        >>> describe_origins([("debug", Chosen(True, "argument")), ("mixed_precision", Chosen("no", "default"))])
        ['debug            true  argument', 'mixed_precision  no    default']
    """
    names = []
    values = []
    origins = []
    for name, option in chosen:
        names.append(name)
        values.append(_text(option.value))
        origins.append(option.origin)
    name_width = max(map(len, names), default=0)
    value_width = max(map(len, values), default=0)
    lines = []
    for name, value, origin in zip(names, values, origins, strict=True):
        lines.append(f"{name:<{name_width}}  {value:<{value_width}}  {origin}")
    return lines


def _text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
