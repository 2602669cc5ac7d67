"""Single files: write and sync them with a checksum made from memory, and read safetensors and ``torch.save`` files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from trainer_kit.core.atomic_files import sync_directory
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, RemotePath
from trainer_kit.core.tensors import local
from trainer_kit.core.torch_private import EXTRA_STATE, storage_key

__all__ = [
    "CARRIERS",
    "TENSOR_DTYPES",
    "FileEntry",
    "checksum",
    "dtype_name",
    "flatten",
    "identity",
    "in_bytes",
    "make_directories",
    "missing_directories",
    "named_failure",
    "numpy_dtype",
    "read_file",
    "read_header",
    "read_start",
    "read_tensors",
    "safetensors_bytes",
    "same_bits",
    "stated_size",
    "tensors_of",
    "tied_names",
    "torch_dtype",
    "torch_load",
    "write_file",
]

CARRIERS: Final = {
    getattr(torch, name): carrier
    for name, carrier in {
        "complex32": torch.float16,
        "complex64": torch.float32,
        "complex128": torch.float64,
        "float8_e4m3fnuz": torch.uint8,
        "float8_e5m2fnuz": torch.uint8,
        "float8_e8m0fnu": torch.uint8,
        "float4_e2m1fn_x2": torch.uint8,
    }.items()
    if hasattr(torch, name)
}
"""Dtypes that not every safetensors release holds, with the dtype as which their flattened content is stored."""

_PLAIN_DTYPE: Final = re.compile(
    r"[<>|=](?:[biufcSU]\d{1,10}|[mM]8(?:\[\d{0,9}[a-zA-Zμ]{1,2}\])?)", re.ASCII
)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; TypeError for any other name in torch."""
    # Not getattr(torch, name): some names there import whole packages.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of numbers, strings or dates of this name; TypeError for any other name."""
    # NumPy evaluates its other notations as Python.
    if not _PLAIN_DTYPE.fullmatch(name):
        raise TypeError(f"{name!r} is not a plain dtype")
    return np.dtype(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix ``torch.``, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


TENSOR_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that every supported safetensors release can hold, with their name in the format."""

_DTYPES: Final = {name: dtype for dtype, name in TENSOR_DTYPES.items()}
_UNITS: Final = {
    "": 1,
    **{f"{p}B": 1000**i for i, p in enumerate(("", "K", "M", "G", "T"))},
}
_BINARY_UNITS: Final = {
    f"{p}IB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), start=1)
}
_FORMAT_KEY: Final = "format"
"""In the metadata of every safetensors file; the other keys there may be further names of a tied weight."""
FileEntry = dict[str, Any]
"""What a manifest lists of a file: size and checksum."""
_READ_BYTES: Final = 4 << 20
_MAX_HEADER_BYTES: Final = 100_000_000
"""Bytes; the safetensors library accepts no longer header."""
_WRITE_BYTES: Final = 64 << 20
"""Bytes of a local file per call. Each call releases the interpreter lock and waits for it again, 5 ms if the training
thread runs Python, so a file is hashed and written in few calls."""


@contextmanager
def named_failure(
    file: object,
    problem: str,
    fix: str | None = None,
) -> Iterator[None]:
    """Turn an ``OSError`` inside into a `CheckpointError` that names ``file``; ``problem`` begins the reason."""
    try:
        yield
    # One of them is an OSError too, and says already what is wrong.
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            file, None, f"{problem}: {error.strerror or error}", fix=fix
        ) from error


def in_bytes(size: int | str, name: str, least: int = 0) -> int:
    """Parse a number of bytes.

    Args:
        size: a number, or ``"5GB"``, ``"200MB"``, ``"1GiB"``.
        name: the name of the argument, for messages.
        least: the smallest number that is valid.

    Raises:
        ConfigurationError: ``size`` is not a number of bytes.

    Example:
        >>> in_bytes("1.5 kB", "size"), in_bytes("2GiB", "size"), in_bytes(7, "size")
        (1500, 2147483648, 7)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Za-z]*)", str(size).strip())
    count = -1
    if match is not None:
        number, unit = match.groups()
        factor = {**_UNITS, **_BINARY_UNITS}.get(unit.upper())
        if factor is not None:
            count = int(float(number) * factor)
    if count < least:
        raise ConfigurationError(
            f"{name} must be a number of bytes",
            found=repr(size),
            fix='write it as "5GB", "200MB" or "1GiB"',
        )
    return count


