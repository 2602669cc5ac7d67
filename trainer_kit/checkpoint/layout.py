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
    DOCUMENT_MOST,
    LAYOUT,
    is_sharded,
    read_json,
    shards_of,
)
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError

__all__ = [
    "Assembled",
    "Chunk",
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
        chunks = (
            Chunk((0,) * len(shape), shape, chunk.file, chunk.key)
            for chunk in self.chunks
        )
        return TensorLayout(dtype, shape, tuple(chunks))


def dump_layout(layout: Mapping[str, Mapping[str, TensorLayout]]) -> bytes:
    """Return the bytes of ``layout.json``: dtype, shape and chunks by part and name.

    Raises:
        CheckpointError: the bytes are more than `read_layout` accepts.
    """
    content = {
        part: {
            name: {
                "dtype": dtype_name(tensor.dtype),
                "shape": tensor.shape,
                "chunks": [vars(chunk) for chunk in tensor.chunks],
            }
            for name, tensor in tensors.items()
        }
        for part, tensors in layout.items()
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > DOCUMENT_MOST:
        reason = f"a layout of {in_units(len(text))}, where at most {in_units(DOCUMENT_MOST)} can be saved"
        raise CheckpointError(
            "the state to save", None, reason, fix="save from fewer ranks"
        )
    return text


def read_layout(
    path: Path, manifest: Mapping[str, Any]
) -> dict[str, dict[str, TensorLayout]]:
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
    layout: dict[str, dict[str, TensorLayout]] = {}
    needed: Counter[str] = Counter()
    for part, tensors in content.items():
        if not isinstance(tensors, dict):
            raise CheckpointError(file, part, "the tensors of a part are not a dict")
        layout[part] = {
            name: _tensor(file, f"{part}.{name}", entry)
            for name, entry in tensors.items()
        }
        for name, tensor in layout[part].items():
            check_cover(file, f"{part}.{name}", tensor)
            for chunk in tensor.chunks:
                if chunk.file not in parts[part]:
                    raise CheckpointError(
                        file, f"{part}.{name}", f"its file {chunk.file!r} is not listed"
                    )
                needed[chunk.file] += math.prod(chunk.sizes) * tensor.dtype.itemsize
    for name, size in needed.items():
        if size > manifest["files"][name]["size"]:
            raise CheckpointError(
                file, None, f"chunks of {size} bytes in {name}, which is smaller"
            )
    return layout


def _tensor(file: Path, key: str, entry: Any) -> TensorLayout:
    try:
        chunks = tuple(
            Chunk(
                _numbers(c["offsets"]),
                _numbers(c["sizes"]),
                str(c["file"]),
                str(c["key"]),
            )
            for c in entry["chunks"]
        )
        return TensorLayout(
            named_dtype(entry["dtype"]), _numbers(entry["shape"]), chunks
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            file, key, f"damaged layout: {type(error).__name__}: {error}"
        ) from error


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in value
    ):
        raise ValueError(f"{value!r} is not a list of sizes")
    return tuple(value)


def check_cover(file: object, key: str, tensor: TensorLayout) -> None:
    """Check that every element of the tensor is in exactly one chunk.

    Raises:
        CheckpointError: naming ``key``; chunks exceed the bounds, overlap, or leave gaps.
    """
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            0 < size <= whole - offset
            for offset, size, whole in zip(
                chunk.offsets, chunk.sizes, shape, strict=True
            )
        )
        if not inside:
            found = f"chunk at {list(chunk.offsets)} of {list(chunk.sizes)} is not inside {list(shape)}"
            raise CheckpointError(file, key, found)
    filled = sum(math.prod(chunk.sizes) for chunk in chunks)
    if filled != math.prod(shape):
        raise CheckpointError(
            file, key, f"chunks of {filled} elements for a tensor of {math.prod(shape)}"
        )
    if (
        len(chunks) < 2 or not shape
    ):  # the sum above already refuses two chunks of a scalar
        return
    # Sweep along the dim with the most different offsets; compare each chunk with those that are still open there.
    starts = [
        len({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(shape))
    ]
    dim = starts.index(max(starts))
    still_open: list[tuple[int, int]] = []  # end on the dim, index of the chunk
    for index in sorted(
        range(len(chunks)), key=lambda index: chunks[index].offsets[dim]
    ):
        one = chunks[index]
        del still_open[: bisect_right(still_open, (one.offsets[dim], len(chunks)))]
        for _, other in still_open:
            if _overlap(one, chunks[other]):
                at = f"{list(one.offsets)} and {list(chunks[other].offsets)}"
                raise CheckpointError(file, key, f"the chunks at {at} overlap")
        insort(still_open, (one.offsets[dim] + one.sizes[dim], index))


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)


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
        stored = list(chunk.sizes)
        if carrier is not None:
            stored = [
                math.prod(chunk.sizes) * tensor.dtype.itemsize // carrier.itemsize
            ]
        try:
            if chunk.file not in self._open:
                file = safe_open(str(path), framework="pt", device="cpu")
                self._open[chunk.file] = self._stack.enter_context(file)
            view = self._open[chunk.file].get_slice(chunk.key)
            found = view.get_dtype(), view.get_shape()
            if found != (TENSOR_DTYPES[carrier or tensor.dtype], stored):
                raise CheckpointError(
                    path,
                    chunk.key,
                    f"it is {found[0]} {found[1]}, not what the layout says",
                )
            box = tuple(
                slice(start, start + length)
                for start, length in zip(starts, lengths, strict=True)
            )
            if carrier is None:
                return torch.as_tensor(view[box])
            return torch.as_tensor(view[:]).view(tensor.dtype).reshape(chunk.sizes)[box]
        except CheckpointError:
            raise
        except Exception as error:  # a damaged header can cause any error
            raise CheckpointError(
                path, chunk.key, f"it cannot be read: {error}"
            ) from error


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
        tensor = self._tensors[name]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for chunk in tensor.chunks:
            target = whole
            for dim, (offset, size) in enumerate(
                zip(chunk.offsets, chunk.sizes, strict=True)
            ):
                target = target.narrow(dim, offset, size)
            target.copy_(
                self._files.read(tensor, chunk, (0,) * len(chunk.sizes), chunk.sizes)
            )
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def tensors_in(file: Path) -> dict[str, TensorLayout]:
    """Return the layout of the tensors of a safetensors file, each as one chunk.

    Raises:
        CheckpointError: the file is not a whole safetensors file, or holds a dtype that torch lacks.
    """
    layout, keys = {}, dict[int, str]()
    for name, tensor in read_header(file).items():
        key = keys.setdefault(
            id(tensor), name
        )  # a tied weight is stored only under its first name
        chunk = Chunk((0,) * tensor.ndim, tuple(tensor.shape), file.name, key)
        layout[name] = TensorLayout(
            tensor.dtype, tuple(tensor.shape), (chunk,) if tensor.numel() else ()
        )
    return layout


def layouts_of(
    path: Path, manifest: Mapping[str, Any], parts: Iterable[str]
) -> dict[str, dict[str, TensorLayout]]:
    """Return the layout of a checkpoint's tensors by part and name, also of one that a single process wrote.

    Raises:
        CheckpointError: as from `read_layout` or `tensors_in`.
    """
    if is_sharded(manifest):
        return read_layout(path, manifest)
    files = {
        part: [path / name for name in shards_of(manifest, part)] for part in parts
    }
    return {
        part: {key: one for file in own for key, one in tensors_in(file).items()}
        for part, own in files.items()
    }
