"""``layout.json``: the chunks of each tensor of a sharded checkpoint, and the file of each chunk."""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import safe_open
from torch import Tensor

from trainer_kit.checkpoint.files import (
    CARRIERS,
    TENSOR_DTYPES,
    dtype_name,
    read_header,
)
from trainer_kit.checkpoint.manifest import (
    LAYOUT,
    MAX_DOCUMENT_BYTES,
    Manifest,
    files_of_part,
    is_sharded,
    read_json,
)
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError

__all__ = [
    "Assembled",
    "Chunk",
    "Layout",
    "ShardFiles",
    "TensorLayout",
    "check_cover",
    "dump_layout",
    "layouts_of",
    "named_dtype",
    "read_layout",
    "tensors_in",
]

_DTYPES: Final[dict[str, torch.dtype]] = {
    dtype_name(dtype): dtype for dtype in (*TENSOR_DTYPES, *CARRIERS)
}


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; KeyError for a dtype that cannot be saved."""
    return _DTYPES[name]


@final
@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that one rank wrote.

    Attributes:
        offsets: its start in the whole tensor, by dim.
        sizes: its number of elements, by dim.
        file: the shard that holds it.
        key: its name in the shard.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@final
@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor and the chunks that cover it exactly; a tensor without elements has no chunks.

    Attributes:
        dtype: of the elements.
        shape: of the whole tensor.
        chunks: in any order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def viewed_as(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorLayout:
        """Return the layout of a tensor of this dtype and shape that is stored flat in another dtype (`CARRIERS`)."""
        # Only a checkpoint of one process stores a tensor flat, as one chunk.
        start = (0,) * len(shape)
        chunks = tuple(
            Chunk(start, shape, chunk.file, chunk.key) for chunk in self.chunks
        )
        return TensorLayout(dtype, shape, chunks)


Layout = dict[str, dict[str, TensorLayout]]
"""The layout of a checkpoint's tensors, by part and name."""


def dump_layout(layout: Mapping[str, Mapping[str, TensorLayout]]) -> bytes:
    """Return the bytes of ``layout.json``: dtype, shape and chunks by part and name.

    Raises:
        CheckpointError: the bytes are more than `read_layout` accepts.
    """
    content = {}
    for part_name, tensors in layout.items():
        content[part_name] = {
            name: _tensor_entry(tensor) for name, tensor in tensors.items()
        }
    document = json.dumps(content, separators=(",", ":"), allow_nan=False)
    text = document.encode()
    if len(text) > MAX_DOCUMENT_BYTES:
        reason = f"a layout of {in_units(len(text))}, where at most {in_units(MAX_DOCUMENT_BYTES)} can be saved"
        raise CheckpointError(
            "the state to save", None, reason, fix="save from fewer ranks"
        )
    return text


def _tensor_entry(tensor: TensorLayout) -> dict[str, object]:
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": tensor.shape,
        "chunks": [vars(chunk) for chunk in tensor.chunks],
    }


def read_layout(path: Path, manifest: Manifest) -> Layout:
    """Return the layout of the checkpoint at ``path`` by part and name, checked before any memory is allocated for it.

    Raises:
        CheckpointError: chunks exceed a tensor's bounds, overlap or leave gaps, or need more bytes than their files
            have; a file is not a file of its part; or ``layout.json`` is damaged.
    """
    file = path / LAYOUT
    content = read_json(file)
    parts = manifest["parts"]
    if not isinstance(content, dict) or set(content) != set(parts):
        raise CheckpointError(
            file, None, "it does not describe the parts that the manifest names"
        )
    layout: Layout = {}
    bytes_by_file: Counter[str] = Counter()
    for part_name, entries in content.items():
        if not isinstance(entries, dict):
            raise CheckpointError(
                file, part_name, "the tensors of a part are not a dict"
            )
        layout[part_name] = {}
        for name, entry in entries.items():
            layout[part_name][name] = _parse_tensor(file, f"{part_name}.{name}", entry)
        for name, tensor in layout[part_name].items():
            key = f"{part_name}.{name}"
            # Gaps would leave memory as it was, so a loaded tensor could hold anything.
            check_cover(file, key, tensor)
            for chunk in tensor.chunks:
                if chunk.file not in parts[part_name]:
                    raise CheckpointError(
                        file, key, f"its file {chunk.file!r} is not listed"
                    )
                bytes_by_file[chunk.file] += (
                    math.prod(chunk.sizes) * tensor.dtype.itemsize
                )
    # A small file must not ask for the memory of a large tensor: each byte of a tensor needs one in a file.
    for name, size in bytes_by_file.items():
        if size > manifest["files"][name]["size"]:
            raise CheckpointError(
                file, None, f"chunks of {size} bytes in {name}, which is smaller"
            )
    return layout


