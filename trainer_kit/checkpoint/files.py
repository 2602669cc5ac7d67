"""Single files: written once, synced, and checksummed from memory while they are written."""

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
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError, ConfigurationError
from trainer_kit.core.location import Location, RemotePath

__all__ = [
    "CARRIERS",
    "EXTRA_STATE",
    "TENSOR_DTYPES",
    "checksum",
    "flatten",
    "identity",
    "in_bytes",
    "numpy_dtype",
    "read_file",
    "read_header",
    "read_tensors",
    "safetensors_bytes",
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
"""Dtypes that safetensors does not hold everywhere: flattened and looked at as these."""

_PLAIN_DTYPE: Final = re.compile(r"[<>|=](?:[biufcSU]\d{1,10}|[mM]8(?:\[\d{0,9}[a-zA-Zμ]{1,2}\])?)", re.ASCII)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name; TypeError for anything else in torch."""
    # Not getattr(torch, name): some names there import whole packages.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of numbers, strings or dates of this name; TypeError for every other one."""
    if not _PLAIN_DTYPE.fullmatch(name):  # NumPy's other notations are evaluated as Python
        raise TypeError(f"{name!r} is not a plain dtype")
    return np.dtype(name)


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
"""The dtypes that every safetensors release we support can hold, by the name the format gives them."""

_DTYPES: Final = {name: dtype for dtype, name in TENSOR_DTYPES.items()}
_UNITS: Final = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(("", "K", "M", "G", "T"))}}
_BINARY_UNITS: Final = {f"{p}IB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), start=1)}
_FORMAT_KEY: Final = "format"
"""In the metadata of every safetensors file; the other keys there may be further names of a tied weight."""
_CHUNK: Final = 4 << 20
_LONGEST_HEADER: Final = 100_000_000
"""Bytes; the library of the format takes no longer one."""
_PIECE: Final = 64 << 20
"""Of a file of this machine. Each call lets go of the interpreter lock and waits for it again, 5 ms where the training
thread runs Python, so a file is hashed and written in few calls."""


def in_bytes(size: int | str, name: str, least: int = 0) -> int:
    """The number of bytes that people mean.

    Args:
        size: a number, or ``"5GB"``, ``"200MB"``, ``"1GiB"``.
        name: what it is, for messages.
        least: what it may be.

    Raises:
        ConfigurationError: it is no such number.

    Example:
        >>> in_bytes("1.5 kB", "size"), in_bytes("2GiB", "size"), in_bytes(7, "size")
        (1500, 2147483648, 7)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Za-z]*)", str(size).strip())
    unit = None if match is None else {**_UNITS, **_BINARY_UNITS}.get(match[2].upper())
    count = -1 if match is None or unit is None else int(float(match[1]) * unit)
    if count < least:
        raise ConfigurationError(
            f"{name} is a number of bytes", found=repr(size), fix='write it as "5GB", "200MB" or "1GiB"'
        )
    return count


def flatten(tensor: Tensor) -> Tensor:
    """All elements in one dimension of stride 1: a single element counts as contiguous with any stride."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> tuple[int, Iterable[Any]]:
    """A safetensors file as a size in bytes and the buffers that make it up, one tensor at a time on the host.

    The library's own writer returns after the bytes are on disk; a checksum made then would bless whatever landed
    there. This one lets the checksum be made from memory. Format: https://huggingface.co/docs/safetensors

    A tensor with several names (a tied weight) is written once, under the first of them; the metadata of the file maps
    the other names to it, as ``safetensors.torch.save_model`` does.
    """
    tied = tied_names(tensors)
    header: dict[str, Any] = {"__metadata__": {**tied, _FORMAT_KEY: "pt"}}
    kept = [item for item in tensors.items() if item[0] not in tied]
    ordered = sorted(kept, key=lambda item: (-item[1].element_size(), item[0]))  # keeps data aligned
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TENSOR_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def buffers() -> Iterable[Any]:
        yield struct.pack("<Q", len(text))
        yield text
        for _, tensor in ordered:
            if tensor.numel():
                yield flatten(tensor.detach().cpu()).view(torch.uint8).numpy().data

    return 8 + len(text) + end, buffers()


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same elements of the same memory; both must be alive.

    Of a tensor that is divided among ranks, this rank's part is looked at. The storage counts, not the address of its
    data: a rank may hold nothing of a tensor, and must still find the names that the other ranks find.
    """
    held: Any = tensor
    part = held.to_local() if hasattr(tensor, "placements") else held
    storage, shape = part.untyped_storage()._cdata, tuple(tensor.shape)
    return storage, part.storage_offset(), shape, part.stride(), tensor.dtype, part.is_conj(), part.is_neg()


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tensors that an earlier name has already, with that name.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> tied_names({"embedding": weight, "bias": weight[0], "head": weight})
        {'head': 'embedding'}
    """
    first: dict[tuple[Any, ...], str] = {}
    found = {name: first.setdefault(identity(tensor), name) for name, tensor in tensors.items()}
    return {name: kept for name, kept in found.items() if kept != name and name != _FORMAT_KEY}


def write_file(path: Location, buffers: Iterable[Any], mode: int = 0o666) -> dict[str, Any]:
    """Write and fsync a new file; returns its manifest entry: ``{"size": bytes, "xxh3_64": hex}``.

    Args:
        path: the file.
        buffers: its content.
        mode: permissions on this machine, of which the umask takes its part.

    Raises:
        OSError: when it exists or cannot be written.
    """
    digest, size = xxhash.xxh3_64(), 0

    def chunks(most: int) -> Iterator[memoryview]:
        nonlocal size
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), most):
                chunk = view[start : start + most]
                digest.update(chunk)
                yield chunk
            size += len(view)

    if isinstance(path, RemotePath):
        path.write_chunks(chunks(_CHUNK))
    else:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for chunk in chunks(_PIECE):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    return {"size": size, "xxh3_64": digest.hexdigest()}


