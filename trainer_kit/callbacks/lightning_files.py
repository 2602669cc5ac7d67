"""Lightning's file beside a checkpoint, for programs that read one with ``torch.load``."""

from __future__ import annotations

from pathlib import Path

from trainer_kit.core.errors import CheckpointError

__all__ = ["remove_lightning_file", "write_lightning_file"]


def _file_beside(checkpoint: str) -> Path:
    return Path(f"{checkpoint}.ckpt")


def write_lightning_file(checkpoint: str) -> str | None:
    """Write a committed checkpoint as the file ``<checkpoint>.ckpt``; an older file of this name is replaced.

    Returns:
        The problem, if any: the checkpoint itself is safe, so the run continues.
    """
    from trainer_kit.checkpoint.weights import export

    file = _file_beside(checkpoint)
    try:
        file.unlink(missing_ok=True)
        export(checkpoint, file, "lightning")
    except (CheckpointError, OSError) as error:
        return f"after saving {checkpoint}: {file.name} could not be written: {error}"
    return None


def remove_lightning_file(checkpoint: str) -> None:
    """Delete the file beside a checkpoint that is deleted."""
    _file_beside(checkpoint).unlink(missing_ok=True)
