"""Which objects a checkpoint can hold besides plain data, and which names in a file may become objects again.

Reading imports no module and calls nothing that a file names. A name is looked up among the modules that the program
has imported, and only these kinds of objects are taken: classes of `torch.nn.Module`, optimizers, schedulers, enums,
dataclasses and named tuples; operations on tensors; classes and functions of the program itself; and what the program
has registered with `codec`. An object is created without its constructor, and its attributes are set.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from importlib import import_module
from operator import index
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, Final, TypeVar, final
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hparams import HParams

__all__ = [
    "Codec",
    "ObjectRecord",
    "attributes_of",
    "cannot_be_stored",
    "codec",
    "codec_named",
    "codec_of",
    "find_class",
    "find_name",
    "import_path",
    "is_library_kind",
    "is_named_tuple",
    "module_from_plain",
    "module_to_plain",
    "object_from_attributes",
    "type_name",
    "why_not_module",
]

_Kind = TypeVar("_Kind", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class Codec:
    """How objects of one class are stored.

    Attributes:
        name: the name of the class in checkpoints.
        to_plain: returns what is stored in place of an object.
        from_plain: returns an object for what was stored.
    """

    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


@final
@dataclass(frozen=True)
class ObjectRecord:
    """A decoded object whose class this program has not imported, or may not create from a file.

    Attributes:
        kind: module and qualified name of its class; of a class or a function, its own.
        state: its attributes or items; None for a class or a function.
    """

    kind: str
    state: Any = None


_CODECS: Final[dict[type, Codec]] = {}
_BY_NAME: Final[dict[str, Codec]] = {}
_REGISTERED: Final[dict[str, Any]] = {}
"""Classes and functions that the program allows checkpoints to name."""


def codec(
    kind: _Kind,
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
) -> _Kind:
    """Register how checkpoints store objects of a class, for example a scaler; or a function that they may name.

    Plain data, tensors, arrays, modules, dataclasses, named tuples, enums and dates need no codec. Register before a
    fit, and in the program that reads the checkpoint; also as a decorator: ``@tk.checkpoint.codec``.

    Args:
        kind: a class, whose subclasses need their own codec; or a function.
        to_plain: returns plain data, tensors or arrays for an object; by default its attributes.
        from_plain: returns an object for what ``to_plain`` returned; by default an object with these attributes, made
            without calling the constructor.

    Returns:
        ``kind``.

    Raises:
        ConfigurationError: ``kind`` is neither a class nor a function, or only one of the two functions is passed.

    Example:
        >>> import trainer_kit as tk
        >>> class Scaler:
        ...     def __init__(self, mean):
        ...         self.mean = mean
        >>> _ = tk.checkpoint.codec(Scaler, lambda scaler: scaler.mean, Scaler)
        >>> from trainer_kit.checkpoint.encoding import decode, encode
        >>> decode(encode({"scaler": Scaler(3.0)}, {}), {})["scaler"].mean
        3.0
    """
    is_function = isinstance(kind, FunctionType)
    if not (isinstance(kind, type) or is_function):
        raise ConfigurationError(
            "a codec is for a class or a function",
            found=repr(kind),
            fix="pass the class: codec(type(value), ...)",
        )
    if (to_plain is None) != (from_plain is None):
        raise ConfigurationError(
            "a codec needs to_plain and from_plain, or neither of them",
            found=f"codec({kind.__name__}, ...) with one of them",
            fix="pass both; without them the attributes of an object are stored",
        )
    name = type_name(kind)
    _REGISTERED[name] = kind
    if isinstance(kind, type):
        restore = from_plain or partial(object_from_attributes, kind)
        _CODECS[kind] = _BY_NAME[name] = Codec(name, to_plain or attributes_of, restore)
    return kind


def type_name(kind: Any) -> str:
    """The import path of a class or a function; of a built-in class its name alone."""
    name: str = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, also those in slots."""
    slots: list[str] = []
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        slots += [names] if isinstance(names, str) else names
    attributes = {
        name: getattr(value, name)
        for name in slots
        if not _is_special(name) and hasattr(value, name)
    }
    return attributes | dict(getattr(value, "__dict__", {}))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def object_from_attributes(kind: type, attributes: Mapping[str, Any]) -> Any:
    """An object of ``kind`` with these attributes; its constructor is not called."""
    special = [name for name in attributes if _is_special(name)]
    if special:
        raise ValueError(f"{special[0]} is not an attribute that is stored")
    value: Any = object.__new__(kind)
    for name, attribute in attributes.items():
        object.__setattr__(value, name, attribute)
    return value


# -- classes of Python and of other libraries --------------------------------------------------------------------------


def _supply(
    kind: type, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]
) -> None:
    name = type_name(kind)
    _CODECS[kind] = _BY_NAME[name] = Codec(name, to_plain, from_plain)


def _generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


