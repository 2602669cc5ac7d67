"""Weights that are read when they are needed: one at a time, from the files in which they are."""

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

from trainer_kit.checkpoint.files import TENSOR_DTYPES, safetensors_bytes, write_file
from trainer_kit.checkpoint.layout import Assembled, ShardFiles, TensorLayout
from trainer_kit.checkpoint.manifest import MANIFEST
from trainer_kit.checkpoint.weights import holds_weight_files, map_weights, read_index, read_weights, weight_layout
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.location import RemotePath, locate

__all__ = ["Lazy", "OnDisk", "open_weights", "same_bits", "write_weights"]

_SAFETENSORS: Final = ".safetensors"


class Lazy(Mapping[str, Tensor], ABC):
    """Tensors by name that are read, or made, when they are asked for."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; a Mapping's own would read it."""

    @abstractmethod
    def read(self, names: Iterable[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Several tensors, each with memory of its own."""

    @abstractmethod
    def like(self, name: str) -> Tensor:
        """A tensor without its content, or at least of its shape and dtype."""

    @abstractmethod
    def agree(self, one: str, other: str) -> bool:
        """Whether the same is stored under both names."""


@final
class OnDisk(Lazy):
    """Tensors by name, in safetensors files or a checkpoint directory; each is read when it is asked for.

    The files are to stay as they are: what is read later would be another model's.

    Args:
        root: the directory of the files.
        layout: by name, where each tensor lies.
    """

    def __init__(self, root: Path, layout: Mapping[str, TensorLayout]) -> None:
        self.root, self._layout = root.absolute(), dict(layout)
        self._began = {chunk.file: self._stand(chunk.file) for one in layout.values() for chunk in one.chunks}

    def __getitem__(self, name: str) -> Tensor:
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._layout

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    def __deepcopy__(self, memo: object) -> OnDisk:
        return self  # a copy of a model reads the same file, which stays as long as one of them does

    def read(self, names: Iterable[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Several tensors, each with memory of its own; a file is opened once, and is closed again.

        Raises:
            CheckpointError: a file is gone, or was written again since this was opened.
        """
        names = list(names)
        used = {chunk.file for name in names for chunk in self._layout[name].chunks}
        self._check(used)  # a file that is shorter by now is not mapped
        with ShardFiles(self.root) as files:
            whole = Assembled(files, self._layout, device)
            found = {name: whole[name] for name in names}
        self._check(used)
        return found

    def _stand(self, file: str) -> tuple[int, int, int]:
        try:
            now = os.stat(self.root / file)
        except OSError as error:
            reason = f"it cannot be read: {error.strerror or error}"
            raise CheckpointError(self.root / file, None, reason) from error
        return now.st_mtime_ns, now.st_size, now.st_ino

    def _check(self, files: Iterable[str]) -> None:
        for file in files:
            if self._stand(file) != self._began[file]:
                raise CheckpointError(
                    self.root / file,
                    None,
                    "it was written again while a model reads its weights from it",
                    fix="write checkpoints to paths of their own, and load the model again",
                )

    def agree(self, one: str, other: str) -> bool:
        """Whether the same is stored under both names; where they are two tensors both are read."""
        if self._layout[one] == self._layout[other]:
            return True
        return same_bits(self[one], self[other])

    def like(self, name: str) -> Tensor:
        """The tensor without its content."""
        one = self._layout[name]
        return torch.empty(one.shape, dtype=one.dtype, device="meta")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, a NaN to itself too.

    Example:
        >>> same_bits(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, torch.nan]))
        True
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def open_weights(checkpoint: str | os.PathLike[str]) -> OnDisk | dict[str, Tensor]:
    """The weights of a checkpoint by name, of which as little as possible is read.

    Args:
        checkpoint: one of ours; safetensors, a file or a directory as Hugging Face writes it; an index; a
            ``torch.save`` file of a state_dict, or a directory with an index of such files.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    path = locate(checkpoint)
    if isinstance(path, RemotePath):
        return read_weights(checkpoint)
    if path.is_file() and path.suffix == ".json":
        return _indexed(path)
    if path.is_dir() and not (path / MANIFEST).exists() and not holds_weight_files(path):
        return _directory(path)
    if path.is_dir() or _is_safetensors(path):
        return OnDisk(*weight_layout(path, verify=True))
    return map_weights(path) if _is_pickle(path) else read_weights(path)


def _directory(path: Path) -> OnDisk | dict[str, Tensor]:
    indices, files = sorted(path.glob("*index.json")), sorted(path.glob("*.bin"))
    if len(indices) == 1:
        return _indexed(indices[0])
    if not indices and len(files) == 1:
        return map_weights(files[0])
    found = ", ".join(file.name for file in [*indices, *files]) or "none of them"
    raise CheckpointError(
        path,
        None,
        f"neither a checkpoint, nor safetensors files, nor one index or .bin file of weights: {found}",
        fix="give the file or the index itself",
    )


def _indexed(index: Path) -> OnDisk | dict[str, Tensor]:
    places = read_index(index)
    names = sorted(set(places.values()))
    if all(name.endswith(_SAFETENSORS) for name in names):
        return OnDisk(*weight_layout(index.parent, index=index))
    weights: dict[str, Tensor] = {}
    for name in names:
        weights |= map_weights(index.parent / name)
    for name, file in places.items():
        if name not in weights:
            raise CheckpointError(index.parent / file, name, f"{index.name} names it here, and it is not here")
    return weights


def _is_safetensors(path: Path) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return file.read(9)[8:] == b"{"
    return False


def _is_pickle(path: Path) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return path.is_file() and file.read(2) in (b"PK", b"\x80\x02")
    return False


def write_weights(folder: str | os.PathLike[str], weights: Mapping[str, Tensor]) -> OnDisk:
    """Put weights into a file of their own, which is removed when nobody reads it any more, or at exit.

    Args:
        folder: it is made where it is missing; what others put there is left alone.
        weights: copied one at a time.

    Raises:
        CheckpointError: it cannot be written, or a dtype is none that safetensors holds.
    """
    for name, tensor in weights.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise CheckpointError(folder, name, f"safetensors files do not hold {tensor.dtype}")
    file = Path(os.path.expanduser(folder)).absolute() / f"offloaded-{uuid.uuid4().hex}{_SAFETENSORS}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, safetensors_bytes(weights)[1])
    except OSError as error:
        with suppress(OSError):
            file.unlink()
        raise CheckpointError(file, None, f"weights could not be offloaded: {error.strerror or error}") from error
    found = OnDisk(*weight_layout(file))
    weakref.finalize(found, _remove, file, os.getpid())
    return found


def _remove(file: Path, process: int) -> None:
    if os.getpid() == process:  # not when a fork of it ends
        with suppress(OSError):
            file.unlink()
