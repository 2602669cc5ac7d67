"""Weights that are read from their files one at a time, when they are used."""

from __future__ import annotations

import os
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.checkpoint.files import (
    TENSOR_DTYPES,
    named_failure,
    safetensors_bytes,
    same_bits,
    write_file,
)
from trainer_kit.checkpoint.layout import Assembled, ShardFiles, TensorLayout
from trainer_kit.checkpoint.manifest import MANIFEST
from trainer_kit.checkpoint.weights import (
    holds_weight_files,
    map_weights,
    read_index,
    read_weights,
    weight_format,
    weight_layout,
)
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import RemotePath, locate

__all__ = [
    "Lazy",
    "OnDisk",
    "have_equal_content",
    "open_weights",
    "read_one",
    "tensor_like",
    "write_weights",
]

_SAFETENSORS: Final = ".safetensors"


class Lazy(Mapping[str, Tensor], ABC):
    """A mapping of names to tensors that are read or computed at each access."""

    # The methods beside Mapping's exist so that no caller reads a whole tensor where a name, a shape or a comparison of
    # positions in a file is enough: the models are larger than memory.

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; Mapping's default would read the tensor."""

    @abstractmethod
    def read(
        self, names: Iterable[str], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return several tensors that share no memory."""

    @abstractmethod
    def like(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype, possibly without content."""

    @abstractmethod
    def agree(self, one: str, other: str) -> bool:
        """Whether both names have equal content."""


@final
class OnDisk(Lazy):
    """Tensors by name in safetensors files or a checkpoint directory; each access reads the tensor.

    The files must not change: a changed file would hold the weights of another model.

    Args:
        root: the directory of the files.
        layout: the layout of each tensor, by name.
    """

    def __init__(self, root: Path, layout: Mapping[str, TensorLayout]) -> None:
        # Absolute, because the script may change its working directory before a layer reads.
        self.root = root.absolute()
        self._layout = dict(layout)
        self._versions = {}
        for tensor_layout in layout.values():
            for chunk in tensor_layout.chunks:
                self._versions[chunk.file] = self._version(chunk.file)

    def __getitem__(self, name: str) -> Tensor:
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def __deepcopy__(self, memo: object) -> OnDisk:
        # A copy of a model reads the same file, which exists as long as this object (`write_weights`).
        return self

    def read(
        self, names: Iterable[str], device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return several tensors that share no memory; each file is opened once, and closed at the end.

        Raises:
            CheckpointError: a file was deleted, or written again since this object was created.
        """
        names = list(names)
        used: set[str] = set()
        for name in names:
            used.update(chunk.file for chunk in self._layout[name].chunks)
        # Before: a read from a mapped file that was truncated would end the process with SIGBUS.
        self._check_versions(used)
        with ShardFiles(self.root) as files:
            assembled = Assembled(files, self._layout, device)
            tensors = {name: assembled[name] for name in names}
        # After: a file that was overwritten during the read may have given half old, half new values.
        self._check_versions(used)
        return tensors

    def _version(self, file: str) -> tuple[int, int, int]:
        with named_failure(self.root / file, "it cannot be read"):
            status = os.stat(self.root / file)
        # The inode shows a file that was replaced by a rename within the resolution of the clock.
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _check_versions(self, files: Iterable[str]) -> None:
        for file in files:
            if self._version(file) != self._versions[file]:
                raise CheckpointError(
                    self.root / file,
                    None,
                    "it was overwritten while a model reads its weights from it",
                    fix="write checkpoints to new paths, and load the model again",
                )

    def agree(self, one: str, other: str) -> bool:
        """Whether both names have equal content; reads both if they are stored as two tensors."""
        if self._layout[one] == self._layout[other]:
            return True
        return same_bits(self[one], self[other])

    def like(self, name: str) -> Tensor:
        """Return the tensor on the meta device."""
        layout = self._layout[name]
        return torch.empty(layout.shape, dtype=layout.dtype, device="meta")


def tensor_like(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor with the shape and dtype of a weight; lazy weights are not read."""
    if isinstance(weights, Lazy):
        return weights.like(name)
    return weights[name]


def read_one(
    weights: Mapping[str, Tensor], name: str, device: torch.device | str
) -> Tensor:
    """Return a weight; lazy weights are read onto ``device``, others stay where they are."""
    if isinstance(weights, Lazy):
        return weights.read([name], device)[name]
    return weights[name]


def have_equal_content(weights: Mapping[str, Tensor], one: str, other: str) -> bool:
    """Whether two names have equal content."""
    if isinstance(weights, Lazy):
        return weights.agree(one, other)
    return same_bits(weights[one], weights[other])


def open_weights(checkpoint: str | os.PathLike[str]) -> OnDisk | dict[str, Tensor]:
    """Open the weights of a checkpoint by name; safetensors and our checkpoints are read at each access.

    Args:
        checkpoint: a checkpoint of ours; a safetensors file, or a directory in Hugging Face's layout; an index; a
            ``torch.save`` file of a state_dict, or a directory with an index of such files.

    Raises:
        CheckpointError: ``checkpoint`` is none of these, or damaged.
    """
    path = locate(checkpoint)
    if isinstance(path, RemotePath):
        return read_weights(checkpoint)
    if path.is_file() and path.suffix == ".json":
        return _open_index(path)
    # A directory without a manifest and without safetensors files may still have `torch.save` files or their index.
    if path.is_dir():
        has_manifest = (path / MANIFEST).exists()
        if not has_manifest and not holds_weight_files(path):
            return _open_directory(path)
    if path.is_dir() or weight_format(path) == "safetensors":
        return OnDisk(*weight_layout(path, verify=True))
    return map_weights(path)


def _open_directory(path: Path) -> OnDisk | dict[str, Tensor]:
    indices = sorted(path.glob("*index.json"))
    files = sorted(path.glob("*.bin"))
    if len(indices) == 1:
        return _open_index(indices[0])
    if not indices and len(files) == 1:
        return map_weights(files[0])
    candidates = [file.name for file in [*indices, *files]]
    listing = ", ".join(candidates) or "none of them"
    raise CheckpointError(
        path,
        None,
        f"neither a checkpoint, nor safetensors files, nor one index or .bin file of weights: {listing}",
        fix="give the file or the index itself",
    )


def _open_index(index: Path) -> OnDisk | dict[str, Tensor]:
    file_of = read_index(index)
    files = sorted(set(file_of.values()))
    if all(file.endswith(_SAFETENSORS) for file in files):
        return OnDisk(*weight_layout(index.parent, index=index))
    # Files of `torch.save` are mapped: pages are read when a tensor is copied, so memory does not hold them all.
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= map_weights(index.parent / file)
    for name, file in file_of.items():
        if name not in weights:
            reason = (
                f"{index.name} lists this weight here, but the file does not hold it"
            )
            raise CheckpointError(index.parent / file, name, reason)
    return weights


def write_weights(
    folder: str | os.PathLike[str], weights: Mapping[str, Tensor]
) -> OnDisk:
    """Write weights to a new file, which is deleted with the returned object, or at exit.

    Args:
        folder: the directory; it is created if missing, and its other files stay.
        weights: copied one at a time.

    Raises:
        CheckpointError: the file cannot be written, or safetensors does not hold a dtype.
    """
    # All dtypes are checked before the file exists, which may take the rest of the disk.
    for name, tensor in weights.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise CheckpointError(
                folder, name, f"safetensors files do not hold {tensor.dtype}"
            )
    directory = Path(os.path.expanduser(folder)).absolute()
    file = directory / f"offloaded-{uuid.uuid4().hex}{_SAFETENSORS}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, safetensors_bytes(weights)[1])
    except OSError as error:
        # A full disk is the usual reason: what was written of the file must not keep it full.
        with suppress(OSError):
            file.unlink()
        raise CheckpointError(
            file, None, f"weights could not be offloaded: {error.strerror or error}"
        ) from error
    stored = OnDisk(*weight_layout(file))
    # Files that outlive the model are refused by design: nothing records which model they belong to, and a later run
    # would take weights of another one from them.
    weakref.finalize(stored, _delete_file, file, os.getpid())
    return stored


def _delete_file(file: Path, process: int) -> None:
    # A forked process (a worker of a loader) inherits the finalizer, and its end must not delete the parent's file.
    if os.getpid() == process:
        with suppress(OSError):
            file.unlink()
