"""Checks of arguments: the types of option records, unknown names, and one value or several."""

from __future__ import annotations

import collections.abc
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.lazy import argument_rows

__all__ = [
    "Replaced",
    "as_list",
    "call_check",
    "check_fields",
    "check_timeout",
    "check_type",
    "known_arguments",
    "positive",
    "refuse_replaced",
    "refuse_unknown",
    "typed_arguments",
    "with_typed_arguments",
    "word_of",
]

_SWITCHES = {
    "bool": bool,
    "bool | None": bool | None,
}  # what `known_arguments` checks, as annotated
_Taken = ParamSpec("_Taken")
_Returned = TypeVar("_Returned")


class Replaced(NamedTuple):
    """An argument of another library that has no counterpart here.

    Attributes:
        instead: what to write; ``{value}`` is the given value.
        same: values that ask for what happens here anyway; they are accepted.
    """

    instead: str
    same: tuple[object, ...] = ()


def check_fields(record: Any) -> None:
    """Compare each field of a dataclass instance with its annotation.

    int accepts the whole numbers of any library, float real numbers, bool also 0 and 1 and numpy's, Path any path
    object, and list any collection but a string. Elements are compared too.

    Raises:
        ConfigurationError: a field has the wrong type; the message names class, field, value and expected type.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Options:
        ...     size: int = 1
        >>> check_fields(Options("4"))
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: Options.size has the wrong type
          found: size='4'
          fix:   size takes int
    """
    cls = type(record)
    hints = _hints(cls)  # type: ignore[arg-type]
    for one in fields(record):
        value = getattr(record, one.name, one.default)
        if not _fits(value, hints[one.name]):
            if isinstance(value, Real) and timedelta in (
                hints[one.name],
                *get_args(hints[one.name]),
            ):
                check_timeout(value, f"{cls.__name__}({one.name}=...)")
            raise ConfigurationError(
                f"{cls.__name__}.{one.name} has the wrong type",
                found=f"{one.name}={value!r}",
                fix=f"{one.name} takes {one.type}",
            )


