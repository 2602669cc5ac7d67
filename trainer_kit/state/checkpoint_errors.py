"""Errors of objects that refuse their saved state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_kit.core.errors import CheckpointError, TrainerKitError

__all__ = ["checkpoint_errors"]


@contextmanager
def checkpoint_errors(part_name: str, *unchanged: type[Exception]) -> Iterator[None]:
    """Turn every error of an object that refuses its saved state into a `CheckpointError`.

    Args:
        part_name: of the state.
        unchanged: errors that are raised as they are.

    Raises:
        CheckpointError: in place of every other error.
    """
    raised_unchanged: tuple[type[Exception], ...] = (
        TrainerKitError,
        Warning,
        *unchanged,
    )
    try:
        yield
    except raised_unchanged:
        raise
    except Exception as error:
        reason = f"it does not fit this run: {type(error).__name__}: {error}"
        raise CheckpointError(part_name, None, reason) from error