def flatten(tensor: Tensor) -> Tensor:
    """Return all elements in one dim of stride 1; `view(-1)` keeps the stride of a single element."""
    size = (tensor.numel(),)
    return tensor.contiguous().as_strided(size, (1,))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; a NaN equals itself.

    Example:
        >>> same_bits(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, torch.nan]))
        True
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw_a = flatten(a).view(torch.uint8)
    raw_b = flatten(b).view(torch.uint8)
    return torch.equal(raw_a, raw_b)


def safetensors_bytes(
    tensors: Mapping[str, Tensor],
) -> tuple[int, Iterable[bytes | memoryview]]:
    """Return the size of a safetensors file in bytes, and its buffers, one tensor at a time on the host.

    The safetensors library writes the file before a checksum can be made, so a checksum of the file could not detect a
    failed write. Here the checksum is computed from memory. Format: https://huggingface.co/docs/safetensors

    A tensor with several names (a tied weight) is written once, under its first name; the metadata of the file maps the
    other names to it, as ``safetensors.torch.save_model`` does.
    """
    tied = tied_names(tensors)
    stored = [item for item in tensors.items() if item[0] not in tied]
    # Large elements first: that keeps the data of every tensor aligned. Then by name: equal states give equal files.
    stored.sort(key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {**tied, _FORMAT_KEY: "pt"}}
    offset = 0
    for name, tensor in stored:
        start = offset
        offset += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": TENSOR_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, offset],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)

    # A generator: at most one tensor at a time is copied to the host.
    def buffers() -> Iterable[bytes | memoryview]:
        yield struct.pack("<Q", len(text))
        yield text
        for _, tensor in stored:
            if tensor.numel():
                host = flatten(tensor.detach().cpu())
                yield host.view(torch.uint8).numpy().data

    return 8 + len(text) + offset, buffers()


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors with the same elements of the same memory; both must be alive.

    For a tensor that is sharded over ranks, the key describes this rank's part. It contains the storage and not the
    address of the data: a rank that holds no elements must find the same tied names as the other ranks.
    """
    shard = local(tensor)
    # Shape and strides too: a view of the same memory is another tensor, and stored separately.
    return (
        storage_key(shard.untyped_storage()),
        shard.storage_offset(),
        tuple(tensor.shape),
        shard.stride(),
        tensor.dtype,
        shard.is_conj(),
        shard.is_neg(),
    )


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name whose tensor already has an earlier name, with that earlier name.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> tied_names({"embedding": weight, "bias": weight[0], "head": weight})
        {'head': 'embedding'}
    """
    first_names: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        first_name = first_names.setdefault(identity(tensor), name)
        # The metadata of the file cannot hold a tie under its own key: such a tensor is stored twice.
        if first_name != name and name != _FORMAT_KEY:
            tied[name] = first_name
    return tied


def write_file(path: Location, buffers: Iterable[bytes | memoryview]) -> FileEntry:
    """Write and fsync a new file; returns its manifest entry: ``{"size": bytes, "xxh3_64": hex}``.

    Args:
        path: the file.
        buffers: its content.

    Raises:
        OSError: the file exists or cannot be written.
    """
    # Of the bytes in memory: a checksum of the file could not detect that its writing failed.
    digest = xxhash.xxh3_64()
    size = 0

    def chunks(max_bytes: int) -> Iterator[memoryview]:
        nonlocal size
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), max_bytes):
                chunk = view[start : start + max_bytes]
                digest.update(chunk)
                yield chunk
            size += len(view)

    if isinstance(path, RemotePath):
        path.write_chunks(chunks(_READ_BYTES))
    else:
        # Exclusively: a file that is there already belongs to something else.
        with open(path, "xb") as file:
            for chunk in chunks(_WRITE_BYTES):
                file.write(chunk)
            file.flush()
            # The rename of the directory must not become durable before its content.
            os.fsync(file.fileno())
    return {"size": size, "xxh3_64": digest.hexdigest()}