def typed_arguments(
    cls: type, make: Callable[_Taken, _Returned]
) -> Callable[_Taken, _Returned]:
    """Return ``make``, an ``__init__``, that first compares its arguments with their annotations, as `check_fields`.

    Only numbers, strings, functions, paths, and sequences and mappings of them are compared. The constructor itself
    answers a word that it does not know, and every other class. Arguments that only the other library's class has are
    answered by `refuse_replaced`.

    Args:
        cls: the class.
        make: the method.
    """

    @wraps(make)
    def checked(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
        kinds = _plain_hints(make)
        parameters = inspect.signature(make).parameters
        refuse_replaced(cls.__name__, cls, parameters, kwargs)
        try:
            given = inspect.signature(make).bind(*args, **kwargs).arguments
        except TypeError:  # Python's own error names the argument
            given = {}
        for name in given.keys() & kinds.keys():
            check_type(
                cls.__name__,
                name,
                given[name],
                kinds[name],
                parameters[name].annotation,
            )
        return make(*args, **kwargs)

    return checked


def refuse_replaced(
    owner: str, cls: type | None, parameters: Collection[str], keywords: dict[str, Any]
) -> None:
    """Refuse arguments of another library's class or method, and drop those that ask for what happens anyway.

    Args:
        owner: the class or method, as in the table of `core.lazy.find_names`.
        cls: the class, for the rows of its base classes; None for a method.
        parameters: the names that ``owner`` takes.
        keywords: the arguments by name; dropped ones are removed.

    Raises:
        ConfigurationError: the message has what to write instead.
    """
    unknown = [name for name in keywords if name not in parameters]
    if not unknown:
        return
    owners = [owner] if cls is None else [base.__name__ for base in cls.__mro__]
    rows = argument_rows(__name__, owners)
    for name in unknown:
        row = rows.get(name)
        if row is None:
            continue
        value = keywords[name]
        if any(
            value is same or (type(value) is type(same) and value == same)
            for same in row.same
        ):
            del keywords[name]
        else:
            refuse_unknown(owner, {name: value}, (), {name: row.instead})


def with_typed_arguments(cls: type) -> None:
    """Replace the constructor that a class of this library defines by `typed_arguments` of it."""
    if cls.__module__.startswith("trainer_kit.") and "__init__" in vars(cls):
        made: Any = cls
        made.__init__ = typed_arguments(cls, made.__init__)


def check_type(owner: str, name: str, value: Any, kind: Any, text: str = "") -> None:
    """Raise `ConfigurationError` if ``value`` does not fit the annotation ``kind``, as in `check_fields`.

    Args:
        owner: the function or class, for the message.
        name: the argument.
        value: what the user passed.
        kind: the annotation, such as ``int | Sequence[int]``.
        text: the annotation in words; by default as Python prints it.
    """
    if not _fits(value, kind):
        raise ConfigurationError(
            f"{owner}({name}=) has the wrong type",
            found=f"{name}={value!r}",
            fix=f"{name} takes {text or getattr(kind, '__name__', str(kind).replace('collections.abc.', ''))}",
        )


@cache
def _plain_hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        hints = get_type_hints(make)
    except NameError:  # as in `_hints`
        return {}
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = [
        one.name
        for one in inspect.signature(make).parameters.values()
        if one.kind not in several
    ]
    return {
        name: hints[name] for name in single if name in hints and _is_plain(hints[name])
    }


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return all(map(_is_plain, get_args(kind)))
    if get_origin(kind) in (collections.abc.Sequence, collections.abc.Mapping):
        return all(part is Any or _is_plain(part) for part in get_args(kind))
    if kind in (int, float, bool, str, Path, types.NoneType):
        return True
    return get_origin(kind) in (collections.abc.Callable, os.PathLike)


def check_timeout(timeout: Any, owner: str) -> None:
    """Raise `ConfigurationError` unless ``timeout`` is a positive timedelta.

    Args:
        timeout: the user's argument.
        owner: the name of the class or function that takes it, for the message.
    """
    if isinstance(timeout, timedelta):
        if timeout > timedelta(0):
            return
        fix = "pass a time above zero, such as timedelta(minutes=30)"
    elif isinstance(timeout, Real):
        fix = f"from datetime import timedelta; timeout=timedelta(seconds={timeout})"
    else:
        fix = "timeout=timedelta(minutes=30)"
    raise ConfigurationError(
        f"the timeout of {owner} must be a timedelta",
        found=f"timeout={timeout!r}",
        fix=fix,
    )


def positive(record: Any, *names: str) -> None:
    """Raise `ConfigurationError` for a field that is not above zero; None is accepted."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not value > 0:
            raise ConfigurationError(
                f"{type(record).__name__}.{name} is above zero",
                found=f"{name}={value!r}",
            )


@cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # an annotation names a type of a library that is imported lazily
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
        numpy = str(getattr(value, "dtype", None)) == "bool" and value.ndim == 0
        return (
            isinstance(value, bool)
            or (isinstance(value, Integral) and value in (0, 1))
            or numpy
        )
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return _fits_class(value, kind if origin is None else origin, parts)


def _fits_class(value: Any, kind: type, parts: tuple[Any, ...]) -> bool:
    if kind.__name__ == "Callable":  # a special form; mypy does not know it as a class
        return callable(value)
    if kind in (os.PathLike, Path):
        return isinstance(value, os.PathLike)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(part, what)
            for item in value.items()
            for part, what in zip(item, parts, strict=False)
        )
    if kind in (list, tuple, collections.abc.Sequence):
        several = isinstance(value, Collection) and not isinstance(
            value, (str, bytes, Mapping)
        )
        return several and all(_fits(part, parts[0]) for part in value if parts)
    return isinstance(value, kind)


def as_list(given: Any, *single: type) -> list[Any]:
    """Convert an argument that takes one object or any iterable of them to a list; empty for None and False.

    Args:
        given: the argument.
        single: classes whose objects count as one object even if they are iterable, as strings and mappings always do.

    Example:
        >>> as_list(None), as_list(3), as_list("ab"), as_list({"a": 1, "b": 2}.values())
        ([], [3], ['ab'], [1, 2])
    """
    if given is None or given is False:
        return []
    if isinstance(given, (str, bytes, Mapping, *single)) or not isinstance(
        given, Iterable
    ):
        return [given]
    return list(given)


def word_of(value: Any) -> str:
    """A word from a string or from a member of an enumeration, such as Accelerate's.

    Example:
        >>> from enum import Enum
        >>> word_of("fp16"), word_of(Enum("Kind", {"HALF": "fp16"}).HALF)
        ('fp16', 'fp16')
    """
    return str(value.value if isinstance(value, Enum) else value)


def refuse_unknown(
    owner: str,
    unknown: Mapping[str, Any],
    known: Collection[str],
    former: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `ConfigurationError` for the first of the unknown arguments, if there is one.

    Args:
        owner: what was called.
        unknown: names and values.
        known: the arguments that there are.
        former: as for `known_arguments`.
    """
    for name, value in unknown.items():
        fix = (
            former[name].format(value=repr(value))
            if name in former
            else did_you_mean(name, known)
        )
        text = repr(value)
        text = (
            text
            if len(text) <= 100 and "\n" not in text
            else f"a {type(value).__name__}"
        )
        raise ConfigurationError(
            f"{owner} has no argument {name!r}", found=f"{name}={text}", fix=fix
        )


def known_arguments(
    former: Mapping[str, str],
) -> Callable[[Callable[_Taken, _Returned]], Callable[_Taken, _Returned]]:
    """Decorate a constructor or method: a call that does not fit its arguments raises an error that names the fix.

    Args:
        former: replacements for argument names of other versions; ``{value}`` in them becomes the given value. Read
            when there is an error, so it may be filled later.

    Raises:
        ConfigurationError: an argument is unknown, missing, or has no name where it needs one.

    Example:
        >>> class Runner:
        ...     @known_arguments({"gpus": "devices={value}"})
        ...     def __init__(self, *, devices=1):
        ...         self.devices = devices
        >>> Runner(devices=2).devices
        2
        >>> Runner(gpus=2)
        Traceback (most recent call last):
        trainer_kit.core.errors.ConfigurationError: Runner has no argument 'gpus'
          found: gpus=2
          fix:   devices=2
    """

    def decorate(
        constructor: Callable[_Taken, _Returned],
    ) -> Callable[_Taken, _Returned]:
        check = call_check(constructor, former)

        @wraps(constructor)
        def checked(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
            check(args, kwargs)
            return constructor(*args, **kwargs)

        return checked

    return decorate


def call_check(
    method: Callable[..., Any], former: Mapping[str, str]
) -> Callable[[Sequence[Any], Mapping[str, Any]], None]:
    """The check of `known_arguments` on its own, for a decorator that would otherwise add a second frame to tracebacks.

    Args:
        method: a constructor or method; the first of its arguments is not checked.
        former: as for `known_arguments`.
    """
    parameters = inspect.signature(method).parameters
    several = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    known = [
        name
        for name, each in parameters.items()
        if each.kind is not each.VAR_POSITIONAL
    ][1:]
    positional = (
        sum(each.kind is not each.KEYWORD_ONLY for each in parameters.values()) - 1
    )
    named = [
        name for name in known if parameters[name].kind is parameters[name].KEYWORD_ONLY
    ]
    needed = [
        name for name in known if parameters[name].default is inspect.Parameter.empty
    ]
    switches = {
        name: _SWITCHES.get(each.annotation, Any) for name, each in parameters.items()
    }
    owner = method.__qualname__.removesuffix(".__init__")

    def check(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        refuse_unknown(
            owner,
            {name: value for name, value in kwargs.items() if name not in known},
            known,
            former,
        )
        if len(args) - 1 > positional and not several:
            first = args[positional + 1]
            is_module = any(kind.__name__ == "Module" for kind in type(first).__mro__)
            some = (
                f"{positional} arguments without a name"
                if positional
                else "its arguments by name"
            )
            raise ConfigurationError(
                f"{owner} takes {some}",
                found=(f"a {type(first).__name__}" if is_module else f"{first!r:.100}")
                + " without a name",
                fix=former.get(
                    "module" if is_module else "", f"such as {(named or known)[0]}=..."
                ),
            )
        for name in needed:
            if name not in kwargs and (
                name in named or known.index(name) >= len(args) - 1
            ):
                raise ConfigurationError(
                    f"{owner} needs {name}", found=f"no {name}", fix=f"pass {name}=..."
                )
        for name, value in (
            *zip(list(parameters)[1:], args[1:], strict=False),
            *kwargs.items(),
        ):
            check_type(owner, name, value, switches[name], parameters[name].annotation)

    return check
