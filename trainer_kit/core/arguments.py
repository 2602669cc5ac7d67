"""Checks of arguments: the types of option records, unknown names, and one value or several."""

from __future__ import annotations

import collections.abc
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from datetime import timedelta
from enum import Enum
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    SupportsFloat,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainer_kit.core.errors import ConfigurationError, did_you_mean
from trainer_kit.core.lazy import argument_rows
from trainer_kit.core.types import Function

__all__ = [
    "Replaced",
    "as_list",
    "call_check",
    "check_fields",
    "check_timeout",
    "check_type",
    "known_arguments",
    "positive",
    "read_again",
    "refuse_replaced",
    "refuse_unknown",
    "typed_arguments",
    "typed_function",
    "with_typed_arguments",
    "word_of",
]

_Annotation: TypeAlias = Any
"""An annotation at run time: a class, or a special form of ``typing``."""
_SHOWN: Final = 200
"""The most characters of a value in a message."""
# What `known_arguments` checks, by the annotation as written: a string where True belongs would count as true, and no
# later code would notice.
_SWITCHES = {"bool": bool, "bool | None": bool | None}
_Taken = ParamSpec("_Taken")
_Returned = TypeVar("_Returned")


class _DataclassObject(Protocol):
    """An object of any dataclass, as ``dataclasses.fields`` takes it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Replaced(NamedTuple):
    """An argument of another library that has no counterpart here.

    Attributes:
        instead: what to write; ``{value}`` is the given value.
        same: values that ask for what happens here anyway; they are accepted.
    """

    instead: str
    same: tuple[object, ...] = ()


def check_fields(record: _DataclassObject) -> None:
    """Compare each field of a dataclass instance with its annotation.

    int accepts the integers of any library, float real numbers, bool also 0 and 1 and numpy's, Path any path
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
    hints = _hints(cls)
    for field in fields(record):
        value = getattr(record, field.name, field.default)
        hint = hints[field.name]
        if _fits(value, hint):
            continue
        # A number where a time belongs gets the error that shows how to write it.
        if isinstance(value, Real) and timedelta in (hint, *get_args(hint)):
            check_timeout(value, f"{cls.__name__}({field.name}=...)")
        raise ConfigurationError(
            f"{cls.__name__}.{field.name} has the wrong type",
            found=f"{field.name}={value!r}",
            fix=f"{field.name} takes {field.type}",
        )


def typed_arguments(
    cls: type, make: Callable[_Taken, _Returned]
) -> Callable[_Taken, _Returned]:
    """Return ``make``, an ``__init__``, that first compares its arguments with their annotations, as `check_fields`.

    Only numbers, strings, functions, paths, and sequences and mappings of them are compared. An unknown name is a
    `TypeError`, as for any function, with the nearest known one. Arguments that only the other library's class has are
    answered by `refuse_replaced`.

    Args:
        cls: the class.
        make: the method.
    """
    return _checked(make, cls.__name__, cls)


def typed_function(
    function: Callable[_Taken, _Returned],
) -> Callable[_Taken, _Returned]:
    """Decorate a function: its arguments are checked as `typed_arguments` checks those of a constructor.

    Args:
        function: the function.

    Example:
        >>> @typed_function
        ... def pad(rows: list, length: int = 8):
        ...     return rows
        >>> pad([], lenght=9)
        Traceback (most recent call last):
        TypeError: pad() got an unexpected keyword argument 'lenght': did you mean 'length'?
    """
    return _checked(function, function.__name__, None)


def _checked(
    function: Callable[_Taken, _Returned], owner: str, cls: type | None
) -> Callable[_Taken, _Returned]:
    """`typed_arguments` and `typed_function`; ``cls`` and ``owner`` as in `refuse_replaced`."""

    @wraps(function)
    def checked(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Returned:
        # In the call, since annotations may name classes that the module defines below this one.
        kinds = _plain_hints(function)
        signature = inspect.signature(function)
        parameters = signature.parameters
        refuse_replaced(owner, cls, parameters, kwargs)
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            _suggest_name(error, function, parameters, kwargs)
            # The call below raises Python's own error, which names what is missing or too much.
            values = {}
        for name in values.keys() & kinds.keys():
            annotation = parameters[name].annotation
            check_type(owner, name, values[name], kinds[name], annotation)
        return function(*args, **kwargs)

    return checked


def _suggest_name(
    error: TypeError,
    function: Function,
    parameters: Mapping[str, inspect.Parameter],
    keywords: Mapping[str, object],
) -> None:
    """Raise Python's error for an unknown argument with the nearest known name, if an argument is unknown.

    Raises:
        TypeError: from ``error``, which `inspect` has raised.
    """
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    accepted = [name for name in parameters if name != "self"]
    for name in keywords:
        if name not in parameters:
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}:"
                f" {did_you_mean(name, accepted)}"
            ) from error


