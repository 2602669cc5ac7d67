"""Encode the state of a run as JSON and tensors, and decode it.

Plain JSON values are stored unchanged. Every other value becomes a *record*, ``{"$": tag, "v": ...}``; a dict that has
the key ``"$"`` is written as a record of pairs, so no user value can be mistaken for a record. Decoding builds the
types named in this file, and objects of the kinds that `trainer_kit.checkpoint.codecs` describes: no file can run code.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, Flag
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from trainer_kit.checkpoint.codecs import (
    Codec,
    ObjectRecord,
    attributes_of,
    codec_named,
    codec_of,
    find_class,
    find_name,
    import_path,
    is_library_kind,
    is_named_tuple,
    module_from_plain,
    module_to_plain,
    object_from_attributes,
    type_name,
    why_not_module,
)
from trainer_kit.checkpoint.files import (
    CARRIERS,
    TENSOR_DTYPES,
    dtype_name,
    flatten,
    identity,
    numpy_dtype,
    torch_dtype,
)
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.torch_private import VERSIONS, set_versions, versions_of

__all__ = [
    "TAG",
    "EnumRecord",
    "Tree",
    "decode",
    "encode",
]

TAG: Final = "$"
"""The key of a record that names its kind."""
_SOURCE: Final = "the state to save"
_FIX: Final = (
    "register how to store it: tk.checkpoint.codec(Class, to_plain, from_plain); or save plain data, tensors and"
    ' arrays, and rebuild the rest when the state is loaded; Trainer(on_unsaveable="drop") leaves it out'
)
_SCALARS: Final = "biufcmMUS"
"""NumPy kinds whose bytes are their value."""
_DISTRIBUTED: Final = "__create_write_items__"
"""A method of torch's protocol for tensors that are divided among ranks."""

Tree = Any
"""An encoded value, as JSON holds it."""
_KeyPath = tuple[str, ...]
_Record = dict[str, Any]
"""An encoded value that is not plain JSON: a tag, its content, and what else its kind needs."""

_E = TypeVar("_E", bound=Enum)


@final
@dataclass(frozen=True)
class EnumRecord:
    """A decoded member of an enum that the program has not imported; ``of`` returns the member of a given class.

    Attributes:
        kind: module and qualified name of the enum class.
        name: the member's name; None for a combination of flags without one.
        value: the member's value.

    Example:
        >>> import enum
        >>> Mode = enum.Enum("Mode", "FAST SLOW", module="elsewhere")
        >>> record = decode(encode(Mode.SLOW, {}), {})
        >>> record.name, record.value, record.as_member(Mode)
        ('SLOW', 2, <Mode.SLOW: 2>)
    """

    kind: str
    name: str | None
    value: Any

    def as_member(self, cls: type[_E]) -> _E:
        """Return the member of ``cls`` with this name, else with this value; ValueError if there is neither."""
        if self.name is not None and self.name in cls.__members__:
            return cls[self.name]
        return cls(self.value)


def encode(
    value: Any,
    tensors: MutableMapping[str, Tensor],
    *,
    at: str = "",
    copy: bool | Callable[[str, Tensor], Tensor] = True,
    sharded: bool = False,
) -> Tree:
    """Turn ``value`` into a JSON tree; tensors and arrays are collected under names made from their key paths.

    Encoded: None, bool, int, float, str, list, dict (any encodable keys, order kept), tuple, set, frozenset, bytes,
    bytearray, complex, OrderedDict (with a ``state_dict``'s ``_metadata``), Counter, ``torch.Size``, ``torch.dtype``,
    ``torch.device``, paths, timedelta, enum members, numpy scalars; dense tensors of any shape and numpy arrays of
    numbers, strings and dates. Modules, dataclasses, named tuples, classes, functions and objects with a codec are
    encoded with their import path (see `trainer_kit.checkpoint.codecs`). Otherwise only exact types: a subclass would
    be decoded as another type, so it is refused. Parameters are decoded as tensors. A tensor that occurs several times
    (a tied weight) is collected once and decoded as one tensor; tensors that overlap in any other way are decoded as
    separate tensors.

    Args:
        value: the state.
        tensors: filled with dense tensors that safetensors can hold.
        at: the key path of ``value``, for messages.
        copy: True: copy every tensor to the CPU. False: alias the state, to write it at once. A callable gets the
            tensor's name, prefixed with ``at``, and the tensor, and returns the copy.
        sharded: collect all tensors, including distributed tensors, in their dtype, on their device, without a copy.

    Returns:
        The tree, for ``json.dumps(tree, allow_nan=False)`` and `decode`.

    Raises:
        CheckpointError: for anything else, naming its key path and type.

    Example:
        >>> tensors = {}
        >>> encode({"weight": torch.zeros(2), "shape": (1, 2), "step": 3}, tensors)
        {'weight': {'$': 'tensor', 'v': 'weight'}, 'shape': {'$': 'tuple', 'v': [1, 2]}, 'step': 3}
        >>> tensors
        {'weight': tensor([0., 0.])}
    """
    try:
        return _Encoder(tensors, at, copy, sharded).encode(value, ())
    except RecursionError:
        raise CheckpointError(
            _SOURCE, at or None, "it is nested too deeply to be saved", fix=_FIX
        ) from None


