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

from trainer_kit.checkpoint.torch_private import MUTATION_GUARD
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hparams import HParams
from trainer_kit.core.torch_private import (
    BUFFERS,
    CHILDREN,
    COMPILED_CALL,
    PARAMETERS,
    direct_buffers,
    direct_parameters,
    direct_submodules,
)

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
_Conversion = Callable[[Any], Any]


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
    to_plain: _Conversion
    from_plain: _Conversion


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
_REGISTERED: Final[dict[str, object]] = {}
"""Classes and functions that the program allows checkpoints to name."""


def codec(
    kind: _Kind,
    to_plain: _Conversion | None = None,
    from_plain: _Conversion | None = None,
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
    # Under its import path, which is what a checkpoint stores: the class may be registered before its file is read.
    _REGISTERED[name] = kind
    if isinstance(kind, type):
        restore = from_plain or partial(object_from_attributes, kind)
        _CODECS[kind] = _BY_NAME[name] = Codec(name, to_plain or attributes_of, restore)
    return kind


def type_name(kind: Any) -> str:
    """The import path of a class or a function; of a built-in class its name alone."""
    name: str = kind.__qualname__
    if kind.__module__ == "builtins":
        return name
    return f"{kind.__module__}.{name}"


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object by name, also those in slots."""
    slots: list[str] = []
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        # Python takes a text for the name of one slot.
        if isinstance(names, str):
            names = [names]
        slots += names
    attributes = {
        name: getattr(value, name)
        for name in slots
        if not _is_special(name) and hasattr(value, name)
    }
    attributes.update(getattr(value, "__dict__", {}))
    return attributes


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def object_from_attributes(kind: type, attributes: Mapping[str, Any]) -> Any:
    """An object of ``kind`` with these attributes; its constructor is not called."""
    special = [name for name in attributes if _is_special(name)]
    # `__class__`, for example, would make the object one of another class.
    if special:
        raise ValueError(f"{special[0]} is not an attribute that is stored")
    # A constructor could do anything with what a file holds.
    value: Any = object.__new__(kind)
    for name, attribute in attributes.items():
        # Also of frozen dataclasses; a class's own __setattr__ would be code that the file calls.
        object.__setattr__(value, name, attribute)
    return value


# -- classes of Python and of other libraries --------------------------------------------------------------------------


def _register_builtin(
    kind: type,
    to_plain: _Conversion,
    from_plain: _Conversion,
) -> None:
    name = type_name(kind)
    _CODECS[kind] = _BY_NAME[name] = Codec(name, to_plain, from_plain)


def _make_generator(state: Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


_register_builtin(datetime, datetime.isoformat, datetime.fromisoformat)
_register_builtin(date, date.isoformat, date.fromisoformat)
_register_builtin(time, time.isoformat, time.fromisoformat)
_register_builtin(Decimal, str, Decimal)
_register_builtin(
    Fraction,
    lambda value: [value.numerator, value.denominator],
    lambda parts: Fraction(*map(index, parts)),
)
_register_builtin(UUID, str, UUID)
_register_builtin(
    range,
    lambda value: [value.start, value.stop, value.step],
    lambda parts: range(*parts),
)
_register_builtin(
    slice,
    lambda value: [value.start, value.stop, value.step],
    lambda parts: slice(*parts),
)
_register_builtin(
    deque,
    lambda value: [list(value), value.maxlen],
    lambda parts: deque(parts[0], parts[1]),
)
_register_builtin(
    defaultdict,
    lambda value: [value.default_factory, dict(value)],
    lambda parts: defaultdict(*parts),
)
_register_builtin(
    argparse.Namespace, vars, partial(object_from_attributes, argparse.Namespace)
)
_register_builtin(
    SimpleNamespace, vars, lambda attributes: SimpleNamespace(**attributes)
)
_register_builtin(HParams, dict, HParams)
_register_builtin(torch.Generator, torch.Generator.get_state, _make_generator)


def _config_to_plain(config: object) -> object:
    """Plain data; interpolations are resolved if they can be, since a file must not name a resolver of the program."""
    omegaconf = import_module("omegaconf")
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True)
    except omegaconf.errors.OmegaConfBaseException:
        return omegaconf.OmegaConf.to_container(config, resolve=False)


def _config_from_plain(content: object) -> object:
    try:
        omegaconf = import_module("omegaconf")
    except ImportError:
        return content
    return omegaconf.OmegaConf.create(_without_interpolation(content))


def _without_interpolation(content: object) -> object:
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


def codec_of(value: object) -> Codec | None:
    """The codec for objects of exactly this class; None without one."""
    kind = type(value)
    # Not imported for this: without it, no value can be one of its objects.
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and kind in (omegaconf.DictConfig, omegaconf.ListConfig):
        return _CONFIG
    return _CODECS.get(kind)


def cannot_be_stored(kind: type) -> bool:
    """Whether objects of a class of the program, or of `object`, have neither a codec nor a form of their own."""
    if kind in _CODECS or issubclass(kind, (*_TORCH_KINDS, Path)):
        return False
    if dataclasses.is_dataclass(kind) or is_named_tuple(kind):
        return False
    # The caller makes an object of the class with `object.__new__`, which does not fit other constructors.
    constructor = inspect.getattr_static(kind, "__new__")
    if constructor is not vars(object)["__new__"]:
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
_FUNCTION_MODULES: Final = (
    "torch.nn.functional",
    "torch.nn.init",
    "torchmetrics.utilities.data",
    "torchmetrics.metric",
)
_STATE_SETTERS: Final = (
    "torch.nn.modules",
    MUTATION_GUARD,
    "torchmetrics",
)
"""The modules whose ``__setstate__`` of a module is called; the second one replaces torch's once something compiles."""
_LIBRARIES: Final = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "trainer_kit"}
) - {"__main__"}
_MOVED_MODULES: Final = {
    "compat.deepspeed": "options.deepspeed",
    "compat.fp8": "options.fp8",
    "compat.megatron": "options.megatron",
    "compat.options": "options.records",
    "compat.parallelism": "options.parallelism",
}
"""Modules of option records of this package by their former path: checkpoints of 0.2.0 name their classes by it."""


