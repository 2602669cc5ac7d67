"""Which checkpoints the logger of a tracker uploads, and when."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, final

from trainer_kit.core.errors import LogError
from trainer_kit.core.location import Location, RemotePath, locate

__all__ = ["CheckpointUploads"]

_FIX: Final = "keep more of them (save_top_k=), or log_model=True, which uploads those that exist at the end"


@final
class CheckpointUploads:
    """Uploads checkpoints according to ``log_model``; a run may delete a checkpoint before or during its upload.

    Args:
        log_model: ``"all"`` for each when it is saved, True for those that still exist at the end.
    """

    def __init__(self, log_model: Literal["all"] | bool) -> None:
        self._log_model = log_model
        # A dict as an ordered set: `last` is saved again and again, and uploaded once.
        self._recorded: dict[Location, None] = {}

    def saved(
        self, path: str | os.PathLike[str], upload: Callable[[Location], None]
    ) -> None:
        """Upload a checkpoint, or record it for the end.

        Raises:
            LogError: the checkpoint was deleted before the upload was complete.
        """
        if self._log_model == "all":
            if not _upload_unchanged(locate(path), upload):
                raise LogError(f"{path} was deleted before it was uploaded", fix=_FIX)
        elif self._log_model:
            self._recorded[locate(path)] = None

    def ended(self, status: str, upload: Callable[[Location], None]) -> None:
        """After ``"success"``, upload the recorded checkpoints that still exist."""
        if status == "success":
            for path in self._recorded:
                # Retention has deleted the others; unlike "all", this option does not promise them.
                if path.exists():
                    _upload_unchanged(path, upload)
            # A later entry point uploads only what it saves itself.
            self._recorded.clear()


def _upload_unchanged(path: Location, upload: Callable[[Location], None]) -> bool:
    """Upload a checkpoint; return False if it was deleted or replaced meanwhile, so that the copy may lack files."""
    # Only the address of a remote checkpoint is sent: no file of it is read here.
    if isinstance(path, RemotePath):
        upload(path)
        return True
    before = _identity(path)
    if before is None:
        return False
    try:
        upload(path)
    except Exception:
        # An error about files that vanished is the deletion; any other is the tracker's, and is retried.
        if _identity(path) == before:
            raise
    return _identity(path) == before


def _identity(path: Path) -> int | None:
    """The inode, which differs if a new checkpoint was moved to this path; None if nothing is there."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
