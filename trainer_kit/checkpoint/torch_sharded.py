"""Read torch's distributed checkpoints, whose ``.metadata`` is a pickle, without running anything of it."""

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
from trainer_kit.core.errors import CheckpointError

__all__ = ["find_torch_sharded", "read_torch_sharded"]

_METADATA: Final = ".metadata"
_MOST: Final = 256 << 20
_RECORDS: Final = {
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata"),
    },
}


def _word(value: Any) -> Any:
    """A text or number as it is: the text of a nested list can be longer than the memory."""
    if not isinstance(value, (str, int)):
        raise TypeError(f"a {type(value).__name__} is neither text nor a number")
    return value


_VALUES: Final[Mapping[tuple[str, str], Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _word,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _word,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(parts),
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
        if (module, name) in _VALUES:
            return _VALUES[module, name]
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

    __hash__ = object.__hash__  # type: ignore[assignment]  # keys of a dict are filled before they have attributes

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"values": state})


def find_torch_sharded(directory: Path) -> Path | None:
    """Return the torch distributed checkpoint of a model at, or directly inside of, a directory; None without one.

    Raises:
        CheckpointError: there are several.
    """
    found = [
        file.parent for file in (directory / _METADATA, *sorted(directory.glob(f"*/{_METADATA}"))) if file.is_file()
    ]
    models = [one for one in found if not one.name.startswith("optimizer")] or found
    if len(models) > 1:
        names = ", ".join(one.name for one in models)
        raise CheckpointError(
            directory, None, f"several torch distributed checkpoints: {names}", fix="name one of them"
        )
    return models[0] if models else None


def read_torch_sharded(directory: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
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
        if file.stat().st_size > _MOST:
            raise CheckpointError(file, None, f"it has more than {_MOST} bytes")
        content = file.read_bytes()
    try:
        metadata = _Reader(content, file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        tensors = {
            name: _tensor(directory, name, one, places).to(device)
            for name, one in metadata.state_dict_metadata.items()
            if hasattr(one, "chunks")  # else it is a pickled value
        }
    except CheckpointError:
        raise
    except Exception as error:  # a hostile file can cause any error
        raise CheckpointError(file, None, f"it does not describe tensors ({type(error).__name__}: {error})") from error
    inside = all(name.startswith("model.") for name in tensors)
    return {name.removeprefix("model.") if inside else name: tensor for name, tensor in tensors.items()}


def _tensor(directory: Path, name: str, one: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Tensor:
    dtype, shape = one.properties.values[0], tuple(one.size)
    parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks if math.prod(chunk.sizes)]
    chunks = [Chunk(offsets, sizes, places[name, offsets].relative_path, name) for offsets, sizes in parts]
    check_cover(directory / _METADATA, name, TensorLayout(dtype, shape, tuple(chunks)))
    for chunk in chunks:
        file = directory / chunk.file
        bytes_of = math.prod(chunk.sizes) * dtype.itemsize
        if chunk.file != os.path.basename(chunk.file) or not file.is_file() or bytes_of > file.stat().st_size:
            raise CheckpointError(file, name, "it does not hold this tensor")
    whole = torch.empty(shape, dtype=dtype)
    for chunk in chunks:
        place, target = places[name, chunk.offsets], whole
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, start, size)
        with open(directory / chunk.file, "rb") as stream:
            stream.seek(place.offset)
            content = io.BytesIO(stream.read(place.length))
        try:
            part = torch_load(content, "cpu")
        except CheckpointError as error:
            raise CheckpointError(directory / chunk.file, name, error.reason) from error
        target.copy_(part.reshape(chunk.sizes))
    return whole
