"""Option records of Accelerate itself, which libraries built on it pass, as this library's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.types import Function, Keywords
from trainer_kit.options.records import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

__all__ = ["takes_accelerate_records", "translated_record"]

_Taken = ParamSpec("_Taken")
_Returned = TypeVar("_Returned")

_KINDS: Final[dict[str, Function]] = {
    kind.__name__: kind
    for kind in (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
}
# Accelerate's engine plugins read the environment and change it when they are made, so they cannot be copied.
_ENGINES: Final = {
    "DeepSpeedPlugin": 'pass Accelerator(strategy="deepspeed_stage_2"), or a DeepSpeedPlugin of trainer_kit',
    "FullyShardedDataParallelPlugin": "pass a FullyShardedDataParallelPlugin of trainer_kit, or "
    "`trainer-kit launch --use_fsdp`",
    "MegatronLMPlugin": "pass a MegatronLMPlugin of trainer_kit",
    "ParallelismConfig": "pass a ParallelismConfig of trainer_kit",
    "TorchTensorParallelPlugin": "pass a ParallelismConfig of trainer_kit",
}


def translated_record(value: Any) -> Any:
    """This library's record for an option record of Accelerate; any other value unchanged.

    Args:
        value: an argument of an `Accelerator`.

    Raises:
        ConfigurationError: it is a plugin of Accelerate that chooses an engine.
    """
    # By name and module: Accelerate is not imported for it, and need not be installed.
    record_class = type(value)
    if record_class.__module__.partition(".")[0] != "accelerate":
        return value
    if record_class.__name__ in _ENGINES:
        raise ConfigurationError(
            f"this {record_class.__name__} is Accelerate's, which sets up an engine in its constructor",
            found=f"{record_class.__module__}.{record_class.__name__}",
            fix=_ENGINES[record_class.__name__],
        )
    # Other objects of Accelerate pass: what takes the argument says that it is wrong.
    kind = _KINDS.get(record_class.__name__)
    if kind is None:
        return value
    # Only what the caller has set: Accelerate's defaults differ from those here in places.
    # A fresh record of the same class: the defaults of the installed Accelerate, whatever its version.
    default = record_class()
    options: Keywords = {}
    for field in fields(value):
        option = getattr(value, field.name)
        if option != getattr(default, field.name):
            options[field.name] = _read_enum_value(option)
    if kind is GradientAccumulationPlugin:
        # What passes Accelerate's record counts on Accelerate's division, as Transformers' Trainer does.
        options["fixed_divisor"] = True
    return kind(**options)


def _read_enum_value(value: object) -> object:
    if isinstance(value, Enum):
        # Accelerate's enums are other classes than those here, but have the same values.
        return value.value
    return value


def takes_accelerate_records(
    construct: Callable[_Taken, _Returned],
) -> Callable[_Taken, _Returned]:
    """Decorate a constructor, so that its arguments may be option records of Accelerate, alone or in a list."""

    @wraps(construct)
    def translate(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
        positional: Any = [_translate_argument(value) for value in args]
        named: Any = {
            name: _translate_argument(value) for name, value in kwargs.items()
        }
        return construct(*positional, **named)

    return translate


def _translate_argument(argument: object) -> object:
    if isinstance(argument, (list, tuple)):
        return [translated_record(value) for value in argument]
    # `deepspeed_plugins` is a dict of them.
    if isinstance(argument, Mapping):
        return {name: translated_record(value) for name, value in argument.items()}
    return translated_record(argument)