def checksum(path: Location) -> str:
    """The xxh3-64 of a file's bytes, in hex."""
    digest = xxhash.xxh3_64()
    if isinstance(path, RemotePath):
        for part in path.read_chunks():
            digest.update(part)
        return digest.hexdigest()
    with open(path, "rb", opener=_open_itself) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_file(path: Location, most: int) -> bytes:
    """All bytes of a regular file: no link is followed, and nothing that stands there in its place is waited for.

    Args:
        path: the file.
        most: bytes that it may have, so that no file can ask for all memory.

    Raises:
        OSError: it is not there, larger, something else, or cannot be read.
    """
    if isinstance(path, RemotePath):
        _check_file(path.lstat(), most)
        return b"".join(path.read_chunks())
    with open(path, "rb", opener=_open_itself) as file:
        _check_file(os.fstat(file.fileno()), most)
        return file.read(most)


def _check_file(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"{in_units(status.st_size)}, where at most {in_units(most)} are written")


def _open_itself(path: str, flags: int) -> int:
    # A pipe would be waited for without O_NONBLOCK; on regular files it does nothing.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of a safetensors file, each with memory of its own; names of one tied weight have one tensor.

    Raises:
        CheckpointError: when it is not a whole safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            # Some releases hand out views of a mapping of the file, which must not outlive the file.
            found = {name: file.get_tensor(name).clone() for name in list(file.keys())}
            return {**found, **{name: found[kept] for name, kept in _stored_ties(file).items()}}
    except Exception as error:  # the header is data: torch refuses what it asks for in many ways
        raise CheckpointError(path, None, f"not a readable safetensors file: {error}") from error


def stated_size(path: Location) -> int:
    """The bytes of a whole safetensors file, as its header gives them; only the header is read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no header of a safetensors file.
    """
    length = struct.unpack("<Q", _start(path, 8))[0]
    if length > _LONGEST_HEADER:
        raise ValueError(f"a header of {in_units(length)}")
    header = json.loads(_start(path, 8 + length)[8:])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + int(length) + max(ends, default=0)


def _start(path: Location, size: int) -> bytes:
    if isinstance(path, RemotePath):
        start = b""
        for chunk in path.read_chunks(min(size, _CHUNK)):
            start += chunk
            if len(start) >= size:
                break
    else:
        with open(path, "rb", opener=_open_itself) as file:
            start = file.read(size)
    if len(start) < size:
        raise ValueError(f"{len(start)} bytes, where a header of {size} begins")
    return start[:size]


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file without their content, on torch's ``meta`` device; only the header is read.

    Raises:
        CheckpointError: it is no whole safetensors file, or holds a dtype that torch lacks.
    """
    try:
        with safe_open(str(file), framework="pt") as content:
            entries = {name: content.get_slice(name) for name in list(content.keys())}
            found = {name: (entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
            ties = _stored_ties(content)
    except Exception as error:  # the header is data: whatever it provokes
        raise CheckpointError(file, None, f"not a readable safetensors file: {error}") from error
    for name, (word, _) in found.items():
        if word not in _DTYPES:
            raise CheckpointError(file, name, f"a tensor of {word}, which is not read")
    held = {name: torch.empty(shape, dtype=_DTYPES[word], device="meta") for name, (word, shape) in found.items()}
    return {**held, **{name: held[kept] for name, kept in ties.items()}}


def _stored_ties(file: Any) -> dict[str, str]:
    names, metadata = set(file.keys()), dict(file.metadata() or {})
    return {key: kept for key, kept in metadata.items() if kept in names and key not in names and key != _FORMAT_KEY}


EXTRA_STATE: Final = "_extra_state"
"""What torch calls what modules keep besides tensors."""
_UNSAFE: Final = "if you trust its author, load it yourself and save only its state_dict, best as safetensors"


def torch_load(file: Path, device: torch.device | str, mapped: bool = False) -> Any:
    """The content of a file.

    Args:
        file: of this machine.
        device: where tensors go.
        mapped: nothing of them is read before it is used.

    Raises:
        CheckpointError: it needs more than tensors and plain values, and could run code.
    """
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("it is compressed, as torch.save never writes it")
        content = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a hostile file provokes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(file, None, f"torch.load(weights_only=True) refused it: {reason}", fix=_UNSAFE) from error
    return content


def tensors_of(file: Location, content: Any, most: float = math.inf) -> dict[str, Tensor]:
    """The tensors of a state_dict.

    Args:
        file: where it lies, for the error.
        content: of it.
        most: bytes that one of them can have.

    Raises:
        CheckpointError: something else is in it.
    """
    if not isinstance(content, dict):
        raise CheckpointError(file, None, f"it holds a {type(content).__name__}, not a state_dict")
    weights = {}
    for name, value in content.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            if value.numel() * value.element_size() > most:  # strides of 0 make a byte stand for all memory
                raise CheckpointError(file, name, f"a tensor of {list(value.shape)} is larger than its file")
            weights[name] = value.detach()
        elif not (isinstance(name, str) and name.endswith(EXTRA_STATE)):
            raise CheckpointError(
                file,
                name if isinstance(name, str) else f"a {type(name).__name__}",
                f"a {type(value).__name__} where a state_dict has a tensor",
                fix="save a state_dict",
            )
    return weights
