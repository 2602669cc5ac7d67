"""Read torch's distributed checkpoints: the tensors, whole, without running code that a file names."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import named_failure, torch_load
from trainer_kit.checkpoint.layout import Chunk, TensorLayout, check_cover
from trainer_kit.checkpoint.torch_private import (
    LAYOUT_FUNCTION,
    MEMORY_FORMAT,
    STORAGE_RECORD,
)
from trainer_kit.core.errors import CheckpointError

__all__ = ["find_torch_distributed", "read_torch_distributed"]

_METADATA: Final = ".metadata"
_MAX_METADATA_BYTES: Final = 256 << 20
_RECORDS: Final = {
    "torch.distributed.checkpoint.filesystem": {STORAGE_RECORD},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}
"""Torch's classes in these files, by module."""


def _text_or_number(value: object) -> str | int:
    """A text or number as it is: the text of a nested list can be longer than the memory."""
    if not isinstance(value, (str, int)):
        raise TypeError(f"a {type(value).__name__} is neither text nor a number")
    return value


def _join_path(*segments: str) -> str:
    return "/".join(segments)


_FUNCTIONS: Final[Mapping[tuple[str, str], Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", LAYOUT_FUNCTION): _text_or_number,
    ("torch.distributed.checkpoint.metadata", MEMORY_FORMAT): _text_or_number,
    ("pathlib", "PosixPath"): _join_path,
    ("pathlib", "WindowsPath"): _join_path,
}
"""What stands in the place of the functions that these files call."""


@final
class _Reader(pickle.Unpickler):
    """Creates plain records for torch's classes, and refuses every other name, so that no other code runs."""

    def __init__(self, content: bytes, file: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._file = file
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return self._records.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            self._file.parent,
            None,
            f"{module}.{name} does not belong in a torch distributed checkpoint; its .metadata is a pickle,"
            " which can run "
            "any code when it is read",
            fix="if you trust its author, convert it yourself: python -m torch.distributed.checkpoint.format_utils "
            "dcp_to_torch DIRECTORY FILE.pt",
        )


class _Record(SimpleNamespace):
    """One of torch's records: its attributes, or the tuple that it is pickled as."""

    # A pickle puts keys into a dict before it sets their attributes, so they are hashed by identity.
    __hash__ = object.__hash__  # type: ignore[assignment]  # the base class has none, since its attributes change

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            state = {"values": state}
        vars(self).update(state)


def find_torch_distributed(directory: Path) -> Path | None:
    """Return the torch distributed checkpoint of a model at, or directly inside of, a directory; None without one.

    Raises:
        CheckpointError: there are several.
    """
    files = [directory / _METADATA, *sorted(directory.glob(f"*/{_METADATA}"))]
    parents = [file.parent for file in files if file.is_file()]
    # Accelerate writes the optimizer's state beside the model's.
    models = [path for path in parents if not path.name.startswith("optimizer")]
    if not models:
        models = parents
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise CheckpointError(
            directory,
            None,
            f"several torch distributed checkpoints: {names}",
            fix="name one of them",
        )
    return next(iter(models), None)


def read_torch_distributed(
    directory: Path,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return the tensors of a torch distributed checkpoint, whole, by name.

    Args:
        directory: with a ``.metadata`` and its ``.distcp`` files.
        device: the device of the tensors.

    Returns:
        By name; of ``{"model": state}``, as Accelerate writes it, the names in ``state``.

    Raises:
        CheckpointError: the files are damaged, or name a class that does not belong in such a checkpoint.
    """
    file = directory / _METADATA
    with named_failure(file, "it cannot be read"):
        if file.stat().st_size > _MAX_METADATA_BYTES:
            reason = f"it has more than {_MAX_METADATA_BYTES} bytes"
            raise CheckpointError(file, None, reason)
        content = file.read_bytes()
    try:
        tensors = _read_tensors(directory, _Reader(content, file).load(), device)
    except CheckpointError:
        raise
    except Exception as error:
        # A hostile file can cause any error.
        raise CheckpointError(
            file,
            None,
            f"it does not describe tensors ({type(error).__name__}: {error})",
        ) from error
    if not all(name.startswith("model.") for name in tensors):
        return tensors
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


_Storage = Mapping[tuple[str, tuple[int, ...]], Any]
"""By name and offsets of a chunk: the record of its file, and of its position there."""


def _read_tensors(
    directory: Path,
    metadata: Any,
    device: torch.device | str,
) -> dict[str, Tensor]:
    storage = {
        (index.fqn, tuple(index.offset or ())): info
        for index, info in metadata.storage_data.items()
    }
    tensors = {}
    for name, record in metadata.state_dict_metadata.items():
        # Other records are of pickled values, which are not read.
        if hasattr(record, "chunks"):
            tensors[name] = _read_tensor(directory, name, record, storage).to(device)
    return tensors


def _read_tensor(
    directory: Path,
    name: str,
    record: Any,
    storage: _Storage,
) -> Tensor:
    layout = _tensor_layout(name, record, storage)
    # Before memory is taken: the shape comes from the file.
    check_cover(directory / _METADATA, name, layout)
    for chunk in layout.chunks:
        file = directory / chunk.file
        chunk_bytes = math.prod(chunk.sizes) * layout.dtype.itemsize
        # The name comes from the file too: a path could lead to any file of this machine.
        leads_out = chunk.file != os.path.basename(chunk.file)
        if leads_out or not file.is_file() or chunk_bytes > file.stat().st_size:
            raise CheckpointError(file, name, "it does not hold this tensor")
    tensor = torch.empty(layout.shape, dtype=layout.dtype)
    for chunk in layout.chunks:
        target = tensor
        for dim, offset in enumerate(chunk.offsets):
            target = target.narrow(dim, offset, chunk.sizes[dim])
        info = storage[name, chunk.offsets]
        with open(directory / chunk.file, "rb") as stream:
            stream.seek(info.offset)
            content = io.BytesIO(stream.read(info.length))
        try:
            values = torch_load(content, "cpu")
        except CheckpointError as error:
            raise CheckpointError(directory / chunk.file, name, error.reason) from error
        target.copy_(values.reshape(chunk.sizes))
    return tensor


def _tensor_layout(
    name: str,
    record: Any,
    storage: _Storage,
) -> TensorLayout:
    dtype = record.properties.values[0]
    shape = tuple(record.size)
    chunks = []
    for chunk in record.chunks:
        offsets = tuple(chunk.offsets)
        sizes = tuple(chunk.sizes)
        # A rank may hold no elements; such a chunk has no file.
        if math.prod(sizes):
            info = storage[name, offsets]
            chunks.append(Chunk(offsets, sizes, info.relative_path, name))
    return TensorLayout(dtype, shape, tuple(chunks))
