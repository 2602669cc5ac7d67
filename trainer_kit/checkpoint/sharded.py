"""Checkpoints that several ranks write, each the tensors it holds, and that any other layout can load.

torch's planner for distributed checkpoints decides who writes which part of which tensor. The bytes are ours: each rank
writes safetensors files into one hidden directory, and the first one commits it, as any checkpoint is committed.
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
from urllib.parse import quote

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.codec import children, decode, encode, merge, tensor_record
from trainer_kit.checkpoint.collective import Collective
from trainer_kit.checkpoint.commit import (
    check_target,
    dump_document,
    encode_info,
    io_failure,
    name_parts,
    staged_files,
    versions,
    work_directory,
)
from trainer_kit.checkpoint.files import CARRIERS, flatten, safetensors_bytes, write_file
from trainer_kit.checkpoint.layout import (
    Assembled,
    Chunk,
    ShardFiles,
    TensorLayout,
    check_cover,
    dtype_name,
    dump_layout,
    named_dtype,
    read_layout,
    tensors_in,
)
from trainer_kit.checkpoint.manifest import (
    DOCUMENT,
    LAYOUT,
    MANIFEST,
    SHARD,
    check_content,
    check_files,
    check_sizes,
    dump_manifest,
    files_of,
    is_sharded,
    new_manifest,
    read_manifest,
    shards_of,
)
from trainer_kit.checkpoint.read import check_parts, descriptions, read_trees
from trainer_kit.checkpoint.remote import fetched
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
    """What one rank is to write: from here on it is only I/O.

    Attributes:
        shards: of this rank, by file and key.
        document: the bytes of ``state.json``; this and what follows only on the first rank.
        layout: by part and name, which chunks all ranks write.
        info: encoded, for the manifest.
        number: of ranks.
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
    """Write a checkpoint together; when this returns it is durable, when it raises there is nothing new.

    What several ranks hold alike (a plain tensor, a replicated dimension) is written by one of them; who writes what is
    spread by size. Other values are those of the first rank; keys of dicts that only later ranks have are added, so
    the stages of a pipeline make one state.

    Args:
        path: the directory to make, or its URL, the same on all ranks, on storage that all of them see.
        state: parts by name, as for `trainer_kit.checkpoint.commit.write_checkpoint`; its tensors may be ``DTensor``,
            such as in what ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns.
        info: small plain data kept in the manifest, such as ``{"step": 1200}``; the first rank's counts.
        group: every rank of it calls this; it must take CPU tensors (gloo). None: the default group, or this process
            alone where there is none.
        overwrite: replace a checkpoint that is there. Until the new one is durable the old one stays whole.
        staged: from `trainer_kit.checkpoint.commit.stage`, the same on all ranks.

    Returns:
        ``path``, absolute.

    Raises:
        CheckpointError: on every rank, for a value that cannot be saved, a target that exists, too little space, or
            failed I/O on any rank, which is then named.
        RankError: on every rank, when one of them fails in any other way.

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
    return write_sharded_snapshot(path, snapshot, group=group, overwrite=overwrite, staged=staged)


def take_sharded_snapshot(
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    group: ProcessGroup | None = None,
    copy: HostBuffers | None,
) -> ShardedSnapshot:
    """The first half of `write_sharded`: who writes what is agreed upon, and encoded.

    Args:
        state: as there.
        info: as there.
        group: as there.
        copy: buffers that this rank's chunks are copied into, so that training may go on before they are written; the
            snapshot before must be written by then. None: not copied.

    Raises:
        CheckpointError: on every rank, for a value that cannot be saved, naming rank and key path.
        RankError: on every rank, when one of them fails in any other way.
    """
    ranks = Collective(group)
    own = ranks.each(lambda: _Local(state, info, first=ranks.rank == 0))
    whole: list[_Whole] = []

    def plan(everyone: list[Any]) -> Any:
        whole.append(_Whole(everyone))
        return whole[0].kept, whole[0].parts

    kept, parts = ranks.reduce(own.describe, plan)
    names = _file_names(parts, ranks.rank, ranks.size)
    mine = kept[ranks.rank]
    shards = ranks.each(lambda: own.resolve(mine, names, copy))
    if not whole:
        return ShardedSnapshot(shards, b"", {}, None, ranks.size)
    return ShardedSnapshot(shards, whole[0].document, whole[0].layout, own.info, ranks.size)


def write_sharded_snapshot(
    path: str | os.PathLike[str],
    snapshot: ShardedSnapshot,
    *,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """The second half of `write_sharded`: no training state is touched, so any thread may run it.

    Args:
        path: as there.
        snapshot: of this rank.
        group: of the ranks that took it, and of CPU tensors; one that nobody else uses at the same time.
        overwrite: as there.
        staged: as there.

    Raises:
        CheckpointError: on every rank; nothing was committed, and the work directory is gone.
        RankError: the same, when a rank fails in any other way than at I/O.
    """
    ranks = Collective(group)
    target = absolute(path)
    sizes = (_bytes(tensor) for tensors in snapshot.layout.values() for tensor in tensors.values())
    needed = len(snapshot.document) + sum(sizes)
    with ExitStack() as stack:

        def begin(_: list[Any]) -> str:
            place = check_target(path, overwrite)
            return str(stack.enter_context(work_directory(place, needed, overwrite=overwrite, staged=staged)))

        def commit(written: list[dict[str, Any]]) -> None:
            try:
                _describe(work, snapshot, written, staged)
            except OSError as error:
                raise io_failure(target, error, needed) from error
            stack.close()  # it becomes the target, or is gone

        work = locate(ranks.reduce(lambda: None, begin))
        ranks.reduce(lambda: _write_shards(work, target, snapshot.shards), commit)
    return target


def _write_shards(work: Location, target: Location, shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    files = {}
    for name, tensors in shards.items():
        size, buffers = safetensors_bytes(tensors)
        try:
            files[name] = write_file(work / name, buffers)
        except OSError as error:
            raise io_failure(target / name, error, size) from error
    if shards and isinstance(work, Path):  # other machines see their names only then
        sync_directory(work)
    return files


def _describe(work: Location, snapshot: ShardedSnapshot, written: list[dict[str, Any]], staged: Path | None) -> None:
    shards = {name: {**entry, "shard": rank + 1} for rank, own in enumerate(written) for name, entry in own.items()}
    document = write_file(work / DOCUMENT, [snapshot.document])
    layout = write_file(work / LAYOUT, [dump_layout(snapshot.layout)])
    parts = {
        part: sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})
        for part, tensors in snapshot.layout.items()
    }
    files = {**shards, DOCUMENT: document, LAYOUT: layout}
    extra = None if staged is None else staged_files(staged, files)
    manifest = new_manifest(files, parts, snapshot.info, versions(), snapshot.number, extra)
    write_file(work / MANIFEST, [dump_manifest(manifest)])


def _bytes(tensor: TensorLayout) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _file_names(parts: Iterable[str], rank: int, size: int) -> dict[str, str]:
    found = name_parts({part: (part,) for part in parts}, f"-{rank + 1:05d}-of-{size:05d}{SHARD}")
    return {part: str(name) for part, name in found.items()}


def _flat(part: str, name: str) -> str:
    return f"{quote(part, safe='')}/{name}"


def _keys(items: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The key of each chunk in its file: its tensor's name, numbered where a rank holds several chunks."""
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
    """What one rank holds, planned but not yet read."""

    def __init__(self, state: Mapping[str, Any], info: Mapping[str, Any] | None, *, first: bool) -> None:
        self.trees: dict[str, Any] = {}
        self.info = encode_info(info) if first else None
        self._places: dict[str, tuple[str, str]] = {}
        flat: dict[str, Tensor] = {}
        for part, value in state.items():
            if not isinstance(part, str):
                raise CheckpointError(_SOURCE, repr(part), "the parts of a checkpoint are named by strings")
            tensors: dict[str, Tensor] = {}
            self.trees[part] = encode(value, tensors, at=part, sharded=True)
            for name, tensor in tensors.items():
                _check_whole(f"{part}.{name}", tensor)
                flat[_flat(part, name)] = tensor
                self._places[_flat(part, name)] = (part, name)
        self._planner = _planner(flat, first)
        # A rank may hold nothing of a tensor; an item for that would claim a place at its end.
        self._items = [item for item in self._planner.create_local_plan().items if math.prod(_box(item)[1])]
        self._shapes = {key: (list(tensor.shape), dtype_name(tensor.dtype)) for key, tensor in flat.items()}

    def describe(self) -> Any:
        """For the first rank: the trees; each tensor's place, shape and dtype; and each chunk's tensor and box."""
        tensors = [[*self._places[key], *self._shapes[key]] for key in self._shapes]
        return self.trees, tensors, [[*self._places[item.index.fqn], *_box(item)] for item in self._items]

    def resolve(
        self, kept: list[int], names: Mapping[str, str], buffers: HostBuffers | None
    ) -> dict[str, dict[str, Tensor]]:
        """The chunks that this rank is to write, by file and key."""
        items = [self._items[index] for index in kept]
        places = [self._places[item.index.fqn] for item in items]
        shards: dict[str, dict[str, Tensor]] = {}
        for item, (part, name), key in zip(items, places, _keys((names[p], n) for p, n in places), strict=True):
            chunk = _plain(f"{part}.{name}", self._planner.resolve_data(item))
            copied = chunk if buffers is None else buffers.copy(f"{names[part]}/{key}", chunk)
            shards.setdefault(names[part], {})[key] = copied
        if buffers is not None:
            buffers.end()
        return shards