def decode(
    tree: Tree,
    tensors: Mapping[str, Tensor],
    *,
    at: str = "",
    file: object = "state.json",
) -> Any:
    """Rebuild the value that `encode` encoded.

    Args:
        tree: from `encode`, or from ``json.loads``.
        tensors: what `encode` collected. The result refers to these tensors; arrays share their memory.
        at: the key path of ``tree``, for messages.
        file: the file that ``tree`` was read from, for messages.

    Raises:
        CheckpointError: for an unknown tag, a damaged record, or a tensor that is not there.

    Example:
        >>> decode({"$": "tuple", "v": [1, {"$": "float", "v": "-inf"}]}, {})
        (1, -inf)
    """
    try:
        return _Decoder(tensors, at, file).decode(tree, ())
    except RecursionError:
        raise CheckpointError(
            file, at or None, "it is nested too deeply to be read"
        ) from None


def _copy_to_host(name: str, tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _alias(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _join(at: str, path: _KeyPath) -> str:
    if at:
        path = (at, *path)
    return ".".join(path)


def _key_name(key: object) -> str:
    """The step of a key path for a key of a dict."""
    if type(key) is str:
        return key
    try:
        return repr(key)
    except ValueError:
        # An int of more digits than Python prints.
        return type(key).__name__


def _describe(value: object) -> str:
    kind = type(value)
    name = getattr(value, "__qualname__", kind.__qualname__)
    detail = ""
    if "<locals>" in name:
        detail = ", which is defined inside a function,"
    return f"a value of type {type_name(kind)}{detail}"


def _record(tag: str, value: object, **entries: object) -> _Record:
    return {TAG: tag, "v": value, **entries}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


_LEAVES: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    complex: ("complex", lambda number: [repr(number.real), repr(number.imag)]),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
    torch.Size: ("size", list),
    timedelta: (
        "timedelta",
        lambda delta: [delta.days, delta.seconds, delta.microseconds],
    ),
}


@final
class _Encoder:
    def __init__(
        self,
        tensors: MutableMapping[str, Tensor],
        at: str,
        copy: bool | Callable[[str, Tensor], Tensor],
        sharded: bool,
    ) -> None:
        self._tensors = tensors
        self._at = at
        self._sharded = sharded
        self._copy: Callable[[str, Tensor], Tensor] = _alias
        if callable(copy):
            self._copy = copy
        elif copy:
            self._copy = _copy_to_host
        # Ids of the containers and objects around the present value: none of them may be inside itself.
        self._open: set[int] = set()
        # The entry holds the tensor: its memory must not be reused while the key refers to it.
        self._records: dict[tuple[object, ...], tuple[Tensor, _Record]] = {}

    def encode(self, value: Any, path: _KeyPath) -> Tree:
        # Exact types everywhere: a subclass would be decoded as its base, without what it adds.
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if -(2**63) <= value < 2**63:
                return value
            # Beyond 64 bits JSON readers disagree, and Python limits the digits it parses.
            return _record("int", hex(value))
        if kind is float:
            if math.isfinite(value):
                return value
            # JSON has no notation for infinity and NaN.
            return _record("float", repr(value))
        if kind in _LEAVES:
            tag, to_json = _LEAVES[kind]
            return _record(tag, to_json(value))
        if kind in (list, tuple, set, frozenset, dict, OrderedDict, Counter):
            return self._container(value, path)
        if kind in (Tensor, torch.nn.Parameter):
            return self._tensor(value, path)
        if self._sharded and hasattr(kind, _DISTRIBUTED):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, PurePath):
            return _record("path", str(value))
        if isinstance(value, Enum):
            member = EnumRecord(type_name(kind), value.name, value.value)
            return self._enum(member, path)
        if kind is EnumRecord:
            return self._enum(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _SCALARS:
            return _record("numpy", value.tobytes().hex(), dtype=value.dtype.str)
        if kind is ObjectRecord:
            # A class or a function that was read in a program without it: it is written as it was.
            if value.state is None:
                return _record("name", value.kind)
            return _record("object", [value.kind, self.encode(value.state, path)])
        return self._object(value, path)

    def _object(self, value: Any, path: _KeyPath) -> _Record:
        """The record of an object of a class, or of a class or a function itself."""
        name = None
        if callable(value):
            name = import_path(value)
        if name is not None:
            return _record("name", name)
        # A class that no name leads to must not be taken for an object of its metaclass.
        if isinstance(value, type):
            reason = f"the class {type_name(value)} cannot be named in a checkpoint"
            raise self._refusal(value, path, reason)
        if id(value) in self._open:
            raise self._refusal(value, path, "it contains itself")
        self._open.add(id(value))
        try:
            return self._instance(value, path)
        finally:
            self._open.discard(id(value))

    def _instance(self, value: Any, path: _KeyPath) -> _Record:
        # First: what the program has registered counts more than a form that the library knows.
        codec = codec_of(value)
        if codec is not None:
            return self._with_codec(codec, value, path)
        if isinstance(value, nn.Module):
            return self._module(value, path)
        kind = type(value)
        if kind is partial and _is_named_library_function(value.func):
            call = [value.func, list(value.args), dict(value.keywords)]
            return _record("partial", self.encode(call, path))
        # Another class of the same name would be found when the checkpoint is read.
        is_importable = find_class(type_name(kind)) is kind
        if is_importable and dataclasses.is_dataclass(value):
            attributes = dict(attributes_of(value))
            for field in dataclasses.fields(value):
                attributes[field.name] = getattr(value, field.name)
            return _record(
                "dataclass", [type_name(kind), self.encode(attributes, path)]
            )
        if is_importable and is_named_tuple(kind):
            return _record(
                "namedtuple", [type_name(kind), self.encode(list(value), path)]
            )
        raise self._refusal(value, path)

    def _with_codec(
        self,
        codec: Codec,
        value: object,
        path: _KeyPath,
    ) -> _Record:
        try:
            plain = codec.to_plain(value)
        except Exception as error:
            reason = f"the codec of {codec.name} raised {type(error).__name__}: {error}"
            raise self._refusal(value, path, reason) from error
        return _record("object", [codec.name, self.encode(plain, path)])

    def _module(self, module: nn.Module, path: _KeyPath) -> _Record:
        # A compiled module is stored as what was compiled.
        module = uncompiled(module)
        reason = why_not_module(type(module))
        if reason is not None:
            raise self._refusal(module, path, f"this module cannot be saved: {reason}")
        content = self.encode(module_to_plain(module), path)
        return _record("module", [type_name(type(module)), content])

    def _refusal(
        self,
        value: object,
        path: _KeyPath,
        reason: str | None = None,
    ) -> CheckpointError:
        fix = _FIX
        if reason is None:
            reason = f"{_describe(value)} cannot be saved"
            for base in (dict, list, tuple, str, int, float):
                if isinstance(value, base):
                    fix = (
                        f"its class would be lost: save {base.__name__}(value),"
                        " or register it: tk.checkpoint.codec(Class)"
                    )
                    break
        return CheckpointError(_SOURCE, _join(self._at, path) or None, reason, fix=fix)

    def _container(self, value: Any, path: _KeyPath) -> Tree:
        if id(value) in self._open:
            raise self._refusal(value, path, "it contains itself")
        self._open.add(id(value))
        kind = type(value)
        tree: Tree
        if issubclass(kind, dict):
            tree = self._dict(value, path)
        else:
            tree = [
                self.encode(item, (*path, str(index)))
                for index, item in enumerate(value)
            ]
            # The order of a set differs between processes: equal sets give equal files.
            if kind in (set, frozenset):
                tree.sort(key=lambda item: json.dumps(item, sort_keys=True))
            if kind is not list:
                tree = _record(kind.__name__, tree)
        self._open.discard(id(value))
        return tree

    def _dict(self, value: dict[Any, Any], path: _KeyPath) -> Tree:
        names = [_key_name(key) for key in value]
        items = [
            self.encode(item, (*path, name))
            for name, item in zip(names, value.values(), strict=True)
        ]
        tree: Tree
        # JSON has text keys only, and a dict with the key of a tag would be read as a record.
        if TAG not in value and all(type(key) is str for key in value):
            tree = dict(zip(value, items, strict=True))
        else:
            pairs = []
            for key, name, item in zip(value, names, items, strict=True):
                pairs.append([self._key(key, (*path, name)), item])
            tree = _record("dict", pairs)
        if type(value) is dict:
            return tree
        record = _record(type(value).__name__, tree)
        # Versions of modules, which load_state_dict reads.
        metadata = versions_of(value)
        if metadata is not None:
            record["metadata"] = self.encode(metadata, (*path, VERSIONS))
        return record

    def _key(self, key: object, path: _KeyPath) -> Tree:
        if isinstance(key, Tensor):
            reason = (
                "a tensor cannot be the key of a saved dict: it is found by identity"
            )
            raise self._refusal(key, path, reason)
        return self.encode(key, path)

    def _enum(self, member: EnumRecord, path: _KeyPath) -> _Record:
        value = self.encode(member.value, (*path, "value"))
        return _record("enum", [member.kind, member.name, value])

    def _tensor(self, tensor: Tensor, path: _KeyPath) -> _Record:
        tensor = tensor.detach()
        kind = _unsaveable_kind(tensor)
        if kind is not None:
            reason = f"only dense tensors with data can be saved, this one is {kind} {tensor.dtype}"
            raise self._refusal(tensor, path, reason)
        if tensor.dtype not in TENSOR_DTYPES and tensor.dtype not in CARRIERS:
            reason = f"tensors of {tensor.dtype} cannot be saved"
            raise self._refusal(tensor, path, reason)
        if type(tensor) is not Tensor and not hasattr(tensor, "placements"):
            # An unknown subclass: its memory cannot be compared.
            return self._new_tensor(tensor, path)
        # A tied weight is stored once, and read as one tensor.
        key = identity(tensor)
        if key not in self._records:
            self._records[key] = tensor, self._new_tensor(tensor, path)
        _, record = self._records[key]
        return dict(record)

    def _new_tensor(self, tensor: Tensor, path: _KeyPath) -> _Record:
        if self._sharded:
            # Each rank views and copies only its chunks, once the plan says which ones it writes.
            name = self._add_tensor(tensor, path)
            return _record("tensor", name)
        tensor = tensor.resolve_conj().resolve_neg()
        dtype = tensor.dtype
        if dtype in TENSOR_DTYPES:
            name = self._add_tensor(tensor, path, self._copy)
            return _record("tensor", name)
        flat = flatten(tensor).view(CARRIERS[dtype])
        name = self._add_tensor(flat, path, self._copy)
        shape = list(tensor.shape)
        return _record("tensor", name, dtype=dtype_name(dtype), shape=shape)

    def _array(self, array: np.ndarray[Any, Any], path: _KeyPath) -> _Record:
        dtype = array.dtype
        if dtype.kind not in _SCALARS:
            reason = f"arrays of {dtype} cannot be saved"
            raise self._refusal(array, path, reason)
        # A copy that is contiguous, writable, and 0-dimensional where the array is.
        copied = np.array(array, order="C")
        is_torch_dtype = dtype.kind in "biuf" and dtype.itemsize <= 8
        if dtype.isnative and is_torch_dtype:
            name = self._add_tensor(torch.from_numpy(copied), path)
            return _record("array", name)
        content = bytearray(copied.tobytes())
        raw = torch.from_numpy(np.array(content, np.uint8))
        name = self._add_tensor(raw, path)
        shape = list(array.shape)
        return _record("array", name, dtype=dtype.str, shape=shape)

    def _add_tensor(
        self,
        tensor: Tensor,
        path: _KeyPath,
        copy: Callable[[str, Tensor], Tensor] = _alias,
    ) -> str:
        """Collect a tensor, or its copy; returns the name under which it is collected."""
        # safetensors refuses a lone surrogate; paths like ("a.b",) and ("a", "b") have the same name.
        stem = ".".join(path).encode(errors="backslashreplace").decode() or "value"
        name = stem
        count = 1
        while name in self._tensors or name == "__metadata__":
            count += 1
            name = f"{stem}#{count}"
        self._tensors[name] = copy(_join(self._at, (name,)), tensor)
        return name


def _is_named_library_function(function: object) -> bool:
    return is_library_kind(function) and import_path(function) is not None


def _unsaveable_kind(tensor: Tensor) -> str | None:
    """What a tensor is if it is not dense, or has no data."""
    if tensor.is_meta:
        return "meta"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor.layout)
    return None


