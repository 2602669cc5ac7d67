"""Sharded checkpoints: each rank writes the tensors that it holds, and any other layout can load them.

torch's planner for distributed checkpoints finds the part of each tensor that a rank holds. The files are ours: each
rank writes safetensors files into one hidden directory, and the first rank commits it like any other checkpoint.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.collective import Collective
from trainer_kit.checkpoint.commit import (
    check_target,
    dump_document,
    encode_info,
    io_failures,
    name_parts,
    staged_files,
    versions,
    work_directory,
)
from trainer_kit.checkpoint.encoding import (
    children,
    decode,
    encode,
    merge,
    tensor_record,
)
from trainer_kit.checkpoint.files import (
    CARRIERS,
    dtype_name,
    flatten,
    safetensors_bytes,
    write_file,
)
from trainer_kit.checkpoint.layout import (
    Assembled,
    Chunk,
    ShardFiles,
    TensorLayout,
    check_cover,
    dump_layout,
    layouts_of,
    named_dtype,
)
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
    SHARD,
    check_content,
    dump_manifest,
    files_of_part,
    new_manifest,
    next_commit,
)
from trainer_kit.checkpoint.read import description_files, open_checkpoint, read_trees
from trainer_kit.core.atomic_files import sync_directory
from trainer_kit.core.errors import CheckpointError, did_you_mean
from trainer_kit.core.location import Location, absolute, is_url, locate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = [
    "ShardedSnapshot",
    "read_divided",
    "read_sharded",
    "take_sharded_snapshot",
    "write_sharded",
    "write_sharded_snapshot",
]

_SOURCE = "the state to save"


@final
@dataclass(frozen=True)
class ShardedSnapshot:
    """The content that one rank writes. Writing it is only I/O.

    Attributes:
        shards: the chunks of this rank, by file and key.
        document: the bytes of ``state.json``; empty on all ranks but the first.
        layout: the chunks of all ranks, by part and name; only on the first rank.
        info: encoded, for the manifest; only on the first rank.
        number: the number of ranks.
    """

    shards: Mapping[str, Mapping[str, Tensor]]
    document: bytes
    layout: Mapping[str, Mapping[str, TensorLayout]]
    info: Any
    number: int


def write_sharded(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """Write a checkpoint together. It is durable when this function returns; an error leaves no new checkpoint.

    A chunk that several ranks hold (a plain tensor, a replicated axis) is written by one of them; the ranks write
    about the same number of bytes. Other values are taken from the first rank; keys of dicts that only later ranks have
    are added, so the stages of a pipeline make one state.

    Args:
        path: the directory to make, or its URL, the same on all ranks, on storage that all ranks see.
        state: parts by name, as for `trainer_kit.checkpoint.commit.write_checkpoint`; its tensors may be ``DTensor``,
            as in the result of ``torch.distributed.checkpoint.state_dict.get_state_dict``.
        info: small plain data for the manifest, such as ``{"step": 1200}``; only the first rank's is used.
        group: every rank of it calls this; it must take CPU tensors (gloo). None: the default group, or this process
            alone if there is none.
        overwrite: replace an existing checkpoint. The old one stays whole until the new one is durable.
        staged: from `trainer_kit.checkpoint.commit.stage`, the same on all ranks.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: on every rank, for a value that cannot be saved, a target that exists, too little space, or
            failed I/O on a rank, which is named.
        RankError: on every rank, if any other error occurs on a rank.

    Example:
        >>> import tempfile, torch
        >>> from trainer_kit.checkpoint.read import read_checkpoint
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_sharded(f"{directory}/step-3", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     sorted(file.name for file in path.iterdir()), read_checkpoint(path, parts=["model"])
        (['layout.json', 'manifest.json', 'model-00001-of-00001.safetensors', 'state.json'],
         {'model': {'w': tensor([1., 1.])}})
    """
    snapshot = take_sharded_snapshot(state, info=info, group=group, copy=None)
    return write_sharded_snapshot(
        path, snapshot, group=group, overwrite=overwrite, staged=staged
    )


def take_sharded_snapshot(
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    copy: HostBuffers | None,
) -> ShardedSnapshot:
    """The first half of `write_sharded`: encode the state, and agree on the chunks that each rank writes.

    Args:
        state: as for `write_sharded`.
        info: as for `write_sharded`.
        group: as for `write_sharded`.
        copy: buffers for copies of this rank's chunks, so that training may change the tensors before they are written;
            the previous snapshot must be written already. None: do not copy.

    Raises:
        CheckpointError: on every rank, for a value that cannot be saved, naming rank and key path.
        RankError: on every rank, if any other error occurs on a rank.
    """
    ranks = Collective(group)
    own = ranks.each(lambda: _Local(state, info, first=ranks.rank == 0))
    plans: list[_Plan] = []  # on the first rank

    def plan(descriptions: list[Any]) -> Any:
        plans.append(_Plan(descriptions))
        return plans[0].kept, plans[0].parts

    kept, parts = ranks.reduce(own.describe, plan)
    names = _file_names(parts, ranks.rank, ranks.size)
    mine = kept[ranks.rank]
    shards = ranks.each(lambda: own.resolve(mine, names, copy))
    if not plans:
        return ShardedSnapshot(shards, b"", {}, None, ranks.size)
    return ShardedSnapshot(
        shards, plans[0].document, plans[0].layout, own.info, ranks.size
    )


def write_sharded_snapshot(
    path: str | os.PathLike[str],
    snapshot: ShardedSnapshot,
    *,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """The second half of `write_sharded`: it touches no training state, so any thread may call it.

    Args:
        path: as for `write_sharded`.
        snapshot: of this rank.
        group: of the ranks that took the snapshot, for CPU tensors; no other thread may use it at the same time.
        overwrite: as for `write_sharded`.
        staged: as for `write_sharded`.

    Raises:
        CheckpointError: on every rank, for failed I/O; nothing is committed, and the work directory is deleted.
        RankError: likewise, for any other error on a rank.
    """
    ranks = Collective(group)
    target = absolute(path)
    sizes = (
        _bytes(tensor)
        for tensors in snapshot.layout.values()
        for tensor in tensors.values()
    )
    needed = len(snapshot.document) + sum(sizes)
    with ExitStack() as stack:

        def begin(_: list[Any]) -> str:
            place = check_target(path, overwrite)
            return str(
                stack.enter_context(
                    work_directory(place, needed, overwrite=overwrite, staged=staged)
                )
            )

        def commit(written: list[dict[str, Any]]) -> None:
            with io_failures(target, needed):
                _describe(work, snapshot, written, staged, next_commit(target.parent))
            stack.close()  # commits the work directory, or deletes it

        work = locate(ranks.reduce(lambda: None, begin))
        ranks.reduce(lambda: _write_shards(work, target, snapshot.shards), commit)
    return target


def _write_shards(
    work: Location, target: Location, shards: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    files = {}
    for name, tensors in shards.items():
        size, buffers = safetensors_bytes(tensors)
        with io_failures(target / name, size):
            files[name] = write_file(work / name, buffers)
    if shards and isinstance(
        work, Path
    ):  # makes the names of the files visible to other machines
        sync_directory(work)
    return files


def _describe(
    work: Location,
    snapshot: ShardedSnapshot,
    written: list[dict[str, Any]],
    staged: Path | None,
    committed: int,
) -> None:
    shards = {
        name: {**entry, "shard": rank + 1}
        for rank, own in enumerate(written)
        for name, entry in own.items()
    }
    document = write_file(work / DOCUMENT, [snapshot.document])
    layout = write_file(work / LAYOUT, [dump_layout(snapshot.layout)])
    parts = {
        part: sorted(
            {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
        )
        for part, tensors in snapshot.layout.items()
    }
    files = {**shards, DOCUMENT: document, LAYOUT: layout}
    extra = None if staged is None else staged_files(staged, files)
    manifest = new_manifest(
        files, parts, snapshot.info, versions(), committed, snapshot.number, extra
    )
    write_file(work / MANIFEST, [dump_manifest(manifest)])


def _bytes(tensor: TensorLayout) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _file_names(parts: Iterable[str], rank: int, size: int) -> dict[str, str]:
    found = name_parts(
        {part: (part,) for part in parts}, f"-{rank + 1:05d}-of-{size:05d}{SHARD}"
    )
    return {part: str(name) for part, name in found.items()}


def _keys(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the key of each chunk in its file: its tensor's name, numbered if a rank holds several of its chunks."""
    taken = set()
    for file, name in items:
        key, count = name, 1
        while (file, key) in taken:
            count += 1
            key = f"{name}#{count}"
        taken.add((file, key))
        yield key


@final
class _Local:
    """The state of one rank, encoded, with a plan of its chunks; tensors are not read yet."""

    def __init__(
        self, state: Mapping[str, Any], info: Mapping[str, Any] | None, *, first: bool
    ) -> None:
        self.trees: dict[str, Any] = {}
        self.info = encode_info(info) if first else None
        self._places: dict[str, tuple[str, str]] = {}
        flat: dict[str, Tensor] = {}
        for part, value in state.items():
            if not isinstance(part, str):
                raise CheckpointError(
                    _SOURCE,
                    repr(part),
                    "the parts of a checkpoint are named by strings",
                )
            tensors: dict[str, Tensor] = {}
            self.trees[part] = encode(value, tensors, at=part, sharded=True)
            for name, tensor in tensors.items():
                _check_whole(f"{part}.{name}", tensor)
                key = str(len(flat))
                flat[key] = tensor
                self._places[key] = (part, name)
        self._planner = _planner(flat, first)
        # A rank may hold no elements of a tensor; its empty item would lie outside of the tensor.
        self._items = [
            item
            for item in self._planner.create_local_plan().items
            if math.prod(_box(item)[1])
        ]
        self._shapes = {
            key: (list(tensor.shape), dtype_name(tensor.dtype))
            for key, tensor in flat.items()
        }

    def describe(self) -> Any:
        """Return the trees; part, name, shape and dtype of each tensor; part, name and box of each chunk."""
        tensors = [[*self._places[key], *self._shapes[key]] for key in self._shapes]
        return (
            self.trees,
            tensors,
            [[*self._places[item.index.fqn], *_box(item)] for item in self._items],
        )

    def resolve(
        self, kept: list[int], names: Mapping[str, str], buffers: HostBuffers | None
    ) -> dict[str, dict[str, Tensor]]:
        """Return the chunks that this rank writes, by file and key."""
        items = [self._items[index] for index in kept]
        places = [self._places[item.index.fqn] for item in items]
        shards: dict[str, dict[str, Tensor]] = {}
        for item, (part, name), key in zip(
            items, places, _keys((names[p], n) for p, n in places), strict=True
        ):
            chunk = _plain(f"{part}.{name}", self._planner.resolve_data(item))
            copied = (
                chunk
                if buffers is None
                else buffers.copy(f"{names[part]}/{key}", chunk)
            )
            shards.setdefault(names[part], {})[key] = copied
        if buffers is not None:
            buffers.end()
        return shards


def _planner(flat: dict[str, Tensor], first: bool) -> DefaultSavePlanner:
    from torch.distributed.checkpoint.default_planner import (
        DefaultSavePlanner,
    )  # half a second

    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )
    planner.set_up_planner(flat, is_coordinator=first)
    return planner