def _planner(flat: dict[str, Tensor], first: bool) -> DefaultSavePlanner:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # half a second

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(flat, is_coordinator=first)
    return planner


def _box(item: WriteItem) -> tuple[list[int], list[int]]:
    assert item.tensor_data is not None  # everything else is in the trees
    return list(item.tensor_data.chunk.offsets), list(item.tensor_data.chunk.sizes)


def _check_whole(key: str, tensor: Tensor) -> None:
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise CheckpointError(
            _SOURCE, key, "its ranks hold terms of a sum (Partial), not parts", fix="redistribute() it before saving"
        )


def _plain(key: str, chunk: Any) -> Tensor:
    """What safetensors can hold of a chunk; where that is possible, without copying it."""
    wait = getattr(chunk, "wait", None)  # the result of a collective that may be under way
    tensor = (chunk if wait is None else wait()).detach()
    if type(tensor) is not Tensor:
        raise CheckpointError(_SOURCE, key, f"chunks of type {type(tensor).__name__} cannot be saved")
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in CARRIERS:
        tensor = flatten(tensor).view(CARRIERS[tensor.dtype])
    return tensor


@final
class _Whole:
    """What all ranks hold together, and who writes what of it; on the first rank.

    Attributes:
        document: the bytes of ``state.json``.
        layout: by part and name.
        kept: of each rank's items those that it is to write.
        parts: that have tensors.
    """

    def __init__(self, everyone: list[Any]) -> None:
        trees = reduce(merge, (trees for trees, _, _ in everyone))
        self.document = dump_document(trees)
        whole: dict[tuple[str, str], tuple[list[int], str]] = {}
        for _, tensors, _ in everyone:
            for part, name, shape, dtype in tensors:
                if whole.setdefault((part, name), (shape, dtype)) != (shape, dtype):
                    raise CheckpointError(
                        _SOURCE,
                        f"{part}.{name}",
                        f"{dtype} {shape} on one rank, {whole[part, name][1]} {whole[part, name][0]} on another",
                    )
        self.parts = list(dict.fromkeys(part for part, _ in whole))
        items = [items for _, _, items in everyone]
        self.kept = _divide(items, whole)
        chunks: dict[tuple[str, str], list[Chunk]] = {place: [] for place in whole}
        for rank, (held, kept) in enumerate(zip(items, self.kept, strict=True)):
            names = _file_names(self.parts, rank, len(everyone))
            mine = [held[index] for index in kept]
            for (part, name, offsets, sizes), key in zip(mine, _keys((names[i[0]], i[1]) for i in mine), strict=True):
                chunks[part, name].append(Chunk(tuple(offsets), tuple(sizes), names[part], key))
        self.layout: dict[str, dict[str, TensorLayout]] = {part: {} for part in trees}
        for (part, name), (shape, dtype) in whole.items():
            tensor = TensorLayout(named_dtype(dtype), tuple(shape), tuple(chunks[part, name]))
            check_cover(_SOURCE, f"{part}.{name}", tensor)
            self.layout[part][name] = tensor


def _divide(items: list[list[Any]], whole: Mapping[tuple[str, str], tuple[list[int], str]]) -> list[list[int]]:
    """Of each rank's items the indices of those that it writes; what several hold goes to who has least to write."""
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for rank, own in enumerate(items):
        for index, (part, name, offsets, sizes) in enumerate(own):
            holders.setdefault((part, name, tuple(offsets), tuple(sizes)), []).append((rank, index))
    size = {box: math.prod(box[3]) * named_dtype(whole[box[:2]][1]).itemsize for box in holders}
    load, kept = [0] * len(items), [set[int]() for _ in items]
    for box, places in sorted(holders.items(), key=lambda entry: (len(entry[1]) > 1, -size[entry[0]])):
        rank, index = min(places, key=lambda place: (load[place[0]], place))
        load[rank] += size[box]
        kept[rank].add(index)
    return [sorted(indices) for indices in kept]


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
