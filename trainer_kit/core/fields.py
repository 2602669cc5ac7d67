"""Option records: values of another type than their annotation are refused in words."""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Mapping
from dataclasses import fields
from datetime import timedelta
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer_kit.core.errors import ConfigurationError

__all__ = ["check_fields", "check_timeout", "positive"]


def check_fields(record: Any) -> None:
    """Compare each field of a dataclass instance with its annotation.

    Whole numbers of any library are taken for int, real numbers for float, 0 and 1 for bool, and any collection but a
    string for a list. Elements are compared too.

    Raises:
        ConfigurationError: the class, the field, the value and what the field takes.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     size: int = 1
        >>> check_fields(Options("4"))
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: Options.size is of the wrong type
          found: size='4'
          fix:   size takes int
    """
    cls = type(record)
    hints = _hints(cls)  # type: ignore[arg-type]
    for one in fields(record):
        value = getattr(record, one.name, one.default)
        if not _fits(value, hints[one.name]):
            if isinstance(value, Real) and timedelta in (hints[one.name], *get_args(hints[one.name])):
                check_timeout(value, f"{cls.__name__}({one.name}=...)")
            raise ConfigurationError(
                f"{cls.__name__}.{one.name} is of the wrong type",
                found=f"{one.name}={value!r}",
                fix=f"{one.name} takes {one.type}",
            )


def check_timeout(timeout: Any, owner: str) -> None:
    """Refuse what is not a positive timedelta.

    Args:
        timeout: as the user gave it.
        owner: who takes it, for the message.
    """
    if isinstance(timeout, timedelta):
        if timeout > timedelta(0):
            return
        fix = "pass a time above zero, such as timedelta(minutes=30)"
    elif isinstance(timeout, Real):
        fix = f"from datetime import timedelta; timeout=timedelta(seconds={timeout})"
    else:
        fix = "timeout=timedelta(minutes=30)"
    raise ConfigurationError(f"the timeout of {owner} is a timedelta", found=f"timeout={timeout!r}", fix=fix)


def positive(record: Any, *names: str) -> None:
    """Refuse fields that are not above zero; None passes."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not value > 0:
            raise ConfigurationError(f"{type(record).__name__}.{name} is above zero", found=f"{name}={value!r}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # the type of a library that is imported when it is used
        return dict.fromkeys((one.name for one in fields(cls)), Any)


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if kind is None or kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool) or (isinstance(value, Integral) and value in (0, 1))
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return _fits_class(value, kind if origin is None else origin, parts)


def _fits_class(value: Any, kind: type, parts: tuple[Any, ...]) -> bool:
    if kind.__name__ == "Callable":  # a special form, for mypy no class
        return callable(value)
    if kind is os.PathLike:
        return isinstance(value, kind)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(part, what) for item in value.items() for part, what in zip(item, parts, strict=False)
        )
    if kind in (list, tuple):
        several = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return several and all(_fits(part, parts[0]) for part in value if parts)
    return isinstance(value, kind)
