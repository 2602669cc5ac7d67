"""The chunks of a sharded checkpoint: what each rank holds, and which rank writes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.commit import dump_document, encode_info, name_parts
from trainer_kit.checkpoint.encoding import Tree, encode
from trainer_kit.checkpoint.files import CARRIERS, dtype_name, flatten
from trainer_kit.checkpoint.layout import (
    Chunk,
    Layout,
    TensorLayout,
    check_cover,
    named_dtype,
)
from trainer_kit.checkpoint.manifest import SHARD
from trainer_kit.checkpoint.trees import merge
from trainer_kit.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["LocalState", "WritePlan", "file_names"]

_SOURCE = "the state to save"
_TensorName = tuple[str, str]
"""The part of a tensor, and its name in this part."""
_Tensors = dict[str, Tensor]
_Entries = list[Any]
"""What a rank sends of its tensors or boxes: JSON."""


def file_names(
    parts: Iterable[str],
    rank: int,
    size: int,
) -> dict[str, str]:
    """The names of a rank's files, by part."""
    suffix = f"-{rank + 1:05d}-of-{size:05d}{SHARD}"
    names = name_parts({part_name: (part_name,) for part_name in parts}, suffix)
    return {part_name: str(name) for part_name, name in names.items()}


def _chunk_keys(chunks: Iterable[tuple[str, str]]) -> list[str]:
    """The key of each chunk in its file: its tensor's name, numbered if a rank holds several of its chunks.

    Args:
        chunks: file and name of the tensor of each chunk.
    """
    keys = []
    used: set[tuple[str, str]] = set()
    for file, name in chunks:
        key = name
        count = 1
        while (file, key) in used:
            count += 1
            key = f"{name}#{count}"
        used.add((file, key))
        keys.append(key)
    return keys


@final
class LocalState:
    """The state of one rank, encoded, with a plan of its chunks; tensors are not read yet.

    Attributes:
        trees: the encoded parts.
        info: encoded; only on the first rank.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        info: Mapping[str, object] | None,
        *,
        first: bool,
    ) -> None:
        self.trees: dict[str, Tree] = {}
        self.info = None
        if first:
            self.info = encode_info(info)
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[str, _TensorName] = {}
        self._entries: dict[str, _Entries] = {}
        for part_name, value in state.items():
            if not isinstance(part_name, str):
                raise CheckpointError(
                    _SOURCE,
                    repr(part_name),
                    "the parts of a checkpoint are named by strings",
                )
            self._encode(part_name, value)
        # torch knows which part of a distributed tensor this rank holds, for every layout.
        self._planner = _save_planner(self._tensors, first)
        # A rank may hold no elements of a tensor; its empty item would lie outside of the tensor.
        self._items = []
        self._boxes: _Entries = []
        for item in self._planner.create_local_plan().items:
            offsets, sizes = _box(item)
            if math.prod(sizes):
                self._items.append(item)
                self._boxes.append([*self._names[item.index.fqn], offsets, sizes])

    def _encode(self, part_name: str, value: object) -> None:
        """Encode a part and number its tensors, as torch's planner takes one flat dict."""
        tensors: _Tensors = {}
        self.trees[part_name] = encode(value, tensors, at=part_name, sharded=True)
        entries: _Entries = []
        for name, tensor in tensors.items():
            _refuse_partial(f"{part_name}.{name}", tensor)
            # A number: parts may have equal names, with any characters.
            key = str(len(self._tensors))
            self._tensors[key] = tensor
            self._names[key] = (part_name, name)
            shape = list(tensor.shape)
            entries.append([part_name, name, shape, dtype_name(tensor.dtype)])
        self._entries[part_name] = entries

    @cached_property
    def digests(self) -> dict[str, str]:
        """A number for the tree and the tensors of each part."""
        digests = {}
        for part_name, tree in self.trees.items():
            text = json.dumps([tree, self._entries[part_name]])
            digest = hashlib.blake2b(text.encode(), digest_size=16)
            digests[part_name] = digest.hexdigest()
        return digests

    def describe(self, first_digests: Mapping[str, str]) -> object:
        """Return the trees; part, name, shape and dtype of each tensor; part, name and box of each chunk.

        Args:
            first_digests: of the first rank. Where this rank has the same, trees and tensors are left out: the first
                rank has them, and would get as many copies as there are ranks.
        """
        trees = {}
        tensors: _Entries = []
        for part_name, digest in self.digests.items():
            if digest != first_digests.get(part_name):
                trees[part_name] = self.trees[part_name]
                tensors += self._entries[part_name]
        return trees, tensors, self._boxes

    def read_chunks(
        self,
        indices: list[int],
        file_names: Mapping[str, str],
        buffers: HostBuffers | None,
    ) -> dict[str, _Tensors]:
        """Return the chunks that this rank writes, by file and key.

        Args:
            indices: of the items that it writes.
            file_names: by part.
            buffers: for copies; None: do not copy.
        """
        # In the order of `indices`, in which the first rank has numbered the keys for the layout.
        items = [self._items[index] for index in indices]
        names = [self._names[item.index.fqn] for item in items]
        files = [file_names[part_name] for part_name, _ in names]
        keys = _chunk_keys((file_names[part_name], name) for part_name, name in names)
        shards: dict[str, _Tensors] = {}
        for item, (part_name, name), file, key in zip(
            items, names, files, keys, strict=True
        ):
            chunk = _plain_tensor(
                f"{part_name}.{name}", self._planner.resolve_data(item)
            )
            if buffers is not None:
                chunk = buffers.copy(f"{file}/{key}", chunk)
            shards.setdefault(file, {})[key] = chunk
        # Copies from an accelerator run until here.
        if buffers is not None:
            buffers.end()
        return shards