def is_named_tuple(kind: type) -> bool:
    """Whether this is the class of a named tuple."""
    return issubclass(kind, tuple) and isinstance(vars(kind).get("_fields"), tuple)


def import_path(value: object) -> str | None:
    """The name by which a checkpoint may hold a class or a function; None if it may not hold it."""
    name = _tensor_operation(value) or _defined_name(value)
    if name is None or find_name(name) is not value:
        return None
    return name


def find_name(name: str) -> object:
    """The class or function of this name that a checkpoint may hold; None if it is not imported, or may not be held."""
    # The program has named this class itself, whatever module it is in.
    if name in _REGISTERED:
        return _REGISTERED[name]
    name = _current_name(name)
    value = _find_imported(name)
    if is_library_kind(value):
        # Another path to it, such as an alias in a module, need not lead to the same object tomorrow.
        if name in (_tensor_operation(value), _defined_name(value)):
            return value
        return None
    if _defined_name(value) != name or not _is_of_program(value.__module__):
        return None
    return value


def _current_name(name: str) -> str:
    """The name today of a class that a checkpoint of an earlier version names."""
    package, _, path = name.partition(".")
    module, _, class_name = path.rpartition(".")
    if package != "trainer_kit" or module not in _MOVED_MODULES:
        return name
    return f"{package}.{_MOVED_MODULES[module]}.{class_name}"


def find_class(name: str) -> type | None:
    """The class that `find_name` finds; None if it is none."""
    value = find_name(name)
    if isinstance(value, type):
        return value
    return None


def is_library_kind(value: object) -> bool:
    """Whether this is a class or a function that is safe to name wherever it is defined."""
    if isinstance(value, type):
        if value in _PLAIN_KINDS or issubclass(value, _TORCH_KINDS):
            return True
        return dataclasses.is_dataclass(value) or is_named_tuple(value)
    if isinstance(value, FunctionType):
        return value.__module__ in _FUNCTION_MODULES
    return _tensor_operation(value) is not None


def _defined_name(value: object) -> str | None:
    """The import path at which a class or a function was defined; None for every other object."""
    if isinstance(value, (type, FunctionType)):
        return type_name(value)
    return None


def _tensor_operation(value: object) -> str | None:
    """The name of a built-in function that computes tensors or arrays; None for every other object."""
    if isinstance(value, np.ufunc):
        ufunc: Any = value
        # A function of another package, such as SciPy's, may have the name of one of NumPy's.
        if vars(np).get(ufunc.__name__) is value:
            return f"numpy.{ufunc.__name__}"
        return None
    if not isinstance(value, BuiltinFunctionType):
        return None
    name = value.__name__
    # A tensor has no method that loads or writes a file.
    if vars(torch).get(name) is value and hasattr(Tensor, name):
        return f"torch.{name}"
    if vars(nn.functional).get(name) is value:
        return f"torch.nn.functional.{name}"
    return None