@final
class _Decoder:
    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        at: str,
        file: object,
    ) -> None:
        self._tensors = tensors
        self._at = at
        self._file = file
        self._parameters: dict[int, nn.Parameter] = {}

    def decode(self, tree: Tree, path: _KeyPath) -> Any:
        if isinstance(tree, list):
            return self._decode_list(tree, path)
        if not isinstance(tree, dict):
            return tree
        if TAG not in tree:
            return {key: self.decode(item, (*path, key)) for key, item in tree.items()}
        tag = tree[TAG]
        read = None
        # Other values of a damaged file may not be hashable.
        if isinstance(tag, str):
            read = _READERS.get(tag)
        if read is None:
            fix = "read it with the version that wrote it"
            raise self._damage(path, f"unknown tag {tag!r}", fix=fix)
        try:
            return read(self, tree, path)
        # Both are named already: by an inner record, and by `decode`.
        except (CheckpointError, RecursionError):
            raise
        except Exception as error:
            # Each type raises its own error for a damaged record.
            reason = f"damaged record of a {tag}: {error}"
            raise self._damage(path, reason) from error

    def _decode_list(self, items: list[Any], path: _KeyPath) -> list[Any]:
        return [
            self.decode(item, (*path, str(index))) for index, item in enumerate(items)
        ]

    def _damage(
        self,
        path: _KeyPath,
        reason: str,
        fix: str | None = None,
    ) -> CheckpointError:
        return CheckpointError(
            self._file, _join(self._at, path) or None, reason, fix=fix
        )

    def items(self, record: _Record, path: _KeyPath) -> list[Any]:
        if not isinstance(record["v"], list):
            raise TypeError("the items are missing")
        return self._decode_list(record["v"], path)

    def pairs(self, record: _Record, path: _KeyPath) -> dict[Any, Any]:
        # All keys before all items, as they were encoded.
        keys = [self.decode(key, (*path, "key")) for key, _ in record["v"]]
        decoded = {}
        for key, (_, item) in zip(keys, record["v"], strict=True):
            decoded[key] = self.decode(item, (*path, _key_name(key)))
        return decoded

    def ordered(self, record: _Record, path: _KeyPath) -> OrderedDict[Any, Any]:
        value = OrderedDict(self.decode(record["v"], path))
        if "metadata" in record:
            set_versions(value, self.decode(record["metadata"], (*path, VERSIONS)))
        return value

    def enum(self, record: _Record, path: _KeyPath) -> Any:
        kind, name, value = record["v"]
        if not isinstance(kind, str) or not (name is None or isinstance(name, str)):
            raise TypeError("its names are not strings")
        member = EnumRecord(kind, name, self.decode(value, (*path, "value")))
        # Found among the classes that the program has imported: nothing is imported here.
        cls = find_class(kind)
        if cls is None or not issubclass(cls, Enum):
            return member
        if name is not None and name in cls.__members__:
            return cls.__members__[name]
        # A combination of flags. Other values may be looked up by code of the class.
        if issubclass(cls, Flag) and type(member.value) is int:
            return cls(member.value)
        return member

    def named(self, record: _Record, path: _KeyPath) -> tuple[str, Any]:
        name, content = record["v"]
        if not isinstance(name, str):
            raise TypeError("its name is not a string")
        return name, self.decode(content, path)

    def name(self, record: _Record) -> Any:
        if not isinstance(record["v"], str):
            raise TypeError("it is not a string")
        value = find_name(record["v"])
        if value is None:
            return ObjectRecord(record["v"])
        return value

    def object(self, record: _Record, path: _KeyPath) -> Any:
        name, content = self.named(record, path)
        codec = codec_named(name)
        if codec is None:
            return ObjectRecord(name, content)
        # Code that the program has registered itself; only its argument comes from the file.
        return codec.from_plain(content)

    def dataclass(self, record: _Record, path: _KeyPath) -> Any:
        name, attributes = self.named(record, path)
        kind = find_class(name)
        if kind is None or not dataclasses.is_dataclass(kind):
            return ObjectRecord(name, attributes)
        return object_from_attributes(kind, attributes)

    def namedtuple(self, record: _Record, path: _KeyPath) -> Any:
        name, items = self.named(record, path)
        kind = find_class(name)
        if kind is None or not is_named_tuple(kind):
            return ObjectRecord(name, items)
        if len(items) != len(vars(kind)["_fields"]):
            raise TypeError("it has a different number of fields")
        # Without the constructor, which the class may have replaced.
        return tuple.__new__(kind, items)

    def module(self, record: _Record, path: _KeyPath) -> Any:
        name, content = self.named(record, path)
        kind = find_class(name)
        if kind is None or not issubclass(kind, nn.Module):
            return ObjectRecord(name, content)
        # The class may have changed since the checkpoint was written.
        if why_not_module(kind) is not None:
            return ObjectRecord(name, content)
        return module_from_plain(kind, content, self._parameters)

    def partial(self, record: _Record, path: _KeyPath) -> Any:
        function, arguments, keywords = self.decode(record["v"], path)
        # Of a function of the program a file would choose the arguments.
        if isinstance(function, ObjectRecord) or not is_library_kind(function):
            return ObjectRecord("functools.partial", [function, arguments, keywords])
        return partial(function, *arguments, **keywords)

    def stored(self, record: _Record, path: _KeyPath) -> Tensor:
        name = record["v"]
        if name not in self._tensors:
            raise self._damage(path, f"its tensor {name!r} is not in the file")
        return self._tensors[name]

    def tensor(self, record: _Record, path: _KeyPath) -> Tensor:
        stored = self.stored(record, path)
        if "dtype" not in record:
            return stored
        dtype = torch_dtype(record["dtype"])
        # A damaged record must not view memory in a dtype that it was not written from.
        if stored.dtype is not CARRIERS.get(dtype) or stored.dim() != 1:
            raise TypeError(f"{dtype} in a tensor of {stored.dtype}")
        return stored.view(dtype).reshape(record["shape"])

    def array(self, record: _Record, path: _KeyPath) -> Any:
        tensor = self.stored(record, path)
        # Only headers were read; NumPy has no arrays without content.
        if tensor.is_meta:
            return None
        stored = tensor.cpu().numpy()  # no sync point: arrays are read on the CPU
        if "dtype" not in record:
            return stored
        shape, dtype = tuple(record["shape"]), numpy_dtype(record["dtype"])
        array = np.ndarray(shape, dtype, stored.data)
        # A dtype of width 0 would allow any number of elements.
        if array.size > max(stored.size, 1):
            raise TypeError("it has more elements than bytes")
        return array


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _scalar(record: _Record) -> Any:
    content = bytes.fromhex(record["v"])
    return np.ndarray((), numpy_dtype(record["dtype"]), content)[()]