def _parse_tensor(file: Path, key: str, entry: Any) -> TensorLayout:
    try:
        chunks = tuple(_parse_chunk(chunk) for chunk in entry["chunks"])
        return TensorLayout(
            named_dtype(entry["dtype"]), _parse_sizes(entry["shape"]), chunks
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            file, key, f"damaged layout: {type(error).__name__}: {error}"
        ) from error


def _parse_chunk(entry: Any) -> Chunk:
    offsets = _parse_sizes(entry["offsets"])
    sizes = _parse_sizes(entry["sizes"])
    file, key = str(entry["file"]), str(entry["key"])
    return Chunk(offsets, sizes, file, key)


def _parse_sizes(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(map(_is_size, value)):
        return tuple(value)
    raise ValueError(f"{value!r} is not a list of sizes")


def _is_size(number: object) -> bool:
    # Beyond 64 bits torch raises an error of its own.
    return type(number) is int and 0 <= number < 2**63


def check_cover(file: object, key: str, tensor: TensorLayout) -> None:
    """Check that every element of the tensor is in exactly one chunk.

    Raises:
        CheckpointError: naming ``key``; chunks exceed the bounds, overlap, or leave gaps.
    """
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        if not _is_inside(chunk, shape):
            reason = f"chunk at {list(chunk.offsets)} of {list(chunk.sizes)} is not inside {list(shape)}"
            raise CheckpointError(file, key, reason)
    # Chunks inside the bounds that have as many elements, and do not overlap, cover every element once.
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise CheckpointError(
            file,
            key,
            f"chunks of {covered} elements for a tensor of {math.prod(shape)}",
        )
    # The sum above already refuses two chunks of a scalar.
    if len(chunks) > 1 and shape:
        _refuse_overlap(file, key, tensor)


def _is_inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return False
    dims = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    return all(0 < size <= length - offset for offset, size, length in dims)


def _refuse_overlap(
    file: object,
    key: str,
    tensor: TensorLayout,
) -> None:
    """Raise if two chunks share an element.

    Sweep along the dim with the most different offsets; compare each chunk with those that are still open there.
    """
    # Comparing all pairs would take time quadratic in the number of chunks, which a file chooses.
    chunks = tensor.chunks
    start_counts = [
        len({chunk.offsets[dim] for chunk in chunks})
        for dim in range(len(tensor.shape))
    ]
    dim = start_counts.index(max(start_counts))
    # End on the dim, and index of the chunk; sorted by the end, so that chunks that have ended stand at the front.
    still_open: list[tuple[int, int]] = []
    for index in sorted(
        range(len(chunks)), key=lambda index: chunks[index].offsets[dim]
    ):
        chunk = chunks[index]
        start = chunk.offsets[dim]
        # Chunks that end before this one starts cannot overlap with it, or with a later one.
        del still_open[: bisect_right(still_open, (start, len(chunks)))]
        for _, open_index in still_open:
            other = chunks[open_index]
            if _overlap(chunk, other):
                starts = f"{list(chunk.offsets)} and {list(other.offsets)}"
                raise CheckpointError(file, key, f"the chunks at {starts} overlap")
        insort(still_open, (start + chunk.sizes[dim], index))


def _overlap(first: Chunk, second: Chunk) -> bool:
    dims = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in dims)