def _box(item: WriteItem) -> tuple[list[int], list[int]]:
    assert item.tensor_data is not None  # all other values are in the trees
    return list(item.tensor_data.chunk.offsets), list(item.tensor_data.chunk.sizes)


def _check_whole(key: str, tensor: Tensor) -> None:
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise CheckpointError(
            _SOURCE,
            key,
            "its ranks hold terms of a sum (Partial), not parts",
            fix="redistribute() it before saving",
        )


def _plain(key: str, chunk: Any) -> Tensor:
    """Return a chunk as a plain tensor that safetensors can hold, without a copy if possible."""
    wait = getattr(chunk, "wait", None)  # the result of a collective that may still run
    tensor = (chunk if wait is None else wait()).detach()
    if type(tensor) is not Tensor:
        raise CheckpointError(
            _SOURCE, key, f"chunks of type {type(tensor).__name__} cannot be saved"
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in CARRIERS:
        tensor = flatten(tensor).view(CARRIERS[tensor.dtype])
    return tensor


@final
class _Plan:
    """The merged state of all ranks, and the chunks that each rank writes; made on the first rank.

    Attributes:
        document: the bytes of ``state.json``.
        layout: by part and name.
        kept: for each rank the indices of the items that it writes.
        parts: the parts that have tensors.
    """

    def __init__(self, descriptions: list[Any]) -> None:
        trees = reduce(merge, (trees for trees, _, _ in descriptions))
        self.document = dump_document(trees)
        whole: dict[tuple[str, str], tuple[list[int], str]] = {}
        for _, tensors, _ in descriptions:
            for part, name, shape, dtype in tensors:
                known = whole.setdefault((part, name), (shape, dtype))
                if known != (shape, dtype):
                    reason = (
                        f"{dtype} {shape} on one rank, {known[1]} {known[0]} on another"
                    )
                    raise CheckpointError(_SOURCE, f"{part}.{name}", reason)
        self.parts = list(dict.fromkeys(part for part, _ in whole))
        items = [items for _, _, items in descriptions]
        self.kept = _divide(items, whole)
        chunks: dict[tuple[str, str], list[Chunk]] = {place: [] for place in whole}
        for rank, (held, kept) in enumerate(zip(items, self.kept, strict=True)):
            names = _file_names(self.parts, rank, len(descriptions))
            mine = [held[index] for index in kept]
            for (part, name, offsets, sizes), key in zip(
                mine, _keys((names[i[0]], i[1]) for i in mine), strict=True
            ):
                chunks[part, name].append(
                    Chunk(tuple(offsets), tuple(sizes), names[part], key)
                )
        self.layout: dict[str, dict[str, TensorLayout]] = {part: {} for part in trees}
        for (part, name), (shape, dtype) in whole.items():
            tensor = TensorLayout(
                named_dtype(dtype), tuple(shape), tuple(chunks[part, name])
            )
            check_cover(_SOURCE, f"{part}.{name}", tensor)
            self.layout[part][name] = tensor


def _divide(
    items: list[list[Any]], whole: Mapping[tuple[str, str], tuple[list[int], str]]
) -> list[list[int]]:
    """Return for each rank the indices of the items that it writes; of shared items the rank with the least load."""
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for rank, own in enumerate(items):
        for index, (part, name, offsets, sizes) in enumerate(own):
            holders.setdefault((part, name, tuple(offsets), tuple(sizes)), []).append(
                (rank, index)
            )
    size = {
        box: math.prod(box[3]) * named_dtype(whole[box[:2]][1]).itemsize
        for box in holders
    }
    load, kept = [0] * len(items), [set[int]() for _ in items]
    for box, places in sorted(
        holders.items(), key=lambda entry: (len(entry[1]) > 1, -size[entry[0]])
    ):
        rank, index = min(places, key=lambda place: (load[place[0]], place))
        load[rank] += size[box]
        kept[rank].add(index)
    return [sorted(indices) for indices in kept]


_ELSEWHERE: Final = object()
"""Replaces a value that is not read on this rank."""


def read_sharded(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    group: ProcessGroup | None = None,
    verify: bool = True,
) -> str | None:
    """Load a checkpoint into ``state``, in place; each rank reads only the parts that it holds.

    The checkpoint may have any layout, and may also be written by `trainer_kit.checkpoint.commit.write_checkpoint`. The
    tensors of ``state`` are filled in place, in their own dtype; every other value is replaced by the stored one, dicts
    key by key and lists with tensors item by item. Keys that ``state`` lacks are not read. None is replaced by whatever
    is stored, with whole tensors.

    Args:
        path: a checkpoint directory, or its URL, the same on all ranks.
        state: parts by name, such as the result of ``get_state_dict``, which is then passed to ``set_state_dict``; its
            tensors may be ``DTensor``.
        group: every rank of it calls this; it must take CPU tensors (gloo). None: the default group, or this process
            alone if there is none.
        verify: compare the checksums of the files that are read, each file on one rank, before loading.

    Returns:
        ``"resharding 8 → 6"`` if another number of ranks wrote the checkpoint, else None.

    Raises:
        CheckpointError: on every rank, for a missing, damaged or foreign file, or a value of ``state`` that is not
            stored or has another shape; file or key, and rank, are named. ``state`` must not be used afterwards.
        RankError: on every rank, if any other error occurs on a rank.

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
        source = ranks.each(
            lambda: _Source(*stack.enter_context(open_checkpoint(path, list(state))))
        )
        _fill_together(path, source, state, ranks, verify)
        return (
            None
            if source.number == ranks.size
            else f"resharding {source.number} → {ranks.size}"
        )


def read_divided(
    path: str | os.PathLike[str],
    like: Mapping[str, Any],
    *,
    parts: Iterable[str] | None = None,
    elsewhere: Mapping[str, Collection[str]] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state of a checkpoint by part, with tensors divided among ranks as the tensors in ``like`` are.

    The checkpoint may have any layout; each rank reads the parts that it holds. A stored tensor is divided like
    ``like[name]`` if ``name`` is one of the keys of its key path and the shapes are equal: so weights, their averages
    and the optimizer's state of each weight are divided. Every other tensor is whole.

    Args:
        path: a checkpoint directory, or its URL, the same on all ranks.
        like: tensors by name; only ``DTensor`` values have an effect.
        parts: the parts to read; None for all.
        elsewhere: by part, keys that only other ranks need: below them a tensor is returned on the meta device, and any
            other value as None.
        group: as for `read_sharded`.

    Raises:
        CheckpointError: on every rank, for a missing, damaged or foreign file.
        RankError: on every rank, if any other error occurs on a rank.

    Example:
        >>> import tempfile
        >>> from trainer_kit.checkpoint.sharded import write_sharded
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = write_sharded(f"{directory}/step-3", {"model": {"w": torch.ones(2)}, "progress": {"step": 3}})
        ...     read_divided(path, {"w": torch.zeros(2)}, parts=["model"])
        {'model': {'w': tensor([1., 1.])}}
    """
    ranks = Collective(group)
    divided = {
        name: tensor for name, tensor in like.items() if hasattr(tensor, "placements")
    }
    absent = elsewhere or {}
    with ExitStack() as stack:
        source = ranks.each(
            lambda: _Source(*stack.enter_context(open_checkpoint(path, parts)))
        )
        state = ranks.each(
            lambda: {
                p: source.template(p, divided, absent.get(p, ())) for p in source.parts
            }
        )
        _fill_together(path, source, state, ranks, verify=True)
        return state


def _fill_together(
    path: str | os.PathLike[str],
    source: _Source,
    state: MutableMapping[str, Any],
    ranks: Collective,
    verify: bool,
) -> None:
    if verify:
        shards = sorted(
            file
            for part in source.parts
            for file in files_of_part(source.manifest, part)
        )
        # Each rank verifies its share of the files; from a URL each rank has fetched its own copies.
        share = shards if is_url(path) else shards[ranks.rank :: ranks.size]
        ranks.each(lambda: check_content(source.root, source.manifest, share))
    with ShardFiles(source.root) as files:
        target = ranks.each(lambda: _Target(source, files, state))
        ranks.reduce(target.strided, _check_boxes)
        ranks.each(target.load)


@final
class _Source:
    """A checkpoint on disk: manifest, encoded trees, and layouts by part and name."""

    def __init__(self, root: Path, manifest: dict[str, Any], parts: list[str]) -> None:
        self.root = root
        self.manifest = manifest
        self.parts = parts
        self.number = manifest.get("shards", 1)
        self.document = root / DOCUMENT
        check_content(root, manifest, description_files(manifest))
        self.trees = read_trees(root, parts)
        self.layout = layouts_of(root, manifest, parts)

    def stored(self, tree: Any, part: str, key: str) -> TensorLayout | None:
        """Return the layout of the tensor that ``tree`` records; None if it records none."""
        record = tensor_record(tree)
        found = None if record is None else self.layout[part].get(str(record.get("v")))
        if record is None or found is None or "dtype" not in record:
            return found
        try:
            return found.viewed_as(
                named_dtype(record["dtype"]),
                tuple(int(size) for size in record["shape"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                self.document, key, f"damaged record of a tensor: {error}"
            ) from error

    def template(
        self, part: str, like: Mapping[str, Any], elsewhere: Collection[str]
    ) -> Any:
        """Return the state of a part that is to be filled: memory for divided tensors, None for all other values."""
        return self._template(
            self.trees[part],
            {**dict.fromkeys(elsewhere, _ELSEWHERE), **like},
            (part,),
            None,
        )

    def _template(
        self, tree: Any, like: Mapping[str, Any], at: tuple[str, ...], own: Any
    ) -> Any:
        if own is _ELSEWHERE:
            return own
        key = ".".join(at)
        if tensor_record(tree) is not None:
            stored = None if own is None else self.stored(tree, at[0], key)
            if stored is None or stored.shape != tuple(own.shape):
                return None
            return torch.empty_like(own, dtype=stored.dtype, requires_grad=False)
        inside = children(tree, at=key, file=self.document)
        if inside is None:
            return None
        pairs = enumerate(inside) if isinstance(inside, list) else inside.items()
        found = {
            name: self._template(
                value,
                like,
                (*at, str(name)),
                like.get(name, own) if type(name) is str else own,
            )
            for name, value in pairs
        }
        if all(value is None for value in found.values()):
            return None
        return list(found.values()) if isinstance(inside, list) else found


@final
class _Target:
    """The state to be filled: the constructor replaces plain values, `load` fills all tensors."""

    def __init__(
        self, source: _Source, files: ShardFiles, state: MutableMapping[str, Any]
    ) -> None:
        self._source = source
        self._files = files
        self._tensors: dict[str, Tensor] = {}
        self._layouts: dict[str, TensorLayout] = {}
        self._places: dict[str, str] = {}
        for part in state:
            state[part] = self._fill(state[part], source.trees[part], part, ())

    def strided(self) -> list[Any]:
        """Return name, shape and boxes of this rank's tensors that are split twice along one dim."""
        found: list[Any] = []
        for name, tensor in self._tensors.items():
            if any(
                type(placement).__name__ == "_StridedShard"
                for placement in getattr(tensor, "placements", ())
            ):
                held: Any = tensor
                boxes = [
                    [list(chunk.offsets), list(chunk.sizes)]
                    for chunk in held.__create_chunk_list__()
                ]
                found.append([self._places[name], list(tensor.shape), boxes])
        return found

    def _fill(self, value: Any, tree: Any, part: str, at: tuple[str, ...]) -> Any:
        """Return ``value`` with the content of ``tree``; register tensors for `load`."""
        key = ".".join((part, *at))
        if value is _ELSEWHERE:
            layout = self._source.stored(tree, part, key)
            return (
                None
                if layout is None
                else torch.empty(layout.shape, dtype=layout.dtype, device="meta")
            )
        if isinstance(value, Tensor):
            return self._register(value, tree, part, key)
        inside = children(tree, at=key, file=self._source.document)
        if isinstance(value, MutableMapping) and isinstance(inside, Mapping):
            for name in list(value):
                if name not in inside:
                    fix = did_you_mean(str(name), map(str, inside)) if inside else None
                    raise CheckpointError(
                        self._source.root,
                        f"{key}.{name}",
                        "it is not in the checkpoint",
                        fix=fix,
                    )
                value[name] = self._fill(
                    value[name], inside[name], part, (*at, str(name))
                )
            return value
        if isinstance(value, (list, tuple)) and _holds_tensors(value):
            if not isinstance(inside, list) or len(inside) != len(value):
                found = (
                    f"{len(inside)} items are"
                    if isinstance(inside, list)
                    else "something else is"
                )
                raise CheckpointError(
                    self._source.root,
                    key,
                    f"{found} stored, the state has {len(value)} items",
                )
            items = [
                self._fill(v, t, part, (*at, str(i)))
                for i, (v, t) in enumerate(zip(value, inside, strict=True))
            ]
            if isinstance(value, tuple):
                return tuple(items)
            value[:] = items
            return value
        return decode(
            tree,
            Assembled(self._files, self._source.layout[part]),
            at=key,
            file=self._source.document,
        )

    def load(self) -> None:
        """Fill the tensors; torch's planner finds the stored chunks that overlap with this rank's parts."""
        from torch.distributed.checkpoint.default_planner import (
            DefaultLoadPlanner,
        )  # half a second
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        stored: dict[str, Any] = {}
        chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for name, layout in self._layouts.items():
            boxes = [
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in layout.chunks
            ]
            stored[name] = TensorStorageMetadata(
                TensorProperties(layout.dtype), torch.Size(layout.shape), boxes
            )
            chunks.update({(name, chunk.offsets): chunk for chunk in layout.chunks})
        planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planner.set_up_planner(self._tensors, Metadata(stored))
        for item in planner.create_local_plan().items:
            name = item.dest_index.fqn
            offset = item.storage_index.offset
            assert offset is not None  # every item is a tensor
            chunk = chunks[name, tuple(offset)]
            found = self._files.read(
                self._layouts[name],
                chunk,
                tuple(item.storage_offsets),
                tuple(item.lengths),
            )
            planner.resolve_tensor(item).detach().copy_(found)

    def _register(self, value: Tensor, tree: Any, part: str, key: str) -> Tensor:
        root = self._source.root
        layout = self._source.stored(tree, part, key)
        if layout is None:
            raise CheckpointError(
                root, key, "the state has a tensor where the checkpoint has none"
            )
        if layout.shape != tuple(value.shape):
            raise CheckpointError(
                root,
                key,
                f"{list(layout.shape)} is stored, the state has {list(value.shape)}",
            )
        if value.is_meta:
            raise CheckpointError(
                root,
                key,
                "the state's tensor has no memory",
                fix="call module.to_empty() first",
            )
        name = f"{len(self._tensors)}/{key}"
        self._tensors[name] = value
        self._layouts[name] = layout
        self._places[name] = (
            f"{part}.{tree['v']}"  # its stored name, which is the same on all ranks
        )
        return value


def _check_boxes(everyone: list[list[Any]]) -> None:
    """Refuse layouts that torch describes wrongly: it treats a strided part of a tensor as a box, and boxes overlap."""
    boxes: dict[str, set[Chunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape, held in (tensor for own in everyone for tensor in own):
        shapes[name] = tuple(shape)
        chunks = (
            Chunk(tuple(offsets), tuple(sizes), "", "")
            for offsets, sizes in held
            if math.prod(sizes)
        )
        boxes.setdefault(name, set()).update(chunks)
    for name, found in boxes.items():
        check_cover(
            "the state to fill",
            name,
            TensorLayout(torch.float32, shapes[name], tuple(found)),
        )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return any(_holds_tensors(item) for item in items)