def _save_planner(tensors: _Tensors, first: bool) -> DefaultSavePlanner:
    # torch's planner takes half a second to import.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )
    planner.set_up_planner(tensors, is_coordinator=first)
    return planner


def _box(item: WriteItem) -> tuple[list[int], list[int]]:
    """Offsets and sizes of a chunk."""
    # All other values are in the trees, so the planner got tensors only.
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return list(chunk.offsets), list(chunk.sizes)


def _refuse_partial(key: str, tensor: Tensor) -> None:
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise CheckpointError(
            _SOURCE,
            key,
            "its ranks hold terms of a sum (Partial), not parts",
            fix="redistribute() it before saving",
        )


def _plain_tensor(key: str, chunk: Any) -> Tensor:
    """Return a chunk as a plain tensor that safetensors can hold, without a copy if possible."""
    # The result of a collective that may still run; other tensors have no such method.
    wait = getattr(chunk, "wait", None)
    if wait is not None:
        chunk = wait()
    tensor = chunk.detach()
    if type(tensor) is not Tensor:
        raise CheckpointError(
            _SOURCE, key, f"chunks of type {type(tensor).__name__} cannot be saved"
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in CARRIERS:
        tensor = flatten(tensor).view(CARRIERS[tensor.dtype])
    return tensor


@final
@dataclass(frozen=True)
class _Box:
    """A box of a tensor that a rank holds."""

    part_name: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@final
class WritePlan:
    """The merged state of all ranks, and the chunks that each rank writes; made on the first rank.

    Attributes:
        document: the bytes of ``state.json``.
        layout: by part and name.
        written: for each rank the indices of the items that it writes.
        parts: the parts that have tensors.
    """

    def __init__(self, descriptions: list[Any]) -> None:
        trees: list[Tree] = []
        tensors_by_rank: list[_Entries] = []
        boxes_by_rank: list[list[_Box]] = []
        for rank_trees, rank_tensors, rank_boxes in descriptions:
            trees.append(rank_trees)
            tensors_by_rank.append(rank_tensors)
            boxes_by_rank.append(_parse_boxes(rank_boxes))
        # The first rank's value wins; keys that only later ranks have (stages of a pipeline) are added.
        merged = reduce(merge, trees)
        tensors = _agreed_tensors(tensors_by_rank)
        self.document = dump_document(merged)
        self.parts = list(dict.fromkeys(part_name for part_name, _ in tensors))
        self.written = _assign_boxes(boxes_by_rank, tensors)
        chunks = self._written_chunks(boxes_by_rank)
        self.layout: Layout = {part_name: {} for part_name in merged}
        for (part_name, name), (shape, dtype) in tensors.items():
            tensor_chunks = tuple(chunks[part_name, name])
            tensor = TensorLayout(dtype, shape, tensor_chunks)
            # Before anything is written: a layout that torch describes wrongly would lose elements.
            check_cover(_SOURCE, f"{part_name}.{name}", tensor)
            self.layout[part_name][name] = tensor

    def _written_chunks(
        self,
        boxes_by_rank: list[list[_Box]],
    ) -> Mapping[_TensorName, list[Chunk]]:
        """The chunks of each tensor in the files of all ranks."""
        chunks: dict[_TensorName, list[Chunk]] = defaultdict(list)
        rank_count = len(boxes_by_rank)
        for rank, boxes in enumerate(boxes_by_rank):
            files = file_names(self.parts, rank, rank_count)
            written = [boxes[index] for index in self.written[rank]]
            # Every rank numbers its chunks in this order too, see `LocalState.read_chunks`.
            keys = _chunk_keys((files[box.part_name], box.name) for box in written)
            for box, key in zip(written, keys, strict=True):
                file = files[box.part_name]
                chunk = Chunk(box.offsets, box.sizes, file, key)
                tensor_chunks = chunks[box.part_name, box.name]
                tensor_chunks.append(chunk)
        return chunks


def _parse_boxes(entries: _Entries) -> list[_Box]:
    return [
        _Box(part_name, name, tuple(offsets), tuple(sizes))
        for part_name, name, offsets, sizes in entries
    ]


def _agreed_tensors(
    descriptions: list[_Entries],
) -> dict[_TensorName, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor; raises if they differ between ranks."""
    # Shapes are of whole tensors, so all ranks that have a tensor must agree on it.
    tensors: dict[_TensorName, tuple[list[int], str]] = {}
    for rank_tensors in descriptions:
        for part_name, name, shape, dtype in rank_tensors:
            first_shape, first_dtype = tensors.setdefault(
                (part_name, name), (shape, dtype)
            )
            if (first_shape, first_dtype) != (shape, dtype):
                reason = f"{dtype} {shape} on one rank, {first_dtype} {first_shape} on another"
                raise CheckpointError(_SOURCE, f"{part_name}.{name}", reason)
    return {
        name: (tuple(shape), named_dtype(dtype))
        for name, (shape, dtype) in tensors.items()
    }


def _assign_boxes(
    boxes: list[list[_Box]],
    tensors: Mapping[_TensorName, tuple[tuple[int, ...], torch.dtype]],
) -> list[list[int]]:
    """Return for each rank the indices of the boxes that it writes; of shared boxes the rank with the least load."""
    holders = _find_holders(boxes)
    box_bytes = {}
    for box in holders:
        _, dtype = tensors[box.part_name, box.name]
        box_bytes[box] = math.prod(box.sizes) * dtype.itemsize
    loads = [0] * len(boxes)
    assigned = [set[int]() for _ in boxes]
    # Boxes of one rank come first: shared ones then even out the load, the largest first.
    ordered = sorted(holders, key=lambda box: box_bytes[box], reverse=True)
    ordered.sort(key=lambda box: len(holders[box]) > 1)
    for box in ordered:
        # With equal loads the first rank writes, so that equal states give equal files.
        rank, index = min(holders[box], key=lambda holder: (loads[holder[0]], holder))
        loads[rank] += box_bytes[box]
        assigned[rank].add(index)
    # In the order of the rank's items: both sides number the chunks of a tensor in it.
    return [sorted(indices) for indices in assigned]


def _find_holders(boxes: list[list[_Box]]) -> dict[_Box, list[tuple[int, int]]]:
    """By box the ranks that hold it, each with the index of the box on this rank."""
    holders: dict[_Box, list[tuple[int, int]]] = {}
    for rank, rank_boxes in enumerate(boxes):
        for index, box in enumerate(rank_boxes):
            holders.setdefault(box, []).append((rank, index))
    return holders