@final
class ShardFiles:
    """The shards of a checkpoint, each opened at its first use; a context manager that closes them.

    Args:
        root: the checkpoint's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(
        self,
        tensor: TensorLayout,
        chunk: Chunk,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> Tensor:
        """Return a box of a chunk on the CPU; it may alias the file, so copy it before this object is closed.

        Raises:
            CheckpointError: the file holds another tensor under the chunk's key, or is not a safetensors file.
        """
        path = self._root / chunk.file
        carrier = CARRIERS.get(tensor.dtype)
        stored_shape = list(chunk.sizes)
        # Such a dtype is stored flat, in another one.
        if carrier is not None:
            stored_bytes = math.prod(chunk.sizes) * tensor.dtype.itemsize
            stored_shape = [stored_bytes // carrier.itemsize]
        box = tuple(
            slice(start, start + length)
            for start, length in zip(starts, lengths, strict=True)
        )
        try:
            # A slice is read from the file without the rest of the tensor.
            view = self._file(chunk.file).get_slice(chunk.key)
            dtype, shape = view.get_dtype(), view.get_shape()
            if dtype != TENSOR_DTYPES[carrier or tensor.dtype] or shape != stored_shape:
                raise CheckpointError(
                    path, chunk.key, f"it is {dtype} {shape}, not what the layout says"
                )
            if carrier is None:
                return torch.as_tensor(view[box])
            # It is stored flat in another dtype, of which a box is no slice.
            values = torch.as_tensor(view[:]).view(tensor.dtype)
            return values.reshape(chunk.sizes)[box]
        except CheckpointError:
            raise
        except Exception as error:
            # A damaged header can cause any error.
            raise CheckpointError(
                path, chunk.key, f"it cannot be read: {error}"
            ) from error

    def _file(self, name: str) -> Any:
        """The opened file of this name."""
        if name not in self._open:
            file = safe_open(str(self._root / name), framework="pt", device="cpu")
            self._open[name] = self._stack.enter_context(file)
        return self._open[name]


@final
class Assembled(Mapping[str, Tensor]):
    """Whole tensors by name; each access assembles a new tensor from its chunks.

    Args:
        files: the files of the chunks.
        tensors: the layouts of one part.
        device: the device of the tensors.
    """

    def __init__(
        self,
        files: ShardFiles,
        tensors: Mapping[str, TensorLayout],
        device: torch.device | str = "cpu",
    ) -> None:
        self._files = files
        self._tensors = tensors
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        layout = self._tensors[name]
        # Not zeroed: `read_layout` has checked that the chunks cover every element.
        tensor = torch.empty(layout.shape, dtype=layout.dtype, device=self._device)
        for chunk in layout.chunks:
            # Views into the whole tensor: a chunk is copied to its place without a second tensor of that size.
            target = tensor
            for dim, offset in enumerate(chunk.offsets):
                target = target.narrow(dim, offset, chunk.sizes[dim])
            start = (0,) * len(chunk.sizes)
            target.copy_(self._files.read(layout, chunk, start, chunk.sizes))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def tensors_in(file: Path) -> dict[str, TensorLayout]:
    """Return the layout of the tensors of a safetensors file, each as one chunk.

    Raises:
        CheckpointError: the file is not a whole safetensors file, or holds a dtype that torch lacks.
    """
    layout: dict[str, TensorLayout] = {}
    keys: dict[int, str] = {}
    for name, tensor in read_header(file).items():
        # A tied weight is stored only under its first name.
        key = keys.setdefault(id(tensor), name)
        shape = tuple(tensor.shape)
        # A tensor without elements has no chunks, as in a layout that is written.
        chunks: tuple[Chunk, ...] = ()
        if tensor.numel():
            start = (0,) * tensor.ndim
            chunks = (Chunk(start, shape, file.name, key),)
        layout[name] = TensorLayout(tensor.dtype, shape, chunks)
    return layout


def layouts_of(
    path: Path,
    manifest: Manifest,
    parts: Iterable[str],
) -> Layout:
    """Return the layout of a checkpoint's tensors by part and name, also of one that a single process wrote.

    Raises:
        CheckpointError: as from `read_layout` or `tensors_in`.
    """
    if is_sharded(manifest):
        return read_layout(path, manifest)
    layout: Layout = {}
    for part_name in parts:
        layout[part_name] = {}
        for name in files_of_part(manifest, part_name):
            layout[part_name].update(tensors_in(path / name))
    return layout