def missing_directories(path: Path) -> list[Path]:
    """Return ``path`` and its parents as far as they do not exist, innermost first."""
    return list(
        takewhile(
            lambda directory: not os.path.lexists(directory), (path, *path.parents)
        )
    )


def make_directories(missing: list[Path]) -> None:
    """Create the directories that `missing_directories` returned, durably."""
    # The outermost first; another process may make the same ones.
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        # A checkpoint is only as durable as the name of its directory.
        sync_directory(directory.parent)


def checksum(path: Location) -> str:
    """Return the xxh3-64 of a file's bytes, in hex."""
    digest = xxhash.xxh3_64()
    for chunk in _chunks(path, _READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Location, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file, ``size`` at a time; follow no link."""
    if isinstance(path, RemotePath):
        yield from path.read_chunks(size)
        return
    with open(path, "rb", opener=_open_no_follow) as file:
        while chunk := file.read(size):
            yield chunk


def read_file(path: Location, max_bytes: int) -> bytes:
    """Return all bytes of a regular file; follow no link, and do not wait for a pipe.

    Args:
        path: the file.
        max_bytes: the largest number of bytes to read, so that no file can exhaust the memory.

    Raises:
        OSError: the file is absent, too large, not a regular file, or cannot be read.
    """
    if isinstance(path, RemotePath):
        _check_file(path.lstat(), max_bytes)
        return b"".join(path.read_chunks())
    with open(path, "rb", opener=_open_no_follow) as file:
        # Of the opened file: between a check of the path and the open another file could take its place.
        _check_file(os.fstat(file.fileno()), max_bytes)
        return file.read(max_bytes)


def _check_file(status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > max_bytes:
        raise OSError(
            errno.EFBIG,
            f"{in_units(status.st_size)}, where at most {in_units(max_bytes)} are written",
        )


def _open_no_follow(path: str, flags: int) -> int:
    # Without O_NONBLOCK the open of a pipe blocks; for regular files the flag has no effect.
    return os.open(
        path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    )


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return copies of all tensors of a safetensors file; the names of a tied weight share one tensor.

    Raises:
        CheckpointError: the file is not a whole safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            # Some releases return views of the mapped file, which must not outlive the file.
            tensors = {
                name: file.get_tensor(name).clone() for name in list(file.keys())
            }
            for name, first_name in _stored_ties(file).items():
                tensors[name] = tensors[first_name]
            return tensors
    except Exception as error:
        # A damaged header can cause any error in torch.
        raise CheckpointError(
            path, None, f"not a readable safetensors file: {error}"
        ) from error


def stated_size(path: Location) -> int:
    """Return the size of a whole safetensors file, computed from its header; only the header is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not begin with the header of a safetensors file.
    """
    length = struct.unpack("<Q", _header_start(path, 8))[0]
    # Before so many bytes are read: the number comes from the file.
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {in_units(length)}")
    header = json.loads(_header_start(path, 8 + length)[8:])
    ends = [
        entry["data_offsets"][1]
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    return 8 + int(length) + max(ends, default=0)


def read_start(path: Location, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, or all bytes of a shorter file; follow no link.

    Raises:
        OSError: the file cannot be read.
    """
    start = b""
    for chunk in _chunks(path, min(size, _READ_BYTES)):
        start += chunk
        if len(start) >= size:
            break
    return start[:size]


def _header_start(path: Location, size: int) -> bytes:
    start = read_start(path, size)
    if len(start) < size:
        raise ValueError(f"{len(start)} bytes, where a header of {size} begins")
    return start


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the meta device; only the header is read.

    Raises:
        CheckpointError: the file is not a whole safetensors file, or holds a dtype that torch lacks.
    """
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    try:
        with safe_open(str(file), framework="pt") as content:
            for name in list(content.keys()):
                entry = content.get_slice(name)
                dtypes[name] = entry.get_dtype()
                shapes[name] = entry.get_shape()
            ties = _stored_ties(content)
    except Exception as error:
        # A damaged header can cause any error.
        raise CheckpointError(
            file, None, f"not a readable safetensors file: {error}"
        ) from error
    tensors = {}
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise CheckpointError(file, name, f"a tensor of {dtype}, which is not read")
        tensors[name] = torch.empty(shapes[name], dtype=_DTYPES[dtype], device="meta")
    for name, first_name in ties.items():
        tensors[name] = tensors[first_name]
    return tensors


def _stored_ties(file: Any) -> dict[str, str]:
    """Each further name of a tied weight in a safetensors file, with the name under which it is stored."""
    names = set(file.keys())
    metadata = dict(file.metadata() or {})
    return {
        name: first_name
        for name, first_name in metadata.items()
        if first_name in names and name not in names and name != _FORMAT_KEY
    }


_UNSAFE_FIX: Final = (
    "if you trust its author, load it yourself, with weights_only=False, and save its state_dict(), or only tensors"
    " and plain values"
)
_REFUSED: Final = re.compile(r"GLOBAL (\S+)")


def torch_load(
    file: Path | IO[bytes],
    device: torch.device | str,
    mapped: bool = False,
) -> Any:
    """Load a ``torch.save`` file with ``weights_only=True``, never in another way.

    Args:
        file: a local file, or its content.
        device: the device of the tensors.
        mapped: map the file, so that a tensor is read when it is used.

    Raises:
        CheckpointError: the file is damaged, or needs more than tensors and plain values and could run code.
    """
    try:
        if zipfile.is_zipfile(file):
            _refuse_compression(file)
        if not isinstance(file, Path):
            file.seek(0)
        # torch refuses everything that could run code, and names it in the error.
        return torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:
        # A hostile file can cause any error. Later lines of the text advise to load the file without protection.
        lines = str(error).strip().splitlines()
        reason = next(iter(lines), type(error).__name__)
        refused = _REFUSED.search(str(error))
        if refused is not None:
            reason = f"it holds {refused[1]}, and a class could run code"
        raise CheckpointError(
            file,
            None,
            f"torch.load(weights_only=True) refused it: {reason}",
            fix=_UNSAFE_FIX,
        ) from error


def _refuse_compression(file: Path | IO[bytes]) -> None:
    """Raise for a compressed archive: a small one may unpack to more than any memory."""
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed, as torch.save never writes it")


def tensors_of(
    file: Location,
    content: object,
    max_bytes: float = math.inf,
) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, without extra state.

    Args:
        file: the file of the state_dict, for messages.
        content: the state_dict.
        max_bytes: the largest size of a tensor in bytes.

    Raises:
        CheckpointError: the state_dict holds other values, or a tensor is larger than ``max_bytes``.
    """
    if not isinstance(content, dict):
        raise CheckpointError(
            file, None, f"it holds a {type(content).__name__}, not a state_dict"
        )
    weights = {}
    for name, value in content.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            # Strides of 0 repeat few bytes without end.
            if value.numel() * value.element_size() > max_bytes:
                raise CheckpointError(
                    file,
                    name,
                    f"a tensor of {list(value.shape)} is larger than its file",
                )
            weights[name] = value.detach()
        elif not (isinstance(name, str) and name.endswith(EXTRA_STATE)):
            raise _not_a_tensor(file, name, value)
    return weights


def _not_a_tensor(
    file: Location,
    name: object,
    value: object,
) -> CheckpointError:
    """The error for an entry of a state_dict that is neither a tensor nor extra state."""
    key = name if isinstance(name, str) else f"a {type(name).__name__}"
    reason = f"a {type(value).__name__} where a state_dict has a tensor"
    fix = "save a state_dict"
    if isinstance(name, str) and isinstance(value, dict):
        if any(isinstance(entry, Tensor) for entry in value.values()):
            inner = f"torch.load({str(file)!r})[{key[:200]!r}]"
            fix = f"it has the state_dict inside: module.load_state_dict({inner}), or torch.save({inner}, another_file)"
    return CheckpointError(file, key, reason, fix=fix)