_supply(datetime, datetime.isoformat, datetime.fromisoformat)
_supply(date, date.isoformat, date.fromisoformat)
_supply(time, time.isoformat, time.fromisoformat)
_supply(Decimal, str, Decimal)
_supply(
    Fraction,
    lambda value: [value.numerator, value.denominator],
    lambda parts: Fraction(*map(index, parts)),
)
_supply(UUID, str, UUID)
_supply(
    range,
    lambda value: [value.start, value.stop, value.step],
    lambda parts: range(*parts),
)
_supply(
    slice,
    lambda value: [value.start, value.stop, value.step],
    lambda parts: slice(*parts),
)
_supply(
    deque,
    lambda value: [list(value), value.maxlen],
    lambda parts: deque(parts[0], parts[1]),
)
_supply(
    defaultdict,
    lambda value: [value.default_factory, dict(value)],
    lambda parts: defaultdict(*parts),
)
_supply(argparse.Namespace, vars, partial(object_from_attributes, argparse.Namespace))
_supply(SimpleNamespace, vars, lambda attributes: SimpleNamespace(**attributes))
_supply(HParams, dict, HParams)
_supply(torch.Generator, torch.Generator.get_state, _generator)


def _config_to_plain(config: Any) -> Any:
    """Plain data; interpolations are resolved if they can be, since a file must not name a resolver of the program."""
    omegaconf = import_module("omegaconf")
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True)
    except omegaconf.errors.OmegaConfBaseException:
        return omegaconf.OmegaConf.to_container(config, resolve=False)


def _config_from_plain(content: Any) -> Any:
    try:
        omegaconf = import_module("omegaconf")
    except ImportError:
        return content
    return omegaconf.OmegaConf.create(_without_interpolation(content))


def _without_interpolation(content: Any) -> Any:
    """Escape each interpolation: reading the value would call the resolver that it names."""
    if isinstance(content, str):
        return content.replace("${", "\\${")
    if isinstance(content, dict):
        return {key: _without_interpolation(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_interpolation(value) for value in content]
    return content


_CONFIG: Final = Codec("omegaconf", _config_to_plain, _config_from_plain)
_BY_NAME[_CONFIG.name] = _CONFIG


def codec_of(value: Any) -> Codec | None:
    """The codec for objects of exactly this class; None without one."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and type(value) in (
        omegaconf.DictConfig,
        omegaconf.ListConfig,
    ):
        return _CONFIG
    return _CODECS.get(type(value))


def cannot_be_stored(kind: type) -> bool:
    """Whether objects of a class of the program, or of `object`, have neither a codec nor a form of their own."""
    plain = (
        issubclass(kind, (*_TORCH_KINDS, Path))
        or dataclasses.is_dataclass(kind)
        or is_named_tuple(kind)
    )
    creates = inspect.getattr_static(kind, "__new__")
    if plain or kind in _CODECS or creates is not vars(object)["__new__"]:
        return False
    return kind is object or _is_of_program(kind.__module__)


def codec_named(name: str) -> Codec | None:
    """The codec of this name; None without one."""
    return _BY_NAME.get(name)


# -- names -------------------------------------------------------------------------------------------------------------

_PLAIN_KINDS: Final = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    type(None),
    object,
)
_TORCH_KINDS: Final = (nn.Module, Optimizer, LRScheduler, Tensor, Enum)
_FUNCTIONS_OF: Final = (
    "torch.nn.functional",
    "torch.nn.init",
    "torchmetrics.utilities.data",
    "torchmetrics.metric",
)
_STATE_SETTERS: Final = (
    "torch.nn.modules",
    "torch._dynamo.mutation_guard",
    "torchmetrics",
)
"""The modules whose ``__setstate__`` of a module is called; the second one replaces torch's once something compiles."""
_LIBRARIES: Final = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "trainer_kit"}
) - {"__main__"}


def is_named_tuple(kind: type) -> bool:
    """Whether this is the class of a named tuple."""
    return issubclass(kind, tuple) and isinstance(vars(kind).get("_fields"), tuple)


def import_path(value: Any) -> str | None:
    """The name by which a checkpoint may hold a class or a function; None if it may not hold it."""
    name = _tensor_operation(value) or (
        type_name(value) if isinstance(value, (type, FunctionType)) else None
    )
    if name is None:
        return None
    return name if find_name(name) is value else None


