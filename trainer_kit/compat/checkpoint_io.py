"""Lightning's ``CheckpointIO``: for code that reads and writes one checkpoint file itself."""

from __future__ import annotations

import io
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, TypeAlias

import torch

from trainer_kit.checkpoint.files import torch_load
from trainer_kit.core.arguments import as_list
from trainer_kit.core.atomic_files import replace_file
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.location import locate
from trainer_kit.core.types import StateDict

__all__ = ["CheckpointIO", "MapLocation", "TorchCheckpointIO", "refuse_checkpoint_io"]


MapLocation: TypeAlias = str | torch.device
"""A device onto which tensors are loaded."""


class CheckpointIO(ABC):
    """How one checkpoint file is written and read.

    An object can be used by itself. ``Trainer(plugins=...)`` refuses it, because checkpoints of this library are
    directories that several ranks write together; the error says what to use.
    """

    @abstractmethod
    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Write a checkpoint."""

    @abstractmethod
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation | None = None,
        weights_only: bool | None = None,
    ) -> StateDict:
        """Read a checkpoint."""

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint."""

    def teardown(self) -> None:
        """Release what is held; nothing by default."""


class TorchCheckpointIO(CheckpointIO):
    """One file of ``torch.save``, written atomically and read without unpickling classes.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/model.ckpt"
        >>> TorchCheckpointIO().save_checkpoint({"step": 3}, path)
        >>> TorchCheckpointIO().load_checkpoint(path)
        {'step': 3}
    """

    def save_checkpoint(
        self,
        checkpoint: StateDict,
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Write a checkpoint; the directories above it are made.

        Args:
            checkpoint: what ``torch.save`` takes.
            path: the file, or its URL.
            storage_options: must be None.

        Raises:
            TypeError: for storage options, as in Lightning.
        """
        if storage_options is not None:
            raise TypeError(
                "TorchCheckpointIO takes no storage_options: set them in fsspec's configuration"
            )
        file = locate(path)
        # An object store has no directories.
        if isinstance(file, Path):
            file.parent.mkdir(parents=True, exist_ok=True)
        # In memory first: an interrupted write leaves the former file as it was.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        replace_file(file, buffer.getvalue())

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation | None = None,
        weights_only: bool | None = None,
    ) -> StateDict:
        """Read a checkpoint onto a device, by default the CPU.

        Args:
            path: the file, or its URL.
            map_location: a device.
            weights_only: accepted: nothing but tensors and plain data is ever read.

        Raises:
            CheckpointError: it is damaged, or holds objects that would have to be unpickled.
        """
        file = locate(path)
        source: Path | IO[bytes]
        if isinstance(file, Path):
            source = file
        # torch seeks in the file, which a stream from a store may not allow.
        else:
            source = io.BytesIO(file.read_bytes())
        # Without it torch would put the tensors on the devices that they were saved from.
        if map_location is None:
            map_location = "cpu"
        content: StateDict = torch_load(source, map_location)
        return content

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a file or a directory; one that does not exist is not an error."""
        file = locate(path)
        # Checkpoints of this library are directories, and Lightning's method deletes those too.
        if isinstance(file, Path) and file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)


def refuse_checkpoint_io(plugins: object) -> None:
    """Refuse a `CheckpointIO` among the plugins of a Trainer or a Fabric.

    Raises:
        ConfigurationError: there is one; the message says what to write instead.
    """
    for plugin in as_list(plugins):
        if isinstance(plugin, CheckpointIO):
            raise ConfigurationError(
                "checkpoints are not written through a CheckpointIO",
                found=f"plugins={type(plugin).__name__}()",
                fix="leave it out: checkpoints are directories, written in the background;"
                ' default_root_dir="s3://..." writes to a store, and'
                " Callback.on_checkpoint_committed(trainer, pl_module, path) copies or uploads one",
            )