_READERS: Final[dict[str, Callable[[_Decoder, _Record, _KeyPath], Any]]] = {
    "int": lambda _, record, __: int(record["v"], 16),
    "float": lambda _, record, __: float(record["v"]),
    "bytes": lambda _, record, __: _bytes(record["v"]),
    "bytearray": lambda _, record, __: bytearray(_bytes(record["v"])),
    "complex": lambda _, record, __: complex(*map(float, record["v"])),
    "dtype": lambda _, record, __: torch_dtype(record["v"]),
    "device": lambda _, record, __: torch.device(record["v"]),
    "size": lambda _, record, __: torch.Size(record["v"]),
    "timedelta": lambda _, record, __: timedelta(*record["v"]),
    "path": lambda _, record, __: Path(record["v"]),
    "numpy": lambda _, record, __: _scalar(record),
    "tuple": lambda decoder, record, path: tuple(decoder.items(record, path)),
    "set": lambda decoder, record, path: set(decoder.items(record, path)),
    "frozenset": lambda decoder, record, path: frozenset(decoder.items(record, path)),
    "dict": _Decoder.pairs,
    "OrderedDict": _Decoder.ordered,
    "Counter": lambda decoder, record, path: Counter(decoder.decode(record["v"], path)),
    "enum": _Decoder.enum,
    "name": lambda decoder, record, _: decoder.name(record),
    "object": _Decoder.object,
    "dataclass": _Decoder.dataclass,
    "namedtuple": _Decoder.namedtuple,
    "module": _Decoder.module,
    "partial": _Decoder.partial,
    "tensor": _Decoder.tensor,
    "array": _Decoder.array,
}