def find_name(name: str) -> Any:
    """The class or function of this name that a checkpoint may hold; None if it is not imported, or may not be held."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    value = _find_imported(name)
    if is_library_kind(value):
        return value if name in (_tensor_operation(value), _own_name(value)) else None
    is_named = isinstance(value, (type, FunctionType)) and type_name(value) == name
    return value if is_named and _is_of_program(value.__module__) else None


def find_class(name: str) -> type | None:
    """The class that `find_name` finds; None if it is none."""
    value = find_name(name)
    return value if isinstance(value, type) else None


def is_library_kind(value: Any) -> bool:
    """Whether this is a class or a function that is safe to name wherever it is defined."""
    if isinstance(value, type):
        known = value in _PLAIN_KINDS or issubclass(value, _TORCH_KINDS)
        return known or dataclasses.is_dataclass(value) or is_named_tuple(value)
    if isinstance(value, FunctionType):
        return value.__module__ in _FUNCTIONS_OF
    return _tensor_operation(value) is not None


def _own_name(value: Any) -> str | None:
    return type_name(value) if isinstance(value, (type, FunctionType)) else None


def _tensor_operation(value: Any) -> str | None:
    """The name of a built-in function that computes tensors or arrays; None for every other object."""
    if isinstance(value, np.ufunc):
        ufunc: Any = value
        return (
            f"numpy.{ufunc.__name__}" if vars(np).get(ufunc.__name__) is value else None
        )
    if not isinstance(value, BuiltinFunctionType):
        return None
    name = value.__name__
    if vars(torch).get(name) is value and hasattr(
        Tensor, name
    ):  # a tensor has no method that loads or writes a file
        return f"torch.{name}"
    return (
        f"torch.nn.functional.{name}"
        if vars(nn.functional).get(name) is value
        else None
    )


def _is_of_program(module_name: str) -> bool:
    """Whether a module belongs to the program: it is neither Python's, nor this library's, nor of a package."""
    if module_name == "__main__":
        return True
    if module_name.partition(".")[0] in _LIBRARIES:
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"} & set(
        Path(file).parts
    )


def _find_imported(path: str) -> Any:
    """The object at an import path in the imported modules; no module or class is asked for an attribute."""
    if "." not in path:
        return next((kind for kind in _PLAIN_KINDS if kind.__name__ == path), None)
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        value: Any = sys.modules.get(".".join(parts[:length]))
        if value is None:
            continue
        for part in parts[length:]:
            value = (
                vars(value).get(part) if isinstance(value, (ModuleType, type)) else None
            )
        return value
    return None


# -- modules -----------------------------------------------------------------------------------------------------------

_OUTSIDE_STATE: Final = frozenset(
    {"_compiled_call_impl", "_parameters", "_buffers", "_modules"}
)


def why_not_module(kind: type[nn.Module]) -> str | None:
    """Why modules of a class cannot be stored; None if they can."""
    if find_class(type_name(kind)) is not kind:
        return f"{type_name(kind)} cannot be found by this name"
    if (
        kind.__reduce__ is not object.__reduce__
        or kind.__reduce_ex__ is not object.__reduce_ex__
    ):
        return f"{type_name(kind)} defines how it is pickled"
    setter: str = inspect.getattr_static(kind, "__setstate__").__module__
    trusted = setter.startswith(_STATE_SETTERS) or _is_of_program(setter)
    return None if trusted else f"{type_name(kind)} defines __setstate__"


def module_to_plain(module: nn.Module) -> dict[str, Any]:
    """The state of a module from which `module_from_plain` makes one, without its class."""
    defaults = vars(nn.Module())
    reader: Any = inspect.getattr_static(
        type(module), "__getstate__", None
    )  # Python 3.10 has no default
    state: dict[str, Any] = vars(module) if reader is None else dict(reader(module))
    attributes = {
        name: value
        for name, value in state.items()
        if name not in _OUTSIDE_STATE
        and (name == "training" or name not in defaults or value)
    }
    parameters = {
        name: None if parameter is None else [parameter, parameter.requires_grad]
        for name, parameter in module._parameters.items()
    }
    return {
        "attributes": attributes,
        "parameters": parameters,
        "buffers": dict(module._buffers),
        "modules": dict(module._modules),
    }


def module_from_plain(
    kind: type[nn.Module], plain: Mapping[str, Any], parameters: dict[int, nn.Parameter]
) -> nn.Module:
    """A module of a class, made without its constructor.

    Args:
        kind: for which `why_not_module` returns None.
        plain: from `module_to_plain`.
        parameters: filled with the parameters by the identity of their tensors, so that tied weights stay tied.
    """

    def parameter_of(entry: list[Any] | None) -> nn.Parameter | None:
        if entry is None:
            return None
        tensor, requires_grad = entry
        if not isinstance(tensor, Tensor):
            raise TypeError("a parameter is not a tensor")
        return parameters.setdefault(
            id(tensor), nn.Parameter(tensor, bool(requires_grad))
        )

    for parts, part_kind in ((plain["buffers"], Tensor), (plain["modules"], nn.Module)):
        if not all(
            part is None or isinstance(part, part_kind) for part in parts.values()
        ):
            raise TypeError(f"not a {part_kind.__name__}")
    module: Any = object.__new__(kind)
    state = {
        **vars(nn.Module()),
        **plain["attributes"],
        "_parameters": {
            name: parameter_of(entry) for name, entry in plain["parameters"].items()
        },
        "_buffers": dict(plain["buffers"]),
        "_modules": dict(plain["modules"]),
    }
    module.__setstate__(state)
    restored: nn.Module = module
    return restored
