"""The end of an entry point: exceptions arrive unchanged, and every cleanup runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from trainer_kit.core.errors import add_note

__all__ = ["Teardown"]


@final
class Teardown:
    """A context that reports an exception to listeners, then cleans up.

    What goes wrong meanwhile is attached to the user's exception as a note, never raised instead of it. Without one,
    the first error of the cleanup becomes the exception: listeners are called, and the remaining cleanup runs.

    Attributes:
        failed: functions that are called with the exception.
        cleanup: functions that are called in order, also after an exception, with the exception or None.
    """

    def __init__(self) -> None:
        self.failed: list[Callable[[BaseException], Any]] = []
        self.cleanup: list[Callable[[BaseException | None], Any]] = []
        self._first: BaseException | None = None

    def __enter__(self) -> Teardown:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._first = error
        if error is not None:
            self._report(error)
        for clean in self.cleanup:
            reported = self._first is not None
            self._attempt(clean, self._first)
            if not reported and self._first is not None:
                self._report(self._first)
        # Its traceback holds every frame of the entry point and this object: a reference would be a cycle for gc.
        first, self._first = self._first, None
        if error is None and first is not None:
            try:
                raise first
            finally:
                del first

    def _report(self, error: BaseException) -> None:
        for listener in self.failed:
            self._attempt(listener, error)

    def _attempt(self, call: Callable[[Any], Any], error: BaseException | None) -> None:
        try:
            call(error)
        except BaseException as problem:
            if self._first is None:
                self._first = problem
            elif problem is not self._first:
                add_note(
                    self._first, f"while ending: {type(problem).__name__}: {problem}"
                )