def refuse_replaced(
    owner: str,
    cls: type | None,
    parameters: Collection[str],
    keywords: dict[str, object],
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
        if any(_is_same(value, same) for same in row.same):
            del keywords[name]
        else:
            refuse_unknown(owner, {name: value}, (), {name: row.instead})


def _is_same(value: object, other: object) -> bool:
    # The types are compared too: True equals 1. Identity first: an array has no truth value.
    return value is other or (type(value) is type(other) and value == other)


def with_typed_arguments(cls: type) -> None:
    """Replace the constructor that a class of this library defines by `typed_arguments` of it."""
    if cls.__module__.startswith("trainer_kit.") and "__init__" in vars(cls):
        # mypy takes an assignment to a method for a mistake.
        target: Any = cls
        target.__init__ = typed_arguments(cls, target.__init__)


def check_type(
    owner: str, name: str, value: object, kind: _Annotation, text: str = ""
) -> None:
    """Raise `ConfigurationError` if ``value`` does not fit the annotation ``kind``, as in `check_fields`.

    Args:
        owner: the function or class, for the message.
        name: the argument.
        value: what the user passed.
        kind: the annotation, such as ``int | Sequence[int]``.
        text: the annotation in words; by default as Python prints it.
    """
    if _fits(value, kind):
        return
    if not text:
        printed = str(kind).replace("collections.abc.", "")
        text = getattr(kind, "__name__", printed)
    origin: _Annotation = get_origin(kind)
    if origin is collections.abc.Mapping:
        text = f'a dict, {text}: {name}={{"name": ...}}'
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    raise ConfigurationError(
        f"{owner}({name}=) has the wrong type",
        found=f"{name}={shown}",
        fix=f"{name} takes {text}",
    )


@cache
def _plain_hints(make: Function) -> dict[str, _Annotation]:
    """The annotations of those parameters of a function that `typed_arguments` checks."""
    try:
        hints = get_type_hints(make)
    except NameError:
        # As in `_hints`: a type of a library that is imported lazily.
        return {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    plain = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.kind in variadic or name not in hints:
            continue
        if _is_plain(hints[name]):
            plain[name] = hints[name]
    return plain


_PLAIN: Final = (int, float, SupportsFloat, bool, str, Path, types.NoneType)


def _is_plain(kind: _Annotation) -> bool:
    """Whether an annotation consists of numbers, strings, functions, paths and collections of them."""
    origin: _Annotation = get_origin(kind)
    members = get_args(kind)
    if origin in (Union, types.UnionType):
        return all(map(_is_plain, members))
    if origin in (collections.abc.Sequence, collections.abc.Mapping):
        # Entries of any type need no comparison.
        compared = [member for member in members if member not in (Any, object)]
        return all(map(_is_plain, compared))
    if origin in (collections.abc.Callable, os.PathLike):
        return True
    return kind in _PLAIN


def check_timeout(timeout: object, owner: str) -> None:
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


def positive(record: object, *names: str) -> None:
    """Raise `ConfigurationError` for a field that is not above zero; None is accepted."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not value > 0:
            raise ConfigurationError(
                f"{type(record).__name__}.{name} is above zero",
                found=f"{name}={value!r}",
            )


@cache
def _hints(cls: type) -> dict[str, _Annotation]:
    try:
        return get_type_hints(cls)
    except NameError:
        # An annotation names a type of a library that is imported lazily: no field is checked.
        return {field.name: Any for field in fields(cls)}


def _fits(value: object, kind: _Annotation) -> bool:
    origin: _Annotation = get_origin(kind)
    arguments = get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, alternative) for alternative in arguments)
    if origin is Literal:
        return value in arguments
    if kind is None or kind is type(None):
        return value is None
    if kind is bool:
        return _fits_bool(value)
    # The abstract classes of numbers, since numpy's are no subclasses of Python's.
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return _fits_class(value, origin or kind, arguments)


def _fits_bool(value: object) -> bool:
    # Python's bool is an Integral too; NumPy's is none.
    if isinstance(value, Integral):
        return value in (0, 1)
    return str(getattr(value, "dtype", None)) == "bool" and not getattr(
        value, "ndim", 0
    )


def _fits_class(value: object, kind: type, members: tuple[_Annotation, ...]) -> bool:
    # By name: Callable is a special form, which mypy does not know as a class.
    if kind.__name__ == "Callable":
        return callable(value)
    if kind in (os.PathLike, Path):
        return isinstance(value, os.PathLike)
    if issubclass(kind, Mapping):
        if not isinstance(value, Mapping):
            return False
        if not members:
            return True
        key_kind, item_kind = members
        return all(
            _fits(key, key_kind) and _fits(item, item_kind)
            for key, item in value.items()
        )
    if kind in (list, tuple, collections.abc.Sequence):
        # A string is a sequence of strings, and a mapping one of keys: both are mistakes where a list belongs.
        if isinstance(value, (str, bytes, Mapping)):
            return False
        if not isinstance(value, Collection):
            return False
        return not members or all(_fits(item, members[0]) for item in value)
    return isinstance(value, kind)


def as_list(value: Any, *single: type) -> list[Any]:
    """Convert an argument that takes one object or any iterable of them to a list; empty for None and False.

    Args:
        value: the argument.
        single: classes whose objects count as one object even if they are iterable, as strings and mappings always do.

    Example:
        >>> as_list(None), as_list(3), as_list("ab"), as_list({"a": 1, "b": 2}.values())
        ([], [3], ['ab'], [1, 2])
    """
    if value is None or value is False:
        return []
    if not isinstance(value, Iterable):
        return [value]
    if isinstance(value, (str, bytes, Mapping, *single)):
        return [value]
    return list(value)


def read_again(value: Any) -> Any:
    """A list of what an iterator yields, which can be read only once; every other argument as it is.

    Example:
        >>> read_again(iter("ab")), read_again("ab"), read_again(None)
        (['a', 'b'], 'ab', None)
    """
    if isinstance(value, Iterator):
        return list(value)
    return value


def word_of(value: object) -> str:
    """A word from a string or from a member of an enumeration, such as Accelerate's.

    Example:
        >>> from enum import Enum
        >>> word_of("fp16"), word_of(Enum("Kind", {"HALF": "fp16"}).HALF)
        ('fp16', 'fp16')
    """
    if isinstance(value, Enum):
        value = value.value
    return str(value)


def refuse_unknown(
    owner: str,
    unknown: Mapping[str, object],
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
        text = repr(value)
        if name in former:
            fix = former[name].format(value=text)
        else:
            fix = did_you_mean(name, known)
        # The repr of a module or an array would hide the message.
        if len(text) > 100 or "\n" in text:
            text = f"a {type(value).__name__}"
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
    method: Function, former: Mapping[str, str]
) -> Callable[[Sequence[object], Mapping[str, object]], None]:
    """The check of `known_arguments` on its own, for a decorator that would otherwise add a second frame to tracebacks.

    Args:
        method: a constructor or method; the first of its arguments is not checked.
        former: as for `known_arguments`.
    """
    # The signature is read once, for every call. Without the first parameter, which is ``self``.
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])
    variadic = False
    accepted: list[str] = []
    positional: list[str] = []
    required: list[str] = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = True
            continue
        accepted.append(name)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(name)
        if parameter.default is parameter.empty:
            required.append(name)
    owner = method.__qualname__.removesuffix(".__init__")

    def check(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        # Unknown names before missing ones: a misspelled argument is both.
        unknown = {name: kwargs[name] for name in kwargs if name not in accepted}
        refuse_unknown(owner, unknown, accepted, former)
        values = args[1:]
        if len(values) > len(positional) and not variadic:
            named = [name for name in accepted if name not in positional]
            example = (named or accepted)[0]
            surplus = values[len(positional)]
            raise _surplus_argument(owner, len(positional), surplus, example, former)
        by_position = positional[: len(values)]
        for name in required:
            if name not in kwargs and name not in by_position:
                raise ConfigurationError(
                    f"{owner} needs {name}", found=f"no {name}", fix=f"pass {name}=..."
                )
        passed = [*zip(parameters, values, strict=False), *kwargs.items()]
        for name, value in passed:
            annotation = parameters[name].annotation
            kind = _SWITCHES.get(annotation, Any)
            check_type(owner, name, value, kind, annotation)

    return check


def _surplus_argument(
    owner: str, count: int, value: object, example: str, former: Mapping[str, str]
) -> ConfigurationError:
    """The error for a value without a name behind the ``count`` that ``owner`` takes."""
    takes = "its arguments by name"
    if count:
        takes = f"{count} arguments without a name"
    fix = f"such as {example}=..."
    shown = f"{value!r:.100}"
    # By name: torch need not be imported for it, and the repr of a module has many lines.
    if any(base.__name__ == "Module" for base in type(value).__mro__):
        shown = f"a {type(value).__name__}"
        fix = former.get("module", fix)
    else:
        fix = former.get("", fix)
    return ConfigurationError(
        f"{owner} takes {takes}", found=f"{shown} without a name", fix=fix
    )