def _is_of_program(module_name: str) -> bool:
    """Whether a module belongs to the program: it is neither Python's, nor this library's, nor of a package."""
    if module_name == "__main__":
        return True
    if module_name.partition(".")[0] in _LIBRARIES:
        return False
    # A module of the program has a file, which does not lie where packages are installed.
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None:
        return False
    return {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _find_imported(path: str) -> object:
    """The object at an import path in the imported modules; no module or class is asked for an attribute."""
    if "." not in path:
        for kind in _PLAIN_KINDS:
            if kind.__name__ == path:
                return kind
        return None
    names = path.split(".")
    # The longest prefix that is a module decides.
    for length in range(len(names) - 1, 0, -1):
        value: object = sys.modules.get(".".join(names[:length]))
        if value is None:
            continue
        for name in names[length:]:
            # Not getattr: an object, and a module too, may compute its attributes by code.
            if not isinstance(value, (ModuleType, type)):
                return None
            value = vars(value).get(name)
        return value
    return None


# -- modules -----------------------------------------------------------------------------------------------------------

_OUTSIDE_STATE: Final = frozenset({COMPILED_CALL, PARAMETERS, BUFFERS, CHILDREN})


def why_not_module(kind: type[nn.Module]) -> str | None:
    """Why modules of a class cannot be stored; None if they can."""
    name = type_name(kind)
    if find_class(name) is not kind:
        return f"{name} cannot be found by this name"
    has_reduce = kind.__reduce__ is not object.__reduce__
    if has_reduce or kind.__reduce_ex__ is not object.__reduce_ex__:
        return f"{name} defines how it is pickled"
    setter: str = inspect.getattr_static(kind, "__setstate__").__module__
    # Reading calls ``__setstate__``, so it must be code that the program runs anyway.
    if setter.startswith(_STATE_SETTERS) or _is_of_program(setter):
        return None
    return f"{name} defines __setstate__"


def module_to_plain(module: nn.Module) -> dict[str, Any]:
    """The state of a module from which `module_from_plain` makes one, without its class."""
    # Python 3.10 has no default.
    reader: Any = inspect.getattr_static(type(module), "__getstate__", None)
    state: dict[str, Any] = vars(module)
    if reader is not None:
        state = dict(reader(module))
    defaults = vars(nn.Module())
    attributes = {}
    for name, value in state.items():
        if name in _OUTSIDE_STATE:
            continue
        # torch's own empty attributes (hooks, for example) are left out: a later version may have others.
        if name == "training" or name not in defaults or value:
            attributes[name] = value
    parameters: dict[str, list[Any] | None] = {}
    for name, parameter in direct_parameters(module).items():
        # None: registered without a value, as a layer without bias has it.
        parameters[name] = None
        if parameter is not None:
            parameters[name] = [parameter, parameter.requires_grad]
    return {
        "attributes": attributes,
        "parameters": parameters,
        "buffers": dict(direct_buffers(module)),
        "modules": dict(direct_submodules(module)),
    }


def module_from_plain(
    kind: type[nn.Module],
    plain: Mapping[str, Any],
    parameters: dict[int, nn.Parameter],
) -> nn.Module:
    """A module of a class, made without its constructor.

    Args:
        kind: for which `why_not_module` returns None.
        plain: from `module_to_plain`.
        parameters: filled with the parameters by the identity of their tensors, so that tied weights stay tied.
    """
    # Checked here, because the dicts are set without the methods of torch that would refuse other values.
    _check_kinds(plain["buffers"], Tensor)
    _check_kinds(plain["modules"], nn.Module)
    module: nn.Module = object.__new__(kind)
    state = vars(nn.Module()) | plain["attributes"]
    state[PARAMETERS] = {
        name: _parameter_from_plain(entry, parameters)
        for name, entry in plain["parameters"].items()
    }
    state[BUFFERS] = dict(plain["buffers"])
    state[CHILDREN] = dict(plain["modules"])
    set_state: Any = module.__setstate__  # torch does not type it
    set_state(state)
    return module


def _check_kinds(entries: Mapping[str, object], kind: type) -> None:
    for entry in entries.values():
        if entry is not None and not isinstance(entry, kind):
            raise TypeError(f"not a {kind.__name__}")


def _parameter_from_plain(
    entry: list[Any] | None,
    parameters: dict[int, nn.Parameter],
) -> nn.Parameter | None:
    if entry is None:
        return None
    tensor, requires_grad = entry
    if not isinstance(tensor, Tensor):
        raise TypeError("a parameter is not a tensor")
    parameter = nn.Parameter(tensor, bool(requires_grad))
    return parameters.setdefault(id(tensor), parameter)
