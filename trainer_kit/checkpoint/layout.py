"""``layout.json``: of which chunks each tensor of a sharded checkpoint consists, and in which file each one is."""

from __future__ import annotations

import json
import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import safe_open
from torch import Tensor

from trainer_kit.checkpoint.files import CARRIERS, TENSOR_DTYPES, read_file, read_header
from trainer_kit.checkpoint.manifest import DOCUMENT_MOST, LAYOUT, load_json
from trainer_kit.core.display import in_units
from trainer_kit.core.errors import CheckpointError

__all__ = [
    "Assembled",
    "Chunk",
    "ShardFiles",
    "TensorLayout",
    "check_cover",
    "dtype_name",
    "dump_layout",
    "named_dtype",
    "read_layout",
    "tensors_in",
]

_DTYPES: Final[dict[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype for dtype in (*TENSOR_DTYPES, *CARRIERS)
}


def dtype_name(dtype: torch.dtype) -> str:
    """What a layout calls it, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The dtype that a layout calls so; KeyError when none that can be saved is."""
    return _DTYPES[name]


@final
@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, as one rank wrote it.

    Attributes:
        offsets: where it begins in the whole tensor, by dimension.
        sizes: how many elements it has in each.
        file: the shard that holds it.
        key: its name there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@final
@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor: chunks that cover it exactly. One without elements has none.

    Attributes:
        dtype: of its elements.
        shape: of the whole.
        chunks: in any order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def dump_layout(layout: Mapping[str, Mapping[str, TensorLayout]]) -> bytes:
    """The bytes of ``layout.json``: by part and name dtype, shape and chunks.

    Raises:
        CheckpointError: they are more than can be read.
    """
    content = {
        part: {
            name: {
                "dtype": dtype_name(tensor.dtype),
                "shape": tensor.shape,
                "chunks": [
                    {"offsets": c.offsets, "sizes": c.sizes, "file": c.file, "key": c.key} for c in tensor.chunks
                ],
            }
            for name, tensor in tensors.items()
        }
        for part, tensors in layout.items()
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > DOCUMENT_MOST:
        reason = f"a layout of {in_units(len(text))}, where at most {in_units(DOCUMENT_MOST)} can be saved"
        raise CheckpointError("the state to save", None, reason, fix="save from fewer ranks")
    return text


def read_layout(path: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, TensorLayout]]:
    """The layout of the checkpoint at ``path``, by part and name, checked before anything is allocated for it.

    Raises:
        CheckpointError: chunks reach over a tensor's bounds, overlap or leave gaps, or need more bytes than their
            files have; a file is not one of its part's; or it is damaged.
    """
    file = path / LAYOUT
    try:
        content = load_json(file, read_file(file, DOCUMENT_MOST))
    except OSError as error:
        raise CheckpointError(file, None, f"the file cannot be read: {error}") from error
    parts = manifest["parts"]
    if not isinstance(content, dict) or set(content) != set(parts):
        raise CheckpointError(file, None, "it does not describe the parts that the manifest names")
    layout: dict[str, dict[str, TensorLayout]] = {}
    needed: Counter[str] = Counter()
    for part, tensors in content.items():
        if not isinstance(tensors, dict):
            raise CheckpointError(file, part, "the tensors of a part are not a dict")
        layout[part] = {name: _tensor(file, f"{part}.{name}", entry) for name, entry in tensors.items()}
        for name, tensor in layout[part].items():
            check_cover(file, f"{part}.{name}", tensor)
            for chunk in tensor.chunks:
                if chunk.file not in parts[part]:
                    raise CheckpointError(file, f"{part}.{name}", f"its file {chunk.file!r} is not listed")
                needed[chunk.file] += math.prod(chunk.sizes) * tensor.dtype.itemsize
    for name, size in needed.items():
        if size > manifest["files"][name]["size"]:
            raise CheckpointError(file, None, f"chunks of {size} bytes in {name}, which is smaller")
    return layout


def _tensor(file: Path, key: str, entry: Any) -> TensorLayout:
    try:
        dtype, chunks = named_dtype(entry["dtype"]), entry["chunks"]
        shape = _numbers(entry["shape"])
        found = tuple(
            Chunk(_numbers(c["offsets"]), _numbers(c["sizes"]), str(c["file"]), str(c["key"])) for c in chunks
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(file, key, f"damaged layout: {type(error).__name__}: {error}") from error
    return TensorLayout(dtype, shape, found)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise ValueError(f"{value!r} is not a list of sizes")
    return tuple(value)


def check_cover(file: object, key: str, tensor: TensorLayout) -> None:
    """Every element of the tensor is in exactly one chunk.

    Raises:
        CheckpointError: naming ``key``; chunks reach over the bounds, overlap, or leave something out.
    """
    shape, chunks = tensor.shape, tensor.chunks
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            0 < size <= whole - offset for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside:
            found = f"chunk at {list(chunk.offsets)} of {list(chunk.sizes)} is not inside {list(shape)}"
            raise CheckpointError(file, key, found)
    filled = sum(math.prod(chunk.sizes) for chunk in chunks)
    if filled != math.prod(shape):
        raise CheckpointError(file, key, f"chunks of {filled} elements for a tensor of {math.prod(shape)}")
    if len(chunks) < 2 or not shape:  # as many elements as there are: two scalars are too many already
        return
    starts = [len({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(shape))]
    axis = starts.index(max(starts))
    open_ones: list[tuple[int, int]] = []  # where they end on the axis, and which
    for index in sorted(range(len(chunks)), key=lambda index: chunks[index].offsets[axis]):
        one = chunks[index]
        del open_ones[: bisect_right(open_ones, (one.offsets[axis], len(chunks)))]
        for _, other in open_ones:
            if _overlap(one, chunks[other]):
                at = f"{list(one.offsets)} and {list(chunks[other].offsets)}"
                raise CheckpointError(file, key, f"the chunks at {at} overlap")
        insort(open_ones, (one.offsets[axis] + one.sizes[axis], index))


def _overlap(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides)


@final
class ShardFiles:
    """The shards of a checkpoint, opened when they are needed; a context manager that closes them.

    Args:
        root: the checkpoint's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._stack = root, ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, tensor: TensorLayout, chunk: Chunk, starts: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
        """A box of a chunk, on the CPU; it may alias the file, so it is copied before this is closed.

        Raises:
            CheckpointError: the file holds something else under the chunk's key, or is not a safetensors file.
        """
        path = self._root / chunk.file
        carrier = CARRIERS.get(tensor.dtype)
        stored = list(chunk.sizes)
        if carrier is not None:
            stored = [math.prod(chunk.sizes) * tensor.dtype.itemsize // carrier.itemsize]
        try:
            if chunk.file not in self._open:
                file = safe_open(str(path), framework="pt", device="cpu")
                self._open[chunk.file] = self._stack.enter_context(file)
            view = self._open[chunk.file].get_slice(chunk.key)
            found = view.get_dtype(), view.get_shape()
            if found != (TENSOR_DTYPES[carrier or tensor.dtype], stored):
                raise CheckpointError(path, chunk.key, f"it is {found[0]} {found[1]}, not what the layout says")
            box = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
            if carrier is None:
                return torch.as_tensor(view[box])
            return torch.as_tensor(view[:]).view(tensor.dtype).reshape(chunk.sizes)[box]
        except CheckpointError:
            raise
        except Exception as error:  # the header is data: it is refused in many ways
            raise CheckpointError(path, chunk.key, f"it cannot be read: {error}") from error


@final
class Assembled(Mapping[str, Tensor]):
    """Whole tensors by name, each put together from its chunks when it is asked for.

    Args:
        files: where the chunks are.
        tensors: of one part.
        device: where the tensors go, each with memory of its own.
    """

    def __init__(
        self, files: ShardFiles, tensors: Mapping[str, TensorLayout], device: torch.device | str = "cpu"
    ) -> None:
        self._files, self._tensors, self._device = files, tensors, device

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for chunk in tensor.chunks:
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(self._files.read(tensor, chunk, (0,) * len(chunk.sizes), chunk.sizes))
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def tensors_in(file: Path) -> dict[str, TensorLayout]:
    """The tensors of a safetensors file, each as one chunk: how a checkpoint that was not sharded looks.

    Raises:
        CheckpointError: it is no whole safetensors file, or holds a dtype that torch lacks.
    """
    layout, keys = {}, dict[int, str]()
    for name, tensor in read_header(file).items():
        key = keys.setdefault(id(tensor), name)  # a tied weight is stored under one of its names
        chunk = Chunk((0,) * tensor.ndim, tuple(tensor.shape), file.name, key)
        layout[name] = TensorLayout(tensor.dtype, tuple(tensor.shape), (chunk,) if tensor.numel() else ())
    return layout
