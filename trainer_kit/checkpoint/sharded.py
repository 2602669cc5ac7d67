"""Sharded checkpoints: each rank writes the tensors that it holds, and any other layout can load them.

torch's planner for distributed checkpoints finds the part of each tensor that a rank holds. The files are ours: each
rank writes safetensors files into one hidden directory, and the first rank commits it like any other checkpoint.

The order of a save, in which every step fails on all ranks or on none: all ranks describe what they hold, and the first
one plans who writes what; each rank copies its chunks (training may continue); the first rank makes the hidden
directory; each rank writes and fsyncs its files there; when all have, the first rank writes the descriptions and the
manifest, and renames the directory. So no manifest ever lists a file that another rank has not written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.background import HostBuffers
from trainer_kit.checkpoint.collective import Collective
from trainer_kit.checkpoint.commit import (
    check_target,
    io_failures,
    staged_files,
    versions,
    work_directory,
)
from trainer_kit.checkpoint.encoding import Tree, decode
from trainer_kit.checkpoint.files import (
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
    FileEntries,
    Manifest,
    check_content,
    dump_manifest,
    files_of_part,
    new_manifest,
    next_commit,
)
from trainer_kit.checkpoint.read import description_files, open_checkpoint, read_trees
from trainer_kit.checkpoint.shard_plan import LocalState, WritePlan, file_names
from trainer_kit.checkpoint.torch_private import STRIDED_SHARD
from trainer_kit.checkpoint.trees import children, tensor_record
from trainer_kit.core.atomic_files import sync_directory
from trainer_kit.core.errors import CheckpointError, did_you_mean
from trainer_kit.core.location import Location, absolute, is_url, locate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "ShardedSnapshot",
    "read_divided",
    "read_sharded",
    "take_sharded_snapshot",
    "write_sharded",
    "write_sharded_snapshot",
]

_Tensors = dict[str, Tensor]


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
    info: object
    number: int


def write_sharded(
    path: str | os.PathLike[str],
    state: Mapping[str, object],
    *,
    info: Mapping[str, object] | None = None,
    group: ProcessGroup | None = None,
    overwrite: bool = False,
    staged: Path | None = None,
) -> Location:
    """Write a checkpoint together. It is durable when this function returns; an error leaves no new checkpoint.

    A chunk that several ranks hold (a plain tensor, a replicated axis) is written by one of them; the ranks write
    about the same number of bytes. Other values are taken from the first rank; keys of dicts that only later ranks have
    are added, so the stages of a pipeline form one state.

    Args:
        path: the directory to create, or its URL, the same on all ranks, on storage that all ranks see.
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
    state: Mapping[str, object],
    *,
    info: Mapping[str, object] | None = None,
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
    local_states: list[LocalState] = []

    def encode_state() -> dict[str, str]:
        local_states.append(LocalState(state, info, first=ranks.rank == 0))
        return local_states[0].digests

    # Almost all ranks have the trees and tensors of the first one: they send their boxes.
    first_digests = ranks.reduce(encode_state, lambda digests: digests[0])
    local = local_states[0]
    # Filled on the first rank alone: the other ranks need what they write, not the whole layout.
    plans: list[WritePlan] = []

    def plan(descriptions: list[Any]) -> list[object]:
        descriptions[0] = local.describe({})
        plans.append(WritePlan(descriptions))
        return [[indices, plans[0].parts] for indices in plans[0].written]

    written, parts = ranks.divide(lambda: local.describe(first_digests), plan)
    names = file_names(parts, ranks.rank, ranks.size)
    shards = ranks.each(lambda: local.read_chunks(written, names, copy))
    if not plans:
        return ShardedSnapshot(shards, b"", {}, None, ranks.size)
    return ShardedSnapshot(
        shards, plans[0].document, plans[0].layout, local.info, ranks.size
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
    # The bytes of all ranks; on the first rank alone, which checks the free space.
    needed = len(snapshot.document)
    for tensors in snapshot.layout.values():
        needed += sum(map(_tensor_bytes, tensors.values()))
    with ExitStack() as stack:

        def begin(_: list[object]) -> str:
            checked = check_target(path, overwrite)
            directory = work_directory(
                checked, needed, overwrite=overwrite, staged=staged
            )
            return str(stack.enter_context(directory))

        def commit(entries_by_rank: list[FileEntries]) -> None:
            with io_failures(target, needed):
                committed = next_commit(target.parent)
                _write_descriptions(work, snapshot, entries_by_rank, staged, committed)
            # Commits the work directory. Here and not at the end of the stack: if it fails, `reduce` raises on every
            # rank, and after it no rank may report a checkpoint that does not exist.
            stack.close()

        # The first rank makes the directory, and the others get its name.
        work = locate(ranks.reduce(lambda: None, begin))
        # `commit` runs only when every rank has written its files; an error leaves the stack, which deletes them.
        ranks.reduce(lambda: _write_shards(work, target, snapshot.shards), commit)
    return target


def _write_shards(
    work: Location,
    target: Location,
    shards: Mapping[str, Mapping[str, Tensor]],
) -> FileEntries:
    """Write the files of this rank; returns their manifest entries by name."""
    entries = {}
    for name, tensors in shards.items():
        size, buffers = safetensors_bytes(tensors)
        # The error names the file in the checkpoint, not in the hidden directory.
        with io_failures(target / name, size):
            entries[name] = write_file(work / name, buffers)
    # Make the names of the files visible to other machines.
    if shards and isinstance(work, Path):
        sync_directory(work)
    return entries


def _write_descriptions(
    work: Location,
    snapshot: ShardedSnapshot,
    entries_by_rank: list[FileEntries],
    staged: Path | None,
    committed: int,
) -> None:
    """Write the state, the layout and the manifest; on the first rank, when all ranks have written their files."""
    files: FileEntries = {}
    for rank, entries in enumerate(entries_by_rank):
        for name, entry in entries.items():
            files[name] = {**entry, "shard": rank + 1}
    files[DOCUMENT] = write_file(work / DOCUMENT, [snapshot.document])
    files[LAYOUT] = write_file(work / LAYOUT, [dump_layout(snapshot.layout)])
    # Of the chunks: a rank that holds no element of a part has written no file for it.
    parts = {}
    for part_name, tensors in snapshot.layout.items():
        names: set[str] = set()
        for tensor in tensors.values():
            names.update(chunk.file for chunk in tensor.chunks)
        parts[part_name] = sorted(names)
    extra = None
    if staged is not None:
        extra = staged_files(staged, files)
    manifest = new_manifest(
        files, parts, snapshot.info, versions(), committed, snapshot.number, extra
    )
    write_file(work / MANIFEST, [dump_manifest(manifest)])


def _tensor_bytes(tensor: TensorLayout) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


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
        source = ranks.each(lambda: _open_source(stack, path, list(state)))
        _fill_together(path, source, state, ranks, verify)
        if source.number == ranks.size:
            return None
        return f"resharding {source.number} → {ranks.size}"


def read_divided(
    path: str | os.PathLike[str],
    like: Mapping[str, Any],
    *,
    parts: Iterable[str] | None = None,
    like_by_part: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: Mapping[str, Collection[str]] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state of a checkpoint by part, with tensors sharded over ranks as the tensors in ``like`` are.

    The checkpoint may have any layout; each rank reads the parts that it holds. A stored tensor is sharded like
    ``like[name]`` if ``name`` is one of the keys of its key path and the shapes are equal: so weights, their averages
    and the optimizer's state of each weight are sharded. Every other tensor is whole.

    Args:
        path: a checkpoint directory, or its URL, the same on all ranks.
        like: tensors by name; only ``DTensor`` values have an effect.
        parts: the parts to read; None for all.
        like_by_part: tensors that count before those of ``like`` in one part.
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
    divided = _divided(like)
    divided_by_part = {
        part_name: {**divided, **_divided(tensors)}
        for part_name, tensors in (like_by_part or {}).items()
    }
    absent = elsewhere or {}
    with ExitStack() as stack:
        # Errors are raised on all ranks: one that cannot open a file would leave the others waiting in the reads.
        source = ranks.each(lambda: _open_source(stack, path, parts))

        def make_template() -> dict[str, Any]:
            return {
                part_name: source.template(
                    part_name,
                    divided_by_part.get(part_name, divided),
                    absent.get(part_name, ()),
                )
                for part_name in source.parts
            }

        state = ranks.each(make_template)
        _fill_together(path, source, state, ranks, verify=True)
        return state


def _divided(tensors: Mapping[str, object]) -> dict[str, object]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if hasattr(tensor, "placements")
    }


def _fill_together(
    path: str | os.PathLike[str],
    source: _Source,
    state: MutableMapping[str, Any],
    ranks: Collective,
    verify: bool,
) -> None:
    if verify:
        files: list[str] = []
        for part_name in source.parts:
            files += files_of_part(source.manifest, part_name)
        # In one order on all ranks, so that each file is in exactly one share.
        files.sort()
        share = files[ranks.rank :: ranks.size]
        # Each rank has fetched its own copies, which no other rank can verify.
        if is_url(path):
            share = files
        ranks.each(lambda: check_content(source.root, source.manifest, share))
    with ShardFiles(source.root) as shard_files:
        target = ranks.each(lambda: _Target(source, shard_files, state))
        # Before any tensor is filled: a state that is half loaded is of no use.
        ranks.reduce(target.strided_tensors, _check_boxes)
        ranks.each(target.load)


def _open_source(
    stack: ExitStack,
    path: str | os.PathLike[str],
    parts: Iterable[str] | None,
) -> _Source:
    root, manifest, names = stack.enter_context(open_checkpoint(path, parts))
    return _Source(root, manifest, names)


@final
class _Source:
    """A checkpoint on disk: manifest, encoded trees, and layouts by part and name."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        parts: list[str],
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.parts = parts
        self.number = manifest.get("shards", 1)
        self.document = root / DOCUMENT
        # On every rank: they are small, and decide what is read at all.
        check_content(root, manifest, description_files(manifest))
        self.trees = read_trees(root, parts)
        self.layout = layouts_of(root, manifest, parts)

    def stored_layout(
        self,
        tree: Tree,
        part_name: str,
        key: str,
    ) -> TensorLayout | None:
        """Return the layout of the tensor that ``tree`` records; None if it records none."""
        record = tensor_record(tree)
        if record is None:
            return None
        # A damaged record may hold any value, also one that is not hashable.
        layout = self.layout[part_name].get(str(record.get("v")))
        if layout is None or "dtype" not in record:
            return layout
        try:
            shape = tuple(int(size) for size in record["shape"])
            return layout.viewed_as(named_dtype(record["dtype"]), shape)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                self.document, key, f"damaged record of a tensor: {error}"
            ) from error

    def template(
        self,
        part_name: str,
        like: Mapping[str, Any],
        elsewhere: Collection[str],
    ) -> Any:
        """Return the state of a part that is to be filled: memory for sharded tensors, None for all other values."""
        # A tensor that this rank holds counts more: a shared parameter has names on several ranks.
        models = {**dict.fromkeys(elsewhere, _ELSEWHERE), **like}
        return self._template(self.trees[part_name], models, (part_name,), None)

    def _template(
        self,
        tree: Tree,
        models: Mapping[Any, Any],
        path: tuple[str, ...],
        model: Any,
    ) -> Any:
        """The template of a tree.

        Args:
            tree: the encoded value.
            models: by name, what a tensor below this name is sharded like.
            path: of the value.
            model: of the innermost name in the path that has one; None if no name has.
        """
        if model is _ELSEWHERE:
            return model
        key = ".".join(path)
        if tensor_record(tree) is not None:
            if model is None:
                return None
            layout = self.stored_layout(tree, path[0], key)
            if layout is None or layout.shape != tuple(model.shape):
                return None
            # In the dtype of the file: loading must not round what the run may keep in more bits.
            return torch.empty_like(model, dtype=layout.dtype, requires_grad=False)
        items = children(tree, at=key, file=self.document)
        if items is None:
            return None
        named_items: Mapping[Any, Tree]
        if isinstance(items, list):
            named_items = dict(enumerate(items))
        else:
            named_items = items
        templates: dict[Any, Any] = {}
        for name, item in named_items.items():
            item_model = model
            # A number, such as an index in a list, names no tensor.
            if type(name) is str:
                item_model = models.get(name, model)
            item_path = (*path, str(name))
            templates[name] = self._template(item, models, item_path, item_model)
        # None means a whole value: what has no divided tensors is decoded in one piece.
        if all(template is None for template in templates.values()):
            return None
        if isinstance(items, list):
            return list(templates.values())
        return templates


@final
class _Target:
    """The state to be filled: the constructor replaces plain values, `load` fills all tensors."""

    def __init__(
        self,
        source: _Source,
        files: ShardFiles,
        state: MutableMapping[str, Any],
    ) -> None:
        self._source = source
        self._files = files
        self._tensors: _Tensors = {}
        self._layouts: dict[str, TensorLayout] = {}
        self._stored_names: dict[str, str] = {}
        for part_name in state:
            state[part_name] = self._fill(
                state[part_name], source.trees[part_name], part_name, ()
            )

    def strided_tensors(self) -> list[Any]:
        """Return name, shape and boxes of this rank's tensors that are split twice along one dim."""
        strided: list[Any] = []
        for name, tensor in self._tensors.items():
            if not _is_strided(tensor):
                continue
            distributed: Any = tensor
            chunks = distributed.__create_chunk_list__()
            boxes = [[list(chunk.offsets), list(chunk.sizes)] for chunk in chunks]
            strided.append([self._stored_names[name], list(tensor.shape), boxes])
        return strided

    def _fill(
        self,
        value: Any,
        tree: Tree,
        part_name: str,
        path: tuple[str, ...],
    ) -> Any:
        """Return ``value`` with the content of ``tree``; register tensors for `load`."""
        key = ".".join((part_name, *path))
        document = self._source.document
        if value is _ELSEWHERE:
            # The engine needs shape and dtype of what other ranks hold, and not the content.
            layout = self._source.stored_layout(tree, part_name, key)
            if layout is None:
                return None
            return torch.empty(layout.shape, dtype=layout.dtype, device="meta")
        if isinstance(value, Tensor):
            return self._register(value, tree, part_name, key)
        # Containers are entered only as far as they hold something to fill; the rest is decoded in one piece.
        items = children(tree, at=key, file=document)
        if isinstance(value, MutableMapping) and isinstance(items, Mapping):
            self._fill_dict(value, items, part_name, path)
            return value
        if isinstance(value, (list, tuple)) and _holds_tensors(value):
            return self._fill_list(value, items, part_name, path)
        assembled = Assembled(self._files, self._source.layout[part_name])
        return decode(tree, assembled, at=key, file=document)

    def _fill_dict(
        self,
        value: MutableMapping[Any, Any],
        items: Mapping[Any, Tree],
        part_name: str,
        path: tuple[str, ...],
    ) -> None:
        for name in list(value):
            if name not in items:
                key = ".".join((part_name, *path, str(name)))
                fix = None
                if items:
                    fix = did_you_mean(str(name), map(str, items))
                raise CheckpointError(
                    self._source.root, key, "it is not in the checkpoint", fix=fix
                )
            value[name] = self._fill(
                value[name], items[name], part_name, (*path, str(name))
            )

    def _fill_list(
        self,
        value: list[Any] | tuple[Any, ...],
        items: object,
        part_name: str,
        path: tuple[str, ...],
    ) -> Any:
        if not isinstance(items, list) or len(items) != len(value):
            stored = "something else is"
            if isinstance(items, list):
                stored = f"{len(items)} items are"
            key = ".".join((part_name, *path))
            raise CheckpointError(
                self._source.root,
                key,
                f"{stored} stored, the state has {len(value)} items",
            )
        filled = [
            self._fill(item, items[index], part_name, (*path, str(index)))
            for index, item in enumerate(value)
        ]
        if isinstance(value, tuple):
            return tuple(filled)
        # In place, as documented: the caller may hold this list.
        value[:] = filled
        return value

    def load(self) -> None:
        """Fill the tensors; torch's planner finds the stored chunks that overlap with this rank's parts."""
        # torch's planner takes half a second to import.
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        # The layout in torch's records, from which its planner finds the overlaps.
        stored: dict[str, Any] = {}
        chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
        for name, layout in self._layouts.items():
            boxes = []
            for chunk in layout.chunks:
                boxes.append(
                    ChunkStorageMetadata(
                        torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                    )
                )
                chunks[name, chunk.offsets] = chunk
            properties = TensorProperties(layout.dtype)
            stored[name] = TensorStorageMetadata(
                properties, torch.Size(layout.shape), boxes
            )
        planner = DefaultLoadPlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        )
        planner.set_up_planner(self._tensors, Metadata(stored))
        for item in planner.create_local_plan().items:
            name = item.dest_index.fqn
            offset = item.storage_index.offset
            # The planner got tensors only, and each of their items has an offset.
            assert offset is not None
            content = self._files.read(
                self._layouts[name],
                chunks[name, tuple(offset)],
                tuple(item.storage_offsets),
                tuple(item.lengths),
            )
            planner.resolve_tensor(item).detach().copy_(content)

    def _register(
        self,
        value: Tensor,
        tree: Tree,
        part_name: str,
        key: str,
    ) -> Tensor:
        root = self._source.root
        layout = self._source.stored_layout(tree, part_name, key)
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
        # Numbered: key paths such as ("a.b",) and ("a", "b") have the same text.
        name = f"{len(self._tensors)}/{key}"
        self._tensors[name] = value
        self._layouts[name] = layout
        # Under its stored name a tensor is the same on all ranks.
        self._stored_names[name] = f"{part_name}.{tree['v']}"
        return value


def _is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is split twice along one dim, so that a rank's elements are not one box."""
    placements = getattr(tensor, "placements", ())
    return any(type(placement).__name__ == STRIDED_SHARD for placement in placements)


def _check_boxes(tensors_by_rank: list[list[Any]]) -> None:
    """Refuse layouts that torch describes wrongly: it treats a strided part of a tensor as a box, and boxes overlap."""
    chunks: dict[str, set[Chunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensors in tensors_by_rank:
        for name, shape, boxes in tensors:
            shapes[name] = tuple(shape)
            tensor_chunks = chunks.setdefault(name, set())
            for offsets, sizes in boxes:
                if math.prod(sizes):
                    # Several ranks may hold the same box: it counts once.
                    tensor_chunks.add(Chunk(tuple(offsets), tuple(sizes), "", ""))
    for name, tensor_chunks in chunks.items():
        # Any dtype will do: only shapes are checked.
        layout = TensorLayout(torch.float32, shapes[name], tuple(tensor_chunks))
        check_cover("the state to fill", name, layout)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return False
