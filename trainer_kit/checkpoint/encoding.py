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

__all__ = [
    "EnumRecord",
    "children",
    "decode",
    "encode",
    "holds_record",
    "merge",
    "tensor_record",
]

_TAG: Final = "$"
_SOURCE: Final = "the state to save"
_FIX: Final = (
    "register how to store it: tk.checkpoint.codec(Class, to_plain, from_plain); or save plain data, tensors and"
    ' arrays, and rebuild the rest when the state is loaded; Trainer(on_unsaveable="drop") leaves it out'
)
_SCALARS: Final = "biufcmMUS"  # numpy kinds whose bytes are their value
_DISTRIBUTED: Final = "__create_write_items__"  # torch's protocol for tensors that are divided among ranks

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
        >>> record.name, record.value, record.of(Mode)
        ('SLOW', 2, <Mode.SLOW: 2>)
    """

    kind: str
    name: str | None
    value: Any

    def of(self, cls: type[_E]) -> _E:
        """Return the member of ``cls`` with this name, else with this value; ValueError if there is neither."""
        known = self.name is not None and self.name in cls.__members__
        return cls[str(self.name)] if known else cls(self.value)


def encode(
    value: Any,
    tensors: MutableMapping[str, Tensor],
    *,
    at: str = "",
    copy: bool | Callable[[str, Tensor], Tensor] = True,
    sharded: bool = False,
) -> Any:
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
    tree: Any,
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


def _copied(name: str, tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _join(at: str, path: tuple[str, ...]) -> str:
    return ".".join((at, *path) if at else path)


def _step(key: Any) -> str:
    try:
        return key if type(key) is str else repr(key)
    except ValueError:  # an int of more digits than Python prints
        return type(key).__name__


def _described(value: Any) -> str:
    kind = type(value)
    inner = getattr(value, "__qualname__", kind.__qualname__)
    inside = ", which is defined inside a function," if "<locals>" in inner else ""
    return f"a value of type {type_name(kind)}{inside}"


def _record(tag: str, value: Any, **more: Any) -> dict[str, Any]:
    return {_TAG: tag, "v": value, **more}


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


_LEAVES: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("bytes", _text),
    bytearray: ("bytearray", _text),
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
        self._copy = (
            copy if callable(copy) else _copied if copy else lambda name, tensor: tensor
        )
        self._open: set[int] = set()
        # The entry holds the tensor: its memory must not be reused while the key refers to it.
        self._records: dict[tuple[Any, ...], tuple[Tensor, dict[str, Any]]] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if (
            kind is int
        ):  # beyond 64 bits JSON readers disagree, and Python limits the digits it parses
            return value if -(2**63) <= value < 2**63 else _record("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _record("float", repr(value))
        if kind in _LEAVES:
            tag, to_json = _LEAVES[kind]
            return _record(tag, to_json(value))
        if kind in (list, tuple, set, frozenset, dict, OrderedDict, Counter):
            return self._container(value, path)
        if kind in (Tensor, torch.nn.Parameter) or (
            self._sharded and hasattr(kind, _DISTRIBUTED)
        ):
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, PurePath):
            return _record("path", str(value))
        if isinstance(value, Enum):
            return self._enum(
                EnumRecord(type_name(kind), value.name, value.value), path
            )
        if kind is EnumRecord:
            return self._enum(value, path)
        if isinstance(value, np.generic) and value.dtype.kind in _SCALARS:
            return _record("numpy", value.tobytes().hex(), dtype=value.dtype.str)
        if kind is ObjectRecord:
            return _record(
                "name" if value.state is None else "object",
                self._named(value.kind, value.state, path),
            )
        return self._object(value, path)

    def _named(self, name: str, state: Any, path: tuple[str, ...]) -> Any:
        return name if state is None else [name, self.encode(state, path)]

    def _object(self, value: Any, path: tuple[str, ...]) -> Any:
        """The record of an object of a class, or of a class or a function itself."""
        kind = type(value)
        name = import_path(value) if callable(value) else None
        if name is not None:
            return _record("name", name)
        if isinstance(value, type):
            raise self._refusal(
                value,
                path,
                f"the class {type_name(value)} cannot be named in a checkpoint",
            )
        if id(value) in self._open:
            raise self._refusal(value, path, "it contains itself")
        self._open.add(id(value))
        try:
            return self._parts(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _parts(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        codec = codec_of(value)
        if codec is not None:
            try:
                plain = codec.to_plain(value)
            except Exception as error:
                reason = (
                    f"the codec of {codec.name} raised {type(error).__name__}: {error}"
                )
                raise self._refusal(value, path, reason) from error
            return _record("object", [codec.name, self.encode(plain, path)])
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if (
            kind is partial
            and is_library_kind(value.func)
            and import_path(value.func) is not None
        ):
            parts = [value.func, list(value.args), dict(value.keywords)]
            return _record("partial", self.encode(parts, path))
        if dataclasses.is_dataclass(value) and find_class(type_name(kind)) is kind:
            fields = {
                field.name: getattr(value, field.name)
                for field in dataclasses.fields(value)
            }
            return _record(
                "dataclass",
                [
                    type_name(kind),
                    self.encode({**attributes_of(value), **fields}, path),
                ],
            )
        if is_named_tuple(kind) and find_class(type_name(kind)) is kind:
            return _record(
                "namedtuple", [type_name(kind), self.encode(list(value), path)]
            )
        raise self._refusal(value, path)

    def _module(self, module: nn.Module, path: tuple[str, ...]) -> Any:
        module = (
            module._modules.get("_orig_mod") or module
        )  # a compiled module is stored as what was compiled
        reason = why_not_module(type(module))
        if reason is not None:
            raise self._refusal(module, path, f"this module cannot be saved: {reason}")
        return _record(
            "module",
            [type_name(type(module)), self.encode(module_to_plain(module), path)],
        )

    def _refusal(
        self, value: Any, path: tuple[str, ...], reason: str | None = None
    ) -> CheckpointError:
        plain = next(
            (
                base
                for base in (dict, list, tuple, str, int, float)
                if isinstance(value, base)
            ),
            None,
        )
        fix = _FIX
        if plain is not None and reason is None:
            fix = f"its class would be lost: save {plain.__name__}(value), or register it: tk.checkpoint.codec(Class)"
        return CheckpointError(
            _SOURCE,
            _join(self._at, path) or None,
            reason or f"{_described(value)} cannot be saved",
            fix=fix,
        )

    def _container(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self._open:
            raise self._refusal(value, path, "it contains itself")
        self._open.add(id(value))
        kind = type(value)
        if issubclass(kind, dict):
            tree = self._dict(value, path)
        else:
            items = [
                self.encode(item, (*path, str(index)))
                for index, item in enumerate(value)
            ]
            if kind in (set, frozenset):  # equal sets give equal files
                items.sort(key=lambda item: json.dumps(item, sort_keys=True))
            tree = items if kind is list else _record(kind.__name__, items)
        self._open.discard(id(value))
        return tree

    def _dict(self, value: Any, path: tuple[str, ...]) -> Any:
        names = [_step(key) for key in value]
        entries = [
            self.encode(item, (*path, name))
            for name, item in zip(names, value.values(), strict=True)
        ]
        tree: Any
        if all(type(key) is str for key in value) and _TAG not in value:
            tree = dict(zip(value, entries, strict=True))
        else:
            keys = [
                self._key(key, (*path, name))
                for key, name in zip(value, names, strict=True)
            ]
            tree = _record(
                "dict", [list(pair) for pair in zip(keys, entries, strict=True)]
            )
        if type(value) is dict:
            return tree
        metadata = getattr(
            value, "_metadata", None
        )  # module versions, which load_state_dict reads
        more = (
            {}
            if metadata is None
            else {"metadata": self.encode(metadata, (*path, "_metadata"))}
        )
        return _record(type(value).__name__, tree, **more)

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        if isinstance(key, Tensor):
            raise self._refusal(
                key,
                path,
                "a tensor cannot be the key of a saved dict: it is found by identity",
            )
        return self.encode(key, path)

    def _enum(self, member: EnumRecord, path: tuple[str, ...]) -> Any:
        return _record(
            "enum",
            [member.kind, member.name, self.encode(member.value, (*path, "value"))],
        )

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> Any:
        tensor = tensor.detach()
        if (
            tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_meta
        ):
            found = (
                "meta"
                if tensor.is_meta
                else "nested"
                if tensor.is_nested
                else str(tensor.layout)
            )
            reason = f"only dense tensors with data can be saved, this one is {found} {tensor.dtype}"
            raise self._refusal(tensor, path, reason)
        if tensor.dtype not in TENSOR_DTYPES and tensor.dtype not in CARRIERS:
            raise self._refusal(
                tensor, path, f"tensors of {tensor.dtype} cannot be saved"
            )
        if type(tensor) is not Tensor and not hasattr(
            tensor, "placements"
        ):  # unknown subclass: memory not comparable
            return self._new_tensor(tensor, path)
        key = identity(tensor)
        if key not in self._records:
            self._records[key] = tensor, self._new_tensor(tensor, path)
        return dict(self._records[key][1])

    def _new_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        if self._sharded:
            return _record("tensor", self._collect(tensor, path, owned=True))
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype in TENSOR_DTYPES:
            return _record("tensor", self._collect(tensor, path))
        flat = flatten(tensor).view(CARRIERS[tensor.dtype])
        name = self._collect(flat, path)
        return _record(
            "tensor", name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape)
        )

    def _array(self, array: np.ndarray[Any, Any], path: tuple[str, ...]) -> Any:
        if array.dtype.kind not in _SCALARS:
            raise self._refusal(array, path, f"arrays of {array.dtype} cannot be saved")
        owned = np.array(
            array, order="C"
        )  # contiguous, writable, and 0-dimensional where it was
        if (
            array.dtype.isnative
            and array.dtype.kind in "biuf"
            and array.dtype.itemsize <= 8
        ):
            return _record(
                "array", self._collect(torch.from_numpy(owned), path, owned=True)
            )
        flat = torch.from_numpy(np.array(bytearray(owned.tobytes()), np.uint8))
        name = self._collect(flat, path, owned=True)
        return _record("array", name, dtype=array.dtype.str, shape=list(array.shape))

    def _collect(
        self, tensor: Tensor, path: tuple[str, ...], *, owned: bool = False
    ) -> str:
        # safetensors refuses a lone surrogate; paths like ("a.b",) and ("a", "b") have the same name.
        name = stem = (
            ".".join(path).encode(errors="backslashreplace").decode() or "value"
        )
        count = 2
        while name in self._tensors or name == "__metadata__":
            name, count = f"{stem}#{count}", count + 1
        self._tensors[name] = (
            tensor if owned else self._copy(_join(self._at, (name,)), tensor)
        )
        return name


@final
class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor], at: str, file: object) -> None:
        self._tensors = tensors
        self._at = at
        self._file = file
        self._parameters: dict[int, nn.Parameter] = {}

    def decode(self, tree: Any, path: tuple[str, ...]) -> Any:
        if isinstance(tree, list):
            return [
                self.decode(item, (*path, str(index)))
                for index, item in enumerate(tree)
            ]
        if not isinstance(tree, dict):
            return tree
        if _TAG not in tree:
            return {key: self.decode(item, (*path, key)) for key, item in tree.items()}
        read = _READERS.get(tree[_TAG]) if isinstance(tree[_TAG], str) else None
        if read is None:
            raise self._damage(
                path,
                f"unknown tag {tree[_TAG]!r}",
                fix="read it with the version that wrote it",
            )
        try:
            return read(self, tree, path)
        except (CheckpointError, RecursionError):
            raise
        except (
            Exception
        ) as error:  # each type raises its own error for a damaged record
            raise self._damage(
                path, f"damaged record of a {tree[_TAG]}: {error}"
            ) from error

    def _damage(
        self, path: tuple[str, ...], reason: str, fix: str | None = None
    ) -> CheckpointError:
        return CheckpointError(
            self._file, _join(self._at, path) or None, reason, fix=fix
        )

    def items(self, record: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
        if not isinstance(record["v"], list):
            raise TypeError("the items are missing")
        return [
            self.decode(item, (*path, str(index)))
            for index, item in enumerate(record["v"])
        ]

    def pairs(self, record: dict[str, Any], path: tuple[str, ...]) -> dict[Any, Any]:
        pairs = [(self.decode(key, (*path, "key")), item) for key, item in record["v"]]
        return {key: self.decode(item, (*path, _step(key))) for key, item in pairs}

    def ordered(
        self, record: dict[str, Any], path: tuple[str, ...]
    ) -> OrderedDict[Any, Any]:
        value = OrderedDict(self.decode(record["v"], path))
        if "metadata" in record:
            value._metadata = self.decode(record["metadata"], (*path, "_metadata"))  # type: ignore[attr-defined]
        return value

    def enum(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        kind, name, value = record["v"]
        if not isinstance(kind, str) or not (name is None or isinstance(name, str)):
            raise TypeError("its names are not strings")
        member = EnumRecord(kind, name, self.decode(value, (*path, "value")))
        found = find_class(kind)
        if found is None or not issubclass(found, Enum):
            return member
        if name is not None and name in found.__members__:
            return found.__members__[name]
        # A combination of flags. Other values may be looked up by code of the class.
        return (
            found(member.value)
            if issubclass(found, Flag) and type(member.value) is int
            else member
        )

    def named(self, record: dict[str, Any], path: tuple[str, ...]) -> tuple[str, Any]:
        name, content = record["v"]
        if not isinstance(name, str):
            raise TypeError("its name is not a string")
        return name, self.decode(content, path)

    def name(self, record: dict[str, Any]) -> Any:
        if not isinstance(record["v"], str):
            raise TypeError("it is not a string")
        value = find_name(record["v"])
        return ObjectRecord(record["v"]) if value is None else value

    def object(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        name, content = self.named(record, path)
        codec = codec_named(name)
        return (
            ObjectRecord(name, content) if codec is None else codec.from_plain(content)
        )

    def dataclass(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        name, attributes = self.named(record, path)
        kind = find_class(name)
        if kind is None or not dataclasses.is_dataclass(kind):
            return ObjectRecord(name, attributes)
        return object_from_attributes(kind, attributes)

    def namedtuple(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        name, items = self.named(record, path)
        kind = find_class(name)
        if kind is None or not is_named_tuple(kind):
            return ObjectRecord(name, items)
        if len(items) != len(vars(kind)["_fields"]):
            raise TypeError("it has another number of fields")
        return tuple.__new__(kind, items)

    def module(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        name, content = self.named(record, path)
        kind = find_class(name)
        if (
            kind is None
            or not issubclass(kind, nn.Module)
            or why_not_module(kind) is not None
        ):
            return ObjectRecord(name, content)
        return module_from_plain(kind, content, self._parameters)

    def partial(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        function, arguments, keywords = self.decode(record["v"], path)
        if isinstance(function, ObjectRecord) or not is_library_kind(function):
            return ObjectRecord("functools.partial", [function, arguments, keywords])
        return partial(function, *arguments, **keywords)

    def stored(self, record: dict[str, Any], path: tuple[str, ...]) -> Tensor:
        if record["v"] not in self._tensors:
            raise self._damage(path, f"its tensor {record['v']!r} is not in the file")
        return self._tensors[record["v"]]

    def tensor(self, record: dict[str, Any], path: tuple[str, ...]) -> Tensor:
        stored = self.stored(record, path)
        if "dtype" not in record:
            return stored
        dtype = torch_dtype(record["dtype"])
        if stored.dtype is not CARRIERS.get(dtype) or stored.dim() != 1:
            raise TypeError(f"{dtype} in a tensor of {stored.dtype}")
        return stored.view(dtype).reshape(record["shape"])

    def array(self, record: dict[str, Any], path: tuple[str, ...]) -> Any:
        tensor = self.stored(record, path)
        if (
            tensor.is_meta
        ):  # only headers were read; NumPy has no arrays without content
            return None
        stored = tensor.cpu().numpy()  # no sync point: arrays are read on the CPU
        if "dtype" not in record:
            return stored
        array = np.ndarray(
            tuple(record["shape"]), numpy_dtype(record["dtype"]), stored.data
        )
        if array.size > max(
            stored.size, 1
        ):  # a dtype of width 0 would allow any number of elements
            raise TypeError("it has more elements than bytes")
        return array


_READERS: Final[
    dict[str, Callable[[_Decoder, dict[str, Any], tuple[str, ...]], Any]]
] = {
    "int": lambda _, record, __: int(record["v"], 16),
    "float": lambda _, record, __: float(record["v"]),
    "bytes": lambda _, record, __: base64.b64decode(record["v"], validate=True),
    "bytearray": lambda _, record, __: bytearray(
        base64.b64decode(record["v"], validate=True)
    ),
    "complex": lambda _, record, __: complex(*map(float, record["v"])),
    "dtype": lambda _, record, __: torch_dtype(record["v"]),
    "device": lambda _, record, __: torch.device(record["v"]),
    "size": lambda _, record, __: torch.Size(record["v"]),
    "timedelta": lambda _, record, __: timedelta(*record["v"]),
    "path": lambda _, record, __: Path(record["v"]),
    "numpy": lambda _, record, __: np.ndarray(
        (), numpy_dtype(record["dtype"]), bytes.fromhex(record["v"])
    )[()],
    "tuple": lambda decoder, record, path: tuple(decoder.items(record, path)),
    "set": lambda decoder, record, path: set(decoder.items(record, path)),
    "frozenset": lambda decoder, record, path: frozenset(decoder.items(record, path)),
    "dict": lambda decoder, record, path: decoder.pairs(record, path),
    "OrderedDict": lambda decoder, record, path: decoder.ordered(record, path),
    "Counter": lambda decoder, record, path: Counter(decoder.decode(record["v"], path)),
    "enum": lambda decoder, record, path: decoder.enum(record, path),
    "name": lambda decoder, record, _: decoder.name(record),
    "object": lambda decoder, record, path: decoder.object(record, path),
    "dataclass": lambda decoder, record, path: decoder.dataclass(record, path),
    "namedtuple": lambda decoder, record, path: decoder.namedtuple(record, path),
    "module": lambda decoder, record, path: decoder.module(record, path),
    "partial": lambda decoder, record, path: decoder.partial(record, path),
    "tensor": lambda decoder, record, path: decoder.tensor(record, path),
    "array": lambda decoder, record, path: decoder.array(record, path),
}


def children(
    tree: Any, *, at: str = "", file: object = "state.json"
) -> Mapping[Any, Any] | list[Any] | None:
    """Return the encoded values of a dict by key, or the encoded items of a list or tuple; None for other trees.

    Example:
        >>> from trainer_kit.checkpoint.encoding import encode
        >>> children(encode({"a": {1: "one"}}, {}))
        {'a': {'$': 'dict', 'v': [[1, 'one']]}}
        >>> children(children(encode({"a": {1: "one"}}, {}))["a"])
        {1: 'one'}
    """
    if isinstance(tree, list):
        return tree
    if not isinstance(tree, dict):
        return None
    if _TAG not in tree:
        return tree
    tag, value = tree[_TAG], tree.get("v")
    if tag in ("OrderedDict", "Counter"):
        return children(value, at=at, file=file)
    if tag == "tuple" and isinstance(value, list):
        return value
    if tag != "dict" or not isinstance(value, list):
        return None
    try:
        return {decode(key, {}, at=at, file=file): item for key, item in value}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            file, at or None, f"damaged record of a dict: {error}"
        ) from error


def holds_record(value: Any) -> bool:
    """Whether a decoded value holds an `EnumRecord` or an `ObjectRecord` in place of an object.

    Example:
        >>> holds_record(decode({"kind": {"$": "name", "v": "elsewhere.Kind"}}, {}))
        True
    """
    if isinstance(value, (EnumRecord, ObjectRecord)):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_record, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(holds_record, value))
    if isinstance(value, partial):
        return holds_record([value.args, value.keywords])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return holds_record(attributes_of(value))
    return False


def tensor_record(tree: Any) -> Mapping[str, Any] | None:
    """Return ``tree`` if it is the record of a tensor, which has the tensor's name under ``"v"``; else None."""
    return tree if isinstance(tree, dict) and tree.get(_TAG) == "tensor" else None


def merge(first: Any, second: Any) -> Any:
    """Merge two encoded trees: the keys of both dicts, at any depth; elsewhere the first tree wins.

    This makes one state from ranks that hold different parts of a model, such as the stages of a pipeline.

    Example:
        >>> merge({"model": {"a": 1}, "step": 3}, {"model": {"b": 2}, "step": 4})
        {'model': {'a': 1, 'b': 2}, 'step': 3}
    """
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        if _TAG not in first and _TAG not in second:
            joined = {
                key: merge(value, second[key]) if key in second else value
                for key, value in first.items()
            }
            return {
                **joined,
                **{key: value for key, value in second.items() if key not in first},
            }
        if first.get(_TAG) == second.get(_TAG) == "OrderedDict":
            return {**first, "v": merge(first["v"], second["v"])}
    if (
        isinstance(first, list)
        and isinstance(second, list)
        and len(first) == len(second)
    ):
        return [merge(one, other) for one, other in zip(first, second, strict=True)]
    return first
