"""Loading a checkpoint into a state of any other layout: other ranks, other meshes, or no process group at all."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.codec import decode
from trainer_kit.checkpoint.collective import Collective
from trainer_kit.checkpoint.layout import (
    Assembled,
    Chunk,
    ShardFiles,
    TensorLayout,
    check_cover,
    named_dtype,
    read_layout,
    tensors_in,
)
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    check_content,
    check_files,
    check_sizes,
    files_of,
    is_sharded,
    read_manifest,
    shards_of,
)
from trainer_kit.checkpoint.read import check_parts, descriptions, read_trees
from trainer_kit.checkpoint.remote import fetched
from trainer_kit.checkpoint.trees import children, tensor_record
from trainer_kit.core.errors import CheckpointError, did_you_mean
from trainer_kit.core.location import is_url, locate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["read_divided", "read_sharded"]

_ELSEWHERE: Final = object()
"""In place of what is not read."""


def read_sharded(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: ProcessGroup | None = None,
    verify: bool = True,
) -> str | None:
    """Load a checkpoint into ``state``, in place; each rank reads only what it holds.

    Whatever wrote the checkpoint, also `trainer_kit.checkpoint.commit.write_checkpoint`: any layout loads into any
    other. Tensors of ``state`` are filled where they are, in their own dtype; every other value is replaced by the
    stored one, dicts key by key and lists with tensors item by item. What ``state`` lacks is not read, and None takes
    whatever is stored there, with whole tensors.

    Args:
        path: a checkpoint directory, or its URL, the same on all ranks.
        state: parts by name, such as what ``get_state_dict`` returns before ``set_state_dict`` is called with it; its
            tensors may be ``DTensor``.
        group: every rank of it calls this; it must take CPU tensors (gloo). None: the default group, or this process
            alone where there is none.
        verify: compare the checksums of the files that are read, each on one rank, before anything is loaded.

    Returns:
        ``"resharding 8 → 6"`` when another number of ranks wrote it, else None.

    Raises:
        CheckpointError: on every rank, for a missing, damaged or foreign file, or a value of ``state`` that is not
            stored or has another shape; file or key, and rank, are named. ``state`` is then not to be used.
        RankError: on every rank, when one of them fails in any other way.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.sharded import write_sharded
        >>> state = {"model": {"w": torch.zeros(2)}, "progress": {"step": 0}}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_sharded(f"{directory}/step-3", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     read_sharded(path, state)
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'progress': {'step': 3}}
    """
    ranks = Collective(group)
    with ExitStack() as stack:
        source = ranks.each(lambda: _open(path, list(state), stack))
        _fill_together(path, source, state, ranks, verify)
        return None if source.number == ranks.size else f"resharding {source.number} → {ranks.size}"


def read_divided(
    path: str | os.PathLike[str],
    like: Mapping[str, Any],
    *,
    parts: Iterable[str] | None = None,
    elsewhere: Mapping[str, Collection[str]] | None = None,
    group: ProcessGroup | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """The state that was written, by part, with what belongs to a divided tensor divided as that is.

    Whatever wrote the checkpoint; a rank reads what it holds. A tensor belongs to a name in ``like`` when that is one
    of the keys on the way to it, and it has the same shape: weights, their averages, and what optimizers keep of them.
    Every other tensor is whole.

    Args:
        path: a checkpoint directory, or its URL, the same on all ranks.
        like: by name; those that are ``DTensor`` count.
        parts: which parts to read; None for all.
        elsewhere: by part, keys under which nothing is read, for only other ranks need it: a tensor there is on the
            meta device, anything else None.
        group: as for `read_sharded`.
        verify: likewise.

    Raises:
        CheckpointError: on every rank, for a missing, damaged or foreign file.
        RankError: on every rank, when one of them fails in any other way.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.sharded import write_sharded
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_sharded(f"{directory}/step-3", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     read_divided(path, {"w": torch.zeros(2)}, parts=["model"])
        {'model': {'w': tensor([1., 1.])}}
    """
    ranks = Collective(group)
    divided = {name: tensor for name, tensor in like.items() if hasattr(tensor, "placements")}
    with ExitStack() as stack:
        source = ranks.each(lambda: _open(path, parts, stack))
        absent = elsewhere or {}
        state = ranks.each(
            lambda: {part: source.template(part, divided, absent.get(part, ())) for part in source.parts}
        )
        _fill_together(path, source, state, ranks, verify)
        return state


def _fill_together(
    path: str | os.PathLike[str], source: _Source, state: MutableMapping[str, Any], ranks: Collective, verify: bool
) -> None:
    if verify:
        # From a URL each rank has fetched files of its own.
        share = (0, 1) if is_url(path) else (ranks.rank, ranks.size)
        ranks.each(lambda: _verify(source, *share))
    with ShardFiles(source.root) as files:
        target = ranks.each(lambda: _Target(source, files, state))
        ranks.reduce(target.strided, _check_boxes)
        ranks.each(target.load)


@final
class _Source:
    """A checkpoint as it is on disk: manifest, trees, and layout by part and name."""

    def __init__(self, root: Path, manifest: dict[str, Any], parts: list[str]) -> None:
        self.root, self.manifest, self.parts = root, manifest, parts
        self.number = manifest.get("shards", 1)
        check_content(root, manifest, descriptions(manifest))
        self.trees = read_trees(root, parts)
        self.layout: dict[str, dict[str, TensorLayout]] = {part: {} for part in parts}
        if is_sharded(manifest):
            self.layout = read_layout(root, manifest)
        else:
            for part in parts:
                for file in shards_of(manifest, part):
                    self.layout[part] |= tensors_in(root / file)

    def template(self, part: str, like: Mapping[str, Any], elsewhere: Collection[str]) -> Any:
        """What of a part is to be filled: memory for tensors that are divided; None takes whatever is stored."""
        whole = {**dict.fromkeys(elsewhere, _ELSEWHERE), **like}
        return self._template(self.trees[part], self.layout[part], whole, (part,), None)

    def _template(
        self, tree: Any, layout: Mapping[str, TensorLayout], like: Mapping[str, Any], at: tuple[str, ...], own: Any
    ) -> Any:
        if own is _ELSEWHERE:
            return own
        document = self.root / DOCUMENT
        record = tensor_record(tree)
        if record is not None:
            stored = None if own is None else layout.get(str(record.get("v")))
            if stored is not None and "dtype" in record:
                stored = _carried(record, stored, document, ".".join(at))
            if stored is None or stored.shape != tuple(own.shape):
                return None
            return torch.empty_like(own, dtype=stored.dtype, requires_grad=False)
        inside = children(tree, at=".".join(at), file=document)
        if inside is None:
            return None
        pairs = enumerate(inside) if isinstance(inside, list) else inside.items()
        made = {
            key: self._template(value, layout, like, (*at, str(key)), like.get(key, own) if type(key) is str else own)
            for key, value in pairs
        }
        if all(value is None for value in made.values()):
            return None
        return list(made.values()) if isinstance(inside, list) else made


def _open(path: str | os.PathLike[str], parts: Iterable[str] | None, stack: ExitStack) -> _Source:
    manifest = read_manifest(locate(path))
    root = files_of(locate(path), manifest)
    check_files(root, manifest)
    wanted = check_parts(root, manifest, parts)
    names = [*descriptions(manifest), *(name for part in wanted for name in shards_of(manifest, part))]
    check_sizes(root, manifest, names)  # before anything is fetched
    return _Source(stack.enter_context(fetched(root, names)), manifest, wanted)


def _verify(source: _Source, rank: int, size: int) -> None:
    shards = sorted(file for part in source.parts for file in shards_of(source.manifest, part))
    check_content(source.root, source.manifest, shards[rank::size])


@final
class _Target:
    """The state to be filled: other values at once, tensors all together."""

    def __init__(self, source: _Source, files: ShardFiles, state: MutableMapping[str, Any]) -> None:
        self._source, self._files = source, files
        self._tensors: dict[str, Tensor] = {}
        self._layouts: dict[str, TensorLayout] = {}
        self._places: dict[str, str] = {}
        for part in state:
            state[part] = self._fill(state[part], source.trees[part], part, ())

    def strided(self) -> list[Any]:
        """Name, shape and boxes of what is held here of tensors that were split twice along one dimension."""
        found: list[Any] = []
        for name, tensor in self._tensors.items():
            if any(type(placement).__name__ == "_StridedShard" for placement in getattr(tensor, "placements", ())):
                held: Any = tensor
                boxes = [[list(chunk.offsets), list(chunk.sizes)] for chunk in held.__create_chunk_list__()]
                found.append([self._places[name], list(tensor.shape), boxes])
        return found

    def _fill(self, value: Any, tree: Any, part: str, at: tuple[str, ...]) -> Any:
        """``value`` with what ``tree`` holds; tensors are noted for `load`."""
        key, document = ".".join((part, *at)), self._source.root / DOCUMENT
        if value is _ELSEWHERE:
            return self._unread(tree, part, key)
        if isinstance(value, Tensor):
            return self._note(value, tree, part, key)
        inside = children(tree, at=key, file=document)
        if isinstance(value, MutableMapping) and isinstance(inside, Mapping):
            for name in list(value):
                if name not in inside:
                    fix = did_you_mean(str(name), map(str, inside)) if inside else None
                    raise CheckpointError(self._source.root, f"{key}.{name}", "it is not in the checkpoint", fix=fix)
                value[name] = self._fill(value[name], inside[name], part, (*at, str(name)))
            return value
        if isinstance(value, (list, tuple)) and _holds_tensors(value):
            if not isinstance(inside, list) or len(inside) != len(value):
                found = f"{len(inside)} items are" if isinstance(inside, list) else "something else is"
                raise CheckpointError(self._source.root, key, f"{found} stored, the state has {len(value)} items")
            items = [self._fill(v, t, part, (*at, str(i))) for i, (v, t) in enumerate(zip(value, inside, strict=True))]
            if isinstance(value, tuple):
                return tuple(items)
            value[:] = items
            return value
        return decode(tree, Assembled(self._files, self._source.layout[part]), at=key, file=document)

    def load(self) -> None:
        """Fill the tensors: torch's planner says which chunks overlap with what is held here."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner  # half a second
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        stored: dict[str, Any] = {}
        places: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for name, layout in self._layouts.items():
            boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in layout.chunks]
            stored[name] = TensorStorageMetadata(TensorProperties(layout.dtype), torch.Size(layout.shape), boxes)
            places.update({(name, chunk.offsets): chunk for chunk in layout.chunks})
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(self._tensors, Metadata(stored))
        for item in planner.create_local_plan().items:
            name = item.dest_index.fqn
            offset = item.storage_index.offset
            assert offset is not None  # of a tensor
            chunk = places[name, tuple(offset)]
            found = self._files.read(self._layouts[name], chunk, tuple(item.storage_offsets), tuple(item.lengths))
            planner.resolve_tensor(item).detach().copy_(found)

    def _unread(self, tree: Any, part: str, key: str) -> Tensor | None:
        record = tensor_record(tree)
        layout = None if record is None else self._source.layout[part].get(str(record.get("v")))
        if record is None or layout is None:
            return None
        if "dtype" in record:
            layout = _carried(record, layout, self._source.root / DOCUMENT, key)
        return torch.empty(layout.shape, dtype=layout.dtype, device="meta")

    def _note(self, value: Tensor, tree: Any, part: str, key: str) -> Tensor:
        record, root = tensor_record(tree), self._source.root
        layout = None if record is None else self._source.layout[part].get(str(record.get("v")))
        if record is None or layout is None:
            raise CheckpointError(root, key, "the state has a tensor where the checkpoint has none")
        if "dtype" in record:
            layout = _carried(record, layout, root / DOCUMENT, key)
        if layout.shape != tuple(value.shape):
            raise CheckpointError(root, key, f"{list(layout.shape)} is stored, the state has {list(value.shape)}")
        if value.is_meta:
            raise CheckpointError(root, key, "the state's tensor has no memory", fix="call module.to_empty() first")
        name = f"{len(self._tensors)}/{key}"
        self._tensors[name], self._layouts[name] = value, layout
        self._places[name] = f"{part}.{record['v']}"  # where it is stored: the same on all ranks
        return value


def _check_boxes(everyone: list[list[Any]]) -> None:
    """torch takes what a rank holds for a box, also where it is every other row: then the boxes do not fit together."""
    boxes: dict[str, set[Chunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, held in (tensor for own in everyone for tensor in own):
        shapes[name] = tuple(shape)
        chunks = (Chunk(tuple(offsets), tuple(sizes), "", "") for offsets, sizes in held if math.prod(sizes))
        boxes.setdefault(name, set()).update(chunks)
    for name, found in boxes.items():
        check_cover("the state to fill", name, TensorLayout(torch.float32, shapes[name], tuple(found)))


def _carried(record: Mapping[str, Any], stored: TensorLayout, file: Path, key: str) -> TensorLayout:
    """What one process wrote flat and as another dtype."""
    try:
        dtype, shape = named_dtype(record["dtype"]), tuple(int(size) for size in record["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(file, key, f"damaged record of a tensor: {error}") from error
    chunks = tuple(Chunk((0,) * len(shape), shape, chunk.file, chunk.key) for chunk in stored.chunks)
    return TensorLayout(dtype, shape, chunks)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_tensors(item) for item in items)
